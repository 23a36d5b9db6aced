"""The picture of a tuning: the objective and the hyperparameters over what they cost."""

import itertools
import math
from typing import Any

import numpy as np

from fedjaxsim.extras import importing
from fedjaxsim.report.plots import COLOURS, STYLE, legend_above, line, picture
from fedjaxsim.report.symbols import axis_label
from fedjaxsim.tune.descent import Path, Step
from fedjaxsim.tune.objective import Grid

with importing("plots"):
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

_MOST_IN_PLANES = 3
_RUNS = "run-equivalents"
_BACK: dict[str, Any] = {"color": COLOURS[1], "marker": "x", "ms": 5, "ls": "none"}
_START: dict[str, Any] = {"color": "white", "mec": COLOURS[0], "marker": "o", "ls": "none"}
_BEST: dict[str, Any] = {"color": COLOURS[0], "marker": "*", "ls": "none"}
_GRID: dict[str, Any] = {"color": "0.35", "marker": "s", "ls": "none"}
_BEST_OF_GRID: dict[str, Any] = {**_GRID, "ms": 8, "mfc": "none", "mew": 1.5}


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
        figure, over_runs, planes = _layout(title, len(pairs))
        _draw_objective(over_runs[0], path, metric, grid)
        _draw_hyperparameters(over_runs[1], path, names)
        for panel, pair in zip(planes, pairs, strict=True):
            _draw_plane(panel, path, pair, grid)
        if planes:
            marks: dict[str, Any] = {"start": _START | {"ms": 6}, "best": _BEST | {"ms": 10}}
            if grid is not None:
                marks |= {"grid: dark is low": _GRID | {"ms": 5}, "grid's best": _BEST_OF_GRID}
            handles = [Line2D([], [], label=text, **looks) for text, looks in marks.items()]
            legend_above(planes[0], *handles)
    return figure


def _layout(title: str, planes: int) -> tuple[Figure, list[Axes], list[Axes]]:
    """A row of panels; with three planes, these are a row of their own."""
    if planes <= 1:
        figure = picture(title, 3.4 * (2 + planes), 3.3)
        panels = list(figure.subplots(1, 2 + planes))
        return figure, panels[:2], panels[2:]
    figure = picture(title, 9.6, 6.4)
    rows: Any = figure.subfigures(2, 1)
    above, below = rows
    return figure, list(above.subplots(1, 2)), list(below.subplots(1, planes))


def _draw_objective(panel: Axes, path: Path, metric: str, grid: Grid | None) -> None:
    kept, refused = _kept_and_refused(path)
    runs, values, errors = np.array([(s.runs, s.value, s.standard_error) for s in kept]).T
    low, high = values - errors, values + errors
    looks = {"color": COLOURS[0], "label": "descent, ± standard error"}
    line(panel, runs, values, (low, high), marker="o", ms=3.5, **looks)
    shown = [*low, *high]
    if grid is not None:
        best = float(np.mean(grid.values[grid.best]))
        label = f"best of {len(grid.points)} on a grid"
        panel.plot([grid.runs], [best], ms=5, label=label, **_GRID)
        panel.axhline(best, color=_GRID["color"], lw=1, ls="dotted")
        shown.append(best)
    finite = [height for height in shown if math.isfinite(height)]
    bottom, top = min(finite, default=0.0), max(finite, default=0.0)
    room = 0.06 * (top - bottom) or 1.0
    if refused:
        # One that is far above, or not finite, is shown at the edge: the descent must be readable.
        heights = np.minimum(np.nan_to_num([s.value for s in refused], nan=math.inf), top + room)
        places = [step.runs for step in refused]
        panel.plot(places, heights, label="taken back", clip_on=False, **_BACK)
    if finite:
        panel.set_ylim(bottom - room, top + room)
    panel.set_xlabel(_RUNS)
    panel.set_ylabel(f"{metric.replace('_', ' ')}\nmean over clients and seeds")
    legend_above(panel, ncols=1)


def _draw_hyperparameters(panel: Axes, path: Path, names: list[str]) -> None:
    kept, _ = _kept_and_refused(path)
    for name, colour in zip(names, itertools.cycle(COLOURS)):
        values = [step.point[name] for step in kept]
        looks = {"color": colour, "marker": "o", "ms": 3}
        panel.plot([step.runs for step in kept], values, label=axis_label(name), **looks)
    if all(step.point[name] > 0 for step in kept for name in names):
        panel.set_yscale("log")
        _name_decades(panel.yaxis)
    panel.set_xlabel(_RUNS)
    panel.set_ylabel("hyperparameter")
    legend_above(panel)


def _draw_plane(panel: Axes, path: Path, pair: tuple[str, str], grid: Grid | None) -> None:
    x, y = pair
    kept, refused = _kept_and_refused(path)
    if grid is not None:
        _draw_grid(panel, grid, pair)
    looks: dict[str, Any] = {"color": COLOURS[0], "lw": 1.2, "marker": "o", "ms": 3}
    panel.plot([s.point[x] for s in kept], [s.point[y] for s in kept], **looks)
    panel.plot([s.point[x] for s in refused], [s.point[y] for s in refused], **_BACK)
    start, best = kept[0].point, path.best.point
    panel.plot(start[x], start[y], ms=7, zorder=4, **_START)
    panel.plot(best[x], best[y], ms=12, mec="white", zorder=5, **_BEST)
    if all(step.point[name] > 0 for step in path.steps for name in pair):
        panel.set(xscale="log", yscale="log")
        _name_decades(panel.xaxis)
        _name_decades(panel.yaxis)
    panel.set_xlabel(axis_label(x))
    panel.set_ylabel(axis_label(y))


def _draw_grid(panel: Axes, grid: Grid, pair: tuple[str, str]) -> None:
    """The grid's points, in the colour of the best value over the hyperparameters not shown."""
    x, y = pair
    lowest: dict[tuple[float, float], float] = {}
    for point, mean in zip(grid.points, np.mean(grid.values, axis=1), strict=True):
        place = point[x], point[y]
        lowest[place] = np.fmin(lowest.get(place, math.inf), mean)
    shown = np.array([(*place, lowest[place]) for place in sorted(lowest)])
    panel.scatter(*shown.T[:2], color="0.85", marker="s", s=14, zorder=1)
    finite = shown[np.isfinite(shown[:, 2])]
    if len(finite):
        # The lower half tells settings apart that are worth it; the others share one colour.
        means = finite[:, 2]
        panel.scatter(
            *finite.T[:2], c=means, cmap="Greys_r", vmin=means.min(), vmax=np.median(means),
            marker="s", s=26, edgecolors="0.8", linewidths=0.5, zorder=1,
        )  # fmt: skip
    best = grid.points[grid.best]
    panel.plot(best[x], best[y], zorder=3, **_BEST_OF_GRID)


def _kept_and_refused(path: Path) -> tuple[list[Step], list[Step]]:
    kept = [step for step in path.steps if step.accepted]
    return kept, [step for step in path.steps if not step.accepted]


def _name_decades(axis: Axis) -> None:
    """Plain numbers along a log scale, of which there are enough within one decade too."""
    low, high = axis.get_data_interval()
    subs = (1.0,) if high > 30 * low else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
