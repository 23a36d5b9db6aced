"""How a descent chooses its next step: by an optax optimizer, or by a quadratic model.

A rule is pure: it keeps its memory in what `start` and `learn` return. Both rules have a trust
radius, which falls with steps that turned out badly and grows with good ones.

Axes: k coordinates, S seeds.
"""

import dataclasses
import math
from typing import Any, NamedTuple, Protocol

import numpy as np
import optax

Memory = Any


class Place(NamedTuple):
    """A point of a descent with what was measured there.

    Attributes:
      at: its coordinates, (k,).
      values: the objective for each seed, (S,).
      slope: the derivatives of the mean over seeds in the coordinates, (k,).
      error: their standard errors, (k,).
      finite: whether all that was measured is.
    """

    at: np.ndarray
    values: np.ndarray
    slope: np.ndarray
    error: np.ndarray
    finite: bool

    @property
    def value(self) -> float:
        """The mean of the objective over seeds."""
        return float(np.mean(self.values))


class Rule(Protocol):
    """Where a descent looks next."""

    def start(self, here: Place) -> Memory:
        """What the rule knows at the start.

        Raises:
          ValueError: if the rule does not apply to such an objective.
        """
        ...

    def step(self, memory: Memory, here: Place) -> np.ndarray:
        """A change of the coordinates, (k,)."""
        ...

    def learn(self, memory: Memory, here: Place, there: Place, kept: bool) -> Memory:
        """What the rule knows after a step from `here` to `there`, and whether it was kept."""
        ...

    def radius(self, memory: Memory) -> float:
        """The longest step allowed, in the norm of the rule."""
        ...


@dataclasses.dataclass(frozen=True)
class Optax:
    """Steps of an optax optimizer, shortened to the trust radius.

    The radius becomes half of a step that was taken back, and the optimizer then forgets what came
    before, so that the next step follows the gradient. With a step that is kept the radius grows by
    half, up to the first one.

    Attributes:
      optimizer: of the coordinates; by default `optax.adam(0.3)`.
      largest: the first and largest trust radius: the most that one step changes a coordinate, 1
        being a factor of e on a log scale.

    Raises:
      ValueError: if the largest radius is not positive and finite.
    """

    optimizer: optax.GradientTransformation = dataclasses.field(
        default_factory=lambda: optax.adam(0.3)
    )
    largest: float = 1.0

    def __post_init__(self):
        if not 0 < self.largest < math.inf:
            raise ValueError(f"the radius must be positive and finite, got {self.largest}")

    def start(self, here: Place) -> Memory:
        """As `Rule.start`."""
        return self.optimizer.init(here.at), self.largest

    def step(self, memory: Memory, here: Place) -> np.ndarray:
        """As `Rule.step`."""
        state, radius = memory
        update, _ = self.optimizer.update(here.slope, state, here.at)
        update = np.asarray(update, np.float64)
        return update * min(1.0, radius / max(_longest(update), 1e-300))

    def learn(self, memory: Memory, here: Place, there: Place, kept: bool) -> Memory:
        """As `Rule.learn`."""
        state, radius = memory
        if not kept:
            return self.optimizer.init(here.at), _longest(there.at - here.at) / 2
        _, state = self.optimizer.update(here.slope, state, here.at)
        return state, min(1.5 * radius, self.largest)

    def radius(self, memory: Memory) -> float:
        """As `Rule.radius`."""
        return memory[1]


class _Model(NamedTuple):
    """What `Quadratic` keeps: the model's second derivatives (k, k), and the radius in its norm."""

    curvature: np.ndarray
    radius: float


@dataclasses.dataclass(frozen=True)
class Quadratic:
    """Steps to the minimum of a quadratic model in a trust region.

    The model is one of the logarithm of the objective. Its curvature is learnt from all points
    measured, those that were taken back included, by the symmetric rank-one update (Nocedal and
    Wright 2006, algorithm 6.2). The trust region is an ellipsoid with the axes of the model, so
    that a direction in which the objective bends sharply does not keep the others short. For a few
    hyperparameters and an objective with little noise it needs fewer steps than `Optax`.

    Attributes:
      longest: the most that one step changes the coordinates, in the Euclidean norm.

    Raises:
      ValueError: if the longest step is not positive and finite.
    """

    longest: float = 2.0

    def __post_init__(self):
        if not 0 < self.longest < math.inf:
            raise ValueError(f"the longest step must be positive and finite, got {self.longest}")

    def start(self, here: Place) -> Memory:
        """As `Rule.start`."""
        if not here.value > 0:
            raise ValueError(
                "a quadratic model of the objective's logarithm needs a positive objective, got "
                f"{here.value} at the start"
            )
        # Until something is known, the step is the longest one down the slope.
        steepness = float(np.linalg.norm(here.slope / here.value))
        model = np.eye(len(here.at)) * steepness / self.longest
        return _Model(model, math.sqrt(steepness * self.longest))

    def step(self, memory: Memory, here: Place) -> np.ndarray:
        """As `Rule.step`; the model's multiplier by bisection (Moré and Sorensen 1983)."""
        values, axes = np.linalg.eigh(memory.curvature)
        weights = _weights(values)
        along = axes.T @ (here.slope / here.value)

        def step(multiplier):
            return -axes @ (along / (values + multiplier * weights))

        def is_short(multiplier):
            change = step(multiplier)
            short = _length(memory.curvature, change) <= memory.radius
            return short and np.linalg.norm(change) <= self.longest

        low, high = max(0.0, -float(np.min(values / weights))) + 1e-9, 1e4
        if is_short(low):
            return step(low)
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (low, middle) if is_short(middle) else (middle, high)
        return step(high)

    def learn(self, memory: Memory, here: Place, there: Place, kept: bool) -> Memory:
        """As `Rule.learn`."""
        model, radius = memory
        change, slope = there.at - here.at, here.slope / here.value
        length = _length(model, change)
        # What is left of a step that the bounds cut short may promise nothing.
        expected = max(-(slope @ change + change @ model @ change / 2), 1e-12)
        good = there.finite and there.value > 0
        rise = math.log(there.value / here.value) if good else math.inf
        gained = -rise / expected
        if rise < 2:  # further up there is a cliff, of which no quadratic tells
            missing = there.slope / there.value - slope - model @ change
            along = missing @ change
            if abs(along) > 1e-6 * np.linalg.norm(change) * np.linalg.norm(missing):
                model = model + np.outer(missing, missing) / along
        if gained < 0.1:
            radius = length / 3 if gained < -1 else length / 2
        elif gained > 0.5 and length > 0.8 * radius:
            radius *= 1.5
        return _Model(model, radius)

    def radius(self, memory: Memory) -> float:
        """As `Rule.radius`."""
        # The longest axis of the ellipsoid.
        weights = _weights(np.linalg.eigvalsh(memory.curvature))
        return min(self.longest, memory.radius / math.sqrt(np.min(weights)))


def _longest(change: np.ndarray) -> float:
    return float(np.max(np.abs(change)))


def _weights(values: np.ndarray) -> np.ndarray:
    """The squared norm's weights along the axes: eigenvalues made positive, none much smaller."""
    return np.maximum(np.abs(values), 0.01 * np.max(np.abs(values)))


def _length(model: np.ndarray, change: np.ndarray) -> float:
    """The length of a step in the norm of the model."""
    values, axes = np.linalg.eigh(model)
    return float(np.linalg.norm(np.sqrt(_weights(values)) * (axes.T @ change)))
