"""Figures of a sweep over several keys: envelopes over rounds, and maps of two keys."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjaxsim import metrics
from fedjaxsim.extras import importing
from fedjaxsim.report.envelopes import Combination, Frame, best_first, grouped, placed
from fedjaxsim.report.labels import NOISE, combination_label, key_label, line_styles, value_label
from fedjaxsim.report.plots import COLOURS, STYLE, line, picture
from fedjaxsim.report.progress import epsilon_text, number

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

BEST: dict[str, Any] = {"color": "black", "lw": 3.4, "zorder": 1.9, "label": "best of all"}
"""Wide and below the other lines, so that the one that is best shows on it."""
MEANING = "(zero-out, joint DP)"
"""The meaning of ε in figures."""
_IN_A_ROW = 5
_MOST_COLOURED = 7
_REST: dict[str, Any] = {"color": "0.75", "ls": "solid", "lw": 1.0, "zorder": 1.8}


@mpl.rc_context(STYLE)
def envelope_figure(
    envelope: pd.DataFrame,
    *,
    panels: Sequence[str],
    lines: Sequence[str],
    title: str,
    best: pd.DataFrame | None = None,
) -> Figure:
    """Draw values over rounds; titles of panels name the ε spent at the end.

    Bands are one standard error over seeds. At most seven lines are in colour, those that lead at
    most evaluations; the others are grey.

    Args:
      envelope: from `envelopes.envelope`.
      panels: keys whose values make panels, e.g. the noise multiplier; in rows of five.
      lines: keys whose values make lines, e.g. the level of personalization.
      title: title of the figure.
      best: the envelope over `lines` too, drawn in black.

    Raises:
      ValueError: if panels and lines together are not the keys of the envelope.
    """
    rows = placed(envelope, [*panels, *lines])
    metric = rows["metric"].iloc[0]
    styles = line_styles(lines, [values for values, _ in grouped(rows, lines)])
    coloured = _foremost(rows, panels, lines)
    looks = {
        name: {"color": colour, "ls": dashes, "lw": 1.4, "label": label}
        for name, (label, colour, dashes) in styles.items() if name in coloured
    }  # fmt: skip
    best_of = {} if best is None else dict(grouped(placed(best, panels), panels))
    figure, axes = _make_panels(rows, panels, title)
    for (values, of_panel), panel in axes:
        for name, one in grouped(of_panel, lines):
            value, error = one["value"], one["standard_error"]
            band = (value - error, value + error) if error.notna().any() else None
            line(panel, one["round"], value, band, **looks.get(name, _REST))
        if values in best_of:
            panel.plot(best_of[values]["round"], best_of[values]["value"], **BEST)
        panel.set_yscale(scale_of(metric, rows["value"]))
    figure.supxlabel("rounds")
    seeds = "\nmean over seeds ± standard error" if rows["standard_error"].notna().any() else ""
    figure.supylabel(metrics.label(metric) + seeds, ma="center")
    handles = list(looks.values()) if lines else []
    rest = [style.label for name, style in styles.items() if name not in looks]
    handles += [{**_REST, "label": f"others: {', '.join(rest)}"}] if rest else []
    handles += [BEST] if best is not None else []
    if handles:
        legend_beside(figure, lines, handles=[Line2D([], [], **each) for each in handles])
    return figure


@mpl.rc_context({**STYLE, "axes.grid": False})
def heat_figure(
    final: pd.DataFrame, *, x: str, y: str, title: str, panels: Sequence[str] = ()
) -> Figure:
    """Draw the final metric for all pairs of values of two keys; the best of a panel is framed.

    Where x is the noise, the best of each column is framed: quality at one ε says nothing about
    another. A cross stands where all settings diverged. Up to two panels have numbers in their
    cells; more are small.

    Args:
      final: the end of an envelope, from `envelopes.last`.
      x: key of the horizontal axis.
      y: key of the vertical axis.
      title: title of the figure.
      panels: keys whose values make panels.

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
    small = len(list(grouped(rows, panels))) > 2
    width, height = (0.17, 0.17) if small else (0.46, 0.36)
    size = width * max(len(across), 3) + 0.9, height * max(len(up), 5) + 0.7
    figure, axes = _make_panels(rows, panels, f"{title}; best framed", size)
    for (_, of_panel), panel in axes:
        cells = of_panel.pivot(index=y, columns=x, values="value")
        grid = cells.reindex(index=up, columns=across).to_numpy()
        panel.imshow(grid, cmap=colours, norm=norm, origin="lower", aspect="auto")
        for (row, column), value in np.ndenumerate(grid):
            if not np.isfinite(value):
                panel.text(column, row, "×", ha="center", va="center", fontsize=7)
            elif not small:
                dark = (norm(value) < 0.5) == upwards
                text = f"{value:.3f}" if 0.01 <= abs(value) < 10 else number(value)
                colour = "white" if dark else "black"
                panel.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
        for part in np.eye(len(across)) if x in NOISE else np.ones((1, len(across))):
            _frame_best(panel, np.where(part, grid, np.nan), upwards)
        for axis, key, values in ((panel.xaxis, x, across), (panel.yaxis, y, up)):
            every = 2 if small and len(values) > 5 else 1
            labels = [value_label(key, value) for value in values[::every]]
            axis.set_ticks(range(0, len(values), every), labels)
    figure.supxlabel(key_label(x))
    figure.supylabel(key_label(y))
    mappable = ScalarMappable(norm, colours)
    figure.colorbar(mappable, ax=[panel for _, panel in axes], label=metrics.label(metric))
    return figure


