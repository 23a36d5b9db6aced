"""The picture of runs side by side: each system over its seeds, with its data set and ε."""

import difflib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjaxsim import metrics
from fedjaxsim.extras import importing
from fedjaxsim.report.labels import (
    MEANING,
    NOISE,
    algorithm_title,
    combination_label,
    epsilon_label,
)  # fmt: skip
from fedjaxsim.report.plots import (
    COLOURS,
    DASHES,
    EPSILON,
    STYLE,
    Records,
    colours_of,
    draw_with_band,
    marked,
    marked_points,
    picture,
    points,
    quality_key,
)  # fmt: skip
from fedjaxsim.report.progress import number
from fedjaxsim.report.seeds import SeedGroup, mean_records

with importing("plots"):
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_OF_NOISE = ("epsilon", *NOISE)
_MOST_IN_A_ROW = 3


class Curve(NamedTuple):
    """One system in a figure.

    Attributes:
      label: name in the legend.
      records: evaluations; `METRIC_low` and `METRIC_high`, where present, bound a band.
      style: arguments of `Axes.plot`, `color` among them.
      data: name of the data set, with the number of its clients.
    """

    label: str
    records: Records
    style: dict[str, Any]
    data: str


def of_systems(found: Sequence[SeedGroup], columns: Sequence[str] = ()) -> list[Curve]:
    """Return a curve per system, the means of `columns` over its seeds.

    By default the column is the metric that judges the first run of the data set. A colour is an
    algorithm's, and dashes tell its settings apart; settings of a single algorithm have colours.
    """
    algorithms = [each.algorithm for each in found]
    colours = colours_of(algorithms)
    judged: dict[str, str] = {}
    curves = []
    for place, (system, label) in enumerate(zip(found, _labels(found), strict=True)):
        colour, dashes = colours[system.algorithm]
        rank = algorithms[:place].count(system.algorithm)
        if len(colours) == 1:
            colour = COLOURS[(COLOURS.index(colour) + rank) % len(COLOURS)]
            rank //= len(COLOURS)
        dashes = DASHES[(DASHES.index(dashes) + rank) % len(DASHES)]
        style = {"color": colour, "ls": dashes} | (marked(place) if len(found) > 1 else {})
        metric = judged.setdefault(
            system.data, quality_key(next(iter(system.runs.values())).records)
        )
        curves.append(Curve(label, mean_records(system, columns or [metric]), style, system.data))
    return curves


@mpl.rc_context(STYLE)
def comparison_figure(found: Sequence[SeedGroup], columns: Sequence[str] = ()) -> Figure:
    """Draw columns of the evaluations of systems over rounds, a panel for each, with one legend.

    Each data set has panels of its own. The title names the only one, and the ε of all systems or,
    where they differ, its meaning.

    Args:
      found: systems, from `seeds.systems`.
      columns: columns of `metrics.jsonl`; by default the metric that judges the runs.

    Raises:
      ValueError: if no run of a data set has numbers in a column.
    """
    curves = of_systems(found, columns)
    of_data: dict[str, list[Curve]] = {}
    for curve in curves:
        of_data.setdefault(curve.data, []).append(curve)
    panels = [
        (name if len(of_data) > 1 else "", alike, column)
        for name, alike in of_data.items()
        for column in columns or [quality_key(alike[0].records)]
    ]
    across = min(len(panels), _MOST_IN_A_ROW)
    down = -(-len(panels) // across)
    # Entries of the legend in a row, by the width that their letters take.
    entries = min(len(curves), max(1, 54 * across // (9 + max(len(each.label) for each in curves))))
    width, height = 4.8 if across == 1 else 3.4 * across, 2.9 * down
    title = "; ".join(filter(None, [curves[0].data if len(of_data) == 1 else "", _spent(found)[0]]))
    figure = picture(title, width, height + 0.2 * -(-len(curves) // entries))
    every = list(figure.subplots(down, across, squeeze=False).flat)
    for (name, alike, column), panel in zip(panels, every, strict=False):
        if not any(len(points(each.records, column)[0]) for each in alike):
            known = next(iter(found[0].runs.values())).records[-1]
            close = difflib.get_close_matches(column, known, n=1, cutoff=0.5)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ValueError(
                f"a figure needs a column with numbers in metrics.jsonl, got {column}{hint}"
            )
        bands = [
            draw_with_band(panel, each.records, column, ("_low", "_high"), **each.style)
            for each in alike
        ]
        over = "pooled over clients" if metrics.of_column(column).pooled else "mean over clients"
        over += "; mean over seeds, 95 %" if any(bands) else ""
        label = f"{metrics.label(column)}\n{over}"
        panel.set(title=name, ylabel=EPSILON if column == "epsilon" else label)
    for unused in every[len(panels) :]:
        unused.remove()
    for panel in every[max(0, len(panels) - across) : len(panels)]:
        panel.set_xlabel("rounds")
    handles = [Line2D([], [], label=each.label, **each.style) for each in curves]
    if len(handles) > 1:
        figure.legend(handles=handles, loc="outside lower center", ncols=entries)
    return figure


@mpl.rc_context(STYLE)
def clients_figure(runs: Sequence[tuple[Curve, np.ndarray]], metric: str) -> Figure:
    """Draw the empirical distribution of a metric over the clients (m,) of each curve."""
    figure = picture("", 4.6, 3.0)
    axes = figure.subplots()
    for run, values in runs:
        style = dict(run.style)
        if "markevery" in style:
            style["markevery"] = marked_points(len(values) + 1, style["markevery"])
        axes.ecdf(values, label=run.label, **style)
    axes.axhline(0.1, color="0.6", lw=0.8, zorder=1)
    axes.set(xlabel=metrics.label(metric), ylabel="share of clients at or below")
    if len(runs) > 1:
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def spent_by(system: SeedGroup) -> str:
    """Return the largest ε over the seeds of a system, as text."""
    spent = [run.summary.get("epsilon") for run in system.runs.values()]
    return epsilon_label(None if None in spent else max(filter(None, spent), default=0.0))


def _labels(found: Sequence[SeedGroup]) -> list[str]:
    """Name systems in a legend: algorithm, ε unless the title has it, settings where needed."""
    _, common = _spent(found)
    short, full = [], []
    for each in found:
        differs = {key: value for key, value in each.differs.items() if key not in _OF_NOISE}
        settings, spent = combination_label([*differs], [*differs.values()]), spent_by(each)
        parts = [algorithm_title(each.algorithm), "" if spent == common else spent]
        short.append(", ".join(filter(None, parts)))
        full.append(", ".join(filter(None, [*parts, settings])))
    names = zip(short, full, found, strict=True)
    return [
        brief if short.count(brief) == 1 else long if full.count(long) == 1 else each.label
        for brief, long, each in names
    ]


def _spent(found: Sequence[SeedGroup]) -> tuple[str, str]:
    """Return the ε of all systems that release anything, with its meaning and alone.

    Where they differ the first is the meaning and the second empty.
    """
    nothing, endless = epsilon_label(0.0), epsilon_label(None)
    released = {text for each in found if (text := spent_by(each)) != nothing} or {nothing}
    runs = [run for each in found for run in each.runs.values()]
    deltas = {run.summary["delta"] for run in runs if run.summary.get("epsilon")}
    ends = " to ".join(map(number, sorted({min(deltas), max(deltas)}))) if deltas else ""
    meaning = f" ({MEANING}, δ = {ends})" if released - {nothing, endless} else ""
    meaning = " (whole clients)" if released == {endless} else meaning
    common = released.pop() if len(released) == 1 else ""
    return f"{common or 'ε'}{meaning}", common
