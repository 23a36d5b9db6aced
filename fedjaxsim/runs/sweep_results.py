"""The files, report and figures of a sweep; an interrupted one can resume from its files.

A sweep directory holds

    sweep.toml          the sweep as asked for (it can be run again), resolved values, versions
    results.parquet     finished runs: one row per run and evaluation, by run and round
    ledgers.json        the ledger of each finished run: what its releases were charged
    loggers/            what trackers keep of each run; see `loggers.py`
    search/             the runs that chose the settings, another sweep, if the file searches
    checkpoint/         the chunk in progress: its rows so far and the state of the engine
    report.json         a summary, guarantees, draws, and what is not covered; written last
    *.png, *.pdf        figures
"""

import collections
import dataclasses
import io
import itertools
import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjaxsim import store
from fedjaxsim.callbacks import fits
from fedjaxsim.checks import SettingWarning
from fedjaxsim.clock import ROUNDS, Axis
from fedjaxsim.data.files import read_tables, reading
from fedjaxsim.data.readers import DataSpec
from fedjaxsim.divergence import LESS_NOISE, MORE_STEPS, Record, failures, list_worse
from fedjaxsim.engine.checkpoint import Checkpoint, CheckpointFolder, has_x64, require_x64
from fedjaxsim.extras import importing
from fedjaxsim.factories import settings_of
from fedjaxsim.metrics import (
    METRICS,
    MetricRecords,
    find_metric,
    metrics_from_tables,
    metrics_to_tables,
)
from fedjaxsim.privacy.assumptions import SHARED_SEED
from fedjaxsim.privacy.events import ChecksSkipped, PrivacySpend
from fedjaxsim.privacy.guarantee import Report, report
from fedjaxsim.report.files import (
    intact,
    make_directory,
    read_json,
    tables_text,
    write_json,
    write_tables,
)
from fedjaxsim.report.labels import (
    NOISE,
    algorithm_title,
    combination_label,
    key_label,
)
from fedjaxsim.report.progress import number
from fedjaxsim.report.results import (
    SPENT,
    SPENT_OF_EXAMPLES,
    TIGHT,
    Run,
    default_metric,
    envelope,
    estimate,
    grouped,
    last,
    metrics_of,
    selection_column,
)
from fedjaxsim.runs.baseline import worse_than_constant
from fedjaxsim.runs.build import Experiment, versions
from fedjaxsim.runs.directory import OTHER_CODE, OTHER_DATA, other_results, settings_digest
from fedjaxsim.runs.loggers import FOLDER as LOGS
from fedjaxsim.runs.memory import peak_bytes
from fedjaxsim.runs.settings_files import RECORDS
from fedjaxsim.runs.sweep_files import SWEEP, SweepOptions
from fedjaxsim.runs.sweep_runs import Ranking, SweepRuns, column_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

with importing("tables"):
    import pyarrow as pa
    import pyarrow.parquet as pq

_PICTURES = ("envelopes.png", "envelopes.pdf", "trade_off.png", "trade_off.pdf")
CHECKPOINT = "checkpoint"
_METRICS = b"metrics"
"""The key of the records of metrics in the metadata of the results, as JSON."""
ROWS = "rows.jsonl"
RESULTS = "results.parquet"
LEDGERS = "ledgers.json"
SEARCH = "search"
REPORT = "report.json"

_NO_LEDGER = "the sweep kept no ledger of this run: compute it again with --overwrite"
SELECTION = (
    "Each guarantee is for one run alone. Choosing the best of a sweep by metrics of private "
    "data is not covered by any of them, and neither is publishing the metrics: both need their "
    "own budget."
)
"""A sentence of every report of a sweep."""


