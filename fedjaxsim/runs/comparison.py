"""Finished runs side by side, from folders and from sweeps."""

import collections
import csv
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from fedjaxsim import checks
from fedjaxsim.clock import ROUNDS, Axis
from fedjaxsim.divergence import Record, list_worse
from fedjaxsim.metrics import Metric, MetricRecords, column_label, column_metric, named_metric
from fedjaxsim.privacy import entries
from fedjaxsim.report.files import KINDS, csv_text, intact, strict
from fedjaxsim.report.labels import algorithm_title, key_label, setting_label, short_name
from fedjaxsim.report.progress import decimals
from fedjaxsim.report.results import (
    Run,
    System,
    compared,
    default_metric,
    metrics_of,
    name_subset,
    remarks_on,
    systems,
    table_of_means,
    table_of_runs,
)
from fedjaxsim.report.tables import TextTable
from fedjaxsim.runs.directory import (
    CLIENTS,
    RunDirectory,
    check_guarantee,
    named,
    read_run,
    settings_of_system,
)
from fedjaxsim.runs.settings_files import CONFIG, RECORDS
from fedjaxsim.runs.sweep_files import SWEEP

PAGE = ".html"
_PANELS = 12
"""Most panels of a picture of clients."""


def check_out(out: Path) -> None:
    """Check that `Comparison.content` knows a file's format, and that its folder exists."""
    from fedjaxsim.report.plots import FORMATS, check_path

    check_path(out, (*FORMATS, PAGE, ".tex", ".csv"), "out")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ComparedRun(Run):
    """A finished run, its guarantee as JSON, and the rounds that it drew from each key.

    `path` is the folder of the run, or of the sweep that it is in, whose name is `sweep`, with its
    `swept` values.
    """

    path: Path
    guarantee: Record
    draws: tuple[entries.Drawn, ...]
    sweep: str = ""
    swept: Record = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, run: Run, **changes: Any) -> Self:
        """Return a run of a table with what else is known of it, and changes."""
        names = [field.name for field in dataclasses.fields(Run)]
        return cls(**{name: getattr(run, name) for name in names} | changes)

    @functools.cached_property
    def clients(self) -> dict[str, np.ndarray] | None:
        """The numbers of the table of clients by column, NaN for nothing; None without a table."""
        path = self.path / CLIENTS
        if self.sweep or not path.is_file():
            return None
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        names = [name for name in rows[0] if name != "name"] if rows else []
        return {name: np.array([float(row[name] or "nan") for row in rows]) for name in names}

    @property
    def row(self) -> Record:
        """Its name and summary."""
        return {"run": self.name, **self.summary}

    @property
    def source(self) -> str:
        """The name of its sweep, whose runs share sentences and keys, or its own."""
        return self.sweep or self.name


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """Runs side by side, as tables and sentences.

    Attributes:
      asked: the metric by which they are compared; None for that by which they are judged.
      choices: sentences on how runs of sweeps were chosen.
    """

    runs: tuple[ComparedRun, ...]
    asked: str | None = None
    choices: tuple[str, ...] = ()

    @functools.cached_property
    def metrics(self) -> MetricRecords:
        """The records of the metrics."""
        return metrics_of(self.runs)

    @property
    def rows(self) -> list[Record]:
        """The summary of each run, with its name."""
        return [run.row for run in self.runs]

    def described_rows(self, name_algorithm: Callable[[str], str] = short_name) -> list[Record]:
        """Return the rows; names of a sweep's runs are followed by their swept values."""
        rows = self.rows
        for row, run in zip(rows, self.runs, strict=True):
            words = [
                name_algorithm(value) if key == "algorithm" else setting_label(key, value)
                for key, value in run.swept.items()
                if value is not None
            ]
            row["run"] = " ".join([row["run"], ", ".join(words)]).rstrip()
        return rows

    @functools.cached_property
    def titled_rows(self) -> list[Record]:
        """The described rows with the titles of algorithms."""
        return self.described_rows(algorithm_title)

    @functools.cached_property
    def systems(self) -> list[System]:
        """The runs of each setting."""
        return systems(self.runs)

    @functools.cached_property
    def means(self) -> list[Record]:
        """The means over seeds; empty if all runs differ in more than their seed."""
        return self.compared() if len(self.systems) < len(self.runs) else []

    def compared(self) -> list[Record]:
        """Return a row for each system, which compares it with the first."""
        return compared(self.systems, self.column)

    def tables(self) -> list[TextTable]:
        """Return the tables of a page: means over seeds, runs, clients, settings that differ."""
        tables = []
        if self.means:
            label = column_label(self.means[0]["metric"], self.metrics)
            rows = [
                row | {"system": system.title}
                for row, system in zip(self.means, self.systems, strict=True)
            ]
            title = "Means over seeds with 95 % intervals; differences on seeds that both have"
            tables.append(table_of_means(rows, label, title))
        tables.append(
            table_of_runs(self.titled_rows, "Runs", self.metrics, condensed=True, printed=True)
        )
        if of_clients := [run for run in self.runs if run.clients is not None]:
            metric = column_metric(self.column, self.metrics)
            tables.append(_table_of_clients(of_clients, self.column, metric))
        varied = self.settings_that_differ
        if varied:
            shown = [[run.name, *(str(run.config.get(name, "–")) for name in varied)]
                     for run in self.runs]  # fmt: skip
            names = ["run", *map(key_label, varied)]
            tables.append(TextTable("Settings that differ", names, shown, left=len(names)))
        return tables

    def content(self, out: Path, axis: Axis = ROUNDS) -> bytes:
        """Return the content of a file of the runs, in the format of its ending."""
        from fedjaxsim.report.figures import comparison_figure
        from fedjaxsim.report.plots import content

        if out.suffix == ".tex":
            return "\n".join(table.latex for table in self.tables()).encode()
        if out.suffix == ".csv":  # the summaries with all digits
            names = dict.fromkeys(name for row in self.rows for name in row)
            lines = ([row.get(name) for name in names] for row in self.rows)
            return csv_text([[*names], *lines]).encode()
        curves = comparison_figure(self.systems, self.shown, axis)
        if out.suffix == PAGE:
            return self._page(out, content(curves))
        return content(curves, out.suffix[1:])

    def _page(self, out: Path, curves: bytes) -> bytes:
        """Return the page of the runs, from which relative links lead to their folders."""
        import tomli_w

        from fedjaxsim.privacy.guarantee import Report
        from fedjaxsim.report.figures import clients_figure
        from fedjaxsim.report.page import page
        from fedjaxsim.report.plots import content

        pictures = {"Curves": curves}
        clients = [
            (run.name, run.clients["train_rows"], run.clients[self.column])
            for run in self.runs
            if run.clients is not None and {"train_rows", self.column} <= run.clients.keys()
        ][:_PANELS]
        if clients:
            metric = column_metric(self.column, self.metrics)
            pictures["Clients against their rows"] = content(clients_figure(clients, metric))
        texts = {}
        for run in self.runs:
            texts[f"{run.name}: guarantee"] = str(Report.from_json(run.guarantee))
            settings = {name: value for name, value in run.config.items() if value is not None}
            texts[f"{run.name}: settings"] = tomli_w.dumps(settings)
        warnings = filter(None, (self.worse, self.drawn_twice))
        return page(
            "Runs",
            "For the person who ran the simulation: metrics are without noise, which no guarantee "
            "covers, and the noise follows from the seed.",
            self.tables(),
            pictures,
            [*self.choices, *self.sentences, *warnings, *remarks_on(self.rows, self.metrics)],
            texts,
            {
                row["run"]: os.path.relpath(run.path, out.parent)
                for rows in (self.rows, self.titled_rows)
                for row, run in zip(rows, self.runs, strict=True)
            },
        )

    @property
    def column(self) -> str:
        """The column of the metric by which the runs are compared."""
        if self.asked is not None:
            return f"test_{self.asked}"
        return default_metric(self.runs)

    @property
    def shown(self) -> list[str]:
        """The columns of pictures; empty for the metric that judges the runs on each data set."""
        return [] if self.asked is None else [self.column]

    @property
    def settings_that_differ(self) -> list[str]:
        """The names of the settings in which runs differ.

        In a single sweep they are swept or have several values: another one differs only because
        some systems do not read it.
        """
        configs = [
            {name: value for name, value in run.config.items() if name not in RECORDS}
            | {"seed": run.seed}
            for run in self.runs
        ]
        names = dict.fromkeys(name for config in configs for name in config)
        values = {name: {str(config.get(name)) for config in configs} for name in names}
        if len({run.sweep for run in self.runs}) == 1 and self.runs[0].sweep:
            keys = {key for run in self.runs for key in run.swept}
            swept = keys | {key.removeprefix("target_") for key in keys}
            values = {
                name: texts if name in swept else texts - {"None"} for name, texts in values.items()
            }
        return [name for name in names if len(values[name]) > 1]

    @functools.cached_property
    def sentences(self) -> list[str]:
        """The assumptions of the guarantees, also about single examples, with their runs."""
        names_by_sentence: dict[str, list[str]] = {}
        for run in self.runs:
            for sentence in (*_of_examples(run.guarantee), *run.guarantee["assumed"]):
                names_by_sentence.setdefault(sentence, []).append(run.source)
        every = dict.fromkeys(run.source for run in self.runs)
        return [
            f"{sentence}{name_subset([*dict.fromkeys(names)], every)}"
            for sentence, names in names_by_sentence.items()
        ]

    @property
    def worse(self) -> str:
        """A sentence on runs whose models are worse than one constant; "" if there are none."""
        told = {run.name: run.summary.get("worse_than_constant") for run in self.runs}
        return list_worse([f"{name}: {how}" for name, how in told.items() if how])

    @property
    def drawn_twice(self) -> str:
        """A sentence on private runs that draw from the same key; "" if there are none.

        Runs of one sweep do, as a sentence of its guarantees says.
        """
        draws: dict[str, dict[entries.Drawn, None]] = {}
        for run in self.runs:
            if run.summary["epsilon"] is not None:
                draws.setdefault(run.source, {}).update(dict.fromkeys(run.draws))
        return entries.drawn_twice(draws)


