"""Medians and ranges over processes, and what can be said when two of them are compared."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Spread(NamedTuple):
    """A number as several processes measured it.

    Attributes:
      median: of the processes.
      least: the smallest one.
      greatest: the largest one.
    """

    median: float
    least: float
    greatest: float


def spread(values: Sequence[float]) -> Spread:
    """Median and range of at least one value."""
    return Spread(statistics.median(values), min(values), max(values))


def ratio(new: Spread, old: Spread) -> Spread:
    """The ratio of two medians, and the range of the ratios of any two processes.

    Args:
      new: positive numbers.
      old: positive numbers.
    """
    return Spread(new.median / old.median, new.least / old.greatest, new.greatest / old.least)


def differs(ratio: Spread) -> int:
    """1 or −1 where every process of the one was above, or below, every one of the other; else 0.

    With five processes each, equal distributions come apart like this once in 126 comparisons.

    Args:
      ratio: from `ratio`.
    """
    return (ratio.least > 1) - (ratio.greatest < 1)