@dataclasses.dataclass(frozen=True)
class SweepDirectory:
    """The directory of one sweep.

    `data` is a fingerprint of the clients' rows, `metrics` has the records of the runs' metrics.

    Methods raise ValueError for a damaged file, or a checkpoint of another sweep.
    """

    path: Path
    sweep: SweepRuns
    data: str = ""
    metrics: MetricRecords = dataclasses.field(default_factory=lambda: METRICS)

    @classmethod
    def open(
        cls,
        path: Path,
        sweep: SweepRuns,
        data: str = "",
        metrics: MetricRecords = METRICS,
        *,
        code: str = "",
        overwrite: bool = False,
    ) -> "SweepDirectory":
        """Make the directory, or open it to resume the same runs; another sweep is refused.

        `code` is a fingerprint of the user's code.
        """
        names = (CHECKPOINT, RESULTS, LEDGERS, REPORT, SWEEP, LOGS) if overwrite else ()
        make_directory(path, names, "sweep", overwrite=overwrite, pictures=_PICTURES)
        if not overwrite:
            check_same(path, sweep, data, code)
        resolved = {"fingerprint": sweep.fingerprint, "runs": len(sweep.runs), "x64": has_x64()}
        resolved |= {"best_over": list(sweep.best_over), "data_fingerprint": data}
        resolved |= {"code_fingerprint": code}
        asked, of_runs = sweep.settings(), [run.settings() for run in sweep.runs]
        common = {
            name: value
            for name, value in of_runs[0].items()
            if all(settings.get(name) == value for settings in of_runs)
        }
        differing = [{k: v for k, v in of.items() if k not in common} for of in of_runs]
        resolved |= {"digest": _digest(asked), "settings": common, "settings_of_runs": differing}
        write_tables(path / SWEEP, {**asked, "resolved": resolved, "versions": versions()})
        return cls(path, sweep, data, metrics)

    @property
    def checkpoints(self) -> CheckpointFolder:
        """The chunk in progress; notes hold its `runs` and the number of its `places`."""
        about = {"settings": self.sweep.fingerprint, "data": self.data}
        return CheckpointFolder(self.path / CHECKPOINT, about, fits(self.rows))

    @property
    def rows(self) -> Path:
        """The evaluations of the chunk in progress."""
        return self.path / CHECKPOINT / ROWS

    def results(self) -> pa.Table:
        """Read the evaluations of all finished runs, by run and round."""
        path = self.path / RESULTS
        return read_results(path) if path.exists() else tidy(self.sweep, [])

    def finished(self) -> set[int]:
        """Return the indices of the finished runs."""
        return set(self.results()["run"].to_pylist())

    def runs(self) -> list[Run]:
        """Read the finished runs."""
        return self._runs_in(self.results())

    def _runs_in(self, table: pa.Table) -> list[Run]:
        return runs_of_sweep(table, self.sweep.columns, dict(self.sweep.base))

    def ledgers(self) -> dict[int, tuple[PrivacySpend, ...]]:
        """Read what each finished run was charged."""
        path = self.path / LEDGERS
        if not path.exists():
            return {}
        content = read_json(path)
        with intact(path, ": restore it, or start anew"):
            accounts, digest = content["accounts"], content["digest"]
            if digest != settings_digest(accounts, content["runs"]):
                raise ValueError("its digest does not fit")
            return {
                int(run): tuple(
                    PrivacySpend.from_dict({**accounts[account], **charged})
                    for account, charged in spends
                )
                for run, spends in content["runs"].items()
            }

    def _write_ledgers(self, ledgers: Mapping[int, Sequence[PrivacySpend]]) -> None:
        accounts: list[Record] = []
        runs: dict[str, list[Any]] = {}
        for run, spends in sorted(ledgers.items()):
            for spend in spends:
                charged = spend.to_dict()
                account = {name: charged.pop(name) for name in ("scheme", "event")}
                if account not in accounts:
                    accounts.append(account)
                runs.setdefault(str(run), []).append([accounts.index(account), charged])
        content = {"accounts": accounts, "runs": runs}
        content["digest"] = settings_digest(accounts, runs)
        text = json.dumps(content)  # z may be infinite, or no number
        store.write(self.path / LEDGERS, f"{text}\n".encode())

    def add(
        self, rows: Iterable[Record], ledgers: Mapping[int, Sequence[PrivacySpend]]
    ) -> list[Run]:
        """Add all evaluations of finished runs and their ledgers, and remove their checkpoint.

        See `tidy` for the rows. Returns these runs.
        """
        self._write_ledgers({**self.ledgers(), **ledgers})
        metadata = {_METRICS: json.dumps(metrics_to_tables(self.metrics))}
        added = tidy(self.sweep, rows).replace_schema_metadata(metadata)
        table = pa.concat_tables([self.results(), added], promote_options="default")
        # A metric that earlier runs lack has come last.
        last = (*SPENT, TIGHT, *SPENT_OF_EXAMPLES, "failed")
        names = [name for name in last if name in table.column_names]
        table = table.select([*(n for n in table.column_names if n not in last), *names])
        table = table.sort_by([("run", "ascending"), ("round", "ascending")])
        table = table.replace_schema_metadata(metadata)
        sink = io.BytesIO()
        pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
        store.write(self.path / RESULTS, sink.getvalue())
        self.checkpoints.clear()
        return self._runs_in(added)

    def checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint of the chunk in progress; None without one."""
        last = self.checkpoints.last()
        # Results are written before their checkpoints are removed.
        if last is not None and set(last.note["runs"]) <= self.finished():
            self.checkpoints.clear()
            return None
        return last


def check_same(
    path: Path, sweep: SweepRuns, data: str | None = None, code: str | None = None
) -> None:
    """Check that a directory holds no other sweep: the same one goes on, on its data and code."""
    if not (path / SWEEP).is_file():
        return
    earlier, asked = read_tables(path / SWEEP), tomllib.loads(tables_text(sweep.settings()))
    with intact(path / SWEEP, ": choose another directory or say --overwrite"):
        made, theirs = dict(earlier["resolved"]), _settings_and_axes(earlier)
    if made.get("fingerprint") != sweep.fingerprint:
        raise other_results(path, "sweep", theirs, _settings_and_axes(asked))
    for what, ours, other in (("data", data, OTHER_DATA), ("code", code, OTHER_CODE)):
        if ours is not None and made.get(f"{what}_fingerprint", ours) != ours:
            raise other_results(path, "sweep", {}, {}, other)
    require_x64(made.get("x64"), path)


def _digest(tables: Mapping[str, Any]) -> str:
    """Return the digest of what a sweep's file asks for."""
    asked = {name: value for name, value in tables.items() if name not in RECORDS}
    return settings_digest(tomllib.loads(tables_text(asked)))


