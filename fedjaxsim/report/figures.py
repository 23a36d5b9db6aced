"""Figures of the table of results: curves over rounds, quality against ε, clients."""

import difflib
import math
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjaxsim import metrics
from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.extras import importing
from fedjaxsim.report.files import Record
from fedjaxsim.report.labels import (
    MEANING,
    NOISE,
    Combination,
    algorithm_title,
    combination_label,
    epsilon_label,
    key_label,
    value_label,
)  # fmt: skip
from fedjaxsim.report.plots import (
    COLOURS,
    DASHES,
    EPSILON,
    STYLE,
    bounds_so_far,
    colours_of,
    line,
    marked,
    marked_points,
    picture,
)  # fmt: skip
from fedjaxsim.report.progress import number
from fedjaxsim.report.results import System, best_first, curve, default_metric, grouped

with importing("plots"):
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

_INTERVAL = "mean over seeds, 95 %"

Rows = Sequence[Record]
"""Rows of an envelope or a curve, of `report.results`."""


def _draw_curve(axes: Axes, rows: Rows, **style: Any) -> bool:
    """Draw values over rounds with their intervals; return whether there are intervals."""
    value, half = (
        np.array([math.nan if row[name] is None else row[name] for row in rows], float)
        for name in ("value", "half")
    )
    known = bool(np.isfinite(half).any())
    rounds = [row["round"] for row in rows]
    band = _within(rows[0]["metric"], value, half) if known else None
    line(axes, rounds, value, band, **style)
    return known


