"""The picture of a tuning: the objective and the hyperparameters over what they cost."""

import itertools
import math
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from fedjaxsim.hparams import ABOUT
from fedjaxsim.report.plots import COLOURS, STYLE
from fedjaxsim.runs.settings import flag
from fedjaxsim.tune.descent import Path
from fedjaxsim.tune.objective import Grid

_GRID = "0.35"
_MOST_IN_PLANES = 3
_RUNS = "run-equivalents"


def path_figure(path: Path, metric: str, title: str, grid: Grid | None = None) -> Figure:
    """The objective and the hyperparameters over run-equivalents, and the path in its planes.

    Planes are drawn for two or three hyperparameters, one for each pair.

    Args:
      path: of the descent.
      metric: what is minimized.
      title: what is shown.
      grid: what a sweep of the same runs found, to be set beside.
    """
    names = list(path.steps[0].point)
    pairs = list(itertools.combinations(names, 2)) if len(names) <= _MOST_IN_PLANES else []
    with mpl.rc_context(STYLE):
        figure, over_runs, planes = _layout(len(pairs))
        figure.suptitle(title, fontsize=10)
        _draw_objective(over_runs[0], path, metric, grid)
        _draw_hyperparameters(over_runs[1], path, names)
        for panel, pair in zip(planes, pairs, strict=True):
            _draw_plane(panel, path, pair, grid)
        if planes:
            _name_marks(planes[0], grid is not None)
    return figure


def _layout(planes: int) -> tuple[Figure, list[Axes], list[Axes]]:
    """A row of panels; with three planes, these are a row of their own."""
    if planes <= 1:
        figure = Figure(figsize=(3.4 * (2 + planes), 3.3), layout="constrained")
        panels = list(figure.subplots(1, 2 + planes))
        return figure, panels[:2], panels[2:]
    figure = Figure(figsize=(9.6, 6.4), layout="constrained")
    rows: Any = figure.subfigures(2, 1)
    above, below = rows
    return figure, list(above.subplots(1, 2)), list(below.subplots(1, planes))


def _draw_objective(panel: Axes, path: Path, metric: str, grid: Grid | None) -> None:
    kept = [step for step in path.steps if step.accepted]
    runs = np.array([step.runs for step in kept])
    values = np.array([step.value for step in kept])
    errors = np.array([step.standard_error for step in kept])
    panel.plot(
        runs, values, color=COLOURS[0], marker="o", ms=3.5, label="descent, ± standard error"
    )
    panel.fill_between(runs, values - errors, values + errors, color=COLOURS[0], alpha=0.18, lw=0)
    top = np.nanmax(np.append(values + errors, -math.inf))
    bottom = np.nanmin(np.append(values - errors, math.inf))
    if grid is not None:
        best = float(np.mean(grid.values[grid.best]))
        label = f"best of {len(grid.points)} on a grid"
        panel.plot([grid.runs], [best], color=_GRID, marker="s", ms=5, ls="none", label=label)
        panel.axhline(best, color=_GRID, lw=1, ls="dotted")
        top, bottom = max(top, best), min(bottom, best)
    room = 0.06 * (top - bottom) or 1.0
    refused = [step for step in path.steps if not step.accepted]
    if refused:
        # One that is far above, or not finite, is shown at the edge: the descent must be readable.
        heights = [
            min(step.value, top + room) if math.isfinite(step.value) else top + room
            for step in refused
        ]
        panel.plot(
            [step.runs for step in refused], heights, color=COLOURS[1], marker="x", ms=5,
            ls="none", label="taken back", clip_on=False,
        )  # fmt: skip
    if math.isfinite(top) and math.isfinite(bottom):
        panel.set_ylim(bottom - room, top + room)
    panel.set_xlabel(_RUNS)
    panel.set_ylabel(f"{metric.replace('_', ' ')}\nmean over clients and seeds")
    panel.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=1, borderaxespad=0.2)