def scale_of(metric: str, values: Frame) -> str:
    """Return "log" for a positive metric that belongs on a logarithmic axis, else "linear"."""
    return "log" if metrics.of_column(metric).logarithmic and values.min() > 0 else "linear"


def legend_beside(figure: Figure, keys: Sequence[str], **given: Any) -> None:
    """Add a legend beside the axes; its title is the key, where there is one."""
    title = key_label(keys[0]) if len(keys) == 1 else None
    figure.legend(title=title, loc="outside right center", **given)


def _make_panels(
    rows: Frame, keys: Sequence[str], title: str, size: tuple[float, float] | None = None
) -> tuple[Figure, list[tuple[tuple[Combination, Frame], Axes]]]:
    """Make a panel of `size` (inches) for the rows of each combination, in even rows."""
    groups = list(grouped(rows, keys))
    in_a_row = math.ceil(len(groups) / math.ceil(len(groups) / _IN_A_ROW))
    above = math.ceil(len(groups) / in_a_row)
    width, height = size or (2.8 if in_a_row > 2 else 3.6, 2.3 if above > 1 else 2.7)
    figure = picture(title, max(width * in_a_row + 2.0, 5.0), height * above + 0.6)
    axes = list(figure.subplots(above, in_a_row, sharex=True, sharey=True, squeeze=False).flat)
    for unused in axes[len(groups) :]:
        unused.remove()
    for place, ((values, of_panel), panel) in enumerate(zip(groups, axes, strict=False)):
        panel.set_title(_with_spent(combination_label(keys, values), of_panel))
        panel.tick_params(labelbottom=place + in_a_row >= len(groups))
    return figure, list(zip(groups, axes, strict=False))


def _foremost(rows: Frame, panels: Sequence[str], lines: Sequence[str]) -> set[Combination]:
    """Return the lines in colour: all if they are few, or those that lead at most evaluations."""
    led = dict.fromkeys((name for name, _ in grouped(rows, lines)), 0)
    if len(led) > _MOST_COLOURED:
        for _, alike in grouped(rows.dropna(subset="value"), [*panels, "round"]):
            [(name, _)] = grouped(best_first(alike, rows["metric"].iloc[0]).head(1), lines)
            led[name] += 1
    return set(sorted(led, key=lambda name: -led[name])[:_MOST_COLOURED])


def _with_spent(label: str, rows: Frame) -> str:
    """Add the ε of the last round to the title of a panel, the largest where lines differ."""
    final = rows[rows["round"] == rows["round"].max()]
    spent = final["epsilon"].max()
    if not spent > 0 or final.loc[final["epsilon"] != 0, "epsilon"].isna().any():
        return label
    rounded = epsilon_text(spent).rstrip("0").rstrip(".")
    return f"{label}\nε ≤ {rounded} {MEANING}".lstrip()


def _frame_best(axes: Axes, grid: np.ndarray, upwards: bool) -> None:
    """Frame the best finite cell, if there is one."""
    if np.isfinite(grid).any():
        at = (np.nanargmax if upwards else np.nanargmin)(grid)
        row, column = map(int, np.unravel_index(at, grid.shape))
        looks: dict[str, Any] = {"fill": False, "ec": COLOURS[1], "lw": 2.2, "zorder": 4}
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, clip_on=False, **looks))
