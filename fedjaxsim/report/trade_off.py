"""What privacy costs in a sweep: quality at the end of training against the ε spent."""

import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from fedjaxsim import metrics
from fedjaxsim.report.files import Record
from fedjaxsim.report.labels import Combination, legend_title, line_styles
from fedjaxsim.report.panels import (
    BEST_LABEL,
    BEST_STYLE,
    EPSILON,
    check_keys,
    combinations,
    grouped,
    is_logarithmic,
)
from fedjaxsim.report.plots import STYLE

Points = list[tuple[float, Record]]
"""Of one line of a trade-off: ε and the row that it comes from."""


def trade_off_figure(
    final: pa.Table, *, noise: Sequence[str], family: Sequence[str], title: str
) -> Figure:
    """Quality at the end of training against the ε spent, one line per family.

    What adds no noise stands at ε = ∞ to the right; what releases nothing is a level line, since it
    can be had at every ε. The best of all families is black (Bietti et al. 2022, figure 2).

    Args:
      final: the end of an envelope, from `envelopes.last`.
      noise: the keys along a line, e.g. the noise multiplier.
      family: the keys whose values make lines, e.g. the level of personalization.
      title: what is shown.

    Raises:
      ValueError: if noise and family together are not the keys of the envelope.
    """
    check_keys(final, [*noise, *family, "round"])
    rows = [row for row in final.to_pylist() if row["value"] is not None]
    metric = final["metric"][0].as_py()
    styles = line_styles(family, combinations(final.to_pylist(), family))
    spent = [row["epsilon"] for row in rows if row["epsilon"]]
    infinite = _beyond(spent)
    upwards = metrics.of_column(metric).larger_is_better
    points, levels = _trade_off_points(rows, noise, family, infinite)
    points = {values: _one_beyond(line, infinite, upwards) for values, line in points.items()}
    with mpl.rc_context(STYLE):
        # Room for the legend beside the axes.
        longest = max(len(style.label) for style in styles.values())
        figure = Figure(figsize=(5.2 + 0.075 * longest, 3.8), layout="constrained")
        figure.suptitle(textwrap.fill(title, 64), fontsize=10)
        axes = figure.subplots()
        axes.set_xscale("log")
        for values, style in styles.items():
            looks: dict[str, Any] = {"color": style.colour, "ls": style.dashes, "lw": 1.4}
            if values in levels:
                axes.axhline(levels[values]["value"], label=style.label, **looks)
            if values in points:
                _trade_off_line(axes, points[values], infinite, label=style.label, ms=4, **looks)
        if family:
            best = _best_at_each(points, levels, noise, upwards)
            best = _one_beyond(best, infinite, upwards)
            _trade_off_line(axes, best, infinite, label=BEST_LABEL, ms=8, **BEST_STYLE)
        _epsilon_ticks(axes, spent, infinite)
        axes.set_xlabel(f"{EPSILON} at the end of training, nats")
        axes.set_ylabel(metrics.label(metric))
        axes.set_yscale("log" if is_logarithmic(metric, rows) else "linear")
        if family:
            figure.legend(title=legend_title(family), loc="outside right center")
    return figure


def _beyond(spent: Sequence[float]) -> float:
    """Where ∞ stands on a logarithmic axis of these ε."""
    if not spent:
        return 1.0
    return max(spent) * max(2.0, (max(spent) / min(spent)) ** 0.2)


def _trade_off_points(
    rows: Sequence[Record], noise: Sequence[str], family: Sequence[str], infinite: float
) -> tuple[dict[Combination, Points], dict[Combination, Record]]:
    """For each family its (ε, row) in order of ε; and the rows of those that spend nothing.

    A family that spends nothing where others do (a local algorithm among private ones) stands at
    the ε of the others.
    """
    at_noise = {
        values: max(infinite if row["epsilon"] is None else row["epsilon"] for row in of_noise)
        for values, of_noise in grouped(rows, noise)
    }
    points: dict[Combination, Points] = {}
    levels: dict[Combination, Record] = {}
    for values, of_family in grouped(rows, family):
        for row in of_family:
            epsilon = infinite if row["epsilon"] is None else row["epsilon"]
            epsilon = epsilon or at_noise[tuple(row[key] for key in noise)]
            if epsilon:
                points.setdefault(values, []).append((epsilon, row))
            else:
                levels[values] = row
        points.get(values, []).sort(key=lambda point: point[0])
    return points, levels


def _one_beyond(points: Points, infinite: float, upwards: bool) -> Points:
    """The points, of which those without a finite ε are the best one only.

    Besides runs without noise they may be runs with so little that no accountant certifies any ε.
    """
    sign = 1 if upwards else -1
    beyond = [point for point in points if point[0] == infinite]
    best = [max(beyond, key=lambda point: sign * point[1]["value"])] if beyond else []
    return [point for point in points if point[0] < infinite] + best


def _best_at_each(
    points: dict[Combination, Points],
    levels: dict[Combination, Record],
    noise: Sequence[str],
    upwards: bool,
) -> Points:
    """The best family at each noise, level lines included."""
    by_noise: dict[Combination, Points] = {}
    for epsilon, row in itertools.chain.from_iterable(points.values()):
        by_noise.setdefault(tuple(row[key] for key in noise), []).append((epsilon, row))
    sign = 1 if upwards else -1
    best = []
    for candidates in by_noise.values():
        epsilon = max(epsilon for epsilon, _ in candidates)
        rows = [row for _, row in candidates] + list(levels.values())
        best.append((epsilon, max(rows, key=lambda row: sign * row["value"])))
    return sorted(best, key=lambda point: point[0])


def _trade_off_line(axes: Axes, points: Points, infinite: float, **style: Any) -> None:
    """Points joined by a line, which is thin and dotted on its way to ∞."""
    finite = [(epsilon, row["value"]) for epsilon, row in points if epsilon < infinite]
    beyond = [(epsilon, row["value"]) for epsilon, row in points if epsilon == infinite]
    axes.plot(*np.reshape(finite, (-1, 2)).T, marker="o", **style)
    way: dict[str, Any] = {"ls": "dotted", "lw": 0.6 * style["lw"], "label": None}
    axes.plot(*np.reshape(finite[-1:] + beyond, (-1, 2)).T, marker="o", **style | way)
    for epsilon, row in points:
        if row["standard_error"] is not None:
            bar = {"lw": 0.8, "color": style["color"], "zorder": style.get("zorder", 2)}
            axes.errorbar(epsilon, row["value"], row["standard_error"], **bar)


def _epsilon_ticks(axes: Axes, spent: Sequence[float], infinite: float) -> None:
    """Ticks at 1, 2 and 5 times powers of ten, and at ∞."""
    ticks = []
    if spent:
        # Room for the markers at both ends.
        margin = max(1.15, (infinite / min(spent)) ** 0.05)
        low, high = min(spent) / margin, max(spent) * margin
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = (1, 2, 5) if high / low < 200 else (1,)
        ticks = [step * 10.0**power for power in powers for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        axes.set_xlim(low, infinite * margin)
        axes.axvline(math.sqrt(max(spent) * infinite), color="0.6", lw=0.8, ls=(0, (1, 2)))
    axes.xaxis.set_major_locator(FixedLocator([*ticks, infinite]))
    axes.set_xticks([*ticks, infinite], [*(f"{tick:g}" for tick in ticks), "∞"])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