def _draw_hyperparameters(panel: Axes, path: Path, names: list[str]) -> None:
    kept = [step for step in path.steps if step.accepted]
    for name, colour in zip(names, itertools.cycle(COLOURS)):
        values = [step.point[name] for step in kept]
        runs = [step.runs for step in kept]
        panel.plot(runs, values, color=colour, marker="o", ms=3, label=_label(name))
    if all(step.point[name] > 0 for step in kept for name in names):
        panel.set_yscale("log")
        _name_decades(panel.yaxis)
    panel.set_xlabel(_RUNS)
    panel.set_ylabel("hyperparameter")
    panel.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)


def _draw_plane(panel: Axes, path: Path, pair: tuple[str, str], grid: Grid | None) -> None:
    x, y = pair
    kept = [step.point for step in path.steps if step.accepted]
    if grid is not None:
        _draw_grid(panel, grid, pair)
    line: dict[str, Any] = {"color": COLOURS[0], "lw": 1.2, "marker": "o", "ms": 3}
    panel.plot([p[x] for p in kept], [p[y] for p in kept], **line)
    for step in path.steps:
        if not step.accepted:
            panel.plot(step.point[x], step.point[y], color=COLOURS[1], marker="x", ms=5)
    best = path.best.point
    panel.plot(kept[0][x], kept[0][y], color="white", mec=COLOURS[0], marker="o", ms=7, zorder=4)
    panel.plot(best[x], best[y], color=COLOURS[0], marker="*", ms=12, mec="white", zorder=5)
    if all(step.point[name] > 0 for step in path.steps for name in pair):
        panel.set(xscale="log", yscale="log")
        _name_decades(panel.xaxis)
        _name_decades(panel.yaxis)
    panel.set_xlabel(_label(x))
    panel.set_ylabel(_label(y))


def _name_marks(panel: Axes, grid: bool) -> None:
    """One legend for all planes."""
    marks = [
        Line2D([], [], color="white", mec=COLOURS[0], marker="o", ms=6, ls="none", label="start"),
        Line2D([], [], color=COLOURS[0], marker="*", ms=10, ls="none", label="best"),
    ]
    if grid:
        of_grid: dict[str, Any] = {"color": _GRID, "marker": "s", "ls": "none"}
        marks.append(Line2D([], [], ms=5, label="grid: dark is low", **of_grid))
        marks.append(Line2D([], [], ms=8, mfc="none", mew=1.5, label="grid's best", **of_grid))
    panel.legend(handles=marks, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)


def _draw_grid(panel: Axes, grid: Grid, pair: tuple[str, str]) -> None:
    """The grid's points, in the colour of the best value over the hyperparameters not shown."""
    x, y = pair
    means = np.mean(grid.values, axis=1)
    shown: dict[tuple[float, float], float] = {}
    for point, mean in zip(grid.points, means, strict=True):
        place = point[x], point[y]
        mean = float(mean) if math.isfinite(mean) else math.inf
        shown[place] = min(shown.get(place, math.inf), mean)
    finite = {place: mean for place, mean in shown.items() if math.isfinite(mean)}
    panel.scatter(*zip(*shown, strict=True), color="0.85", marker="s", s=14, zorder=1)
    if finite:
        # The lower half tells settings apart that are worth it; the others share one colour.
        high = float(np.median(list(finite.values())))
        places = list(zip(*finite, strict=True))
        panel.scatter(
            *places, c=list(finite.values()), cmap="Greys_r", vmin=min(finite.values()), vmax=high,
            marker="s", s=26, edgecolors="0.8", linewidths=0.5, zorder=1,
        )  # fmt: skip
    best = grid.points[grid.best]
    panel.plot(best[x], best[y], color=_GRID, marker="s", ms=8, mfc="none", mew=1.5, zorder=3)


def _name_decades(axis: Axis) -> None:
    """Plain numbers along a log scale, of which there are enough within one decade too."""
    low, high = axis.get_data_interval()
    subs = (1.0,) if high > 30 * low else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _label(name: str) -> str:
    symbol, label = ABOUT[name].symbol, ABOUT[name].label
    return f"{symbol} ({label})" if symbol and label else symbol or label or flag(name)