def compare(
    paths: Iterable[Path], metric: str | None = None, *, all_runs: bool = False
) -> Comparison:
    """Read the finished runs in folders of runs and of sweeps, in order.

    A folder of several runs, as `run --seeds` makes it, stands for them. They are compared by
    `metric`, or by that by which runs are judged. Of a sweep they are the best over its best-over,
    such as learning rates, unless `all_runs`.

    Raises:
      FileNotFoundError: if a file of a run is missing.
      ValueError: if one is damaged or lacks the metric, or there is no run.
    """
    named_runs, choices = list[tuple[str, ComparedRun]](), list[str]()
    for name, directory in named(itertools.chain(*map(_runs_in, paths))).items():
        if not (directory.path / SWEEP).is_file():
            run = _of_folder(name, directory)
            metric = _asked_of(name, [run], metric)
            named_runs.append((name, run))
            continue
        metric, choice, compared_runs = _of_sweep(name, directory.path, metric, all_runs=all_runs)
        choices += [f"{name}: {choice}"] if choice else []
        named_runs += [(name, run) for run in compared_runs]
    if not named_runs:
        raise ValueError("compare needs at least one run directory, got none")
    return Comparison(_with_distinct_names(named_runs), metric, tuple(choices))


def _asked_of(folder: str, runs: Sequence[Run], metric: str | None) -> str | None:
    """Return the name of the metric that is asked for, which all runs of a folder must have."""
    for run in runs if metric is not None else ():
        names = [name for name in run.metrics if f"test_{name}" in run.rows[-1]]
        metric = named_metric(metric or "", names)
        if metric not in names:
            hint = checks.did_you_mean(metric, names)
            raise ValueError(f"{folder} has no metric {metric!r}, only {', '.join(names)}{hint}")
    return metric