def recorded_settings(path: Path) -> tuple[Ranking, list[Record]]:
    """Return how the runs in a sweep's directory are ranked, and each run's settings, as recorded.

    No user's code is imported.
    """
    tables, again = read_tables(path / SWEEP), ": the same command again writes it anew"
    if isinstance(tables.get("resolved"), dict) and "digest" not in tables["resolved"]:
        raise ValueError(f"{path / SWEEP} was written by another version of fedjaxsim{again}")
    with intact(path / SWEEP, again):
        made = tables["resolved"]
        if made["digest"] != _digest(tables):
            raise ValueError("it asks for other runs than those that were computed")
        runs = [made["settings"] | of_run for of_run in made["settings_of_runs"]]
        keys = dict.fromkeys(key.replace("-", "_") for table in tables["sweep"] for key in table)
        columns, metric = tuple(map(column_of, keys)), runs[0].get("metric")
        return Ranking(columns, tuple(made["best_over"]), metric), runs


def _settings_and_axes(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the runs of a sweep's file depend on, with all values of each swept key."""
    others = {"sweep", "metric", *RECORDS, *settings_of(SweepOptions)}
    settings = {name: value for name, value in tables.items() if name not in others}
    axes: dict[str, list[Any]] = {}
    for table in tables["sweep"]:
        for name, values in table.items():
            axes.setdefault(name, []).extend(v for v in values if v not in axes[name])
    return settings | axes


def read_results(path: Path) -> pa.Table:
    """Read the evaluations of finished runs, by run and round."""
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}: no run of it has ended")
    with intact(path, ": delete it, and its runs are computed again"):
        with reading("Parquet file"), pq.ParquetFile(path, page_checksum_verification=True) as file:
            table, expected = file.read(use_threads=False), file.metadata.num_rows
        # Checksums cover the data of a page, but not the header with its length.
        if table.num_rows != expected:
            raise ValueError(f"it must have {expected} rows, got {table.num_rows}")
    return table


# --- the table of results -----------------------------------------------------------------------


