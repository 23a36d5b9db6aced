"""Panels of figures of a sweep: which rows go where, and how panels share names and a legend."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedjaxsim.metrics import of_column
from fedjaxsim.report.files import Record
from fedjaxsim.report.labels import Combination

_IN_A_ROW = 5
EPSILON = "ε (zero-out, joint DP)"
"""What ε in figures is."""
EPSILON_STYLE: dict[str, Any] = {"color": "#D55E00", "ls": (0, (4, 2)), "lw": 1.1}
BEST_STYLE: dict[str, Any] = {"color": "black", "lw": 3.4, "zorder": 1.9}
"""Wide and below the other lines, so that the one that is best shows on it."""
BEST_LABEL = "best of all"


def check_keys(table: pa.Table, given: Sequence[str]) -> None:
    """Checks that a figure places every row of an envelope.

    Args:
      table: from `envelopes`.
      given: the keys that the figure uses, `round` last.

    Raises:
      ValueError: if they are not those of the envelope, or it has no rows.
    """
    names = table.column_names[: table.column_names.index("round") + 1]
    if sorted(names) != sorted(given):
        raise ValueError(
            f"the keys of the figure must be those of the envelope, {', '.join(names[:-1])}, "
            f"got {', '.join(given[:-1])}"
        )
    if not len(table):
        raise ValueError("a figure needs at least one row of an envelope, got none")


def combinations(rows: Sequence[Record], keys: Sequence[str]) -> list[Combination]:
    """The values of the keys that occur, in order; what is not set comes last."""
    found = {tuple(row[key] for key in keys) for row in rows}
    return sorted(
        found,
        key=lambda values: [(value is None, 0 if value is None else value) for value in values],
    )


def grouped(
    rows: Sequence[Record], keys: Sequence[str]
) -> Iterator[tuple[Combination, list[Record]]]:
    """The rows of each combination of the keys, in order of the combinations."""
    groups: dict[Combination, list[Record]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return ((values, groups[values]) for values in combinations(rows, keys))


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
    figure = Figure(
        figsize=(max(width * columns + 0.8, 5.0), height * rows + 0.9), layout="constrained"
    )
    figure.suptitle(title, fontsize=10)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    axes = list(grid.flat)
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


def is_logarithmic(metric: str, rows: Sequence[Record]) -> bool:
    """Whether a metric belongs on a logarithmic axis, and has the values for one."""
    values = [row["value"] for row in rows if row["value"] is not None]
    return of_column(metric).logarithmic and bool(values) and min(values) > 0


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
