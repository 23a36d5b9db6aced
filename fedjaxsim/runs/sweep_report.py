"""The report of a finished sweep: envelopes, guarantees and their limits."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from fedjaxsim import metrics
from fedjaxsim.extras import importing
from fedjaxsim.privacy.assumptions import SHARED_SEED
from fedjaxsim.privacy.guarantee import report
from fedjaxsim.report.envelopes import default_metric, envelope, keys_of, last, records
from fedjaxsim.report.files import Record
from fedjaxsim.report.labels import key_label, value_label
from fedjaxsim.report.progress import epsilon_text, number, print_rows
from fedjaxsim.runs.build import Experiment
from fedjaxsim.runs.memory import peak_bytes, traffic
from fedjaxsim.runs.sweep_directory import ENVELOPES, REPORT, SELECTION, SweepDirectory
from fedjaxsim.runs.sweep_runs import SweepRuns

with importing("tables"):
    import pandas as pd
    import pyarrow as pa

Key = TypeVar("Key", bound=Hashable)
_MOST_LINES = 30


def write_report(
    sweep: SweepRuns,
    directory: SweepDirectory,
    results: pa.Table,
    experiments: Mapping[int, Experiment],
) -> None:
    """Write the envelopes, and the guarantees of the finished runs, from tidy results."""
    metric = default_metric(results, sweep.columns)
    directory.write_envelopes(envelope(results, sweep.columns, sweep.best_over, metric))
    finished = sorted(set(results["run"].to_pylist()))
    summary = {
        "runs": len(sweep.runs),
        "finished": len(finished),
        "diverged": len(_diverged(results)),
        "rounds": max(results["round"].to_pylist()),
        "metric": metric,
        "best_over": list(sweep.best_over),
        **directory.times(),
        "peak_bytes": peak_bytes(),
    }
    done = {run: experiments[run] for run in finished}
    draws = _runs_by_key((each, run) for run, one in done.items() for each in one.draws())
    programs = _runs_by_key((id(one.simulation), run) for run, one in done.items())
    directory.write_report(
        summary,
        _guarantees(done),
        [_traffic(done[runs[0]], runs) for runs in programs.values()],
        [{"runs": runs, **drawn._asdict()} for drawn, runs in draws.items()],
    )


def print_report(sweep: SweepRuns, results: pa.Table) -> None:
    """Print the best final value of each family of runs, and the limits of the guarantees."""
    metric = default_metric(results, sweep.columns)
    best = best_table(envelope(results, sweep.columns, sweep.best_over, metric), sweep.best_over)
    print_rows(best.headings, best.lines[:_MOST_LINES], best.title, left=0)
    if len(best.lines) > _MOST_LINES:
        print(f"… and {len(best.lines) - _MOST_LINES} more in {ENVELOPES}")
    diverged = _diverged(results)
    if diverged:
        print(f"{len(diverged)} runs diverged: marked in the results, and never the best")
    if "nonfinite" in results.column_names:
        count = np.nansum(np.asarray(results["nonfinite"]))
        print(f"{count:.0f} messages of clients were not finite and counted as zero")
    print(SELECTION)
    print(f"guarantees in full: {REPORT}")
    print(SHARED_SEED)


class BestTable(NamedTuple):
    """The best final values of a sweep; the first `keys` columns are settings."""

    title: str
    headings: list[str]
    lines: list[list[str]]
    keys: int


def best_table(found: pd.DataFrame, best_over: Sequence[str]) -> BestTable:
    """Return the best final value of each combination of the keys of an envelope."""
    best = last(found)
    keys = [*keys_of(best), *best_over]
    rows = records(best)
    over = ", ".join(map(key_label, best_over))
    title = f"{metrics.label(rows[0]['metric'])} at the end" + (over and f", best over {over}")
    if any(row["standard_error"] is not None for row in rows):
        title += ", mean ± standard error over seeds"
    lines = [
        [
            *(value_label(key, row[key]) for key in keys),
            with_error(row["value"], row["standard_error"]),
            str(row["seeds"]),
            *(epsilon_text(row[name]) for name in ("epsilon", "epsilon_replace")),
            number(row["delta"]),
        ]
        for row in rows
    ]
    headings = [*map(key_label, keys), "value", "seeds", "ε\nzero-out", "ε\nreplace", "δ"]
    return BestTable(title, headings, lines, len(keys))


def with_error(value: float | None, error: float | None) -> str:
    """Format a mean with its standard error, to the digits that the error supports."""
    if value is None or not error:
        return number(value)
    places = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:.{places}f} ± {error:.{places}f}"


def _diverged(results: pa.Table) -> set[int]:
    return set(np.asarray(results["run"])[np.asarray(results["diverged"])].tolist())


def _runs_by_key(pairs: Iterable[tuple[Key, int]]) -> dict[Key, list[int]]:
    runs: dict[Key, list[int]] = {}
    for key, run in pairs:
        runs.setdefault(key, []).append(run)
    return runs


def _guarantees(experiments: Mapping[int, Experiment]) -> list[Record]:
    """Return the report of each distinct noise schedule, with its runs."""
    schedules = _runs_by_key(
        ((one.planned(), np.float32(one.noise_multiplier).item(), one.delta,
          (*one.config.public, *one.simulation.setup.public)), run)
        for run, one in experiments.items()
    )  # fmt: skip
    return [
        {
            "runs": runs,
            "noise_multiplier": z,
            "guarantee": report([charged], delta, assumed=[*public, SHARED_SEED]).to_json(),
        }
        for (charged, z, delta, public), runs in schedules.items()
    ]


def _traffic(first: Experiment, runs: list[int]) -> Record:
    """Return the traffic of the runs of one program."""
    passed = traffic(first.simulation, first.hparams)
    return {"algorithm": first.config.algorithm, "runs": runs, **passed}
