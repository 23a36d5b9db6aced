"""Figures of a sweep: envelopes over rounds, accuracy against ε, and a map of two keys."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjaxsim import metrics
from fedjaxsim.extras import importing
from fedjaxsim.report.envelopes import Frame
from fedjaxsim.report.labels import (
    NOISE,
    Combination,
    combination_label,
    key_label,
    legend_title,
    line_styles,
    value_label,
)
from fedjaxsim.report.panels import (
    BEST_LABEL,
    BEST_STYLE,
    EPSILON_MEANS,
    beside_or_below,
    grouped,
    make_panels,
    name_axes,
    placed,
    scale_of,
)
from fedjaxsim.report.plots import COLOURS, STYLE, line
from fedjaxsim.report.progress import number

with importing("plots"):
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle
with importing("tables"):
    import pandas as pd

_MOST_COLOURED = 7
_REST: dict[str, Any] = {"color": "0.75", "ls": "solid", "lw": 1.0, "zorder": 1.8}


def envelope_figure(
    envelope: pd.DataFrame,
    *,
    panels: Sequence[str],
    lines: Sequence[str],
    title: str,
    best: pd.DataFrame | None = None,
) -> Figure:
    """Lines over rounds; the titles of panels say the ε that is spent at the end.

    Bands are one standard error over seeds. At most seven lines are in colour, those that lead at
    most evaluations; the others are grey.

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
    coloured = _foremost(rows, panels, lines)
    best_of = {} if best is None else dict(grouped(placed(best, panels), panels))
    groups = list(grouped(rows, panels))
    with mpl.rc_context(STYLE):
        figure, axes = make_panels(len(groups), title)
        for panel, (values, of_panel) in zip(axes, groups, strict=True):
            panel.set_title(_with_spent(combination_label(panels, values), of_panel))
            for name, one in grouped(of_panel, lines):
                _, colour, dashes = styles[name]
                looks: dict[str, Any] = {"color": colour, "ls": dashes, "lw": 1.4}
                value, error = one["value"], one["standard_error"]
                band = (value - error, value + error) if error.notna().any() else None
                line(panel, one["round"], value, band, **(looks if name in coloured else _REST))
            if values in best_of:
                panel.plot(best_of[values]["round"], best_of[values]["value"], **BEST_STYLE)
            panel.set_yscale(scale_of(metric, rows["value"]))
        name_axes(axes, "rounds", metrics.label(metric))
        handles = [
            Line2D([], [], color=colour, ls=dashes, label=label)
            for name, (label, colour, dashes) in styles.items()
            if lines and name in coloured
        ]
        rest = [style.label for name, style in styles.items() if name not in coloured]
        if rest:
            handles.append(Line2D([], [], label=f"others: {', '.join(rest)}", **_REST))
        if best is not None:
            handles.append(Line2D([], [], label=BEST_LABEL, **BEST_STYLE))
        beside_or_below(figure, handles, legend_title(lines), len(groups))
    return figure


def heat_figure(
    final: pd.DataFrame, *, x: str, y: str, title: str, panels: Sequence[str] = ()
) -> Figure:
    """The final metric for all pairs of values of two keys, with the best of each panel framed.

    Where x is the noise, the best of each column is framed: quality at one ε says nothing about
    another. A cross stands where all settings diverged. Up to two panels have their numbers in
    them; more are small.

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
        small = len(groups) > 2
        cell = (0.17, 0.17) if small else (0.46, 0.36)
        size = cell[0] * max(len(across), 3) + 0.9, cell[1] * max(len(up), 5) + 0.7
        figure, axes = make_panels(len(groups), f"{title}; best framed", size)
        for panel, (values, of_panel) in zip(axes, groups, strict=True):
            panel.set_title(_with_spent(combination_label(panels, values), of_panel))
            cells = of_panel.pivot(index=y, columns=x, values="value")
            grid = cells.reindex(index=up, columns=across).to_numpy()
            panel.imshow(grid, cmap=colours, norm=norm, origin="lower", aspect="auto")
            _write_cells(panel, grid, colours, norm, crosses=small)
            columns = np.eye(len(across), dtype=bool) if x in NOISE else np.ones((1, len(across)))
            for part in columns:
                _frame_best(panel, np.where(part, grid, np.nan), upwards)
            for axis, key, known in ((panel.xaxis, x, across), (panel.yaxis, y, up)):
                every = 2 if small and len(known) > 5 else 1
                labels = [value_label(key, value) for value in known[::every]]
                axis.set_ticks(range(0, len(known), every), labels)
        name_axes(axes, key_label(x), key_label(y))
        mappable = ScalarMappable(norm, colours)
        figure.colorbar(mappable, ax=list(axes), label=metrics.label(metric))
    return figure


def _foremost(rows: Frame, panels: Sequence[str], lines: Sequence[str]) -> set[Combination]:
    """The lines in colour: all if they are few, or those that are best at most evaluations."""
    names = [name for name, _ in grouped(rows, lines)]
    if len(names) <= _MOST_COLOURED:
        return set(names)
    upwards = metrics.of_column(rows["metric"].iloc[0]).larger_is_better
    led = dict.fromkeys(names, 0)
    for _, alike in grouped(rows.dropna(subset="value"), [*panels, "round"]):
        ordered = alike.sort_values("value", ascending=not upwards, kind="stable")
        [(name, _)] = grouped(ordered.head(1), lines)
        led[name] += 1
    return set(sorted(names, key=lambda name: -led[name])[:_MOST_COLOURED])


def _with_spent(label: str, rows: Frame) -> str:
    """The label of a panel with the ε of its last round, the largest where lines differ."""
    final = rows[rows["round"] == rows["round"].max()]
    spent = final["epsilon"].max()
    if not spent > 0 or final.loc[final["epsilon"] != 0, "epsilon"].isna().any():
        return label
    return f"{label}\nε ≤ {number(spent)} {EPSILON_MEANS}".lstrip()


def _frame_best(axes: Axes, grid: np.ndarray, upwards: bool) -> None:
    """Frames the best cell that is known, if there is one."""
    if np.isfinite(grid).any():
        at = (np.nanargmax if upwards else np.nanargmin)(grid)
        row, column = map(int, np.unravel_index(at, grid.shape))
        corner = column - 0.5, row - 0.5
        looks: dict[str, Any] = {"fill": False, "ec": COLOURS[1], "lw": 2.2}
        axes.add_patch(Rectangle(corner, 1, 1, clip_on=False, zorder=4, **looks))


def _write_cells(axes: Axes, grid: np.ndarray, colours: Any, norm: Any, *, crosses: bool) -> None:
    """The numbers, in black or white, and crosses where all settings diverged; or crosses alone."""
    for (row, column), value in np.ndenumerate(grid):
        known = np.isfinite(value)
        if known and crosses:
            continue
        *rgb, _ = colours(norm(value)) if known else (1, 1, 1, 1)
        luminance = np.dot(rgb, (0.299, 0.587, 0.114))
        axes.text(
            column, row, _short(value) if known else "×",
            ha="center", va="center", fontsize=7, color="black" if luminance > 0.5 else "white",
        )  # fmt: skip


def _short(value: float) -> str:
    return f"{value:.3f}" if 0.01 <= abs(value) < 10 else number(value)
