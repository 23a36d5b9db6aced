"""`fedjaxsim compare`: finished runs side by side."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fedjaxsim.cli.flags import Work
from fedjaxsim.runs.output import FigureAxis

if TYPE_CHECKING:
    from fedjaxsim.clock import Axis
    from fedjaxsim.runs.comparison import Comparison

PAGE = ".html"
_PANELS = 12
"""Most panels of a picture of clients."""


def compare(
    runs: tuple[Path, ...],
    *,
    metric: str | None = None,
    all_runs: bool = False,
    figure: FigureAxis,
    out: Path | None = None,
    json: bool = False,
) -> Work:
    """Compare finished runs, and settings over their seeds, in tables and in a figure.

    Args:
      runs: Directories of runs or sweeps, or of several runs, as `run --seeds` makes them.
      metric: Metric by which they are compared, such as f1; by default the one that judges them.
      all_runs: Take all runs of a sweep, not only those with the best learning rates, or with the
        best values of its `best_over`.
      figure: Axis of the curves.
      out: Figure of the runs (.png, .pdf or .svg), their tables for LaTeX (.tex), their summaries
        (.csv), or a page of all (.html), with pictures, clients, guarantees and settings.
      json: Print JSON instead of a table.
    """
    from fedjaxsim import store
    from fedjaxsim.cli.printing import print_comparison, print_json
    from fedjaxsim.report.progress import doing
    from fedjaxsim.runs.comparison import compare as read

    axis = figure.axis
    if axis.over != "rounds" and (out is None or out.suffix in (".tex", ".csv")):
        raise ValueError(
            f"over {axis.over} is an axis of a figure: give --out FILE.png or FILE.html"
        )
    if out is not None:
        from fedjaxsim.report.plots import FORMATS, check_path

        check_path(out, (*FORMATS, PAGE, ".tex", ".csv"), "out")
    with doing("reading the runs", quiet=json):
        comparison, written = read(runs, metric, all_runs=all_runs), b""
        _ = comparison.means, comparison.sentences, comparison.drawn_twice
        if out is not None:
            written = _content(comparison, out, axis)

    def work() -> int:
        if json:
            assumed = [run.guarantee["assumed"] for run in comparison.runs]
            shown = [
                row | {"assumed": of} for row, of in zip(comparison.rows, assumed, strict=True)
            ]
            print_json({"runs": shown, "systems": comparison.means})
            if comparison.drawn_twice:
                print(comparison.drawn_twice, file=sys.stderr)
        else:
            print_comparison(comparison)
        if out is not None:
            store.write(out, written)
            print(f"written to {out}", file=sys.stderr if json else sys.stdout)
        return 0

    return work


def _content(comparison: "Comparison", out: Path, axis: "Axis") -> bytes:
    """Return the content of a file of the runs, in the format of its ending."""
    if out.suffix == PAGE:
        return _page(comparison, out, axis)
    if out.suffix == ".tex":
        return "\n".join(table.latex for table in comparison.tables()).encode()
    if out.suffix == ".csv":
        return _csv(comparison).encode()
    from fedjaxsim.report.figures import comparison_figure
    from fedjaxsim.report.plots import content

    picture = comparison_figure(comparison.systems, comparison.shown, axis)
    return content(picture, out.suffix[1:])


def _page(comparison: "Comparison", out: Path, axis: "Axis") -> bytes:
    """Return the page of the runs, from which relative links lead to their folders."""
    import tomli_w

    from fedjaxsim.metrics import column_metric
    from fedjaxsim.privacy.guarantee import Report
    from fedjaxsim.report.figures import clients_figure, comparison_figure
    from fedjaxsim.report.page import page
    from fedjaxsim.report.plots import content
    from fedjaxsim.report.results import remarks_on

    curves = comparison_figure(comparison.systems, comparison.shown, axis)
    pictures = {"Curves": content(curves)}
    clients = [
        (run.name, run.clients["train_rows"], run.clients[comparison.column])
        for run in comparison.runs
        if run.clients is not None and {"train_rows", comparison.column} <= run.clients.keys()
    ][:_PANELS]
    if clients:
        metric = column_metric(comparison.column, comparison.metrics)
        pictures["Clients against their rows"] = content(clients_figure(clients, metric))
    texts = {}
    for run in comparison.runs:
        texts[f"{run.name}: guarantee"] = str(Report.from_json(run.guarantee))
        settings = {name: value for name, value in run.config.items() if value is not None}
        texts[f"{run.name}: settings"] = tomli_w.dumps(settings)
    warnings = filter(None, (comparison.worse, comparison.drawn_twice))
    return page(
        "Runs",
        "For the person who ran the simulation: metrics are without noise, which no guarantee "
        "covers, and the noise follows from the seed.",
        comparison.tables(),
        pictures,
        [
            *comparison.choices,
            *comparison.sentences,
            *warnings,
            *remarks_on(comparison.rows, comparison.metrics),
        ],
        texts,
        {
            row["run"]: os.path.relpath(run.path, out.parent)
            for rows in (comparison.rows, comparison.described_rows)
            for row, run in zip(rows, comparison.runs, strict=True)
        },
    )


def _csv(comparison: "Comparison") -> str:
    """Return the summaries of all runs with all digits."""
    from fedjaxsim.report.files import csv_text

    names = dict.fromkeys(name for row in comparison.rows for name in row)
    return csv_text([[*names], *([row.get(name) for name in names] for row in comparison.rows)])
