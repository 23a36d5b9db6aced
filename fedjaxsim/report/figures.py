"""Figures of a sweep: envelopes over rounds, accuracy against ε, and a map of two keys."""

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from fedjaxsim import metrics
from fedjaxsim.report.envelopes import Frame
from fedjaxsim.report.labels import (
    NOISE,
    combination_label,
    key_label,
    legend_title,
    line_styles,
    value_label,
)
from fedjaxsim.report.panels import (
    BEST_LABEL,
    BEST_STYLE,
    EPSILON_LABEL,
    EPSILON_STYLE,
    beside_or_below,
    grouped,
    in_a_row,
    make_panels,
    name_axes,
    placed,
    scale_of,
)
from fedjaxsim.report.plots import STYLE, line
from fedjaxsim.report.progress import number


def envelope_figure(
    envelope: pd.DataFrame,
    *,
    panels: Sequence[str],
    lines: Sequence[str],
    title: str,
    best: pd.DataFrame | None = None,
) -> Figure:
    """Lines over rounds, with the ε spent on an axis of its own to the right.

    Bands are one standard error over seeds. An ε of 0, where nothing is released, is not drawn.

    Args:
      envelope: from `envelopes.envelope`.
      panels: the keys whose values make panels, e.g. the noise multiplier; in rows of five.
      lines: the keys whose values make lines, e.g. the level of personalization.
      title: what is shown.
      best: the envelope over `lines` too, drawn in black.

    Raises:
      ValueError: if panels and lines together are not the keys of the envelope.
    """
    rows = placed(envelope, [*panels, *lines])
    metric = rows["metric"].iloc[0]
    styles = line_styles(lines, [values for values, _ in grouped(rows, lines)])
    best_of = {} if best is None else dict(grouped(placed(best, panels), panels))
    groups = list(grouped(rows, panels))
    with mpl.rc_context(STYLE):
        figure, axes = make_panels(len(groups), title)
        spent: list[Axes | None] = []
        for panel, (values, of_panel) in zip(axes, groups, strict=True):
            panel.set_title(combination_label(panels, values))
            of_lines = dict(grouped(of_panel, lines))
            for name, one in of_lines.items():
                _, colour, dashes = styles[name]
                value, error = one["value"], one["standard_error"]
                band = (value - error, value + error) if error.notna().any() else None
                line(panel, one["round"], value, band, color=colour, ls=dashes, lw=1.4)
            if values in best_of:
                panel.plot(best_of[values]["round"], best_of[values]["value"], **BEST_STYLE)
            panel.set_yscale(scale_of(metric, rows["value"]))
            spent.append(_spent_axis(panel, list(of_lines.values())))
        name_axes(axes, "rounds", metrics.label(metric))
        _name_spent(spent)
        handles = [
            Line2D([], [], color=colour, ls=dashes, label=label)
            for label, colour, dashes in (styles.values() if lines else ())
        ]
        if best is not None:
            handles.append(Line2D([], [], label=BEST_LABEL, **BEST_STYLE))
        if any(spent):
            handles.append(Line2D([], [], label=f"spent {EPSILON_LABEL}", **EPSILON_STYLE))
        beside_or_below(figure, handles, legend_title(lines), len(groups))
    return figure


