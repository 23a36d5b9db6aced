"""Gaussian noise that is correlated over rounds, and the cost of a whole run.

With messages of norm 1, round t releases x_t + z Σ_{j<b} d_j ξ_{t−j}, ξ_s independent standard
normal. With D the lower triangular Toeplitz matrix of d, all releases are D (D⁻¹ x + z ξ): one
Gaussian release of D⁻¹ x, also for messages that depend on earlier releases (Denisov et al. 2022,
Theorem 2.1). A client of group g of B takes part in the rounds g, g + B, …, and d makes all entries
of D⁻¹ nonnegative, so equal messages of group 0 move D⁻¹ x furthest.
"""

import math
from collections.abc import Sequence

import numpy as np

from fedjaxsim.privacy.entries import Entry


def coefficients(bands: int, power: float) -> np.ndarray:
    """Compute d, (bands,): the first coefficients of (1 − x)^power, float32 numbers in float64.

    Power 1/2 is the banded inverse square root of Kalinin, McKenna, Upadhyay and Lampert (2025,
    arXiv 2505.12128); with one band noise is independent.
    """
    j = np.arange(1, bands)
    return np.cumprod([1.0, *((j - 1 - power) / j)]).astype(np.float32).astype(np.float64)


def squared_sensitivity(bands: int, power: float, rounds: int, groups: int) -> float:
    """Compute max_g ‖D⁻¹ u_g‖², u_g the indicator of the rounds of group g, in units of z."""
    from scipy.signal import lfilter  # slow to import

    takes_part = (np.arange(rounds) % groups == 0).astype(np.float64)
    effect = lfilter([1.0], coefficients(bands, power), takes_part)
    return math.fsum(np.square(effect))


def as_one_release(spent: Sequence[Entry], bands: int, power: float, groups: int) -> list[Entry]:
    """Return one release at full participation that costs as much as consecutive rounds."""
    if not spent:
        return []
    squared = squared_sensitivity(bands, power, sum(entry.rounds for entry in spent), groups)
    least = min(entry.noise_multiplier for entry in spent)
    return [Entry(least / math.sqrt(squared), 1.0, 1)]


def prefix_error(bands: int, power: float, rounds: int) -> float:
    """Compute the root mean square over rounds of the noise on the sum of all releases, at zC = 1.

    A model that adds up its releases, as in federated averaging, keeps this noise.
    """
    padded = np.zeros(rounds)
    d = coefficients(bands, power)[:rounds]
    padded[: len(d)] = d
    return math.sqrt(np.mean(np.cumsum(np.cumsum(padded) ** 2)))
