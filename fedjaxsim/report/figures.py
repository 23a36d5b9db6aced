"""Figures of runs, of systems side by side, of sweeps and of populations."""

import difflib
import math
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjaxsim import metrics
from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.data.describe import label_counts, readable
from fedjaxsim.data.population import Population
from fedjaxsim.extras import importing
from fedjaxsim.report.files import Record
from fedjaxsim.report.labels import (
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
    MARKERS,
    STYLE,
    colours_of,
    legend_above,
    line,
    marked_points,
    picture,
)  # fmt: skip
from fedjaxsim.report.progress import number
from fedjaxsim.report.results import System, curve, default_metric, grouped

with importing("plots"):
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

MEANING = "zero-out, joint DP"
"""Adjacency and view of ε in figures."""
_EPSILON = f"bound on ε spent (nats)\n{MEANING}"
_INTERVAL = "mean over seeds, 95 %"

Rows = Sequence[Record]
"""Rows of an envelope or a curve, of `report.results`."""


class Look(NamedTuple):
    """A line in figures: its label, and arguments of `Axes.plot`."""

    label: str
    style: dict[str, Any]

    @property
    def handle(self) -> Line2D:
        """An entry of a legend."""
        return Line2D([], [], label=self.label, **self.style)


def _draw_curve(axes: Axes, rows: Rows, **style: Any) -> bool:
    """Draw values over rounds with their intervals; return whether there are intervals."""
    rounds, value, half = _columns(rows, "round", "value", "half")
    known = bool(np.isfinite(half).any())
    line(axes, rounds, value, _within(rows[0]["metric"], value, half) if known else None, **style)
    return known


def _columns(rows: Rows, *names: str) -> list[np.ndarray]:
    """Return columns of numbers, NaN for None."""
    return [np.array([row[name] for row in rows], float) for name in names]


