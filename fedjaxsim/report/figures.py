"""Figures of a sweep: envelopes over rounds, quality against ε, and maps of two keys."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjaxsim import metrics
from fedjaxsim.extras import importing
from fedjaxsim.report.envelopes import Frame, best_first, grouped, plottable
from fedjaxsim.report.labels import (
    MEANING,
    NOISE,
    Combination,
    combination_label,
    epsilon_label,
    key_label,
    line_styles,
    value_label,
)  # fmt: skip
from fedjaxsim.report.plots import COLOURS, STYLE, line, picture
from fedjaxsim.report.progress import number

with importing("plots"):
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator
with importing("tables"):
    import pandas as pd

_BEST: dict[str, Any] = {"color": "black", "ls": (0, (1, 2)), "zorder": 4, "label": "best of all"}
"""Style of the best: dotted, above the line that it follows."""
_IN_A_ROW = 5
_MOST_COLOURED = 7
_REST: dict[str, Any] = {"color": "0.75", "ls": "solid", "zorder": 1.8}


@mpl.rc_context(STYLE)
def envelope_figure(
    envelope: pd.DataFrame,
    *,
    panels: Sequence[str],
    lines: Sequence[str],
    title: str,
    best: pd.DataFrame | None = None,
) -> Figure:
    """Draw an envelope over rounds: a panel per combination of `panels`, a line per one of `lines`.

    Titles of panels name the ε spent at the end; bands are one standard error over seeds. At most
    seven lines are in colour, those that lead at most evaluations. `best`, the envelope over
    `lines` too, is black.

    Raises:
      ValueError: if panels and lines together are not the keys of the envelope.
    """
    rows = plottable(envelope, [*panels, *lines])
    metric = rows["metric"].iloc[0]
    styles = line_styles(lines, [values for values, _ in grouped(rows, lines)])
    coloured = _foremost(rows, panels, lines)
    looks = {
        name: {"color": style.colour, "ls": style.dashes, "label": style.label, **style.marker}
        for name, style in styles.items() if name in coloured
    }  # fmt: skip
    best_of = {} if best is None else dict(grouped(plottable(best, panels), panels))
    figure, axes = _make_panels(rows, panels, title)
    for (values, of_panel), panel in axes:
        for name, one in grouped(of_panel, lines):
            value, error = one["value"], one["standard_error"]
            band = (value - error, value + error) if error.notna().any() else None
            line(panel, one["round"], value, band, **looks.get(name, _REST))
        if values in best_of:
            panel.plot(best_of[values]["round"], best_of[values]["value"], **_BEST)
        panel.set_yscale(_scale_of(metric, rows["value"]))
    figure.supxlabel("rounds")
    seeds = "\nmean over seeds ± standard error" if rows["standard_error"].notna().any() else ""
    figure.supylabel(metrics.label(metric) + seeds, ma="center")
    handles = list(looks.values()) if lines else []
    rest = [style.label for name, style in styles.items() if name not in looks]
    handles += [{**_REST, "label": f"others: {', '.join(rest)}"}] if rest else []
    handles += [_BEST] if best is not None else []
    if handles:
        _legend_beside(figure, lines, handles=[Line2D([], [], **each) for each in handles])
    return figure


@mpl.rc_context({**STYLE, "axes.grid": False})
def heat_figure(
    final: pd.DataFrame, *, x: str, y: str, title: str, panels: Sequence[str] = ()
) -> Figure:
    """Draw the end of an envelope for all pairs of values of the keys `x` and `y`.

    The best of a panel is framed; if `x` is the noise, the best of each column, because quality at
    one ε says nothing about another. A cross marks cells in which all settings diverged. Up to two
    panels have numbers in their cells; more are small.

    Raises:
      ValueError: if x, y and panels together are not the keys of the envelope.
    """
    everything = plottable(final, [*panels, x, y])
    metric = everything["metric"].iloc[0]
    rows = everything.dropna(subset=[x, y])
    upwards = metrics.of_column(metric).larger_is_better
    across, up = (sorted(rows[key].unique()) for key in (x, y))
    colours = mpl.colormaps["viridis" if upwards else "viridis_r"].with_extremes(bad="0.85")
    known = rows["value"].dropna()
    limits = (known.min(), known.max()) if len(known) else (0, 1)
    norm = (LogNorm if _scale_of(metric, known) == "log" else Normalize)(*limits)
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


@mpl.rc_context(STYLE)
def trade_off_figure(
    final: pd.DataFrame, *, noise: Sequence[str], family: Sequence[str], title: str
) -> Figure:
    """Draw the end of an envelope against the ε spent: points per `noise`, lines per `family`.

    Runs without noise are at ε = ∞ to the right; runs that release nothing are a level line, since
    they fit every ε. The best of all families is black (Bietti et al. 2022, figure 2).

    Raises:
      ValueError: if noise and family together are not the keys of the envelope.
    """
    everything = plottable(final, [*noise, *family])
    metric = everything["metric"].iloc[0]
    styles = line_styles(family, [values for values, _ in grouped(everything, family)])
    rows = best_first(everything.dropna(subset="value"), metric).reset_index(drop=True)
    spent = rows["epsilon"][rows["epsilon"] > 0]
    low, high = (spent.min(), spent.max()) if len(spent) else (1.0, 1.0)
    infinite = high * max(2.0, (high / low) ** 0.2) if len(spent) else 1.0
    rows["at"] = _epsilon_drawn(rows, noise, infinite)
    points, levels = rows[rows["at"] > 0], rows[rows["at"] == 0]
    points_of, level_of = dict(grouped(points, family)), dict(grouped(levels, family))
    # Room for the legend beside the axes.
    longest = max(len(style.label) for style in styles.values())
    figure = picture(textwrap.fill(title, 64), 5.2 + 0.075 * longest, 3.8)
    axes = figure.subplots()
    axes.set(xscale="log", yscale=_scale_of(metric, rows["value"]))
    axes.set(xlabel=f"ε ({MEANING}) at the end of training, nats", ylabel=metrics.label(metric))
    for values, (label, colour, dashes, marker) in styles.items():
        looks: dict[str, Any] = {"color": colour, "ls": dashes, "label": label}
        if values in level_of:
            axes.axhline(level_of[values]["value"].iloc[0], **looks)
        if values in points_of:
            _draw_line(axes, points_of[values], infinite, marker=marker["marker"], **looks)
    if family:
        # At the largest ε of each noise; what releases nothing competes at every ε.
        at = points.groupby(list(noise), dropna=False)["at"].transform("max")
        everywhere = [levels.head(1).assign(at=epsilon) for epsilon in at.unique()]
        rivals = best_first(pd.concat([points.assign(at=at), *everywhere]), metric)
        _draw_line(
            axes, rivals.drop_duplicates("at"), infinite, marker="o", ms=8, mfc="none", **_BEST
        )
        _legend_beside(figure, family)
    ticks: list[float] = []
    if len(spent):
        # Room for the markers at both ends.
        margin = max(1.15, (infinite / low) ** 0.05)
        axes.set_xlim(low / margin, infinite * margin)
        axes.axvline(math.sqrt(high * infinite), color="0.6", lw=0.8, ls=(0, (1, 2)))
        steps = (1, 2, 5) if high / low < 200 / margin**2 else (1,)
        own = sorted({float(f"{epsilon:.2g}") for epsilon in spent})
        even = LogLocator(subs=steps, numticks=50).tick_values(low, high)
        every = own if len(own) <= 6 else even
        ticks = [tick for tick in every if low / margin <= tick <= high * margin]
    axes.xaxis.set_major_locator(FixedLocator([*ticks, infinite]))
    axes.set_xticks([*ticks, infinite], [*(f"{tick:g}" for tick in ticks), "∞"])
    axes.xaxis.set_minor_locator(NullLocator())
    return figure


def _scale_of(metric: str, values: Frame) -> str:
    """Return "log" for a positive metric that belongs on a logarithmic axis, else "linear"."""
    return "log" if metrics.of_column(metric).logarithmic and values.min() > 0 else "linear"


def _legend_beside(figure: Figure, keys: Sequence[str], **given: Any) -> None:
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
    return f"{label}\n{epsilon_label(spent)} ({MEANING})".lstrip()


def _frame_best(axes: Axes, grid: np.ndarray, upwards: bool) -> None:
    """Frame the best finite cell, if there is one."""
    if np.isfinite(grid).any():
        at = (np.nanargmax if upwards else np.nanargmin)(grid)
        row, column = map(int, np.unravel_index(at, grid.shape))
        looks: dict[str, Any] = {"fill": False, "ec": COLOURS[1], "lw": 2.2, "zorder": 4}
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, clip_on=False, **looks))


def _epsilon_drawn(rows: Frame, noise: Sequence[str], infinite: float) -> Frame:
    """Return the ε at which rows are drawn; 0 for a level line.

    A run that spends nothing is drawn at the ε of other runs with its noise.
    """
    at = rows["epsilon"].fillna(infinite)
    of_others = at.groupby([rows[key] for key in noise], dropna=False).transform("max")
    return at.where(at > 0, of_others)


def _draw_line(axes: Axes, rows: Frame, infinite: float, **style: Any) -> None:
    """Draw points joined by a line, dotted on its way to ∞.

    Only the first point at ∞ is drawn: others have too little noise for any accountant.
    """
    beyond = rows[rows["at"] == infinite].head(1)
    finite = rows[rows["at"] < infinite].sort_values("at", kind="stable")
    way = pd.concat([finite.tail(1), beyond])
    axes.plot(finite["at"], finite["value"], **style)
    axes.plot(way["at"], way["value"], **style | {"ls": (0, (1, 3)), "label": None})
    bars: Frame = pd.concat([finite, beyond]).dropna(subset="standard_error")
    looks = {"lw": 0.8, "color": style["color"], "zorder": style.get("zorder", 2), "ls": "none"}
    axes.errorbar(bars["at"], bars["value"], bars["standard_error"], **looks)