def tidy(sweep: SweepRuns, rows: Iterable[Record]) -> pa.Table:
    """Return the table of results: one row per run and evaluation, by run and round.

    Its columns are `run`; every swept key by its field name (`target_epsilon` for ε), null where a
    run's table does not set it; `round`; `train_loss`; the evaluation's metrics; `epsilon` and
    `epsilon_replace`, spent up to this round (joint DP, zero-out and replace; null without a
    guarantee) at `delta`; `epsilon_tight`, whether `epsilon` is the accountant's value and not
    the larger bound by RDP; if a run protects examples, `example_epsilon`,
    `example_epsilon_replace` and `example_delta` of its last evaluation; and `failed`, from
    `divergence.failures`. `rows` hold them from each run's first evaluation on; `train_loss` is
    None if no client took part since the last one.
    """
    ordered = sorted(rows, key=lambda row: (row["run"], row["round"]))
    swept = [sweep.swept[row["run"]] for row in ordered]
    columns: dict[str, pa.Array] = {"run": pa.array([row["run"] for row in ordered], pa.int32())}
    for name in sweep.columns:
        if name not in SPENT:
            columns[name] = pa.array([values[name] for values in swept])
    columns["round"] = pa.array([row["round"] for row in ordered], pa.int32())
    names = dict.fromkeys(itertools.chain(["train_loss"], *ordered))
    spent = (*SPENT, TIGHT, *SPENT_OF_EXAMPLES)
    metrics = [name for name in names if name not in (*columns, *spent)]
    for name in (*metrics, *SPENT):
        columns[name] = pa.array([_float(name, row.get(name)) for row in ordered], pa.float64())
    columns[TIGHT] = pa.array([row.get(TIGHT) for row in ordered], pa.bool_())
    for name in filter(names.__contains__, SPENT_OF_EXAMPLES):
        columns[name] = pa.array([_float(name, row.get(name)) for row in ordered], pa.float64())
    by_run = (list(alike) for _, alike in itertools.groupby(ordered, key=lambda row: row["run"]))
    columns["failed"] = pa.array(itertools.chain(*map(failures, by_run)), pa.bool_())
    return pa.table(columns)


def _float(name: str, value: Any) -> float | None:
    """Return None for an infinite ε, and NaN with the sign that JSON leaves it."""
    if value is None or (name in (*SPENT, *SPENT_OF_EXAMPLES) and not math.isfinite(value)):
        return None
    return float(value) if value == value else math.nan


def read_runs(path: Path) -> tuple[list[Run], list[str], Record]:
    """Read the finished runs of a sweep's directory, its swept columns and its report."""
    config = read_tables(path / SWEEP)
    keys = dict.fromkeys(key for table in config["sweep"] for key in table)
    columns = [column_of(key.replace("-", "_")) for key in keys]
    runs = runs_of_sweep(read_results(path / RESULTS), columns, config)
    return runs, columns, read_json(path / REPORT)


def runs_of_sweep(table: pa.Table, columns: Sequence[str], config: Record) -> list[Run]:
    """Return the runs in a table of results with these swept columns.

    `config` holds the settings that all runs start from. The table's metadata have the records of
    the metrics; a table without has the package's.
    """
    runs, stated = [], (table.schema.metadata or {}).get(_METRICS)
    try:
        metrics = METRICS if stated is None else metrics_from_tables(json.loads(stated))
    except ValueError as error:
        raise ValueError(f"the metadata of the results are damaged: {error}") from error
    for index, rows in itertools.groupby(table.to_pylist(), key=lambda row: row["run"]):
        rows = list(rows)
        swept = {name: rows[0][name] for name in columns}
        run_values = {name: value for name, value in swept.items() if value is not None}
        swept.pop("seed", None)
        seed = run_values.get("seed", config.get("seed", 0))
        settings = {**config, **run_values}
        runs.append(Run(str(index), swept, seed, rows, settings, metrics=metrics))
    return runs


# --- the report -----------------------------------------------------------------------------------

CHOSEN_ON_VALIDATION = "The best settings were chosen on validation rows; values are on test rows."
CHOSEN_ON_TEST = (
    "The best settings were chosen on the very test rows that their values are on, since there are "
    "no validation rows (validation-fraction): these values are optimistic."
)


class Best(NamedTuple):
    """The best final values of a sweep, in the column `metric`.

    Attributes:
      keys: keys of the combinations, then those over which the best was taken.
      rows: rows of an envelope, one per combination.
      choice: how the best was chosen, and on which rows, in a sentence; "" without a choice.
    """

    metric: str
    keys: list[str]
    rows: list[Record]
    choice: str


def best_runs(
    ranking: Ranking, runs: Sequence[Run], asked: str | None = None
) -> tuple[list[Run], str]:
    """Return the runs with the best values over `best_over`, and the sentence of the choice.

    They are all runs if nothing is chosen, or if the metric that is `asked` has no direction.
    """
    records = metrics_of(runs)
    name = asked or ranking.judged_by(records) or next(iter(records))
    if not ranking.best_over or find_metric(name, records).larger_is_better is None:
        return list(runs), ranking.choice
    best = best_of(ranking, runs, asked)
    chosen = [
        {key: row[key] for key in best.keys if row["mean"] is not None or row[key] is not None}
        for row in best.rows
    ]
    return [
        run for run in runs if any(values.items() <= run.settings.items() for values in chosen)
    ], best.choice


