"""The HTML report of a sweep, read from its files."""

from pathlib import Path

from fedjaxsim import metrics
from fedjaxsim.data.files import read_tables
from fedjaxsim.extras import importing
from fedjaxsim.privacy.guarantee import Report
from fedjaxsim.report.files import Record, read_json
from fedjaxsim.report.labels import combination_label
from fedjaxsim.report.page import reading, render
from fedjaxsim.report.progress import number
from fedjaxsim.report.results import Run, best_first
from fedjaxsim.runs.finished import runs_of_sweep
from fedjaxsim.runs.pages import (
    TIMES,
    TRAFFIC,
    Card,
    epsilon_card,
    privacy,
    provenance,
    traffic_cells,
)
from fedjaxsim.runs.sweep_directory import PICTURES, REPORT, RESULTS, read_results
from fedjaxsim.runs.sweep_report import Best, best_of, best_table, text_of
from fedjaxsim.runs.sweep_runs import SWEEP, columns_of

with importing("tables"):
    import pyarrow as pa


def read_runs(path: Path) -> tuple[list[Run], list[str], Record]:
    """Read the finished runs of a sweep's directory, its swept columns and its report.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if a file is damaged.
    """
    with reading(path, "sweep", (SWEEP, REPORT, RESULTS), pa.ArrowException):
        config, found = read_tables(path / SWEEP), read_json(path / REPORT)
        columns = columns_of(config)
        return runs_of_sweep(read_results(path / RESULTS), columns, config), columns, found


def sweep_page(path: Path) -> bytes:
    """Render the report of the sweep in a directory.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if a file is damaged.
    """
    runs, columns, found = read_runs(path)
    with reading(path, "sweep", ()):
        config, summary = read_tables(path / SWEEP), found["summary"]
        best = best_of(runs, columns, summary["best_over"], summary["metric"])
        seeds = ", ".join(map(str, dict.fromkeys(run.seed for run in runs)))
        reports = [
            (f"z = {number(each['noise_multiplier'])}", Report.from_json(each["guarantee"]))
            for each in found["guarantees"]
        ]
        return render(
            "sweep",
            title=f"Sweep of {summary['runs']} runs",
            cards=_cards(best, summary),
            report=found,
            best=best_table(best, summary["best_over"]),
            privacy=privacy(reports),
            shared_seeds="",
            pictures={
                name: (path / name).read_bytes() for name in PICTURES if (path / name).is_file()
            },
            traffic_names=TRAFFIC,
            traffic=[
                [f"{each['algorithm']} ({len(each['runs'])} runs)",
                 *traffic_cells(each, summary["rounds"])]
                for each in found.get("traffic", [])
            ],
            times=TIMES,
            settings=(path / SWEEP).read_text(encoding="utf-8"),
            file=SWEEP,
            commands=[["fedjaxsim", "sweep", SWEEP]],
            **provenance({"sweep": config | {"seed": seeds}}),
        )  # fmt: skip


def _cards(best: Best, summary: Record) -> list[Card]:
    """Return cards for the best value at the end, with its settings and ε, and for the sweep."""
    row = best_first(best.rows, best.metric)[0]
    settings = combination_label(best.keys, [row[key] for key in best.keys])
    private = epsilon_card(row["epsilon"], row["delta"])
    left = f"of {summary['runs']}" if summary["finished"] < summary["runs"] else ""
    return [
        Card(f"best {metrics.label(best.metric)}", text_of(row), settings),
        private._replace(name="privacy of that run, not of its choice"),
        Card("runs", str(summary["finished"]), left or f"{summary['failed']} failed"),
        Card("rounds", str(summary["rounds"]), f"seeds of each setting: {row['seeds']}"),
    ]
