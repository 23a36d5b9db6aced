"""Exact accounting of the Gaussian mechanism without sampling (Gaussian differential privacy).

Gaussian releases with full participation are, for the adversary, one Gaussian release with
μ = s √(Σ rounds / z²), s the sensitivity in units of z. Its profile is exact:
δ(ε) = Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2) (Balle and Wang 2018, Theorem 8; Dong, Roth and Su 2022,
Corollary 2.13).
"""

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import erfcx, ndtr

from fedjaxsim import checks
from fedjaxsim.privacy.accounting.profile import NOTHING, Profile, smallest
from fedjaxsim.privacy.entries import check_delta

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
_MOST_MU = 1e12
"""At a larger μ, ε is about 10²³ at most, beyond the resolution of float64."""


def _mills(x: np.ndarray) -> np.ndarray:
    """Return (1 − Φ(x)) / φ(x), without cancellation or underflow for large x."""
    return math.sqrt(math.pi / 2) * erfcx(x / math.sqrt(2))


def _mills_drop(x: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Return _mills(x) − _mills(x + step) for step > 0."""
    # For small steps the difference would cancel, and three-point Gauss-Legendre integration of
    # −m'(t) = 1 − t m(t) is exact to rounding.
    middle, reach = x + step / 2, step / 2 * math.sqrt(0.6)
    slopes = [1 - t * _mills(t) for t in (middle - reach, middle, middle + reach)]
    integral = step * (5 * slopes[0] + 8 * slopes[1] + 5 * slopes[2]) / 18
    return np.where(step > 0.01, _mills(x) - _mills(x + step), integral)


def log_delta(epsilon: float, mu: ArrayLike) -> np.ndarray:
    """Compute log δ(ε) of μ-GDP, (...), μ finite and positive, with a small relative error in δ."""
    mus = np.asarray(mu, np.float64)
    a = mus / 2 - epsilon / mus
    b = -mus / 2 - epsilon / mus
    log_density = -a * a / 2 - _LOG_SQRT_2PI
    # e^ε Φ(b) = φ(a) (1 − Φ(−b)) / φ(b), since e^ε φ(b) = φ(a).
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        likely = np.log(ndtr(a) - np.exp(log_density) * _mills(-b))
        rare = log_density + np.log(_mills_drop(-a, mus))
    return np.where(a > 1, likely, rare)


def delta(epsilon: float, mu: float) -> float:
    """Compute δ(ε) of μ-GDP, for ε, μ ≥ 0; 1 for μ above 10¹²."""
    checks.in_range("[0, inf]", epsilon=epsilon)
    if mu == 0 or epsilon == math.inf:
        return 0.0
    if mu > _MOST_MU:
        return 1.0
    return float(np.exp(log_delta(epsilon, mu)))


def epsilon(delta: float, mu: float) -> float:
    """Compute the smallest ε ≥ 0 with δ(ε) ≤ delta, never rounded below it; inf at μ > 10¹²."""
    check_delta(delta)
    if mu == 0:
        return 0.0
    if mu > _MOST_MU:
        return math.inf
    # δ(ε) ≤ Φ(μ/2 − ε/μ) ≤ exp(−(ε/μ − μ/2)²/2) for ε ≥ μ²/2 bounds the root.
    upper = mu * mu / 2 + mu * math.sqrt(-2 * math.log(delta))
    return smallest(lambda value: float(log_delta(value, mu)), math.log(delta), upper)


def profile(mu: float) -> Profile:
    """Return the privacy profile of μ-GDP."""
    if mu == 0:
        return NOTHING
    return Profile(lambda value: delta(value, mu), lambda value: epsilon(value, mu))