def best_of(ranking: Ranking, runs: Sequence[Run], asked: str | None = None) -> Best:
    """Return the best final values of the runs of a sweep, by a metric."""
    asked = asked or ranking.judged_by(metrics_of(runs))
    metric = default_metric(runs) if asked is None else f"test_{asked}"
    keys = [name for name in ranking.columns if name != "seed"]
    row_keys = [key for key in keys if key not in ranking.best_over]
    rows = last(envelope(runs, keys, ranking.best_over, metric), row_keys)
    choice = ranking.choice
    if not choice and any(row["runs"] > row["seeds"] for row in rows):
        judged = selection_column(runs, metric)
        choice = CHOSEN_ON_TEST if judged == metric else CHOSEN_ON_VALIDATION
    return Best(metric, [*row_keys, *ranking.best_over], rows, choice)


def write_report(
    sweep: SweepRuns,
    directory: SweepDirectory,
    runs: Sequence[Run],
    best: Best,
    experiments: Mapping[int, Experiment],
) -> list[Report]:
    """Write the summary and the guarantees of the finished runs; return the guarantees."""
    finished, ledgers = [int(run.name) for run in runs], directory.ledgers()
    summary = {
        "runs": len(sweep.runs),
        "finished": len(finished),
        "failed": failed_runs(runs),
        "rounds": max(run.rows[-1]["round"] for run in runs),
        "metric": best.metric,
        "best_over": list(sweep.best_over),
        "choice": best.choice,
        "worse_than_constant": {
            run.name: worse_than_constant(
                experiments[int(run.name)].simulation.population,
                {column: run.value(column) for column in run.rows[-1]},
            )
            for run in runs
        },
        "unread": {name: list(runs) for name, runs in sweep.unread},
        "peak_bytes": peak_bytes(),
    }
    draws: dict[Any, list[int]] = {}
    charged: dict[Any, list[int]] = {}
    for run in finished:
        experiment = experiments[run]
        simulation, z = experiment.simulation, np.float32(experiment.noise_multiplier).item()
        scheme = simulation.sampler.scheme
        lost = (PrivacySpend(scheme, ChecksSkipped(reason=_NO_LEDGER), (), overflowed=True),)
        charges = ledgers.get(run, lost)
        sent = simulation.bytes_sent(experiment.hparams)
        work = simulation.round_work(experiment.hparams)
        key = (charges, experiment.delta, experiment.public, z, scheme.clients, sent, work)
        charged.setdefault(key, []).append(run)
        for drawn in experiment.draws():
            draws.setdefault(drawn, []).append(run)
    reports, guarantees = list[Report](), list[Record]()
    for (charges, delta, public, z, clients, sent, work), alike in charged.items():
        reports.append(report(charges, delta, assumed=[*public, SHARED_SEED]))
        guarantees.append({
            "runs": alike, "noise_multiplier": z, "clients": clients, "bytes_sent": sent,
            "work": work.record(), "guarantee": reports[-1].to_json(),
        })  # fmt: skip
    content = {
        "summary": summary,
        "selection": SELECTION,
        "shared_seed": SHARED_SEED,
        "guarantees": guarantees,
        "draws": [{"runs": alike, **drawn._asdict()} for drawn, alike in draws.items()],
    }
    write_json(directory.path / REPORT, content)
    return reports


def advise_on_noise(
    runs: Sequence[Run], experiments: Mapping[int, Experiment]
) -> tuple[SettingWarning, ...]:
    """Return a sentence for each algorithm whose other message would leave less noise."""
    advised = collections.Counter[tuple[str, ...]]()
    for run in runs:
        experiment = experiments[int(run.name)]
        advice = experiment.simulation.advise_on_noise(experiment.hparams, experiment.config.rounds)
        if advice:
            advised[advice.parts] += 1
    return tuple(
        SettingWarning(*parts, f" ({count} run{'s' if count > 1 else ''}).")
        for parts, count in advised.items()
    )


def warn_of_constants(
    best: Best, runs: Sequence[Run], experiments: Mapping[int, Experiment]
) -> tuple[str, ...]:
    """Return a sentence on rows of the best whose means are worse than one constant, and a remedy.

    The constant is for the first seed's rows: seeds may draw other test rows.
    """
    varied = [key for key in best.keys if len({row[key] for row in best.rows}) > 1]
    worse, remedies = [], dict[str, None]()
    for row in best.rows:
        keys = [key for key in best.keys if row["mean"] is not None or row[key] is not None]
        chosen = [run for run in runs if all(run.settings[key] == row[key] for key in keys)]
        means = {
            column: estimate([run.value(column) for run in chosen]).mean
            for column in chosen[0].rows[-1]
            if column.startswith("test_")
        }
        experiment = experiments[int(chosen[0].name)]
        shortfall = worse_than_constant(experiment.simulation.population, means)
        if shortfall is not None:
            name = combination_label(varied, [row[key] for key in varied])
            worse.append(": ".join(filter(None, [name, shortfall])))
            noise = experiment.noise_multiplier > 0
            remedies[LESS_NOISE.format("") if noise else MORE_STEPS] = None
    return (list_worse(worse, [*remedies]),) if worse else ()