def _within(metric: str, value: np.ndarray, half: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of intervals, clipped to the metric's range: with two seeds they are wide."""
    low, high = metrics.of_column(metric).range
    return np.maximum(value - half, low), np.minimum(value + half, high)


def _label(metric: str, *, banded: bool) -> str:
    over = "pooled over clients" if metrics.of_column(metric).pooled else "mean over clients"
    return "\n".join([metrics.label(metric), over, *([_INTERVAL] if banded else [])])


def _marked(place: int) -> dict[str, Any]:
    """Return a marker for the curve at `place`, for `line`."""
    return {"marker": MARKERS[place % len(MARKERS)], "markevery": place % len(MARKERS)}


def _bounds_so_far(rows: Rows) -> list[float]:
    """Return upper bounds on ε over rounds that never fall; NaN is no bound.

    What bounds the ε of a later round bounds that of an earlier one, so the tight value at the end
    lowers the bounds of the loop before it.
    """
    [known] = _columns(rows, "epsilon")
    return np.fmin.accumulate(known[::-1])[::-1].tolist()


# --- one run, and systems side by side ------------------------------------------------------------


@mpl.rc_context(STYLE)
def run_figure(records: Rows, title: str) -> Figure:
    """Draw loss, quality with its 10–90 percentile band over clients, and ε of one run."""
    quality = metrics.judged_by(key for record in records for key in record) or "test_loss"
    names = [name for name in ("train_loss", quality) if any(name in row for row in records)]
    names += ["epsilon"] * bool(records[-1]["epsilon"])
    figure = picture(title, 3.2 * len(names), 3.2)
    panels = figure.subplots(1, len(names), sharex=True, squeeze=False)
    for axes, name in zip(panels.flat, names, strict=True):
        rows = [row for row in records if row.get(name) is not None]
        [rounds, values], band = _columns(rows, "round", name), None
        if all(row.get(f"{name}_p10") is not None for row in rows):
            band = _columns(rows, f"{name}_p10", f"{name}_p90")
        line(axes, rounds, _bounds_so_far(rows) if name == "epsilon" else values, band,
             color=COLOURS[0])  # fmt: skip
        label = _EPSILON if name == "epsilon" else _label(name, banded=False)
        label += "\n10–90 % of clients" * (band is not None)
        sampled = max((row.get(metrics.SAMPLED) or 0 for row in rows), default=0)
        if name == quality and sampled:
            label += f"\n{sampled:,} sampled clients, all at the end"
        axes.set(xlabel="rounds", ylabel=label)
    return figure


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
        style = {"color": colour, "ls": dashes} | (_marked(place) if len(found) > 1 else {})
        styles.append(Look(label, style))
    return styles


@mpl.rc_context(STYLE)
def comparison_figure(found: Sequence[System], columns: Sequence[str] = ()) -> Figure:
    """Draw columns of the evaluations of systems over rounds, a panel for each, with one legend.

    By default the column is the metric that judges the runs. Each data set has panels of its own.
    The title names the only one, and the ε of all systems or, where they differ, its meaning.

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
        for column in columns or [default_metric([alike[0][0].first])]
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
        _draw_systems(panel, alike, column)
        panel.set_title(name)
    for unused in every[len(panels) :]:
        unused.remove()
    for panel in every[max(0, len(panels) - across) : len(panels)]:
        panel.set_xlabel("rounds")
    if len(pairs) > 1:
        handles = [look.handle for _, look in pairs]
        figure.legend(handles=handles, loc="outside lower center", ncols=entries)
    return figure


def _draw_systems(axes: Axes, alike: Sequence[tuple[System, Look]], column: str) -> None:
    """Draw a column of systems on the same data."""
    banded = known = False
    for system, look in alike:
        rows = curve(list(system.runs.values()), column)
        if column == "epsilon":
            bounds = _bounds_so_far(rows)
            rows = [row | {"value": e, "half": None} for row, e in zip(rows, bounds, strict=True)]
        known |= any(row["value"] is not None and not math.isnan(row["value"]) for row in rows)
        banded |= _draw_curve(axes, rows, **look.style)
    if not known:
        names = alike[0][0].first.rows[-1]
        close = difflib.get_close_matches(column, names, n=1, cutoff=0.5)
        got = f"{column} (did you mean {close[0]}?)" if close else column
        raise ValueError(f"a figure needs a column with numbers in metrics.jsonl, got {got}")
    axes.set_ylabel(_EPSILON if column == "epsilon" else _label(column, banded=banded))


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


def _spent_by(system: System) -> str:
    """Return the largest ε over the seeds of a system, as text."""
    spent = [run.rows[-1].get("epsilon") for run in system.runs.values()]
    return epsilon_label(None if None in spent else max(filter(None, spent), default=0.0))


def _labels(found: Sequence[System]) -> list[str]:
    """Name systems in a legend: algorithm, ε unless the title has it, settings where needed."""
    _, common = _spent(found)
    short, full = [], []
    for each in found:
        differs = {k: v for k, v in each.differs.items() if k not in ("epsilon", *NOISE)}
        settings, spent = combination_label([*differs], [*differs.values()]), _spent_by(each)
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
    released = {text for each in found if (text := _spent_by(each)) != nothing} or {nothing}
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
            styles[values] = Look(label, style | _marked(len(styles)))
    return {values: styles[values] for values in combinations}


def _metric_and_styles(rows: Rows, keys: Sequence[str]) -> tuple[str, str, dict[Combination, Look]]:
    """Return the metric, the scale of its axis, and the look of each combination of keys.

    A positive metric may belong on a logarithmic axis. There must be a row.
    """
    if not rows:
        raise ValueError("a figure needs at least one row of an envelope, got none")
    metric = rows[0]["metric"]
    values = [row["value"] for row in rows if row["value"] is not None]
    logarithmic = metrics.of_column(metric).logarithmic and values and min(values) > 0
    styles = line_styles(keys, [values for values, _ in grouped(rows, keys)])
    return metric, "log" if logarithmic else "linear", styles


def _legend_beside(figure: Figure, keys: Sequence[str], styles: dict[Combination, Look]) -> None:
    """Add a legend beside the axes, if there are keys; the only key is its title."""
    if keys:
        title = key_label(keys[0]) if len(keys) == 1 else None
        handles = [look.handle for look in styles.values()]
        figure.legend(title=title, loc="outside right center", handles=handles)


@mpl.rc_context(STYLE)
def envelope_figure(
    rows: Rows, *, panels: Sequence[str], lines: Sequence[str], title: str
) -> Figure:
    """Draw an envelope over rounds: a panel per combination of `panels`, a line per one of `lines`.

    There are at most five panels in a row. Their titles name the largest ε spent at the end; bands
    are 95 % intervals over seeds.
    """
    metric, scale, styles = _metric_and_styles(rows, lines)
    groups = list(grouped(rows, panels))
    down = math.ceil(len(groups) / 5)
    across = math.ceil(len(groups) / down)
    down = math.ceil(len(groups) / across)
    width, height = 2.8 if across > 2 else 3.6, 2.3 if down > 1 else 2.7
    figure = picture(title, max(width * across + 2.0, 5.0), height * down + 0.6)
    every = list(figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flat)
    for unused in every[len(groups) :]:
        unused.remove()
    banded = False
    for place, ((values, alike), panel) in enumerate(zip(groups, every, strict=False)):
        for name, one in grouped(alike, lines):
            banded |= _draw_curve(panel, one, **styles[name].style)
        label, end = combination_label(panels, values), max(row["round"] for row in alike)
        spent = [row["epsilon"] for row in alike if row["round"] == end]
        if None not in spent and max(spent) > 0:
            label = f"{label}\n{epsilon_label(max(spent))} ({MEANING})".lstrip()
        panel.set(title=label, yscale=scale)
        panel.tick_params(labelbottom=place + across >= len(groups))
    figure.supxlabel("rounds")
    figure.supylabel(_label(metric, banded=banded), ma="center")
    _legend_beside(figure, lines, styles)
    return figure


@mpl.rc_context(STYLE)
def trade_off_figure(
    rows: Rows, *, noise: Sequence[str], family: Sequence[str], title: str
) -> Figure:
    """Draw the end of an envelope against the ε spent: points per `noise`, lines per `family`.

    Runs without noise are at ε = ∞ to the right; runs that release nothing are a level line, since
    they fit every ε (Bietti et al. 2022, figure 2). Bars are 95 % intervals over seeds.
    """
    metric, scale, styles = _metric_and_styles(rows, family)
    best_first = bool(metrics.of_column(metric).larger_is_better)
    known = [row for row in rows if row["value"] is not None]
    known.sort(key=lambda row: row["value"], reverse=best_first)
    spent = sorted(row["epsilon"] for row in known if row["epsilon"])
    low, high = (spent[0], spent[-1]) if spent else (1.0, 1.0)
    infinite = high * max(2.0, (high / low) ** 0.2) if spent else 1.0
    known = _with_places(known, noise, infinite)
    points = dict(grouped([row for row in known if row["at"] > 0], family))
    levels = dict(grouped([row for row in known if row["at"] == 0], family))
    # Room for the legend beside the axes.
    longest = max(len(look.label) for look in styles.values())
    figure = picture(textwrap.fill(title, 64), 5.2 + 0.075 * longest, 3.8)
    axes = figure.subplots()
    banded = any(row["half"] is not None for row in known)
    axes.set(xscale="log", yscale=scale, ylabel=_label(metric, banded=banded))
    axes.set_xlabel(f"ε ({MEANING}) at the end of training, nats")
    for values, look in styles.items():
        style: Any = {"color": look.style["color"], "ls": look.style["ls"], "label": look.label}
        if values in levels:
            axes.axhline(levels[values][0]["value"], **style)
        if values in points:
            _draw_points(axes, points[values], infinite, marker=look.style["marker"], **style)
    _legend_beside(figure, family, styles)
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
    places = [tuple(row[key] for key in noise) for row in rows]
    of_others: dict[Combination, float] = {}
    for place, at in zip(places, own, strict=True):
        of_others[place] = max(at, of_others.get(place, 0.0))
    return [
        row | {"at": at or of_others[place]}
        for row, place, at in zip(rows, places, own, strict=True)
    ]


def _draw_points(axes: Axes, rows: Rows, infinite: float, **style: Any) -> None:
    """Draw points joined by a line, dotted on its way to ∞.

    Only the first point at ∞ is drawn, the best: others have too little noise for any accountant.
    """
    beyond = [row for row in rows if row["at"] == infinite][:1]
    finite = sorted((row for row in rows if row["at"] < infinite), key=lambda row: row["at"])
    for part, looks in (
        (finite, style),
        ([*finite[-1:], *beyond], style | {"ls": (0, (1, 3)), "label": None}),
    ):
        axes.plot([row["at"] for row in part], [row["value"] for row in part], **looks)
    bars = [row for row in (*finite, *beyond) if row["half"] is not None]
    if bars:
        x, y, half = _columns(bars, "at", "value", "half")
        low, high = _within(bars[0]["metric"], y, half)
        axes.errorbar(x, y, (y - low, high - y), lw=0.8, color=style["color"], ls="none")


# --- populations ----------------------------------------------------------------------------------


_NAMED = 30
"""Most clients with names."""
_MOST_LABELS = 64
"""Most rows of labels; the rarest labels share the last one."""
_OTHERS = "others"


@mpl.rc_context(STYLE)
def population_figure(population: Population) -> Figure:
    """Draw the rows of each client, above the shares of labels or the range of targets.

    Few clients are named; many are sorted by their most frequent label, or by their median target.
    """
    y, sizes = population.fields.get("y"), population.counts.sum(axis=1)
    height, ratios = (2.4, [1]) if y is None else (4.8, [1, 2])
    figure = picture(f"Data of {len(sizes)} clients", 9.6, height)
    panels = figure.subplots(len(ratios), sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    order, by = np.arange(len(sizes)), ""
    if y is not None and y.dtype.kind in "iu":
        order, by = _draw_shares(panels[1], population), ", sorted by their most frequent label"
    elif y is not None:
        order, by = _draw_ranges(panels[1], population), ", sorted by the median of their targets"
    edges = np.arange(len(sizes) + 1) - 0.5
    # Steps, since bars of many clients would be thinner than a line.
    panels[0].stairs(sizes[order], edges, fill=True, color=COLOURS[0], alpha=0.8)
    panels[0].set(ylabel="rows", xlim=(edges[0], edges[-1]))
    panels[0].grid(visible=False, axis="x")
    if len(order) > _NAMED:
        panels[-1].set(xlabel=f"{len(order)} clients{by}", xticks=[])
    else:
        names = [str(name) for name in population.names[order]]
        panels[-1].set_xticks(range(len(names)), names)
        panels[-1].tick_params(axis="x", rotation=90 if sum(map(len, names)) > 80 else 0)
        panels[-1].set_xlabel("client")
    return figure


def _draw_shares(axes: Axes, population: Population) -> np.ndarray:
    """Draw the share of each label in the rows of clients; return the order of clients, (m,)."""
    labels, counts = label_counts(population)
    categories = population.categories.get("y")
    names = [str(k) if categories is None else readable(categories[k]) for k in labels]
    if len(labels) > _MOST_LABELS:
        kept = np.sort(np.argsort(-counts.sum(axis=0), kind="stable")[: _MOST_LABELS - 1])
        rest = counts.sum(axis=1) - counts[:, kept].sum(axis=1)
        counts = np.column_stack([counts[:, kept], rest])
        names = [*(names[k] for k in kept), _OTHERS]
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    order = np.arange(len(shares))
    if len(shares) > _NAMED:
        order = np.lexsort((-shares.max(axis=1), np.argmax(shares, axis=1)))
    image = axes.imshow(shares[order].T, "Blues", aspect="auto", interpolation="nearest", vmin=0)
    axes.grid(visible=False)
    ticks = list(range(0, len(names), -(-len(names) // 16)))
    if names[-1] == _OTHERS:
        ticks[-1] = len(names) - 1
    axes.set_yticks(ticks, [names[k] for k in ticks])
    axes.set_ylabel("label")
    axes.figure.colorbar(image, ax=axes, pad=0.01, label="share of the client's labels")
    return order


def _draw_ranges(axes: Axes, population: Population) -> np.ndarray:
    """Draw the targets of each client; return the order of clients, (m,)."""
    targets = [population.rows(k)["y"].ravel() for k in range(population.num_clients)]
    low, middle, high = np.array([np.percentile(one, (10, 50, 90)) for one in targets]).T
    x = np.arange(len(targets))
    order = np.argsort(middle, kind="stable") if len(targets) > _NAMED else x
    axes.vlines(x, low[order], high[order], color=COLOURS[0], alpha=0.35, label="10–90 % of rows")
    axes.plot(x, middle[order], ".", ms=3, color=COLOURS[0], label="median")
    axes.set_ylabel("target")
    legend_above(axes)
    return order
