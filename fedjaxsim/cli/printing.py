"""Tables, JSON, guarantees and reports that commands print on stdout."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich.box
from rich.console import Console
from rich.table import Table

from fedjaxsim.cli.messages import in_flags, say
from fedjaxsim.extras import missing
from fedjaxsim.metrics import METRICS, MetricRecords, column_label
from fedjaxsim.report.files import json_text
from fedjaxsim.report.labels import data_label, key_label, value_label
from fedjaxsim.report.progress import decimals
from fedjaxsim.report.results import (
    columns_of_epsilon,
    estimate_in,
    metrics_of,
    remark_on_examples,
    remarks_on,
    table_of_means,
    table_of_runs,
)

if TYPE_CHECKING:
    from fedjaxsim.privacy.guarantee import Report
    from fedjaxsim.runs.comparison import Comparison
    from fedjaxsim.runs.sweep_results import Best
    from fedjaxsim.runs.sweeping import SweepResult

_MOST_RUNS = 30
"""Most lines of a table of runs."""


def print_json(value: Any) -> None:
    """Print strict JSON."""
    print(json_text(value))


def print_rows(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str | None = None,
    *,
    left: int = 1,
    padding: Any = (0, 1, 0, 0),
) -> None:
    """Print a table, at full width where there is no terminal.

    The first `left` columns are flush left.
    """
    table = Table(show_edge=False, padding=padding, box=rich.box.SIMPLE_HEAD)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    if title:
        console.print(title, style="italic", soft_wrap=True, highlight=False, markup=False)
    Console(width=None if console.is_terminal else 200).print(table)


def print_guarantee(report: "Report", file: Path | None, *, explain: bool) -> None:
    """Print the guarantee of a run in one line that names the file of the rest, or all of it."""
    print(report if explain else f"privacy: {report.short()}; in full: {file or '--explain'}")


def warn_if_no_matplotlib() -> None:
    """Print a warning if no pictures can be drawn."""
    if why := missing("plots"):
        say(f"warning: no pictures will be drawn: {why}")


def print_table(
    rows: Sequence[Mapping[str, Any]],
    title: str | None = None,
    metrics: MetricRecords = METRICS,
    *,
    condensed: bool = False,
) -> None:
    """Print a line for each summary of a run, and remarks on clients that are left out."""
    table = table_of_runs(rows, title or "", metrics, condensed=condensed)
    # 80 columns are enough without padding.
    print_rows(table.headings, table.rows, table.title or None, left=table.left, padding=0)
    for remark in remarks_on(rows, metrics):
        print(remark)


def print_comparison(comparison: "Comparison") -> None:
    """Print the tables of runs and of their means, and what the guarantees assume."""
    rows, means = comparison.described_rows(), comparison.means
    data = {data_label(row.get("data", ""), row.get("clients")) for row in rows}
    title = data.pop() if len(data) == 1 else None
    print_table(rows[:_MOST_RUNS], title, comparison.metrics, condensed=True)
    if len(rows) > _MOST_RUNS:
        print(f"… and {len(rows) - _MOST_RUNS} more runs (--json has all)")
    for sentence in (*comparison.choices, *comparison.sentences):
        print(sentence)
    if means:
        label = column_label(means[0]["metric"], comparison.metrics)
        table = table_of_means(means, label)
        print_rows(table.headings, table.rows)
        print("means over seeds with 95 % intervals; differences on seeds that both have")
    for sentence in filter(None, (comparison.worse, comparison.drawn_twice)):
        print(sentence)


def print_sweep(done: "SweepResult", best: "Best") -> None:
    """Print the best final value of each combination, and the limits of the guarantees."""
    from fedjaxsim.privacy.assumptions import SHARED_SEED
    from fedjaxsim.runs.sweep_results import REPORT, SELECTION, failed_runs

    over = ", ".join(map(key_label, done.plan.best_over))
    label = column_label(best.metric, metrics_of(done.runs))
    title = f"{label} at the end" + (over and f", best over {over}")
    title += ", means over seeds with 95 % intervals"
    spent = columns_of_epsilon(best.rows)
    lines = [
        [
            *("–" if row[key] is None else value_label(key, row[key]) for key in best.keys),
            str(estimate_in(row)), decimals(row["deviation"]), str(row["seeds"]),
            f"{row['failed']} of {row['runs']}", *(texts[index] for _, texts in spent),
        ]
        for index, row in enumerate(best.rows)
    ]  # fmt: skip
    headings = [
        *map(key_label, best.keys), "mean", "std over\nseeds", "seeds", "failed\nruns",
        *(heading for heading, _ in spent),
    ]  # fmt: skip
    print_rows(headings, lines[:_MOST_RUNS], title, left=0)
    if len(lines) > _MOST_RUNS:
        print(f"… and {len(lines) - _MOST_RUNS} more (results.parquet)")
    remarks = best.choice, done.plan.remark, remark_on_examples(best.rows), *done.advice
    for sentence in filter(None, remarks):
        print(in_flags(sentence))
    if failed := failed_runs(done.runs):
        print(f"{failed} runs failed: marked in the results, never ranked and in no mean")
    nonfinite = sum(row.get("nonfinite") or 0 for run in done.runs for row in run.rows)
    if nonfinite:
        print(f"{nonfinite:.0f} messages of clients were not finite and counted as zero")
    for line in dict.fromkeys(filter(None, (report.of_examples() for report in done.reports))):
        print(line)
    print(SELECTION)
    print(f"guarantees in full: {REPORT}")
    print(SHARED_SEED)