def failed_runs(runs: Sequence[Run]) -> int:
    """Return how many runs failed."""
    return sum(any(row["failed"] for row in run.rows) for run in runs)


# --- figures --------------------------------------------------------------------------------------

_MOST_CURVES = 12
_FIRST_CURVES = ("algorithm", "personalization", "lam")


def default_figures(
    sweep: SweepRuns,
    runs: Sequence[Run],
    metric: str,
    axis: Axis = ROUNDS,
    per_round: Mapping[str, float] = MappingProxyType({}),
) -> "dict[str, Figure]":
    """Draw the figures that suit a sweep's keys: `envelopes.png`, `trade_off.png` if ε differs.

    Panels are levels of noise. Lines are the other keys, algorithms and levels of personalization
    first, as long as they are at most twelve; the best is taken over the rest. A round of a run
    goes `per_round` along the axis, by the run's name; by default 1.
    """
    from fedjaxsim.report.figures import envelope_figure, trade_off_figure

    keys = [key for key in sweep.columns if key != "seed"]
    varied = [key for key in keys if len({run.settings[key] for run in runs}) > 1]
    noise = [key for key in varied if key in NOISE and key not in sweep.best_over]
    varied_settings = [key for key in varied if key not in noise]
    order = (*_FIRST_CURVES, *varied_settings)
    lines = sorted((key for key in varied_settings if key not in sweep.best_over), key=order.index)
    lines = lines or varied_settings[:1]
    while len(lines) > 1 and len(grouped(runs, lines, Run.setting)) > _MOST_CURVES:
        lines.pop()
    shown = [*noise, *lines]
    best = envelope(runs, keys, [key for key in keys if key not in shown], metric)
    is_choice = any(row["runs"] > row["seeds"] for row in best)
    over = ", ".join(key_label(key) for key in varied if is_choice and key not in shown)
    seeds = len({run.seed for run in runs})
    mean_of_seeds = f"mean of {seeds} seeds" if seeds > 1 else ""
    titles = dict.fromkeys(algorithm_title(run.algorithm) for run in sweep.runs)
    data = dict.fromkeys(DataSpec(run.data).short_name for run in sweep.runs)
    deltas = {run.rows[-1]["delta"] for run in runs if run.rows[-1]["epsilon"]}
    delta = f"δ = {number(deltas.pop())}" if len(deltas) == 1 else ""
    subject = ", ".join(data)
    if "algorithm" not in lines:  # else the legend names them
        subject = f"{', '.join(titles)} on {subject}"
    about = [subject, delta, over and f"best over {over}", mean_of_seeds]
    title = "; ".join(filter(None, about))
    final_rows = last(best, shown)
    by_setting = {tuple(map(run.setting, keys)): per_round.get(run.name, 1) for run in runs}
    best = [
        row | {"round": row["round"] * by_setting.get(tuple(row[key] for key in keys), 1)}
        for row in best
    ]
    in_panels = _in_every_panel(best, noise)
    how: dict[str, Any] = {"lines": lines, "title": title, "metrics": metrics_of(runs)}
    figures = {"envelopes.png": envelope_figure(in_panels, panels=noise, axis=axis, **how)}
    if noise and len({row["epsilon"] for row in final_rows} - {0}) > 1:
        figures["trade_off.png"] = trade_off_figure(final_rows, **how)
    return figures


def _in_every_panel(rows: Sequence[Record], panels: Sequence[str]) -> list[Record]:
    """Copy what sets no panel and releases nothing to all panels: it fits every ε."""
    places = [place for place, _ in grouped(rows, panels) if any(v is not None for v in place)]
    fits_all = [
        bool(places) and row["epsilon"] == 0 and all(row[key] is None for key in panels)
        for row in rows
    ]
    return [
        row | dict(zip(panels, place, strict=True))
        for row, fitting in zip(rows, fits_all, strict=True)
        for place in (places if fitting else [tuple(row[key] for key in panels)])
    ]
