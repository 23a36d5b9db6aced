"""Tails of the binomial distribution, through the incomplete beta function.

`scipy.stats` has them too, and takes longer to import than JAX.
"""

import bisect

from scipy.special import betainc, betaincinv


def excess(count: int, trials: int, probability: float) -> float:
    """P(Bin(n, p) > k) = I_p(k + 1, n - k).

    Args:
      count: k ≥ 0.
      trials: n.
      probability: p in [0, 1].
    """
    if count >= trials:
        return 0.0
    return float(betainc(count + 1, trials - count, probability))


def least_count(tail: float, trials: int, probability: float) -> int:
    """The smallest k ≥ 0 with P(Bin(n, p) > k) ≤ tail.

    Args:
      tail: at least 0.
      trials: n.
      probability: p in [0, 1].
    """
    return bisect.bisect_left(
        range(trials), True, key=lambda count: excess(count, trials, probability) <= tail
    )


def largest_probability(tail: float, count: int, trials: int) -> float:
    """The p with P(Bin(n, p) > k) = tail, which grows with p.

    Args:
      tail: in [0, 1].
      count: k in [0, n - 1].
      trials: n.
    """
    return float(betaincinv(count + 1, trials - count, tail))