def heat_figure(
    final: pd.DataFrame, *, x: str, y: str, title: str, panels: Sequence[str] = ()
) -> Figure:
    """The final metric for all pairs of values of two keys, with the best of each panel framed.

    Where x is the noise, the best of each column is framed: quality at one ε says nothing about
    another. A cross stands where all settings diverged.

    Args:
      final: the end of an envelope, from `envelopes.last`.
      x: the key across.
      y: the key upwards.
      title: what is shown.
      panels: the keys whose values make panels.

    Raises:
      ValueError: if x, y and panels together are not the keys of the envelope.
    """
    everything = placed(final, [*panels, x, y])
    metric = everything["metric"].iloc[0]
    rows = everything.dropna(subset=[x, y])
    upwards = metrics.of_column(metric).larger_is_better
    across, up = (sorted(rows[key].unique()) for key in (x, y))
    colours = mpl.colormaps["viridis" if upwards else "viridis_r"].with_extremes(bad="0.85")
    known = rows["value"].dropna()
    limits = (known.min(), known.max()) if len(known) else (0, 1)
    norm = (LogNorm if scale_of(metric, known) == "log" else Normalize)(*limits)
    without_grid: dict[Any, Any] = {**STYLE, "axes.grid": False}
    with mpl.rc_context(without_grid):
        groups = list(grouped(rows, panels))
        size = 0.46 * max(len(across), 3) + 0.9, 0.36 * max(len(up), 5) + 0.7
        figure, axes = make_panels(len(groups), f"{title}; best framed", size)
        for panel, (values, of_panel) in zip(axes, groups, strict=True):
            panel.set_title(combination_label(panels, values))
            cells = of_panel.pivot(index=y, columns=x, values="value")
            grid = cells.reindex(index=up, columns=across).to_numpy()
            panel.imshow(grid, cmap=colours, norm=norm, origin="lower", aspect="auto")
            _write_cells(panel, grid, colours, norm)
            columns = np.eye(len(across), dtype=bool) if x in NOISE else np.ones((1, len(across)))
            for part in columns:
                _frame_best(panel, np.where(part, grid, np.nan), upwards)
            panel.set_xticks(range(len(across)), [value_label(x, v) for v in across])
            panel.set_yticks(range(len(up)), [value_label(y, v) for v in up])
        name_axes(axes, key_label(x), key_label(y))
        mappable = ScalarMappable(norm, colours)
        figure.colorbar(mappable, ax=list(axes), label=metrics.label(metric))
    return figure


def _spent_axis(axes: Axes, lines: Sequence[Frame]) -> Axes | None:
    """The ε of the lines, once where they spend the same; None if there is none to draw."""
    known = [rows.dropna(subset="epsilon") for rows in lines]
    curves = {
        tuple(zip(rows["round"], rows["epsilon"], strict=True)): None
        for rows in known
        if rows["epsilon"].max() > 0
    }
    if not curves:
        return None
    right = axes.twinx()
    for curve in curves:
        right.plot(*zip(*curve, strict=True), **EPSILON_STYLE)
    right.set_ylim(bottom=0)
    right.grid(visible=False)
    right.tick_params(axis="y", colors=EPSILON_STYLE["color"], labelsize=8)
    return right


def _name_spent(axes: Sequence[Axes | None]) -> None:
    """The name of ε once in each row of panels, to the right."""
    length = in_a_row(len(axes))
    for start in range(0, len(axes), length):
        drawn = [axis for axis in axes[start : start + length] if axis is not None]
        if drawn:
            drawn[-1].set_ylabel(EPSILON_LABEL, color=EPSILON_STYLE["color"])


def _frame_best(axes: Axes, grid: np.ndarray, upwards: bool) -> None:
    """Frames the best cell that is known, if there is one."""
    if np.isfinite(grid).any():
        at = (np.nanargmax if upwards else np.nanargmin)(grid)
        row, column = map(int, np.unravel_index(at, grid.shape))
        corner = column - 0.5, row - 0.5
        looks: dict[str, Any] = {"fill": False, "ec": EPSILON_STYLE["color"], "lw": 2.2}
        axes.add_patch(Rectangle(corner, 1, 1, clip_on=False, zorder=4, **looks))


def _write_cells(axes: Axes, grid: np.ndarray, colours: Any, norm: Any) -> None:
    """The numbers, in black or white; a cross where all settings diverged."""
    for (row, column), value in np.ndenumerate(grid):
        known = np.isfinite(value)
        *rgb, _ = colours(norm(value)) if known else (1, 1, 1, 1)
        luminance = np.dot(rgb, (0.299, 0.587, 0.114))
        axes.text(
            column, row, _short(value) if known else "×",
            ha="center", va="center", fontsize=7, color="black" if luminance > 0.5 else "white",
        )  # fmt: skip


def _short(value: float) -> str:
    return f"{value:.3f}" if 0.01 <= abs(value) < 10 else number(value)
