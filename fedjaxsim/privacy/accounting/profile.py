"""The privacy profile, the result of every accountant: two functions inverse to each other."""

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np


def costs(values: Any, xp: Any = np) -> Any:
    """Return costs with ∞, an unknown cost, for each that is not a number of at least 0."""
    values = xp.asarray(values)
    return xp.where(values >= 0, values, math.inf)


class Profile:
    """The trade-off of ε and δ for one composed sequence of releases.

    Functions that return no number certify nothing: ε is ∞, and δ is 1.
    """

    def __init__(
        self,
        delta: Callable[[float], float],
        epsilon: Callable[[float], float],
        deltas: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:
        self._delta, self._epsilon, self._deltas = delta, epsilon, deltas

    def delta(self, epsilon: float) -> float:
        """Return the smallest δ certified at ε ≥ 0 (nats), in [0, 1]."""
        value = self._delta(epsilon)
        return value if 0 <= value <= 1 else 1.0

    def deltas(self, epsilons: np.ndarray) -> np.ndarray:
        """Return δ certified at many ε ≥ 0, (n,); it may be larger than `delta`'s if it is tiny."""
        if self._deltas is None:
            return np.array([self.delta(epsilon) for epsilon in epsilons.tolist()])
        values = self._deltas(epsilons)
        return np.where((values >= 0) & (values <= 1), values, 1.0)

    def epsilon(self, delta: float) -> float:
        """Return the smallest ε ≥ 0 certified at δ in (0, 1); inf if there is none."""
        value = self._epsilon(delta)
        return value if value >= 0 else math.inf


NOTHING = Profile(delta=lambda epsilon: 0.0, epsilon=lambda delta: 0.0)
"""The profile of nothing released."""
NO_PRIVACY = Profile(delta=lambda epsilon: 1.0, epsilon=lambda delta: math.inf)
"""The profile of data released as they are."""


def smallest(
    function: Callable[[float], float], target: float, upper: float, lower: float = 0.0
) -> float:
    """Find the smallest x in [lower, upper] with a decreasing `function` at most `target`.

    Never rounded to the side above the target, which is at least function(upper).
    """
    from scipy.optimize import brentq

    if function(lower) <= target:
        return lower
    root = float(cast(Any, brentq(lambda x: function(x) - target, lower, upper, xtol=1e-300)))
    step = 1e-15
    while root < upper and function(root) > target:
        root, step = min(upper, root * (1 + step)), 2 * step
    return root


def with_failure(profile: Profile, probability: float) -> Profile:
    """Return the profile of a mechanism within total variation τ of the described one.

    If two mechanisms differ by at most τ in total variation, such as the probability that any
    cohort exceeds the capacity, δ'(ε) ≤ δ(ε) + (1 + e^ε) τ: τ once for each of the two neighbouring
    inputs.
    """
    if probability == 0:
        return profile

    def delta(epsilon):
        return min(1.0, profile.delta(epsilon) + (1 + math.exp(min(epsilon, 700.0))) * probability)

    def epsilon(target):
        if 2 * probability >= target:
            return math.inf
        # The cost of failure at ε = 0 gives a lower end; from there ε climbs until the growing cost
        # is met, or alone exceeds the target.
        low, step = profile.epsilon(target - 2 * probability), 1e-9
        high = low
        if math.isinf(low) or (1 + math.exp(min(low, 700.0))) * probability >= target:
            return math.inf
        while delta(high) > target:
            low, high, step = high, high + step, 4 * step
            if (1 + math.exp(min(high, 700.0))) * probability >= target:
                return math.inf
        return smallest(delta, target, high, low)

    return Profile(delta, epsilon)
