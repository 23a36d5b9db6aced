"""What the HTML report of a sweep says: all from its files."""

import itertools
from pathlib import Path
from xml.etree.ElementTree import Element

from fedjaxsim import metrics
from fedjaxsim.extras import importing
from fedjaxsim.privacy.guarantee import Report
from fedjaxsim.report.envelopes import Frame, last, records
from fedjaxsim.report.files import Record, read_json, read_tables
from fedjaxsim.report.html import Section, image, page, paragraph, table, verbatim
from fedjaxsim.report.labels import key_label, value_label
from fedjaxsim.report.progress import bytes_text, number
from fedjaxsim.runs.pages import (
    COUNTED,
    FAIRNESS,
    FOR_WHOM,
    SPREAD,
    TIMES,
    TRAFFIC,
    metric_text,
    origin,
    privacy,
    seconds_text,
    traffic_cells,
)
from fedjaxsim.runs.plan import SWEEP
from fedjaxsim.runs.sweep_directory import ENVELOPES, REPORT, RESULTS
from fedjaxsim.runs.sweep_report import best_table

with importing("tables"):
    import pandas as pd
    import pyarrow as pa

_ALT = {
    "envelopes.png": "The best of each family over rounds, with the ε spent",
    "trade_off.png": "The metric at the end against ε",
    "heat.png": "The metric at the end for all pairs of two settings",
}


def sweep_page(path: Path) -> bytes:
    """The report of a sweep.

    Args:
      path: its directory.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if a file is damaged.
    """
    for name in (SWEEP, REPORT, ENVELOPES, RESULTS):
        if not (path / name).is_file():
            raise FileNotFoundError(f"{path} holds no {name}: not a sweep, or not a finished one")
    config, report = read_tables(path / SWEEP), read_json(path / REPORT)
    try:
        swept = [each.get("seed", [config.get("seed", 0)]) for each in config["sweep"]]
        seeds = ", ".join(map(str, dict.fromkeys(itertools.chain(*swept))))
        plans = [
            (f"z = {number(each['noise_multiplier'])}", Report.from_json(each["guarantee"]))
            for each in report["guarantees"]
        ]
        best, results = (
            pd.read_parquet(path / name, dtype_backend="pyarrow") for name in (ENVELOPES, RESULTS)
        )
        sections: list[Section] = [
            ("Results", _results_of_sweep(best, report)),
            ("Privacy", privacy(plans)),
            ("Curves", [
                image((path / name).read_bytes(), alt)
                for name, alt in _ALT.items() if (path / name).is_file()
            ]),
            ("Clients", _clients_of_sweep(last(best), results, report["summary"])),
            ("Bytes, time and memory", _costs_of_sweep(report)),
            ("Settings", [verbatim((path / SWEEP).read_text(encoding="utf-8"))]),
            ("How to reproduce it", origin([("sweep", config | {"seed": seeds}, "sweep", "")])),
        ]  # fmt: skip
        return page(f"Sweep of {report['summary']['runs']} runs", [FOR_WHOM], sections)
    except (AttributeError, KeyError, TypeError, pa.ArrowException) as error:
        raise ValueError(f"{path} is damaged: it does not hold what a sweep writes") from error


def _results_of_sweep(best: pd.DataFrame, report: Record) -> list[Element]:
    summary = report["summary"]
    caption, headings, lines = best_table(best, summary["best_over"])
    done = f"{summary['finished']} of {summary['runs']} runs are done"
    if summary["diverged"]:
        done += f"; runs that diverged, which are never the best: {summary['diverged']}"
    keys = len(headings) - len(("value", "ε", "ε", "δ"))
    shown = table(caption, headings, lines, left=keys)
    return [paragraph(f"{done}."), shown, paragraph(report["selection"])]


def _clients_of_sweep(best: Frame, results: Frame, summary: Record) -> list[Element]:
    """How the best settings spread over clients at the end, as means over seeds."""
    keys = [*best.columns[: best.columns.get_loc("round")], *summary["best_over"]]
    metric, at = summary["metric"], [*keys, "round"]
    shown = [metric, *(name for end in SPREAD if (name := f"{metric}{end}") in results)]
    means = results.groupby(at, dropna=False)[shown].mean().reset_index()
    rows = [
        [*(value_label(key, row[key]) for key in keys), *(metric_text(row[name]) for name in shown)]
        for row in records(best[at].merge(means, on=at, how="left"))
    ]
    caption = f"{metrics.label(metric)} over the clients of the best settings"
    headings = [
        *map(key_label, keys),
        "value",
        *(SPREAD[n.removeprefix(metric)] for n in shown[1:]),
    ]
    return [
        table(caption, headings, rows, left=len(keys)),
        paragraph(f"{FAIRNESS} A sweep keeps no values of single clients; a run does."),
    ]


def _costs_of_sweep(report: Record) -> list[Element]:
    summary = report["summary"]
    rows = [
        [f"{each['algorithm']} ({len(each['runs'])} runs)", *traffic_cells(each, summary["rounds"])]
        for each in report.get("traffic", [])
    ]
    took = [seconds_text(summary.get(key)) for key in ("seconds", "compile_seconds")]
    took.append(bytes_text(summary.get("peak_bytes")))
    return [
        table("What passes in each run", ["runs", *TRAFFIC], rows),
        table("What all of them took", [*TIMES, "memory"], [took]),
        paragraph(COUNTED),
    ]