def _within(metric: str, value: np.ndarray, half: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of intervals, clipped to the metric's range: with two seeds they are wide."""
    low, high = metrics.of_column(metric).range
    return np.maximum(value - half, low), np.minimum(value + half, high)


def _label(metric: str) -> str:
    over = "pooled over clients" if metrics.of_column(metric).pooled else "mean over clients"
    return f"{metrics.label(metric)}\n{over}"


# --- systems side by side -------------------------------------------------------------------------


class Look(NamedTuple):
    """A system in figures: its label, and arguments of `Axes.plot`."""

    label: str
    style: dict[str, Any]


def looks(found: Sequence[System]) -> list[Look]:
    """Return the look of each system.

    A colour is an algorithm's, and dashes tell its settings apart; settings of a single algorithm
    have colours.
    """
    algorithms = [each.algorithm for each in found]
    colours = colours_of(algorithms)
    styles = []
    for place, (system, label) in enumerate(zip(found, _labels(found), strict=True)):
        colour, dashes = colours[system.algorithm]
        rank = algorithms[:place].count(system.algorithm)
        if len(colours) == 1:
            colour = COLOURS[(COLOURS.index(colour) + rank) % len(COLOURS)]
            rank //= len(COLOURS)
        dashes = DASHES[(DASHES.index(dashes) + rank) % len(DASHES)]
        style = {"color": colour, "ls": dashes} | (marked(place) if len(found) > 1 else {})
        styles.append(Look(label, style))
    return styles


def _judged(found: Sequence[System]) -> str:
    return default_metric([found[0].first])


@mpl.rc_context(STYLE)
def comparison_figure(found: Sequence[System], columns: Sequence[str] = ()) -> Figure:
    """Draw columns of the evaluations of systems over rounds, a panel for each, with one legend.

    Each data set has panels of its own. The title names the only one, and the ε of all systems or,
    where they differ, its meaning.

    Args:
      found: systems, from `results.systems`.
      columns: columns of the rows; by default the metric that judges the runs.

    Raises:
      ValueError: if no run of a data set has numbers in a column.
    """
    of_data: dict[str, list[tuple[System, Look]]] = {}
    pairs = list(zip(found, looks(found), strict=True))
    for pair in pairs:
        of_data.setdefault(pair[0].data, []).append(pair)
    panels = [
        (name if len(of_data) > 1 else "", alike, column)
        for name, alike in of_data.items()
        for column in columns or [_judged([system for system, _ in alike])]
    ]
    across = min(len(panels), 3)
    down = -(-len(panels) // across)
    # Entries of the legend in a row, by the width that their letters take.
    longest = max(len(look.label) for _, look in pairs)
    entries = min(len(found), max(1, 54 * across // (9 + longest)))
    width, height = 4.8 if across == 1 else 3.4 * across, 2.9 * down
    title = "; ".join(filter(None, [found[0].data if len(of_data) == 1 else "", _spent(found)[0]]))
    figure = picture(title, width, height + 0.2 * -(-len(found) // entries))
    every = list(figure.subplots(down, across, squeeze=False).flat)
    for (name, alike, column), panel in zip(panels, every, strict=False):
        rows = [curve(list(system.runs.values()), column) for system, _ in alike]
        if column == "epsilon":
            rows = [
                [
                    row | {"value": None if math.isnan(spent) else spent, "half": None}
                    for row, spent in zip(of, by, strict=True)
                ]
                for of in rows
                for by in [bounds_so_far([row["epsilon"] for row in of])]
            ]
        if not any(row["value"] is not None for of in rows for row in of):
            raise _without_numbers(column, found)
        bands = [
            _draw_curve(panel, of, **look.style) for of, (_, look) in zip(rows, alike, strict=True)
        ]
        label = EPSILON if column == "epsilon" else _label(column)
        panel.set(title=name, ylabel=f"{label}\n{_INTERVAL}" if any(bands) else label)
    for unused in every[len(panels) :]:
        unused.remove()
    for panel in every[max(0, len(panels) - across) : len(panels)]:
        panel.set_xlabel("rounds")
    handles = [Line2D([], [], label=look.label, **look.style) for _, look in pairs]
    if len(handles) > 1:
        figure.legend(handles=handles, loc="outside lower center", ncols=entries)
    return figure


def _without_numbers(column: str, found: Sequence[System]) -> ValueError:
    close = difflib.get_close_matches(column, found[0].first.rows[-1], n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return ValueError(f"a figure needs a column with numbers in metrics.jsonl, got {column}{hint}")


@mpl.rc_context(STYLE)
def clients_figure(runs: Sequence[tuple[Look, np.ndarray]], metric: str) -> Figure:
    """Draw the empirical distribution of a metric over the clients (m,) of each system."""
    figure = picture("", 4.6, 3.0)
    axes = figure.subplots()
    for (label, style), values in runs:
        marks = {}
        if "markevery" in style:
            marks["markevery"] = marked_points(len(values) + 1, style["markevery"])
        axes.ecdf(values, label=label, **style | marks)
    axes.axhline(0.1, color="0.6", lw=0.8, zorder=1)
    axes.set(xlabel=metrics.label(metric), ylabel="share of clients at or below")
    if len(runs) > 1:
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def spent_by(system: System) -> str:
    """Return the largest ε over the seeds of a system, as text."""
    spent = [run.rows[-1].get("epsilon") for run in system.runs.values()]
    return epsilon_label(None if None in spent else max(filter(None, spent), default=0.0))


def _labels(found: Sequence[System]) -> list[str]:
    """Name systems in a legend: algorithm, ε unless the title has it, settings where needed."""
    _, common = _spent(found)
    short, full = [], []
    for each in found:
        differs = {k: v for k, v in each.differs.items() if k not in ("epsilon", *NOISE)}
        settings, spent = combination_label([*differs], [*differs.values()]), spent_by(each)
        parts = [algorithm_title(each.algorithm), "" if spent == common else spent]
        short.append(", ".join(filter(None, parts)))
        full.append(", ".join(filter(None, [*parts, settings])))
    names = zip(short, full, found, strict=True)
    return [
        brief if short.count(brief) == 1 else long if full.count(long) == 1 else each.label
        for brief, long, each in names
    ]


def _spent(found: Sequence[System]) -> tuple[str, str]:
    """Return the ε of all systems that release anything, with its meaning and alone.

    Where they differ the first is the meaning and the second empty.
    """
    nothing, endless = epsilon_label(0.0), epsilon_label(None)
    released = {text for each in found if (text := spent_by(each)) != nothing} or {nothing}
    rows = [run.rows[-1] for each in found for run in each.runs.values()]
    deltas = {row["delta"] for row in rows if row.get("epsilon")}
    ends = " to ".join(map(number, sorted({min(deltas), max(deltas)}))) if deltas else ""
    meaning = f" ({MEANING}, δ = {ends})" if released - {nothing, endless} else ""
    meaning = " (whole clients)" if released == {endless} else meaning
    common = released.pop() if len(released) == 1 else ""
    return f"{common or 'ε'}{meaning}", common


# --- sweeps ---------------------------------------------------------------------------------------


def line_styles(
    keys: Sequence[str], combinations: Sequence[Combination]
) -> dict[Combination, Look]:
    """Style the lines of combinations of values: colours for numbers, dashes for words."""
    kinds: dict[Combination, list[Combination]] = {}
    for values in combinations:
        kinds.setdefault(tuple(v for v in values if isinstance(v, str)), []).append(values)
    systems = {kind: next((word for word in kind if word in SYSTEMS), "") for kind in kinds}
    named = colours_of(systems.values())
    styles = {}
    for index, (kind, alike) in enumerate(kinds.items()):
        system = systems[kind]
        for rank, values in enumerate(alike):
            if len(kinds) == len(combinations):
                distinct = len(named) == len(kinds)
                colour = named[system][0] if distinct else COLOURS[index % len(COLOURS)]
            elif len(alike) == 1:
                colour = "0.5"
            else:
                # The ends of the map are too faint, or too dark.
                colour = mpl.colormaps["viridis"](0.2 + 0.72 * rank / (len(alike) - 1))
            alone = len(keys) == 1 and not isinstance(values[0], str)
            label = value_label(keys[0], values[0]) if alone else combination_label(keys, values)
            style: Any = {"color": colour, "ls": DASHES[index % len(DASHES)]}
            styles[values] = Look(label, style | marked(len(styles)))
    return {values: styles[values] for values in combinations}


@mpl.rc_context(STYLE)
def envelope_figure(
    rows: Rows, *, panels: Sequence[str], lines: Sequence[str], title: str
) -> Figure:
    """Draw an envelope over rounds: a panel per combination of `panels`, a line per one of `lines`.

    Titles of panels name the ε spent at the end; bands are 95 % intervals over seeds.

    Raises:
      ValueError: if there is no row.
    """
    metric = _require_rows(rows)
    styles = line_styles(lines, [values for values, _ in grouped(rows, lines)])
    figure, axes = _make_panels(rows, panels, title)
    banded = False
    for (_, of_panel), panel in axes:
        for name, one in grouped(of_panel, lines):
            banded |= _draw_curve(panel, one, **styles[name].style)
        panel.set_yscale(_scale_of(metric, rows))
    figure.supxlabel("rounds")
    figure.supylabel(_label(metric) + (f"\n{_INTERVAL}" if banded else ""), ma="center")
    if lines:
        shown = [Line2D([], [], label=look.label, **look.style) for look in styles.values()]
        _legend_beside(figure, lines, handles=shown)
    return figure


def _require_rows(rows: Rows) -> str:
    """Return the metric of some rows; raise ValueError if there are none."""
    if not rows:
        raise ValueError("a figure needs at least one row of an envelope, got none")
    return rows[0]["metric"]


@mpl.rc_context(STYLE)
def trade_off_figure(
    rows: Rows, *, noise: Sequence[str], family: Sequence[str], title: str
) -> Figure:
    """Draw the end of an envelope against the ε spent: points per `noise`, lines per `family`.

    Runs without noise are at ε = ∞ to the right; runs that release nothing are a level line, since
    they fit every ε (Bietti et al. 2022, figure 2). Bars are 95 % intervals over seeds.

    Raises:
      ValueError: if there is no row.
    """
    metric = _require_rows(rows)
    styles = line_styles(family, [values for values, _ in grouped(rows, family)])
    known = [row for row in best_first(rows, metric) if row["value"] is not None]
    spent = sorted(row["epsilon"] for row in known if row["epsilon"])
    low, high = (spent[0], spent[-1]) if spent else (1.0, 1.0)
    infinite = high * max(2.0, (high / low) ** 0.2) if spent else 1.0
    known = _with_places(known, noise, infinite)
    points = dict(grouped([row for row in known if row["at"] > 0], family))
    levels = dict(grouped([row for row in known if row["at"] == 0], family))
    # Room for the legend beside the axes.
    longest = max(len(style.label) for style in styles.values())
    figure = picture(textwrap.fill(title, 64), 5.2 + 0.075 * longest, 3.8)
    axes = figure.subplots()
    axes.set(xscale="log", yscale=_scale_of(metric, rows))
    banded = any(row["half"] is not None for row in known)
    label = _label(metric) + (f"\n{_INTERVAL}" if banded else "")
    axes.set(xlabel=f"ε ({MEANING}) at the end of training, nats", ylabel=label)
    for values, look in styles.items():
        style: Any = {"color": look.style["color"], "ls": look.style["ls"], "label": look.label}
        if values in levels:
            axes.axhline(levels[values][0]["value"], **style)
        if values in points:
            _draw_points(axes, points[values], infinite, marker=look.style["marker"], **style)
    if family:
        shown = [Line2D([], [], label=look.label, **look.style) for look in styles.values()]
        _legend_beside(figure, family, handles=shown)
    ticks: list[float] = []
    if spent:
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


def _with_places(rows: Rows, noise: Sequence[str], infinite: float) -> list[Record]:
    """Add `at`, the ε at which a row is drawn; 0 is a level line.

    A run that spends nothing is drawn at the ε of other runs with its noise.
    """
    own = [infinite if row["epsilon"] is None else row["epsilon"] for row in rows]
    of_others: dict[Combination, float] = {}
    for row, at in zip(rows, own, strict=True):
        place = tuple(row[key] for key in noise)
        of_others[place] = max(at, of_others.get(place, 0.0))
    return [
        row | {"at": at or of_others[tuple(row[key] for key in noise)]}
        for row, at in zip(rows, own, strict=True)
    ]


def _draw_points(axes: Axes, rows: Rows, infinite: float, **style: Any) -> None:
    """Draw points joined by a line, dotted on its way to ∞.

    Only the first point at ∞ is drawn: others have too little noise for any accountant.
    """
    beyond = [row for row in rows if row["at"] == infinite][:1]
    finite = sorted((row for row in rows if row["at"] < infinite), key=lambda row: row["at"])
    for part, looks in (
        (finite, style),
        ([*finite[-1:], *beyond], style | {"ls": (0, (1, 3)), "label": None}),
    ):
        axes.plot([row["at"] for row in part], [row["value"] for row in part], **looks)
    bars = [row for row in (*finite, *beyond) if row["half"] is not None]
    x, y, half = (np.array([row[name] for row in bars], float) for name in ("at", "value", "half"))
    looks = {"lw": 0.8, "color": style["color"], "zorder": style.get("zorder", 2), "ls": "none"}
    if bars:
        low, high = _within(bars[0]["metric"], y, half)
        axes.errorbar(x, y, (y - low, high - y), **looks)


# --- axes -----------------------------------------------------------------------------------------


def _scale_of(metric: str, rows: Rows) -> str:
    """Return "log" for a positive metric that belongs on a logarithmic axis, else "linear"."""
    values = [row["value"] for row in rows if row["value"] is not None]
    positive = bool(values) and min(values) > 0
    return "log" if metrics.of_column(metric).logarithmic and positive else "linear"


def _legend_beside(figure: Figure, keys: Sequence[str], **given: Any) -> None:
    """Add a legend beside the axes; its title is the key, where there is one."""
    title = key_label(keys[0]) if len(keys) == 1 else None
    figure.legend(title=title, loc="outside right center", **given)


def _make_panels(
    rows: Rows, keys: Sequence[str], title: str
) -> tuple[Figure, list[tuple[tuple[Combination, list[Record]], Axes]]]:
    """Make a panel for the rows of each combination, at most five in a row."""
    groups = list(grouped(rows, keys))
    in_a_row = math.ceil(len(groups) / math.ceil(len(groups) / 5))
    above = math.ceil(len(groups) / in_a_row)
    width, height = 2.8 if in_a_row > 2 else 3.6, 2.3 if above > 1 else 2.7
    figure = picture(title, max(width * in_a_row + 2.0, 5.0), height * above + 0.6)
    axes = list(figure.subplots(above, in_a_row, sharex=True, sharey=True, squeeze=False).flat)
    for unused in axes[len(groups) :]:
        unused.remove()
    for place, ((values, of_panel), panel) in enumerate(zip(groups, axes, strict=False)):
        panel.set_title(_with_spent(combination_label(keys, values), of_panel))
        panel.tick_params(labelbottom=place + in_a_row >= len(groups))
    return figure, list(zip(groups, axes, strict=False))


def _with_spent(label: str, rows: Rows) -> str:
    """Add the ε of the last round to the title of a panel, the largest where lines differ."""
    end = max(row["round"] for row in rows)
    spent = [row["epsilon"] for row in rows if row["round"] == end]
    if None in spent or not max(spent) > 0:
        return label
    return f"{label}\n{epsilon_label(max(spent))} ({MEANING})".lstrip()
