"""Gradient descent on hyperparameters, with a trust region: a bad step costs time and nothing else.

Coordinates are log h for hyperparameters h > 0, so a step multiplies them, and h itself for those
that are named as plain. A rule chooses the step within its trust radius. It is taken back where the
objective is then not finite, or worse by more than the standard error of the difference.

Axes: S seeds.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping

import numpy as np

from fedjaxsim.report.seeds import standard_error
from fedjaxsim.tune.rules import Optax, Place, Rule

SMALLEST_RADIUS = 1e-3
"""Shorter steps are not taken: they change a hyperparameter by less than a thousandth."""

FLAT = "the gradient vanishes within its standard error"
SHORT = "no step of more than a thousandth is better"
BOUNDED = "the way down leaves the bounds"
SPENT = "the steps are used up"
STOPPED = "stopped by the user"
NOT_FINITE = "the objective or its gradient is not finite at the start"

Point = dict[str, float]
"""Hyperparameters by name."""

_FREE = (-math.inf, math.inf)


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
    """The objective and its gradient at one point, seed by seed.

    Seeds are the same at all points, so that differences between points have little noise.

    Attributes:
      values: (S,). With S = 1 the objective counts as free of chance.
      gradients: by name, (S,): the derivatives with respect to the hyperparameters themselves.
    """

    values: np.ndarray
    gradients: Mapping[str, np.ndarray]

    @property
    def finite(self) -> bool:
        """Whether all of these numbers are."""
        return all(np.all(np.isfinite(v)) for v in (self.values, *self.gradients.values()))


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One point at which the objective was measured.

    Attributes:
      point: the hyperparameters.
      values: the objective for each seed, (S,).
      gradient: by name, the derivative of the mean over seeds in the coordinates of the descent,
        d/d log h, or d/dh where h is plain.
      gradient_error: by name, the standard error of that.
      accepted: whether the descent went there.
      radius: the longest step that was allowed on the way here, in the norm of the rule; at the
        start infinite.
      runs: run-equivalents spent so far, this point included.
    """

    point: Point
    values: np.ndarray
    gradient: Point
    gradient_error: Point
    accepted: bool
    radius: float
    runs: float

    @property
    def value(self) -> float:
        """The mean of the objective over seeds."""
        return float(np.mean(self.values))

    @property
    def standard_error(self) -> float:
        """The standard error of the mean over seeds, as an estimate of that over all runs."""
        return standard_error(self.values)


@dataclasses.dataclass(frozen=True)
class Path:
    """What a descent came through.

    Attributes:
      steps: the start and every step tried, in order.
      stopped: why it ended, one of the sentences of this module.
    """

    steps: tuple[Step, ...]
    stopped: str

    @property
    def best(self) -> Step:
        """The accepted point with the lowest value."""
        kept = [step for step in self.steps if step.accepted]
        return min(kept, key=lambda step: step.value if math.isfinite(step.value) else math.inf)

    @property
    def gain(self) -> tuple[float, float]:
        """By how much the best point is below the start, and the standard error of that.

        The difference is taken seed by seed.
        """
        saved = self.steps[0].values - self.best.values
        return float(np.mean(saved)), standard_error(saved)


def descend(
    measure: Callable[[Point], Measured],
    start: Mapping[str, float],
    *,
    steps: int,
    rule: Rule | None = None,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    plain: Collection[str] = (),
    cost: float = 1.0,
    on_step: Callable[[Step], bool | None] | None = None,
) -> Path:
    """Minimizes an objective of hyperparameters.

    Ends where every derivative is at most its own standard error, since the seeds then do not tell
    which way is down, or where the way down leaves the bounds.

    Args:
      measure: `(point) -> Measured`, e.g. a `SeedGradient`.
      start: hyperparameters by name; positive, but for plain ones.
      steps: how many points to try besides the start, at least 1.
      rule: how a step is chosen; by default `Optax()`.
      bounds: by name, the smallest and the largest value allowed; none by default.
      plain: hyperparameters that move on a linear scale, which may be 0 or negative.
      cost: run-equivalents of one call of `measure`.
      on_step: called with the start and every step tried; returning False stops.

    Raises:
      ValueError: if there are no hyperparameters or steps, the start is not within the bounds or
        not positive, a name in bounds or `plain` is unknown, or the rule does not apply.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    space = _Space(start, bounds or {}, plain)
    rule = Optax() if rule is None else rule
    found: list[Step] = []

    def visit(at: np.ndarray, radius: float, kept: Place | None) -> Place:
        point = space.point(at)
        place = space.place(at, measure(point))
        accepted = kept is None or _is_no_worse(place, kept)
        gradient, error = (
            dict(zip(space.names, map(float, v), strict=True)) for v in (place.slope, place.error)
        )
        runs = cost * (len(found) + 1)
        found.append(Step(point, place.values, gradient, error, accepted, radius, runs))
        return place

    def goes_on() -> bool:
        return on_step is None or on_step(found[-1]) is not False

    here = visit(space.start, math.inf, None)
    if not here.finite:
        goes_on()
        return Path(tuple(found), NOT_FINITE)
    memory = rule.start(here)
    if not goes_on():
        return Path(tuple(found), STOPPED)
    for _ in range(steps):
        if (end := space.end(here)) is not None:
            return Path(tuple(found), end)
        radius = rule.radius(memory)
        if radius < SMALLEST_RADIUS:
            return Path(tuple(found), SHORT)
        trial = space.within(here.at + rule.step(memory, here))
        if np.array_equal(trial, here.at):
            return Path(tuple(found), BOUNDED)
        there = visit(trial, radius, here)
        memory = rule.learn(memory, here, there, found[-1].accepted)
        here = there if found[-1].accepted else here
        if not goes_on():
            return Path(tuple(found), STOPPED)
    return Path(tuple(found), space.end(here) or SPENT)


def _is_no_worse(place: Place, other: Place) -> bool:
    """Whether all is finite, and not worse by more than the difference's standard error."""
    if not place.finite:
        return False
    rise = place.values - other.values
    return bool(np.mean(rise) <= standard_error(rise))


