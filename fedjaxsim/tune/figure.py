"""The figure of a tuning: the objective and the hyperparameters over their cost."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjaxsim.extras import importing
from fedjaxsim.report.plots import COLOURS, STYLE, legend_above, line, picture
from fedjaxsim.report.symbols import axis_label
from fedjaxsim.tune.descent import Step, TuningTrace
from fedjaxsim.tune.objective import Grid

with importing("plots"):
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullFormatter

_MOST_IN_PLANES = 3
_MARKS: dict[str, dict[str, Any]] = {
    "start": {"color": "white", "mec": COLOURS[0], "marker": "o", "ms": 7, "ls": "none"},
    "best": {"color": COLOURS[0], "marker": "*", "ms": 12, "ls": "none"},
    "grid: dark is low": {"color": "0.35", "marker": "s", "ms": 5, "ls": "none"},
    "grid's best": {"color": "0.35", "marker": "s", "ms": 8, "mfc": "none", "ls": "none"},
    "taken back": {"color": COLOURS[1], "marker": "x", "ms": 5, "ls": "none"},
}


@mpl.rc_context(STYLE)
def trace_figure(trace: TuningTrace, metric: str, title: str, grid: Grid | None = None) -> Figure:
    """Draw the objective and the hyperparameters over run-equivalents, and the trace in planes.

    Two or three hyperparameters have a plane for each pair, with the results of a grid if given.
    """
    names = list(trace.steps[0].point)
    pairs = list(itertools.combinations(names, 2)) if len(names) <= _MOST_IN_PLANES else []
    kept = [step for step in trace.steps if step.accepted]
    refused = [step for step in trace.steps if not step.accepted]
    if len(pairs) > 1:  # planes take a second row
        figure: Any = picture(title, 9.6, 6.4)
        above, below = figure.subfigures(2, 1)
        objective, values = above.subplots(1, 2)
        planes = list(below.subplots(1, len(pairs)))
    else:
        figure = picture(title, 3.4 * (2 + len(pairs)), 3.3)
        objective, values, *planes = figure.subplots(1, 2 + len(pairs))
    _draw_objective(objective, kept, refused, metric, grid)
    for name, colour in zip(names, itertools.cycle(COLOURS)):
        looks: dict[str, Any] = {"color": colour, "marker": "o", "ms": 3, "label": axis_label(name)}
        values.plot([step.runs for step in kept], [step.point[name] for step in kept], **looks)
    _scale(values, [values.yaxis], [step.point[name] for step in kept for name in names])
    values.set(xlabel="run-equivalents", ylabel="hyperparameter")
    legend_above(values)
    for panel, (x, y) in zip(planes, pairs, strict=True):
        if grid is not None:
            _draw_grid(panel, grid, x, y)
        _draw_steps(panel, kept, x, y, color=COLOURS[0], lw=1.2, marker="o", ms=3)
        _draw_steps(panel, refused, x, y, **_MARKS["taken back"])
        _draw_steps(panel, kept[:1], x, y, zorder=4, **_MARKS["start"])
        _draw_steps(panel, [trace.best], x, y, zorder=5, mec="white", **_MARKS["best"])
        shown = [step.point[name] for step in trace.steps for name in (x, y)]
        _scale(panel, [panel.xaxis, panel.yaxis], shown)
        panel.set(xlabel=axis_label(x), ylabel=axis_label(y))
    if planes:
        marks = list(_MARKS.items())[: 2 if grid is None else 4]
        legend_above(planes[0], *(Line2D([], [], label=text, **looks) for text, looks in marks))
    return figure


def _draw_objective(
    panel: Axes, kept: Sequence[Step], refused: Sequence[Step], metric: str, grid: Grid | None
) -> None:
    runs, values, errors = np.array([(s.runs, s.value, s.standard_error) for s in kept]).T
    low, high = values - errors, values + errors
    looks = {"color": COLOURS[0], "label": "descent, ± standard error"}
    line(panel, runs, values, (low, high), marker="o", ms=3.5, **looks)
    shown = [*low, *high]
    if grid is not None:
        best = float(np.mean(grid.values[grid.best]))
        text = f"best of {len(grid.points)} on a grid"
        panel.plot([grid.runs], [best], label=text, **_MARKS["grid: dark is low"])
        panel.axhline(best, color="0.35", lw=1, ls="dotted")
        shown.append(best)
    finite = [height for height in shown if math.isfinite(height)]
    bottom, top = min(finite, default=0.0), max(finite, default=0.0)
    room = 0.06 * (top - bottom) or 1.0
    if refused:
        # A step far above, or not finite, is drawn at the edge: the descent must be readable.
        heights = np.minimum(np.nan_to_num([s.value for s in refused], nan=math.inf), top + room)
        places = [step.runs for step in refused]
        panel.plot(places, heights, label="taken back", clip_on=False, **_MARKS["taken back"])
    if finite:
        panel.set_ylim(bottom - room, top + room)
    panel.set_xlabel("run-equivalents")
    panel.set_ylabel(f"{metric.replace('_', ' ')}\nmean over clients and seeds")
    legend_above(panel, ncols=1)


def _draw_steps(panel: Axes, steps: Sequence[Step], x: str, y: str, **style: Any) -> None:
    panel.plot([step.point[x] for step in steps], [step.point[y] for step in steps], **style)


def _draw_grid(panel: Axes, grid: Grid, x: str, y: str) -> None:
    """Draw the points of the grid, coloured by the best value over hidden hyperparameters."""
    lowest: dict[tuple[float, float], float] = {}
    for point, mean in zip(grid.points, np.mean(grid.values, axis=1), strict=True):
        place = point[x], point[y]
        lowest[place] = np.fmin(lowest.get(place, math.inf), mean)
    shown = np.array([(*place, lowest[place]) for place in sorted(lowest)])
    panel.scatter(*shown.T[:2], color="0.85", marker="s", s=14, zorder=1)
    finite = shown[np.isfinite(shown[:, 2])]
    if len(finite):
        # Colours differ in the lower half, where settings are worth telling apart.
        means = finite[:, 2]
        panel.scatter(
            *finite.T[:2], c=means, cmap="Greys_r", vmin=means.min(), vmax=np.median(means),
            marker="s", s=26, edgecolors="0.8", linewidths=0.5, zorder=1,
        )  # fmt: skip
    best = grid.points[grid.best]
    panel.plot(best[x], best[y], zorder=3, **_MARKS["grid's best"])


def _scale(panel: Axes, axes: Sequence[Axis], values: Sequence[float]) -> None:
    """Scale the axes of positive values logarithmically, with plain numbers."""
    if min(values) <= 0:
        return
    panel.set(yscale="log", xscale="log" if panel.xaxis in axes else "linear")
    for axis in axes:
        low, high = axis.get_data_interval()
        axis.set_major_locator(LogLocator(subs=(1.0,) if high > 30 * low else (1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
