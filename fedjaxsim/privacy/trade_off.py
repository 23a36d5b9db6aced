"""The trade-off of a test's two errors: what a guarantee means to an attacker (f-DP)."""

import dataclasses
import math

import numpy as np
from numpy.typing import ArrayLike

from fedjaxsim import checks
from fedjaxsim.privacy.accounting.profile import Profile
from fedjaxsim.privacy.entries import Adjacency

_POINTS = 400
_LEAST_DELTAS = (1e-12, 1e-9, 1e-6, 1e-3)
"""Points reach to ε at the first of these δ that has one."""
_LARGEST_EPSILON = 600.0


@dataclasses.dataclass(frozen=True)
class TradeOff:
    """The trade-off curve f of all releases of a run (Dong, Roth and Su 2022), in joint DP.

    An attacker who sees them tests whether one client took part with its data, or its neighbour
    (`adjacency`). A test with a type I error (false alarm) of α has a type II error (miss) of at
    least f(α), whatever the attacker knows and computes. No test has less than 1 − α in all, and f
    is 1 − α, if nothing is released.

    It follows from privacy profiles: f(α) is the largest of 1 − δ − e^ε α and e^(−ε) (1 − δ − α).
    Finitely many points of them bound it from below, tight to about 10⁻⁴.

    Attributes:
      epsilons: (n,) rising from 0, in nats.
      deltas: (n,) the least δ that is certified at each.
    """

    adjacency: Adjacency
    epsilons: np.ndarray
    deltas: np.ndarray

    def least_miss(self, false_alarm: ArrayLike) -> np.ndarray:
        """Compute f(α), (...), at type I errors α in [0, 1], (...)."""
        alpha = np.asarray(false_alarm, np.float64)
        if not np.all((alpha >= 0) & (alpha <= 1)):
            raise ValueError(f"false_alarm must lie in [0, 1], got {false_alarm}")
        complement = 1 - self.deltas
        steep = complement - np.exp(self.epsilons) * alpha[..., None]
        flat = np.exp(-self.epsilons) * (complement - alpha[..., None])
        return np.max(np.maximum(np.maximum(steep, flat), 0.0), axis=-1)

    @property
    def advantage(self) -> float:
        """The largest 1 − α − f(α), δ at ε = 0: the total variation between both runs."""
        return float(self.deltas[0])

    def success(self, prior: float = 0.5) -> float:
        """Return the largest probability to tell a run from its neighbour.

        Args:
          prior: the probability of one of the two before anything was released, in (0, 1).
        """
        checks.in_range("(0, 1)", prior=prior)
        rarer = min(prior, 1 - prior)
        # The least of π f(α) + (1 − π) α is π (1 − δ) at e^ε = (1 − π)/π; δ is convex in e^ε.
        delta = np.interp((1 - rarer) / rarer, np.exp(self.epsilons), self.deltas)
        return float(1 - rarer * (1 - delta))


def trade_off(profile: Profile, adjacency: Adjacency) -> TradeOff:
    """Compute the trade-off curve of a privacy profile."""
    largest = (profile.epsilon(delta) for delta in _LEAST_DELTAS)
    last = next(filter(math.isfinite, largest), _LARGEST_EPSILON)
    epsilons = np.linspace(0, min(last, _LARGEST_EPSILON), _POINTS)
    return TradeOff(adjacency, epsilons, profile.deltas(epsilons))
