"""The central limit theorem for Poisson-sampled Gaussian rounds: an approximation, not a bound.

DPFedMTL, Theorem 4.2, after Bu et al. 2020, with its √T counted once: the composition tends to
μ-GDP with μ = p √(T (e^{1/z²} − 1)). It understates ε where few rounds have a large loss: 0.465 for
1.415 at p = 20/9343, z = 0.65, T = 400, δ = 1e-5.
"""

import math
from collections.abc import Sequence

from fedjaxsim.privacy.events import Entry


def mu(entries: Sequence[Entry], sensitivity: float = 1.0) -> float:
    """Compute μ of the limit, for zero-out, z > 0 and a sensitivity in units of z."""
    total = 0.0
    for z, p, rounds in entries:
        exponent = (sensitivity / z) ** 2
        total += rounds * p**2 * math.expm1(exponent) if exponent < 700 else math.inf
    return math.sqrt(total)
