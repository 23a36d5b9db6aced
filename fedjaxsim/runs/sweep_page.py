"""Contents of the HTML report of a sweep, read from its files."""

import itertools
from pathlib import Path

from fedjaxsim import metrics
from fedjaxsim.data.files import read_tables
from fedjaxsim.extras import importing
from fedjaxsim.privacy.guarantee import Report
from fedjaxsim.report.envelopes import Frame, best_first, keys_of, last, records
from fedjaxsim.report.files import Record, read_json
from fedjaxsim.report.labels import combination_label, key_label, value_label
from fedjaxsim.report.page import metric_text, reading, render
from fedjaxsim.report.progress import number
from fedjaxsim.runs.pages import (
    SPREAD,
    TIMES,
    TRAFFIC,
    Card,
    epsilon_card,
    privacy,
    provenance,
    traffic_cells,
)
from fedjaxsim.runs.sweep_directory import ENVELOPES, PICTURES, REPORT, RESULTS
from fedjaxsim.runs.sweep_report import best_table, with_error
from fedjaxsim.runs.sweep_runs import SWEEP

with importing("tables"):
    import pandas as pd
    import pyarrow as pa


def sweep_page(path: Path) -> bytes:
    """Render the report of the sweep in a directory.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if a file is damaged.
    """
    with reading(path, "sweep", (SWEEP, REPORT, ENVELOPES, RESULTS), pa.ArrowException):
        config, report = read_tables(path / SWEEP), read_json(path / REPORT)
        best, results = (
            pd.read_parquet(path / name, dtype_backend="pyarrow") for name in (ENVELOPES, RESULTS)
        )
        summary = report["summary"]
        swept = [each.get("seed", [config.get("seed", 0)]) for each in config["sweep"]]
        seeds = ", ".join(map(str, dict.fromkeys(itertools.chain(*swept))))
        reports = [
            (f"z = {number(each['noise_multiplier'])}", Report.from_json(each["guarantee"]))
            for each in report["guarantees"]
        ]
        return render(
            "sweep",
            title=f"Sweep of {summary['runs']} runs",
            cards=_cards(best, summary),
            report=report,
            best=best_table(best, summary["best_over"]),
            privacy=privacy(reports),
            shared_seeds="",
            pictures={
                name: (path / name).read_bytes() for name in PICTURES if (path / name).is_file()
            },
            metric=metrics.label(summary["metric"]),
            spread=_spread(last(best), results, summary),
            traffic_names=TRAFFIC,
            traffic=[
                [f"{each['algorithm']} ({len(each['runs'])} runs)",
                 *traffic_cells(each, summary["rounds"])]
                for each in report.get("traffic", [])
            ],
            times=TIMES,
            settings=(path / SWEEP).read_text(encoding="utf-8"),
            file=SWEEP,
            commands=[["fedjaxsim", "sweep", SWEEP]],
            **provenance({"sweep": config | {"seed": seeds}}),
        )  # fmt: skip


def _cards(best: Frame, summary: Record) -> list[Card]:
    """Return cards for the best value at the end, with its settings and ε, and for the sweep."""
    metric, keys = summary["metric"], [*keys_of(best), *summary["best_over"]]
    row = records(best_first(last(best), metric))[0]
    value = with_error(row["value"], row["standard_error"])
    settings = combination_label(keys, [row[key] for key in keys])
    private = epsilon_card(row["epsilon"], row["delta"])
    left = f"of {summary['runs']}" if summary["finished"] < summary["runs"] else ""
    return [
        Card(f"best {metrics.label(metric)}", value, settings),
        private._replace(name="privacy of that run, not of its choice"),
        Card("runs", str(summary["finished"]), left or f"{summary['diverged']} diverged"),
        Card("rounds", str(summary["rounds"]), f"seeds of each setting: {row['seeds']}"),
    ]


def _spread(best: Frame, results: Frame, summary: Record) -> Record:
    """Return the spread over clients of the best settings at the end, as means over seeds."""
    keys = [*keys_of(best), *summary["best_over"]]
    metric, at = summary["metric"], [*keys, "round"]
    shown = {metric: "value"} | {
        f"{metric}{end}": name for end, name in SPREAD.items() if f"{metric}{end}" in results
    }
    means = results.groupby(at, dropna=False)[[*shown]].mean().reset_index()
    rows = [
        [*(value_label(key, row[key]) for key in keys), *(metric_text(row[name]) for name in shown)]
        for row in records(best[at].merge(means, on=at, how="left"))
    ]
    return {"headings": [*map(key_label, keys), *shown.values()], "rows": rows, "left": len(keys)}
