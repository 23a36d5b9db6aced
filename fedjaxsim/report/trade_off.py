"""The cost of privacy in a sweep: quality at the end of training against the ε spent."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from fedjaxsim import metrics
from fedjaxsim.extras import importing
from fedjaxsim.report.envelopes import Frame, best_first, grouped, placed
from fedjaxsim.report.figures import BEST, MEANING, legend_beside, scale_of
from fedjaxsim.report.labels import line_styles
from fedjaxsim.report.plots import STYLE, picture

with importing("plots"):
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator
with importing("tables"):
    import pandas as pd


@mpl.rc_context(STYLE)
def trade_off_figure(
    final: pd.DataFrame, *, noise: Sequence[str], family: Sequence[str], title: str
) -> Figure:
    """Draw quality at the end of training against the ε spent, one line per family.

    Runs without noise stand at ε = ∞ to the right; runs that release nothing are a level line,
    since they fit every ε. The best of all families is black (Bietti et al. 2022, figure 2).

    Args:
      final: the end of an envelope, from `envelopes.last`.
      noise: keys along a line, e.g. the noise multiplier.
      family: keys whose values make lines, e.g. the level of personalization.
      title: title of the figure.

    Raises:
      ValueError: if noise and family together are not the keys of the envelope.
    """
    everything = placed(final, [*noise, *family])
    metric = everything["metric"].iloc[0]
    styles = line_styles(family, [values for values, _ in grouped(everything, family)])
    rows = best_first(everything.dropna(subset="value"), metric).reset_index(drop=True)
    spent = rows["epsilon"][rows["epsilon"] > 0]
    low, high = (spent.min(), spent.max()) if len(spent) else (1.0, 1.0)
    infinite = high * max(2.0, (high / low) ** 0.2) if len(spent) else 1.0
    rows["at"] = _places(rows, noise, infinite)
    points, levels = rows[rows["at"] > 0], rows[rows["at"] == 0]
    points_of, level_of = dict(grouped(points, family)), dict(grouped(levels, family))
    # Room for the legend beside the axes.
    longest = max(len(style.label) for style in styles.values())
    figure = picture(textwrap.fill(title, 64), 5.2 + 0.075 * longest, 3.8)
    axes = figure.subplots()
    axes.set(xscale="log", yscale=scale_of(metric, rows["value"]))
    axes.set(xlabel=f"ε {MEANING} at the end of training, nats", ylabel=metrics.label(metric))
    for values, (label, colour, dashes) in styles.items():
        looks: dict[str, Any] = {"color": colour, "ls": dashes, "lw": 1.4, "label": label}
        if values in level_of:
            axes.axhline(level_of[values]["value"].iloc[0], **looks)
        if values in points_of:
            _draw_line(axes, points_of[values], infinite, ms=4, **looks)
    if family:
        # At the largest ε of each noise; what releases nothing competes at every ε.
        at = points.groupby(list(noise), dropna=False)["at"].transform("max")
        everywhere = [levels.head(1).assign(at=epsilon) for epsilon in at.unique()]
        rivals = best_first(pd.concat([points.assign(at=at), *everywhere]), metric)
        _draw_line(axes, rivals.drop_duplicates("at"), infinite, ms=8, **BEST)
        legend_beside(figure, family)
    ticks: list[float] = []
    if len(spent):
        # Room for the markers at both ends.
        margin = max(1.15, (infinite / low) ** 0.05)
        axes.set_xlim(low / margin, infinite * margin)
        axes.axvline(math.sqrt(high * infinite), color="0.6", lw=0.8, ls=(0, (1, 2)))
        steps = (1, 2, 5) if high / low < 200 / margin**2 else (1,)
        every = LogLocator(subs=steps, numticks=50).tick_values(low, high)
        ticks = [tick for tick in every if low / margin <= tick <= high * margin]
    axes.xaxis.set_major_locator(FixedLocator([*ticks, infinite]))
    axes.set_xticks([*ticks, infinite], [*(f"{tick:g}" for tick in ticks), "∞"])
    axes.xaxis.set_minor_locator(NullLocator())
    return figure


def _places(rows: Frame, noise: Sequence[str], infinite: float) -> Frame:
    """Return the ε at which rows are drawn; 0 for a level line.

    A run that spends nothing where others of its noise do (a local algorithm among private ones)
    stands at their ε.
    """
    at = rows["epsilon"].fillna(infinite)
    of_others = at.groupby([rows[key] for key in noise], dropna=False).transform("max")
    return at.where(at > 0, of_others)


def _draw_line(axes: Axes, rows: Frame, infinite: float, **style: Any) -> None:
    """Draw points joined by a line, thin and dotted on its way to ∞.

    Only the first point without a finite ε is drawn: besides runs without noise they may be runs
    with so little that no accountant certifies any ε.
    """
    beyond = rows[rows["at"] == infinite].head(1)
    finite = rows[rows["at"] < infinite].sort_values("at", kind="stable")
    way = pd.concat([finite.tail(1), beyond])
    axes.plot(finite["at"], finite["value"], marker="o", **style)
    thin: dict[str, Any] = {"ls": "dotted", "lw": 0.6 * style["lw"], "label": None}
    axes.plot(way["at"], way["value"], marker="o", **style | thin)
    bars: Frame = pd.concat([finite, beyond]).dropna(subset="standard_error")
    looks = {"lw": 0.8, "color": style["color"], "zorder": style.get("zorder", 2), "ls": "none"}
    axes.errorbar(bars["at"], bars["value"], bars["standard_error"], **looks)
