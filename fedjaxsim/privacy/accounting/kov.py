"""Composition of releases that are each ε-differentially private, with different ε.

Kairouz, Oh and Viswanath 2017, Theorem 3.5; MP-MTL, equation 6. No sampling is taken into account.
"""

import math
from collections.abc import Sequence

from fedjaxsim.privacy.accounting.profile import Profile
from fedjaxsim.privacy.events import Entry


def _moments(entries: Sequence[Entry]) -> tuple[float, float, float]:
    """Σ ε, Σ ε (e^ε − 1)/(e^ε + 1) and √Σ ε² over all rounds."""
    # (e^ε − 1)/(e^ε + 1) = tanh(ε/2), which does not overflow.
    total = math.fsum(rounds * epsilon for epsilon, _, rounds in entries)
    drift = math.fsum(rounds * epsilon * math.tanh(epsilon / 2) for epsilon, _, rounds in entries)
    return total, drift, math.sqrt(math.fsum(n * epsilon**2 for epsilon, _, n in entries))


def compose(entries: Sequence[Entry], delta: float) -> float:
    """The ε of the composition at δ; for δ = 0 the sum.

    Args:
      entries: the rounds, whose noise entry is the ε of one round.
      delta: in [0, 1).
    """
    if not 0 <= delta < 1:
        raise ValueError(f"delta must lie in [0, 1), got {delta}")
    total, drift, scale = _moments(entries)
    if delta == 0 or scale == 0 or math.isinf(total):
        return total
    spread = min(math.log(1 / delta), math.log(math.e + scale / delta))
    return min(total, drift + scale * math.sqrt(2 * spread))


def profile(entries: Sequence[Entry]) -> Profile:
    """The privacy profile of the composition."""
    total, drift, scale = _moments(entries)

    def delta(epsilon):
        if epsilon >= total:
            return 0.0
        if epsilon <= drift:
            return 1.0
        exponent = ((epsilon - drift) / scale) ** 2 / 2
        # Either logarithm in `compose` may be the smaller one: δ = e^−x and δ = s / (e^x − e).
        found = math.exp(-exponent)
        if 1 < exponent < 700:
            found = min(found, scale / (math.exp(exponent) - math.e))
        return found

    return Profile(delta, lambda target: compose(entries, target))
