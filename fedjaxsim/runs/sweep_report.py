"""The report of a sweep, derived from its results: in files and on the terminal."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from fedjaxsim import metrics
from fedjaxsim.privacy.assumptions import SHARED_SEED
from fedjaxsim.privacy.guarantee import report
from fedjaxsim.report.files import Record
from fedjaxsim.report.labels import key_label, value_label
from fedjaxsim.report.progress import decimals, epsilon_text, number, print_rows
from fedjaxsim.report.results import (
    Estimate,
    Run,
    choosing,
    default_metric,
    envelope,
    last,
)
from fedjaxsim.runs.build import Experiment
from fedjaxsim.runs.memory import peak_bytes
from fedjaxsim.runs.sweep_directory import (
    REPORT,
    SELECTION,
    SweepDirectory,
)
from fedjaxsim.runs.sweep_runs import SweepRuns

Key = TypeVar("Key", bound=Hashable)
_MOST_LINES = 30
CHOSEN_ON_VALIDATION = "The best settings were chosen on validation rows; values are on test rows."
CHOSEN_ON_TEST = (
    "The best settings were chosen on the very test rows that their values are on, since there are "
    "no validation rows (validation-fraction): these values are optimistic."
)


class Best(NamedTuple):
    """The best final values of a sweep.

    Attributes:
      metric: the column of the values.
      keys: keys of the combinations, then those over which the best was taken.
      rows: rows of an envelope, one per combination.
      choice: the rows on which the best was chosen, in a sentence; "" without a choice.
    """

    metric: str
    keys: list[str]
    rows: list[Record]
    choice: str


def best_of(
    runs: Sequence[Run], columns: Sequence[str], best_over: Sequence[str], metric: str | None = None
) -> Best:
    """Return the best final values of the runs of a sweep, by its swept columns."""
    metric = metric or default_metric(runs)
    keys = [name for name in columns if name != "seed"]
    others = [key for key in keys if key not in best_over]
    rows = last(envelope(runs, keys, best_over, metric), others)
    choice = ""
    if any(row["runs"] > row["seeds"] for row in rows):
        judged = choosing(runs, metric)
        choice = CHOSEN_ON_TEST if judged == metric else CHOSEN_ON_VALIDATION
    return Best(metric, [*others, *best_over], rows, choice)


# --- files and terminal ---------------------------------------------------------------------------


def write_report(
    sweep: SweepRuns,
    directory: SweepDirectory,
    runs: Sequence[Run],
    best: Best,
    experiments: Mapping[int, Experiment],
) -> None:
    """Write the summary, and the guarantees of the finished runs."""
    finished = [int(run.name) for run in runs]
    summary = {
        "runs": len(sweep.runs),
        "finished": len(finished),
        "failed": _failed(runs),
        "rounds": max(run.rows[-1]["round"] for run in runs),
        "metric": best.metric,
        "best_over": list(sweep.best_over),
        "choice": sweep.choice or best.choice,
        "peak_bytes": peak_bytes(),
    }
    done = {run: experiments[run] for run in finished}
    draws = _runs_by_key((each, run) for run, one in done.items() for each in one.draws())
    directory.write_report(
        summary,
        _guarantees(done),
        [{"runs": alike, **drawn._asdict()} for drawn, alike in draws.items()],
    )


def print_report(sweep: SweepRuns, runs: Sequence[Run], best: Best) -> None:
    """Print the best final value of each combination, and the limits of the guarantees."""
    over = ", ".join(map(key_label, sweep.best_over))
    title = f"{metrics.label(best.metric)} at the end" + (over and f", best over {over}")
    several, failing = (any(row[name] for row in best.rows) for name in ("half", "failed"))
    if several:
        title += ", means over seeds with 95 % intervals"
    lines = [
        [
            *("–" if row[key] is None else value_label(key, row[key]) for key in best.keys),
            str(Estimate(*(row[name] for name in ("value", *Estimate._fields[1:])))),
            *([decimals(row["deviation"])] if several else []),
            str(row["seeds"]),
            *([f"{row['failed']} of {row['runs']}"] if failing else []),
            *(epsilon_text(row[name]) for name in ("epsilon", "epsilon_replace")),
            number(row["delta"]),
        ]
        for row in best.rows
    ]
    headings = [
        *map(key_label, best.keys), "value", *(["std over\nseeds"] if several else []), "seeds",
        *(["failed\nruns"] if failing else []), "ε\nzero-out", "ε\nreplace", "δ",
    ]  # fmt: skip
    print_rows(headings, lines[:_MOST_LINES], title, left=0)
    if len(lines) > _MOST_LINES:
        print(f"… and {len(lines) - _MOST_LINES} more (results.parquet)")
    if choice := sweep.choice or best.choice:
        print(choice)
    if failed := _failed(runs):
        print(f"{failed} runs failed: marked in the results, never ranked and in no mean")
    nonfinite = sum(row.get("nonfinite") or 0 for run in runs for row in run.rows)
    if nonfinite:
        print(f"{nonfinite:.0f} messages of clients were not finite and counted as zero")
    print(SELECTION)
    print(f"guarantees in full: {REPORT}")
    print(SHARED_SEED)


def _failed(runs: Sequence[Run]) -> int:
    return sum(any(row["failed"] for row in run.rows) for run in runs)


def _runs_by_key(pairs: Iterable[tuple[Key, int]]) -> dict[Key, list[int]]:
    runs: dict[Key, list[int]] = {}
    for key, run in pairs:
        runs.setdefault(key, []).append(run)
    return runs


def _guarantees(experiments: Mapping[int, Experiment]) -> list[Record]:
    """Return the report of each distinct noise schedule, with its runs."""
    schedules = _runs_by_key(
        (((*one.simulation.prepared, one.planned()),
          np.float32(one.noise_multiplier).item(), one.delta,
          (*one.config.public, *one.simulation.public)), run)
        for run, one in experiments.items()
    )  # fmt: skip
    return [
        {
            "runs": runs,
            "noise_multiplier": z,
            "guarantee": report(charges, delta, assumed=[*public, SHARED_SEED]).to_json(),
        }
        for (charges, z, delta, public), runs in schedules.items()
    ]
