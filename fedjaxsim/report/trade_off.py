"""What privacy costs in a sweep: quality at the end of training against the ε spent."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from fedjaxsim import metrics
from fedjaxsim.extras import importing
from fedjaxsim.report.envelopes import Frame
from fedjaxsim.report.labels import legend_title, line_styles
from fedjaxsim.report.panels import (
    BEST_LABEL,
    BEST_STYLE,
    EPSILON_LABEL,
    grouped,
    placed,
    scale_of,
)
from fedjaxsim.report.plots import STYLE, picture

with importing("plots"):
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator
with importing("tables"):
    import pandas as pd


def trade_off_figure(
    final: pd.DataFrame, *, noise: Sequence[str], family: Sequence[str], title: str
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
    everything = placed(final, [*noise, *family])
    metric = everything["metric"].iloc[0]
    upwards = metrics.of_column(metric).larger_is_better
    styles = line_styles(family, [values for values, _ in grouped(everything, family)])
    # The best first, so that of several rows the first is kept.
    rows = everything.dropna(subset="value").sort_values(
        "value", ascending=not upwards, kind="stable", ignore_index=True
    )
    spent = rows["epsilon"][rows["epsilon"] > 0]
    infinite = _beyond(spent)
    rows["at"] = _places(rows, noise, infinite)
    points, levels = rows[rows["at"] > 0], rows[rows["at"] == 0]
    points_of, level_of = dict(grouped(points, family)), dict(grouped(levels, family))
    with mpl.rc_context(STYLE):
        # Room for the legend beside the axes.
        longest = max(len(style.label) for style in styles.values())
        figure = picture(textwrap.fill(title, 64), 5.2 + 0.075 * longest, 3.8)
        axes = figure.subplots()
        axes.set_xscale("log")
        for values, (label, colour, dashes) in styles.items():
            looks: dict[str, Any] = {"color": colour, "ls": dashes, "lw": 1.4}
            if values in level_of:
                axes.axhline(level_of[values]["value"].iloc[0], label=label, **looks)
            if values in points_of:
                _draw_line(axes, points_of[values], infinite, label=label, ms=4, **looks)
        if family:
            best = _best_at_each(points, levels, noise, upwards)
            _draw_line(axes, best, infinite, label=BEST_LABEL, ms=8, **BEST_STYLE)
        _epsilon_ticks(axes, spent, infinite)
        axes.set_xlabel(f"{EPSILON_LABEL} at the end of training, nats")
        axes.set_ylabel(metrics.label(metric))
        axes.set_yscale(scale_of(metric, rows["value"]))
        if family:
            figure.legend(title=legend_title(family), loc="outside right center")
    return figure


def _beyond(spent: Frame) -> float:
    """Where ∞ stands on a logarithmic axis of these ε."""
    if spent.empty:
        return 1.0
    return spent.max() * max(2.0, (spent.max() / spent.min()) ** 0.2)


def _places(rows: Frame, noise: Sequence[str], infinite: float) -> Frame:
    """Where rows stand on the axis of ε; 0 for a level line.

    What spends nothing where others do (a local algorithm among private ones) stands at the ε of
    the others.
    """
    at = rows["epsilon"].fillna(infinite)
    of_others = at.groupby([rows[key] for key in noise], dropna=False).transform("max")
    return at.where(at > 0, of_others)


def _best_at_each(points: Frame, levels: Frame, noise: Sequence[str], upwards: bool) -> Frame:
    """The best family at the largest ε of each noise, level lines included."""
    at = points.groupby(list(noise), dropna=False)["at"].transform("max")
    everywhere = [levels.head(1).assign(at=epsilon) for epsilon in at.unique()]
    rows: Frame = pd.concat([points.assign(at=at), *everywhere])
    return rows.sort_values("value", ascending=not upwards, kind="stable").drop_duplicates("at")


def _draw_line(axes: Axes, rows: Frame, infinite: float, **style: Any) -> None:
    """Points joined by a line, which is thin and dotted on its way to ∞.

    Of those without a finite ε only the first is drawn: besides runs without noise they may be runs
    with so little that no accountant certifies any ε.
    """
    beyond = rows[rows["at"] == infinite].head(1)
    finite = rows[rows["at"] < infinite].sort_values("at", kind="stable")
    way = pd.concat([finite.tail(1), beyond])
    axes.plot(finite["at"], finite["value"], marker="o", **style)
    thin: dict[str, Any] = {"ls": "dotted", "lw": 0.6 * style["lw"], "label": None}
    axes.plot(way["at"], way["value"], marker="o", **style | thin)
    bars: Frame = pd.concat([finite, beyond]).dropna(subset="standard_error")
    looks = {"lw": 0.8, "color": style["color"], "zorder": style.get("zorder", 2)}
    axes.errorbar(bars["at"], bars["value"], bars["standard_error"], ls="none", **looks)


def _epsilon_ticks(axes: Axes, spent: Frame, infinite: float) -> None:
    """Ticks at 1, 2 and 5 times powers of ten, and at ∞."""
    ticks = []
    if len(spent):
        # Room for the markers at both ends.
        margin = max(1.15, (infinite / spent.min()) ** 0.05)
        low, high = spent.min() / margin, spent.max() * margin
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = (1, 2, 5) if high / low < 200 else (1,)
        ticks = [step * 10.0**power for power in powers for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        axes.set_xlim(low, infinite * margin)
        axes.axvline(math.sqrt(spent.max() * infinite), color="0.6", lw=0.8, ls=(0, (1, 2)))
    axes.xaxis.set_major_locator(FixedLocator([*ticks, infinite]))
    axes.set_xticks([*ticks, infinite], [*(f"{tick:g}" for tick in ticks), "∞"])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
