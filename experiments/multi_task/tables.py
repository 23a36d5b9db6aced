"""Means, differences paired over seeds, and tables of them."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats


class Difference(NamedTuple):
    """By how much one method is better than another, over the same seeds.

    Attributes:
      mean: of the differences; positive where the first is better.
      error: the standard error of that mean.
      sure: whether the 95 % confidence interval (Student's t) leaves zero out.
    """

    mean: float
    error: float
    sure: bool

    def __str__(self) -> str:
        text = f"{self.mean:+.3f} ± {self.error:.3f}"
        return f"**{text}**" if self.sure and self.mean > 0 else text


def difference(ours: Sequence[float], theirs: Sequence[float], larger: bool) -> Difference:
    """Return the paired difference of two methods.

    Args:
      ours: one value for each seed, at least two.
      theirs: likewise, of the same seeds.
      larger: whether larger values are better.
    """
    gains = np.subtract(ours, theirs) if larger else np.subtract(theirs, ours)
    mean, error = float(np.mean(gains)), float(np.std(gains, ddof=1) / math.sqrt(len(gains)))
    bound = float(stats.t.ppf(0.975, len(gains) - 1))
    return Difference(mean, error, abs(mean) > bound * error)


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation."""
    return f"{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def epsilon_text(epsilon: float | None) -> str:
    """Return the text of ε in a table; None is no guarantee."""
    return "∞" if epsilon is None or math.isinf(epsilon) else f"{epsilon:.3g}"