def _runs_in(path: Path) -> list[Path]:
    """Return the folder of a run or of a sweep, or the folders of runs in it."""
    if any((path / file).exists() for file in KINDS):
        return [path]
    return sorted(inside.parent for inside in path.glob(f"*/{CONFIG}")) or [path]


def _with_distinct_names(named_runs: Sequence[tuple[str, ComparedRun]]) -> tuple[ComparedRun, ...]:
    """Return the runs, with the folder's name behind a name that several of them have."""
    counts = collections.Counter(run.name for _, run in named_runs)
    return tuple(
        dataclasses.replace(run, name=f"{run.name} ({folder})") if counts[run.name] > 1 else run
        for folder, run in named_runs
    )


def _table_of_clients(runs: Sequence[ComparedRun], column: str, metric: Metric) -> TextTable:
    """Return the spread of a metric over clients, its worst tenth first.

    A metric without a direction has a lowest tenth.
    """
    extremes = ("lowest", "highest") if metric.larger_is_better is None else ("worst", "best")
    lines = []
    for run in runs:
        values = (run.clients or {}).get(column, np.array([]))
        values = np.sort(values[np.isfinite(values)])
        if not len(values):
            continue
        worst_first = values[::-1] if metric.larger_is_better is False else values
        tenth = -(-len(values) // 10)
        numbers = (worst_first[:tenth].mean(), np.median(values), worst_first[-tenth:].mean())
        lines.append([run.name, str(len(values)), *map(decimals, map(float, numbers))])
    first, last = (f"mean of the\n{end} tenth" for end in extremes)
    heads = ["run", "clients", first, "median", last]
    return TextTable(f"{metric.title} of each client", heads, lines)


def _of_folder(name: str, directory: RunDirectory) -> ComparedRun:
    """Return the run of a folder; one without a guarantee may be older than draws are."""
    run = read_run(name, directory)
    draws = () if run.summary["epsilon"] is None else directory.draws()
    guarantee = directory.guarantee()
    return ComparedRun.of(run, path=directory.path, guarantee=guarantee, draws=draws)


def _of_sweep(
    name: str, path: Path, metric: str | None, *, all_runs: bool
) -> tuple[str | None, str, list[ComparedRun]]:
    """Return the metric that is asked for, how runs of a sweep were chosen, and these runs.

    Each has all settings that it had, as the sweep recorded them: no user's code is imported.
    """
    # A run's folder needs no pyarrow.
    from fedjaxsim.runs.sweep_results import REPORT, best_runs, read_runs, recorded_settings

    runs, columns, report = read_runs(path)
    (ranking, configs), compared_runs, choice = recorded_settings(path), [], ""
    metric = _asked_of(name, runs, metric)
    with intact(path, f", so its results do not fit {SWEEP}"):
        worse = report["summary"].get("worse_than_constant", {})
        by_run = {run: stated for stated in report["guarantees"] for run in stated["runs"]}
        if runs and not all_runs:
            runs, choice = best_runs(ranking, runs, metric)
        for run in runs:
            index, last = int(run.name), run.rows[-1]
            settings, stated = configs[index], by_run[index]
            drawn = [draw for draw in report["draws"] if index in draw["runs"]]
            summary = strict({
                **{key: settings[key] for key in ("algorithm", "data", "model")},
                **{key: last[key] for key in last if key not in ("run", "round")},
                "clients": stated.get("clients", settings.get("clients")),
                "rounds": last["round"], "rounds_planned": settings["rounds"],
                "interrupted": False,
                "rounds_per_second": None, "worse_than_constant": worse.get(str(index)),
            })  # fmt: skip
            resolved = {name: stated[name] for name in ("bytes_sent", "work") if name in stated}
            full_config = {**settings, "resolved": {"clients": summary["clients"], **resolved}}
            compared_runs.append(ComparedRun.of(
                run, name=f"{name}/{index}", settings=settings_of_system(full_config),
                config=full_config, summary=summary, path=path, sweep=name,
                guarantee=check_guarantee(stated["guarantee"], path / REPORT),
                draws=entries.read_draws(drawn), swept={name: last[name] for name in columns},
            ))  # fmt: skip
    return metric, choice, compared_runs


def _of_examples(guarantee: Record) -> Sequence[str]:
    """Return the guarantees of single examples; reports of clients alone need no accountants."""
    if "example" not in guarantee:
        return ()
    from fedjaxsim.privacy.guarantee import Report

    return [str(g) for g in Report.from_json(guarantee).guarantees if g.unit == "example"]
