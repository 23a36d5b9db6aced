"""Panels of figures of a sweep: which rows go where, and how panels share names and a legend."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from fedjaxsim.extras import importing
from fedjaxsim.metrics import of_column
from fedjaxsim.report.envelopes import Frame
from fedjaxsim.report.labels import Combination
from fedjaxsim.report.plots import picture

with importing("plots"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
with importing("tables"):
    import pandas as pd

_IN_A_ROW = 5
EPSILON_MEANS = "(zero-out, joint DP)"
EPSILON_LABEL = f"ε {EPSILON_MEANS}"
"""What ε in figures is."""
BEST_STYLE: dict[str, Any] = {"color": "black", "lw": 3.4, "zorder": 1.9}
"""Wide and below the other lines, so that the one that is best shows on it."""
BEST_LABEL = "best of all"


def placed(envelope: pd.DataFrame, given: Sequence[str]) -> Frame:
    """The rows of an envelope, all of which a figure places; what is drawn as NumPy's floats.

    Args:
      envelope: from `envelopes`.
      given: the keys that the figure uses.

    Raises:
      ValueError: if they are not those of the envelope, or it has no rows.
    """
    keys = list(envelope.columns[: envelope.columns.get_loc("round")])
    if sorted(keys) != sorted(given):
        raise ValueError(
            f"the keys of the figure must be those of the envelope, {', '.join(keys)}, "
            f"got {', '.join(given)}"
        )
    if envelope.empty:
        raise ValueError("a figure needs at least one row of an envelope, got none")
    return envelope.astype(dict.fromkeys(("value", "standard_error", "epsilon"), float))


def grouped(frame: Frame, keys: Sequence[str]) -> Iterator[tuple[Combination, Frame]]:
    """The rows of each combination of the keys, in order; what is not set comes last, as None."""
    if not keys and len(frame):
        yield (), frame
    if not keys or frame.empty:
        return
    for values, rows in frame.groupby(list(keys), dropna=False):
        yield tuple(None if pd.isna(value) else value for value in values), rows


def in_a_row(count: int) -> int:
    """Panels in a row: as even as possible."""
    return math.ceil(count / math.ceil(count / _IN_A_ROW))


def make_panels(
    count: int, title: str, size: tuple[float, float] | None = None
) -> tuple[Figure, list[Axes]]:
    """Panels in rows, with room for a legend.

    Args:
      count: of panels.
      title: of the figure.
      size: of a panel in inches, by default wider where there are fewer.
    """
    columns = in_a_row(count)
    rows = math.ceil(count / columns)
    width, height = size or (2.8 if columns > 2 else 3.6, 2.3 if rows > 1 else 2.7)
    figure = picture(title, max(width * columns + 0.8, 5.0), height * rows + 0.9)
    axes = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def name_axes(axes: Sequence[Axes], x: str, y: str) -> None:
    """Names at the outer panels only; the lowest panel of each column shows its ticks."""
    columns = in_a_row(len(axes))
    for place, panel in enumerate(axes):
        if place + columns >= len(axes):
            panel.set_xlabel(x)
            panel.tick_params(labelbottom=True)
        if place % columns == 0:
            panel.set_ylabel(y)


def scale_of(metric: str, values: Frame) -> str:
    """Whether a metric belongs on a "log" axis and has the values for one, or on a "linear" one."""
    return "log" if of_column(metric).logarithmic and values.min() > 0 else "linear"


def beside_or_below(figure: Figure, handles: list[Line2D], title: str | None, panels: int) -> None:
    """A legend beside one panel or two, below more, in as many columns as fit."""
    if not handles:
        return
    if panels <= 2:
        figure.legend(handles=handles, title=title, loc="outside right center")
        return
    longest = max(len(str(handle.get_label())) for handle in handles)
    fitting = max(1, int(figure.get_figwidth() / (0.5 + 0.075 * longest)))
    columns = math.ceil(len(handles) / math.ceil(len(handles) / fitting))
    figure.legend(handles=handles, title=title, loc="outside lower center", ncols=columns)
