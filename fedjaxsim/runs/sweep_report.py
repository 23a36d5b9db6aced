"""What a sweep says at its end: envelopes, guarantees, and what they do not cover."""

from collections.abc import Mapping, Sequence

import numpy as np

from fedjaxsim import metrics
from fedjaxsim.extras import importing
from fedjaxsim.privacy.events import Charged, Drawn
from fedjaxsim.privacy.guarantee import SHARED_SEED, report
from fedjaxsim.report.envelopes import default_metric, envelope, last, records
from fedjaxsim.report.files import Record
from fedjaxsim.report.labels import key_label, value_label
from fedjaxsim.report.progress import epsilon_text, number, print_rows
from fedjaxsim.runs.build import Experiment
from fedjaxsim.runs.memory import peak_bytes, traffic
from fedjaxsim.runs.plan import Plan
from fedjaxsim.runs.sweep_directory import REPORT, SELECTION, SweepDirectory

with importing("tables"):
    import pandas as pd
    import pyarrow as pa

_MOST_LINES = 30


def write_report(
    plan: Plan,
    directory: SweepDirectory,
    results: pa.Table,
    experiments: Mapping[int, Experiment],
) -> None:
    """Writes the envelopes, and the guarantees of the finished runs.

    Args:
      plan: of the sweep.
      directory: where to.
      results: its table.
      experiments: by run.
    """
    metric = default_metric(results, plan.columns)
    directory.write_envelopes(envelope(results, plan.columns, plan.best_over, metric))
    finished = sorted(set(results["run"].to_pylist()))
    summary = {
        "runs": len(plan.runs),
        "finished": len(finished),
        "diverged": len(_diverged(results)),
        "rounds": max(results["round"].to_pylist()),
        "metric": metric,
        "best_over": list(plan.best_over),
        **directory.times(),
        "peak_bytes": peak_bytes(),
    }
    done = {run: experiments[run] for run in finished}
    directory.write_report(summary, _guarantees(done), _traffic(done), _draws(done))


def print_report(plan: Plan, results: pa.Table) -> None:
    """Prints the best final value of each family of runs, and what no guarantee covers."""
    metric = default_metric(results, plan.columns)
    title, headings, lines = best_table(
        envelope(results, plan.columns, plan.best_over, metric), plan.best_over
    )
    print_rows(headings, lines[:_MOST_LINES], title, left=0)
    if len(lines) > _MOST_LINES:
        print(f"… and {len(lines) - _MOST_LINES} more in envelopes.parquet")
    diverged = _diverged(results)
    if diverged:
        print(f"{len(diverged)} runs diverged; they are in the results, marked, and never the best")
    print(SELECTION)
    print(f"the guarantees in full: {REPORT}")
    print(SHARED_SEED)


def best_table(
    found: pd.DataFrame, best_over: Sequence[str]
) -> tuple[str, list[str], list[list[str]]]:
    """The best final values as a table: its title, its headings, and its lines.

    Args:
      found: of the sweep, from `envelope`.
      best_over: the keys over which it takes the best.
    """
    best = last(found)
    rows = records(best)
    over = ", ".join(key_label(key) for key in best_over)
    title = f"{metrics.label(rows[0]['metric'])} at the end"
    title += f", best over {over}" if over else ""
    keys = [*best.columns[: best.columns.get_loc("round")], *best_over]
    lines = [
        [
            *(value_label(key, row[key]) for key in keys),
            number(row["value"]),
            *(epsilon_text(row[name]) for name in ("epsilon", "epsilon_replace")),
            number(row["delta"]),
        ]
        for row in rows
    ]
    return title, [*map(key_label, keys), "value", "ε\nzero-out", "ε\nreplace", "δ"], lines


def _diverged(results: pa.Table) -> set[int]:
    flags = np.asarray(results["diverged"])
    return set(np.asarray(results["run"])[flags].tolist())


def _guarantees(experiments: Mapping[int, Experiment]) -> list[Record]:
    """The report of each different plan of noise, with the runs that have it."""
    runs: dict[tuple[Charged, float, float, tuple[str, ...]], list[int]] = {}
    for run, experiment in experiments.items():
        z = np.float32(experiment.noise_multiplier).item()
        plan = (experiment.planned(), z, experiment.delta, experiment.simulation.public)
        runs.setdefault(plan, []).append(run)
    return [
        {
            "runs": members,
            "noise_multiplier": z,
            "guarantee": report([charged], delta, assumed=[*public, SHARED_SEED]).to_json(),
        }
        for (charged, z, delta, public), members in runs.items()
    ]


def _draws(experiments: Mapping[int, Experiment]) -> list[Record]:
    """List the draws from each key, with the runs that share them."""
    runs: dict[Drawn, list[int]] = {}
    for run, experiment in experiments.items():
        for each in experiment.draws():
            runs.setdefault(each, []).append(run)
    return [{"runs": members, **each._asdict()} for each, members in runs.items()]


def _traffic(experiments: Mapping[int, Experiment]) -> list[Record]:
    """What `traffic` says of each program, with its runs."""
    programs: dict[int, tuple[Experiment, list[int]]] = {}
    for run, experiment in experiments.items():
        programs.setdefault(id(experiment.simulation), (experiment, []))[1].append(run)
    return [
        {"algorithm": one.config.algorithm, "runs": runs, **traffic(one.simulation, one.hparams)}
        for one, runs in programs.values()
    ]
