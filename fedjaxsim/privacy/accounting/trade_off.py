"""Trade-off curves: the power of any test of whether one client's data was used.

The curve gives the smallest type II error (missing that it was used) of a test with a given type I
error (Dong, Roth and Su 2022). Perfect privacy is the line 1 − α.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr, ndtri

from fedjaxsim import checks
from fedjaxsim.privacy.accounting import composition
from fedjaxsim.privacy.accounting.profile import Profile
from fedjaxsim.privacy.entries import Adjacency
from fedjaxsim.privacy.events import PrivacySpend

_SLOPES = 129


def of_gaussian(mu: float, type_one: ArrayLike) -> np.ndarray:
    """Return Φ(Φ⁻¹(1 − α) − μ), the exact curve of μ-GDP, for μ ≥ 0 and α in [0, 1], (...)."""
    alphas = np.asarray(type_one, np.float64)
    if mu == 0:
        return 1 - alphas
    return np.zeros_like(alphas) if mu == np.inf else ndtr(-ndtri(alphas) - mu)


def of_profile(profile: Profile, type_one: ArrayLike) -> np.ndarray:
    """Compute the curve, (...), that a privacy profile certifies from below.

    Each (ε, δ(ε)) allows nothing below the lines 1 − δ − e^ε α and e^−ε (1 − δ − α); the curve is
    their maximum on a grid of ε that is denser near 0 and ends where δ is 1e-8.
    """
    alphas = np.asarray(type_one, np.float64)
    end = min(profile.epsilon(1e-8), 50.0)
    curve = np.zeros_like(alphas)
    for epsilon in end * np.linspace(0, 1, _SLOPES) ** 1.5:
        reached = 1 - profile.delta(epsilon)
        steep, flat = reached - np.exp(epsilon) * alphas, np.exp(-epsilon) * (reached - alphas)
        curve = np.maximum(curve, np.maximum(steep, flat))
    return curve


def trade_off(
    charges: Sequence[PrivacySpend], type_one: ArrayLike, adjacency: Adjacency = "zero_out"
) -> np.ndarray:
    """Compute the smallest type II errors, (...), that the guarantee leaves to any test."""
    alphas = np.asarray(type_one, np.float64)
    checks.in_range("[0, 1]", type_one=alphas)
    costly = [each for each in charges if each.event.releases]
    mu = composition.exact_mu(costly, adjacency)
    if mu is not None:
        return of_gaussian(mu, alphas)
    return of_profile(composition.profile(costly, adjacency), alphas)