class _Space:
    """The coordinates of the descent: log h less that of the start, or h where it is plain."""

    def __init__(
        self,
        start: Mapping[str, float],
        bounds: Mapping[str, tuple[float, float]],
        plain: Collection[str],
    ):
        self.names = tuple(start)
        if not self.names:
            raise ValueError("there must be at least one hyperparameter to tune, got none")
        for given, kind in ((bounds, "bounds"), (plain, "plain")):
            unknown = [name for name in given if name not in start]
            if unknown:
                raise ValueError(
                    f"{kind} must be of what is tuned ({', '.join(start)}), got {unknown[0]!r}"
                )
        self.logarithmic = np.array([name not in plain for name in self.names])
        for name, is_log in zip(self.names, self.logarithmic, strict=True):
            value = start[name]
            low, high = bounds.get(name, _FREE)
            if not math.isfinite(value) or (is_log and value <= 0):
                wanted = "positive and finite, on a log scale" if is_log else "finite"
                raise ValueError(f"{name} must start at a value that is {wanted}, got {value}")
            if not low <= value <= high:
                raise ValueError(f"{name} must start within [{low}, {high}], got {value}")
        self._scale = np.array([start[name] for name in self.names], np.float64)
        self.start = self._coordinates(self._scale)
        limits = np.array([bounds.get(name, _FREE) for name in self.names], np.float64)
        self._low, self._high = map(self._coordinates, limits.T)

    def _coordinates(self, values: np.ndarray) -> np.ndarray:
        # A bound of 0 or below is none on a log scale.
        scale = np.where(self.logarithmic, self._scale, 1.0)
        with np.errstate(divide="ignore"):
            logs = np.log(np.maximum(values, 0.0) / scale)
        return np.where(self.logarithmic, logs, values)

    def point(self, at: np.ndarray) -> Point:
        """The hyperparameters at coordinates (k,)."""
        grown = self._scale * np.exp(np.where(self.logarithmic, at, 0.0))
        values = np.where(self.logarithmic, grown, at)
        return dict(zip(self.names, map(float, values), strict=True))

    def within(self, at: np.ndarray) -> np.ndarray:
        """The nearest coordinates within the bounds."""
        return np.clip(at, self._low, self._high)

    def place(self, at: np.ndarray, measured: Measured) -> Place:
        """What was measured at coordinates (k,), with the derivatives in the coordinates."""
        point = self.point(at)
        with np.errstate(invalid="ignore"):
            slopes = np.array([
                np.asarray(measured.gradients[name], np.float64) * (point[name] if is_log else 1.0)
                for name, is_log in zip(self.names, self.logarithmic, strict=True)
            ])  # fmt: skip
            slope = np.mean(slopes, axis=1)
            error = np.array([standard_error(each) for each in slopes])
        values = np.asarray(measured.values, np.float64)
        return Place(at, values, slope, error, measured.finite)

    def end(self, here: Place) -> str | None:
        """Why a descent ends at a place; None where it can go on.

        It can where a derivative exceeds its standard error and the way down is within the bounds.
        """
        steep = np.abs(here.slope) > here.error
        if not np.any(steep):
            return FLAT
        down, up = here.slope > 0, here.slope < 0
        outwards = ((here.at <= self._low) & down) | ((here.at >= self._high) & up)
        return None if np.any(steep & ~outwards) else BOUNDED
