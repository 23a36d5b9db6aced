"""Tails of the binomial distribution, through the incomplete beta function.

`scipy.stats` has them too, and takes longer to import than JAX.
"""

import bisect

from scipy.special import betainc, betaincinv


def excess(count: int, trials: int, probability: float) -> float:
    """Return P(Bin(n, p) > k) = I_p(k + 1, n - k), for k ≥ 0 and p in [0, 1]."""
    if count >= trials:
        return 0.0
    return float(betainc(count + 1, trials - count, probability))


def least_count(tail: float, trials: int, probability: float) -> int:
    """Return the smallest k ≥ 0 with P(Bin(n, p) > k) ≤ `tail`."""
    return bisect.bisect_left(
        range(trials), True, key=lambda count: excess(count, trials, probability) <= tail
    )


def largest_probability(tail: float, count: int, trials: int) -> float:
    """Return the p with P(Bin(n, p) > k) = `tail`, for k in [0, n - 1]."""
    return float(betaincinv(count + 1, trials - count, tail))
