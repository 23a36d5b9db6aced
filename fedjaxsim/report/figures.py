"""Figures of runs, of systems side by side, of sweeps and of populations."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjaxsim import checks
from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.clock import ROUNDS, Axis
from fedjaxsim.divergence import Record, is_finite
from fedjaxsim.extras import importing
from fedjaxsim.metrics import (
    METRICS,
    SAMPLED,
    Metric,
    MetricRecords,
    column_label,
    column_metric,
    primary_metric,
)
from fedjaxsim.privacy.entries import epsilon_text
from fedjaxsim.privacy.trade_off import TradeOff
from fedjaxsim.report.labels import (
    NOISE,
    Combination,
    algorithm_title,
    combination_label,
    epsilon_label,
)  # fmt: skip
from fedjaxsim.report.plots import (
    COLOURS,
    DASHES,
    MARKERS,
    STYLE,
    colours_of,
    line,
    picture,
)  # fmt: skip
from fedjaxsim.report.progress import number
from fedjaxsim.report.results import System, curve, default_metric, grouped, last, metrics_of

with importing("plots"):
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator, NullLocator

MEANING = "zero-out, joint DP"
"""Adjacency and view of ε in figures."""
_EPSILON = f"bound on ε spent (nats)\n{MEANING}"

_NOTHING = epsilon_label(0)

Rows = Sequence[Record]
"""Rows of an envelope or a curve, of `report.results`."""


class Look(NamedTuple):
    """A curve's label in the legend, and its arguments of `Axes.plot`."""

    label: str
    style: dict[str, Any]


class Panel(NamedTuple):
    """The curves of a column; `records` are the metrics'."""

    title: str
    column: str
    curves: Sequence[tuple[Look, Rows]]
    records: MetricRecords

    @property
    def metric(self) -> Metric:
        """The metric of the column."""
        return column_metric(self.column, self.records)


def looks(kinds: Sequence[str], labels: Sequence[str]) -> list[Look]:
    """Return the looks of curves: a colour for each kind, such as an algorithm, and dashes within.

    Curves of a single kind have shades.
    """
    colours, curve_looks = colours_of(kinds), []
    for place, (kind, label) in enumerate(zip(kinds, labels, strict=True)):
        colour, dashes = colours[kind]
        style: dict[str, Any] = {"color": colour, "ls": dashes}
        if len(kinds) > 1:
            rank = DASHES.index(dashes) + kinds[:place].count(kind)
            mark = place % len(MARKERS)
            style |= {"ls": DASHES[rank % len(DASHES)], "marker": MARKERS[mark], "markevery": mark}
            if len(colours) == 1:  # The ends of the map are too faint, or too dark.
                style["color"] = mpl.colormaps["viridis"](0.2 + 0.7 * place / (len(kinds) - 1))
        curve_looks.append(Look(label, style))
    return curve_looks


def _columns(rows: Rows, *names: str) -> list[np.ndarray]:
    """Return columns of numbers, NaN for None."""
    return [np.array([row[name] for row in rows], float) for name in names]


def _within(metric: Metric, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Return lower and upper band, clipped to the metric's range; with two seeds, both values.

    Student's interval of two values is 12.7 times as wide as they are apart.
    """
    value, half, deviation, seeds = _columns(rows, "mean", "half", "deviation", "seeds")
    half = np.where((seeds == 2) & np.isfinite(half), deviation / math.sqrt(2), half)
    low, high = metric.range
    return np.maximum(value - half, low), np.minimum(value + half, high)


def _label(column: str, rows: Rows, records: MetricRecords) -> str:
    over = "pooled over clients" if column_metric(column, records).pooled else "mean over clients"
    counts = {row["seeds"] for row in rows if row["half"] is not None}
    seeds = "mean and range of two seeds" if counts == {2} else "mean over seeds, 95 %"
    seeds += " (range of two)" if 2 in counts and len(counts) > 1 else ""
    return "\n".join([column_label(column, records), over, *([seeds] if counts else ())])


def _scale(metric: Metric, rows: Rows) -> str:
    """Return the scale of an axis: a positive metric may belong on a logarithmic one."""
    values = [row["mean"] for row in rows if row["mean"] is not None]
    logarithmic = metric.logarithmic and values and min(values) > 0
    return "log" if logarithmic else "linear"


def _bounds_so_far(rows: Rows) -> list[float]:
    """Return upper bounds on ε over rounds that never fall; NaN is no bound.

    What bounds the ε of a later round bounds an earlier round's, so the tight value at the end
    lowers the bounds of the loop before it.
    """
    [bounds] = _columns(rows, "epsilon")
    return np.fmin.accumulate(bounds[::-1])[::-1].tolist()


def _curves(
    title: str,
    panels: Sequence[Panel],
    shown: Sequence[Look],
    *,
    alike: bool,
    axis: Axis,
) -> Figure:
    """Draw panels above one legend; panels that are `alike` share axes."""
    alone = 6.4 if len(shown) > _MANY else 4.8
    figure, every, across = _panels(title, len(panels), alone, 2.8, sharex=alike, sharey=alike)
    drawn = [row for panel in panels for _, rows in panel.curves for row in rows]
    for place, (panel, axes) in enumerate(zip(panels, every, strict=True)):
        rows = drawn if alike else [row for _, curve_rows in panel.curves for row in curve_rows]
        for look, curve_rows in panel.curves:
            rounds, value, half = _columns(curve_rows, "round", "mean", "half")
            band = _within(panel.metric, curve_rows) if np.isfinite(half).any() else None
            line(axes, rounds, value, band, **look.style)
        label = _label(panel.column, rows, panel.records)
        label = _EPSILON if panel.column == "epsilon" else label
        axes.set(title=panel.title, yscale=_scale(panel.metric, rows))
        axes.tick_params(labelbottom=not alike or place + across >= len(panels))
        if not alike or place % across == 0:
            axes.set_ylabel(label)
    _set_axis(figure, every, across, axis)
    _add_legend(figure, shown, alone / 4.8 if across == 1 else across)
    return figure


def _panels(
    title: str, count: int, alone: float, height: float, **shared: Any
) -> tuple[Figure, list[Axes], int]:
    """Make panels of a height, a single one of width `alone`; return how many are in a row, too."""
    down = -(-count // 4)
    across = -(-count // down)
    figure = picture(title, alone if across == 1 else 3.1 * across, height * down)
    panels = list(figure.subplots(down, across, squeeze=False, **shared).flat)
    for unused in panels[count:]:
        unused.remove()
    return figure, panels[:count], across


def _set_axis(figure: Figure, panels: Sequence[Axes], across: int, axis: Axis) -> None:
    """Name the horizontal axis below panels, or once if its name is long; rounds are whole."""
    lowest = panels[-across:]
    if "\n" in axis.title and len(lowest) > 1:
        figure.supxlabel(axis.title)
    for panel in lowest if not figure.get_supxlabel() else ():
        panel.set_xlabel(axis.title)
    for panel in panels if axis.over == "rounds" else ():
        panel.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))


_MANY = 8
"""Most curves whose legend has letters of usual size."""


def _add_legend(figure: Figure, shown: Sequence[Look], panels: float) -> None:
    """Add a legend below some panels of usual width, and room for it; a single curve has none."""
    if len(shown) == 1:
        return
    size = 7.0 if len(shown) > _MANY else 9.0
    longest = max(len(look.label) for look in shown)
    across = min(len(shown), max(1, int(54 * panels * 9 / size) // (9 + longest)))
    figure.set_figheight(figure.get_figheight() + 0.2 * size / 9 * -(-len(shown) // across))
    handles = [Line2D([], [], label=look.label, **look.style) for look in shown]
    how: dict[str, Any] = {"ncols": across, "fontsize": size}
    figure.legend(handles=handles, loc="outside lower center", **how)


# --- one run, and systems side by side ------------------------------------------------------------


@mpl.rc_context(STYLE)
def run_figure(
    records: Rows,
    title: str,
    metrics: MetricRecords = METRICS,
    axis: Axis = ROUNDS,
    per_round: float = 1.0,
) -> Figure:
    """Draw loss, quality with its 10–90 percentile band over clients, and ε of one run.

    A round goes `per_round` along the axis.
    """
    columns = dict.fromkeys(key for record in records for key in record)
    quality = primary_metric(columns, metrics) or "test_loss"
    names = [name for name in ("train_loss", quality) if any(name in row for row in records)]
    names += ["epsilon"] * bool(records[-1]["epsilon"])
    figure, panels, across = _panels(title, len(names), 3.2, 3.2, sharex=True)
    for axes, name in zip(panels, names, strict=True):
        rows = [row for row in records if row.get(name) is not None]
        [rounds, values], band = _columns(rows, "round", name), None
        if all(row.get(f"{name}_p10") is not None for row in rows):
            band = _columns(rows, f"{name}_p10", f"{name}_p90")
        shown = _bounds_so_far(rows) if name == "epsilon" else values
        line(axes, rounds * per_round, shown, band, color=COLOURS[0])
        label = _EPSILON if name == "epsilon" else _label(name, [], metrics)
        label += "\n10–90 % of clients" * (band is not None)
        sampled = max((row.get(SAMPLED) or 0 for row in rows), default=0)
        if name == quality and sampled:
            label += f"\n{sampled:,} sampled clients, all at the end"
        axes.set_ylabel(label)
    _set_axis(figure, panels, across, axis)
    return figure


def looks_of(systems: Sequence[System]) -> list[Look]:
    """Return the looks of systems: algorithm, ε, and settings where these agree.

    Labels of many systems leave out the algorithm and ε that all of them have.
    """
    short = [_brief(system) for system in systems]
    full, shared = [], f"{_shared_by(systems)}, "
    for brief, system in zip(short, systems, strict=True):
        differs = {k: v for k, v in system.differs.items() if k not in ("epsilon", *NOISE)}
        settings = combination_label([*differs], [*differs.values()])
        full.append(f"{brief}, {settings}" if short.count(brief) > 1 and settings else brief)
    labels = [
        name if full.count(name) == 1 else system.label
        for name, system in zip(full, systems, strict=True)
    ]
    labels = [label.removeprefix(shared) for label in labels]
    return looks([system.algorithm for system in systems], labels)


def _brief(system: System) -> str:
    return f"{algorithm_title(system.algorithm)}, {epsilon_label(system.epsilon)}"


def _shared_by(systems: Sequence[System]) -> str:
    """Return algorithm and ε of many systems that have the same, or of a single one; else ""."""
    brief = {_brief(system) for system in systems}
    return brief.pop() if len(brief) == 1 and not 1 < len(systems) <= _MANY else ""


@mpl.rc_context(STYLE)
def comparison_figure(
    systems: Sequence[System],
    columns: Sequence[str] = (),
    axis: Axis = ROUNDS,
) -> Figure:
    """Draw columns of the evaluations of systems along an axis, a panel for each, with one legend.

    By default the column is the metric that judges the runs. Each data set has its own panels.
    The title names the only one, and the meaning of ε. Over bytes, a point stands at the expected
    bytes that all clients have sent by then; over seconds, at the time of the axis's clock.

    Raises:
      ValueError: if no run of a data set has numbers in a column, or bytes or work are not known.
    """
    shown = looks_of(systems)
    sets = dict.fromkeys(system.data for system in systems)
    panels = []
    for name in sets:
        alike = [pair for pair in zip(shown, systems, strict=True) if pair[1].data == name]
        for column in columns or [default_metric([alike[0][1].first])]:
            curves = [(look, _rows_of(system, column, axis)) for look, system in alike]
            if not any(is_finite(row["mean"]) for _, rows in curves for row in rows):
                names = alike[0][1].first.rows[-1]
                hint = checks.did_you_mean(column, names, cutoff=0.5)
                needed = "a figure needs a column of numbers in metrics.jsonl"
                raise ValueError(f"{needed}, got {column}{hint}")
            records = metrics_of([run for _, system in alike for run in system.runs.values()])
            panels.append(Panel(name if len(sets) > 1 else "", column, curves, records))
    rows = [run.rows[-1] for system in systems for run in system.runs.values()]
    deltas = sorted({row["delta"] for row in rows if row.get("epsilon")})
    delta_range = " to ".join(map(number, dict.fromkeys((*deltas[:1], *deltas[-1:]))))
    title = [
        *(sets if len(sets) == 1 else ()),
        *filter(None, [_shared_by(systems)]),
    ]
    meaning = [f"ε: {MEANING}, δ = {delta_range}"] if deltas else []
    return _curves("; ".join([*title, *meaning]), panels, shown, alike=False, axis=axis)


@mpl.rc_context(STYLE)
def clients_figure(clients: Sequence[tuple[str, np.ndarray, np.ndarray]], metric: Metric) -> Figure:
    """Draw a metric of each client against its training rows, a panel for each run.

    `clients` are (name of the run, rows (m,), values (m,)). The worst tenth is marked, if the
    metric has a direction.
    """
    figure, every, across = _panels("", len(clients), 3.7, 2.6, sharex=True, sharey=True)
    for axes, (name, rows, values) in zip(every, clients, strict=True):
        finite = np.isfinite(values)
        rows, values = rows[finite], values[finite]
        order = np.argsort(-values if metric.larger_is_better is False else values)
        worst = order[: -(-len(order) // 10) * (metric.larger_is_better is not None)]
        dots = {"ls": "", "marker": ".", "ms": 3, "alpha": 0.6}
        better = np.setdiff1d(order, worst)
        axes.plot(rows[better], values[better], color=COLOURS[0], **dots)
        if len(worst):
            axes.plot(rows[worst], values[worst], color=COLOURS[1], label="worst tenth", **dots)
        axes.set(title=name, xscale="log", xlabel="training rows")
    for axes in every[::across]:
        axes.set_ylabel(metric.title)
    handles, labels = every[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center")
    return figure


def _rows_of(system: System, column: str, axis: Axis) -> Rows:
    rows = curve([*system.runs.values()], column)
    if column == "epsilon":
        bounds = _bounds_so_far(rows)
        rows = [row | {"mean": e, "half": None} for row, e in zip(rows, bounds, strict=True)]
    per_round = axis.per_round(lambda: system.bytes_sent, lambda: system.work)
    return [row | {"round": row["round"] * per_round} for row in rows]


# --- sweeps ---------------------------------------------------------------------------------------


def _looks_of_values(rows: Rows, keys: Sequence[str]) -> dict[Combination, Look]:
    """Return the look of each combination of keys in the rows of an envelope, at least one."""
    if not rows:
        raise ValueError("a figure needs at least one row of an envelope, got none")
    every = [values for values, _ in grouped(rows, keys)]
    words = [[value for value in values if isinstance(value, str)] for values in every]
    kinds = [next((word for word in of if word in SYSTEMS), ", ".join(of)) for of in words]
    labels = [combination_label(keys, values) for values in every]
    return dict(zip(every, looks(kinds, labels), strict=True))


@mpl.rc_context(STYLE)
def envelope_figure(
    rows: Rows,
    *,
    panels: Sequence[str],
    lines: Sequence[str],
    title: str,
    metrics: MetricRecords = METRICS,
    axis: Axis = ROUNDS,
) -> Figure:
    """Draw an envelope: a panel per combination of `panels`, a line per one of `lines`.

    Titles of panels name the largest ε spent at the end, and the legend the lines that spend
    nothing beside others. Bands are 95 % intervals over seeds, or the range of two.
    """
    shown, subplots = _looks_of_values(rows, lines), []
    private = {
        name: any(row["epsilon"] != 0 for row in last(line_rows, panels))
        for name, line_rows in grouped(rows, lines)
    }
    if any(private.values()):
        shown = {
            name: look if private[name] else look._replace(label=f"{look.label}, {_NOTHING}")
            for name, look in shown.items()
        }
    for values, alike in grouped(rows, panels):
        label = combination_label(panels, values)
        spent = [row["epsilon"] for row in last(alike, lines)]
        if None not in spent and max(spent) > 0:
            label = f"{label}\n{epsilon_label(max(spent))} ({MEANING})".lstrip()
        curves = [(shown[name], line_rows) for name, line_rows in grouped(alike, lines)]
        subplots.append(Panel(label, rows[0]["metric"], curves, metrics))
    return _curves(title, subplots, [*shown.values()], alike=True, axis=axis)


@mpl.rc_context(STYLE)
def trade_off_figure(
    rows: Rows, *, lines: Sequence[str], title: str, metrics: MetricRecords = METRICS
) -> Figure:
    """Draw the end of an envelope against the ε spent, a line per combination of `lines`.

    Runs without noise are at ε = ∞ to the right; runs that release nothing are a level line, since
    they fit every ε (Bietti et al. 2022, figure 2). Bars are as the bands of an envelope.
    """
    shown, column = _looks_of_values(rows, lines), rows[0]["metric"]
    metric = column_metric(column, metrics)
    successful = [row for row in rows if row["mean"] is not None]
    best_first = bool(metric.larger_is_better)
    successful.sort(key=lambda row: row["mean"], reverse=best_first)
    spent = sorted({row["epsilon"] for row in successful if row["epsilon"]})
    low, high = (spent[0], spent[-1]) if spent else (1.0, 1.0)
    infinite = high * max(2.0, (high / low) ** 0.2)
    figure = picture(textwrap.fill(title, 64), 5.2, 3.4)
    axes = figure.subplots()
    axes.set(
        xscale="log", yscale=_scale(metric, successful), ylabel=_label(column, successful, metrics)
    )
    axes.set_xlabel(f"ε ({MEANING}) at the end of training, nats")
    for values, alike in grouped(successful, lines):
        style = {name: of for name, of in shown[values].style.items() if name != "markevery"}
        for row in [row for row in alike if row["epsilon"] == 0][:1]:
            axes.axhline(row["mean"], color=style["color"], ls=style["ls"])
        points = sorted((row for row in alike if row["epsilon"]), key=lambda row: row["epsilon"])
        # The best point at ∞ stands for all: the others have too little noise for any accountant.
        points += [row for row in alike if row["epsilon"] is None][:1]
        if points:
            at, y = _columns(points, "epsilon", "mean")
            least, most = _within(metric, points)
            x = np.where(np.isnan(at), infinite, at)
            axes.errorbar(x, y, (y - least, most - y), elinewidth=0.8, **style)
    margin = max(1.15, (infinite / low) ** 0.05)  # room for the markers at both ends
    axes.set_xlim(low / margin, infinite * margin)
    axes.axvline(math.sqrt(high * infinite), color="0.6", lw=0.8, ls=(0, (1, 2)))
    ticks = spent[:: -(-len(spent) // 6) or 1]
    axes.set_xticks([*ticks, infinite], [*(epsilon_text(tick, 2) for tick in ticks), "∞"])
    axes.xaxis.set_minor_locator(NullLocator())
    _add_legend(figure, [*shown.values()], 1)
    return figure


@mpl.rc_context(STYLE)
def privacy_figure(curves: Sequence[TradeOff], title: str) -> Figure:
    """Draw trade-off curves, and ε against δ, of one plan at its adjacencies."""
    figure = picture(title, 7.2, 3.2)
    errors, budgets = figure.subplots(1, 2)
    alpha = np.concatenate([[0.0], np.geomspace(1e-6, 1.0, 300)])
    alpha = np.unique(np.concatenate([alpha, 1 - alpha]))
    errors.plot([0, 1], [1, 0], color="0.6", lw=0.8, ls=(0, (1, 2)), label="nothing released")
    for trade, colour, dashes in zip(curves, COLOURS, DASHES, strict=False):
        style = {"color": colour, "ls": dashes, "label": trade.adjacency.replace("_", "-")}
        line(errors, alpha, trade.least_miss(alpha), **style)
        shown = trade.deltas >= 1e-9
        line(budgets, trade.deltas[shown], trade.epsilons[shown], **style)
    errors.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    errors.set(xlabel="type I error (false alarm)", ylabel="least type II error (miss)")
    errors.legend()
    budgets.set(xscale="log", xlabel="δ", ylabel="ε (joint DP), nats")
    budgets.set_ylim(bottom=0)
    return figure
