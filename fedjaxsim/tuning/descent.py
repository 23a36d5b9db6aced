"""Gradient descent on hyperparameters through whole runs; bad steps are taken back.

The objective is the mean over seeds of a metric after a run. A step multiplies a hyperparameter:
its coordinate is log h, and 0 at the start.

Axes: S seeds, T rounds, k hyperparameters.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec

from fedjaxsim import checks
from fedjaxsim.checks import Name, SettingError
from fedjaxsim.engine.processes import SAME, across, mesh_of
from fedjaxsim.gradients.modes import Forward, Mode, Reverse
from fedjaxsim.gradients.whole_run import check_names, hypergradient, mean_metric
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.report.results import Estimate, estimate
from fedjaxsim.simulation import Simulation

OPTIMIZER = optax.adam(1.0, b1=0.5, b2=0.8)
"""Adam with short memories, for objectives of little noise and a few tens of steps."""
LARGEST, SMALLEST = 1.0, 1e-3
"""Radii of a step in the largest change of a coordinate; 1 is a factor of e on a log scale."""

FLAT = "the gradient vanishes within its standard error"
SHORT = "no step of more than a thousandth is better"
BOUNDED = "the way down leaves the bounds"
SPENT = "the steps are used up"
STOPPED = "stopped by the user"
NOT_FINITE = "the objective or its gradient is not finite at the start"

Point = dict[str, Any]
"""Named hyperparameters, or numbers for each: floats, or arrays of one per client."""


@dataclasses.dataclass(frozen=True, eq=False)
class ObjectiveValue:
    """The objective and its gradient at one point, for each seed; all points share the seeds.

    Attributes:
      values: (S,). With S = 1 the objective counts as free of chance.
      gradients: a dict of (S,) or (S, m): derivatives with respect to hyperparameters
        themselves.
    """

    values: np.ndarray
    gradients: Mapping[str, np.ndarray]

    @property
    def not_finite(self) -> tuple[str, ...]:
        """Names of what is not finite at some seed: "the objective", "the derivative by lam"."""
        named = {"the objective": self.values}
        named |= {f"the derivative by {name}": slopes for name, slopes in self.gradients.items()}
        return tuple(name for name, slopes in named.items() if not np.all(np.isfinite(slopes)))

    @property
    def finite(self) -> bool:
        """True if all values and derivatives are finite."""
        return not self.not_finite

    @property
    def estimate(self) -> Estimate:
        """The mean over seeds with its 95 % interval."""
        return estimate(self.values.tolist())


MOST_FORWARD = 5
"""Largest k of forward mode, which costs 1 + k runs and keeps nothing of the rounds."""
_SEEDS = PartitionSpec("seeds")


class SeedGradient:
    """A metric after T rounds and its gradient, for each of S seeds, as `descend` takes it.

    One program is compiled for all points and all keys. Seeds follow one another on a CPU, are
    divided evenly over several devices, and run as one batch on one device of another kind.

    Args:
      simulation: the simulation with the clients to tune on.
      hparams: hyperparameters; the tuned ones are replaced.
      rounds: T.
      wrt: names of the hyperparameters to tune, each () or, per client, (m,).
      keys: (S,) typed keys.
      metric: a metric of the task.
      split: rows of the metric.
      pooled: whether it is the mean over the rows of all clients, in place of that over clients.
      mode: by default `Forward()` for at most `MOST_FORWARD` numbers, else `Reverse()`.

    Attributes:
      mode: the mode.
      runs: run-equivalents of one call: S (1 + k) in forward mode, 4 S in reverse mode, since a
        derivative of a round costs about as much as the round.

    Raises:
      ValueError: as `hypergradient`, `mean_metric` and `Simulation.init`, and if the keys are not
        (S,).
    """

    def __init__(
        self,
        simulation: Simulation,
        hparams: Hyperparameters,
        rounds: int,
        wrt: Sequence[str],
        keys: jax.Array,
        *,
        metric: str = "loss",
        split: str = "validation",
        pooled: bool = False,
        mode: Mode | None = None,
    ):
        check_names(wrt, hparams)
        if keys.ndim != 1:
            raise ValueError(f"keys must have shape (S,), got {keys.shape}")
        simulation.check_start(keys[0], hparams)
        count = sum(np.size(getattr(hparams, name)) for name in wrt)
        self.mode = mode or (Forward() if count <= MOST_FORWARD else Reverse())
        self.runs = len(keys) * (1 + count if isinstance(self.mode, Forward) else 4)
        self._simulation, self._hparams, self._keys = simulation, hparams, keys
        objective = mean_metric(simulation, metric, split, pooled=pooled)
        run = hypergradient(simulation, objective, rounds, tuple(wrt), mode=self.mode)

        def for_seeds(keys, hparams):
            def one(key):
                return run(key, hparams)

            # On a CPU a batch of whole runs takes S times the memory for no gain.
            on_cpu = simulation.program.plan.on_cpu
            return jax.lax.map(one, keys) if on_cpu else jax.vmap(one)(keys)

        count = math.gcd(len(keys), len(jax.devices()))
        mesh = mesh_of(jax.devices()[:count], "seeds")
        self._measure = jax.jit(across(for_seeds, mesh, (_SEEDS, SAME), _SEEDS))

    def __call__(self, point: Point, keys: jax.Array | None = None) -> ObjectiveValue:
        """Measure the metric and its gradient at a point, with other keys (S,) if given."""
        hparams = self._simulation.check(self._hparams.replace(**point))
        values, gradients = self._measure(self._keys if keys is None else keys, hparams)
        slopes = {name: np.asarray(slope, np.float64) for name, slope in gradients.items()}
        return ObjectiveValue(np.asarray(values, np.float64), slopes)


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A point that a descent tried.

    Attributes:
      gradient: a dict of derivatives of the mean over seeds with respect to log h.
      gradient_error: the standard errors of `gradient`.
      radius: the largest change of a coordinate that was allowed; infinite at the start.
      runs: run-equivalents spent so far, this point included.
    """

    point: Point
    objective: ObjectiveValue
    gradient: Point
    gradient_error: Point
    accepted: bool
    radius: float
    runs: float

    @property
    def value(self) -> float:
        """The mean of the objective over seeds."""
        return float(np.mean(self.objective.values))


@dataclasses.dataclass(frozen=True)
class TuningTrace:
    """The start and every step tried, in order, the reason for the end, and the direction."""

    steps: tuple[Step, ...]
    stopped: str
    larger_is_better: bool = False

    @property
    def best(self) -> Step:
        """The accepted point with the best value."""
        accepted = [step for step in self.steps if step.accepted]
        sign = -1 if self.larger_is_better else 1
        return min(accepted, key=lambda s: sign * s.value if math.isfinite(s.value) else math.inf)


def descend(
    measure: Callable[[Point], ObjectiveValue],
    start: Mapping[str, Any],
    *,
    steps: int,
    optimizer: optax.GradientTransformation = OPTIMIZER,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    cost: float = 1.0,
    on_step: Callable[[Step], bool | None] | None = None,
    larger_is_better: bool = False,
) -> TuningTrace:
    """Minimize an objective of hyperparameters, or maximize it.

    A step is taken back if the objective or its gradient is not finite, or the objective is worse
    by more than the standard error of its paired difference. The next step is then at most half as
    long, and the optimizer forgets the past; an accepted step allows one that is longer by half.
    The descent ends where no derivative exceeds its standard error, or the way down leaves the
    bounds.

    Args:
      measure: `(point) -> ObjectiveValue`, e.g. a `SeedGradient`.
      start: a dict of hyperparameters of any shape, all positive.
      steps: number of points to try besides the start, at least 1.
      optimizer: optimizer of the coordinates (k,).
      bounds: for each name, the smallest and the largest value allowed; none by default.
      cost: run-equivalents of one call of `measure`.
      on_step: called with the start and every step tried; returning False stops.
      larger_is_better: whether to maximize.

    Raises:
      ValueError: if there are no hyperparameters or steps, the start is not within the bounds or
        not positive, or a name in `bounds` is unknown.
    """
    checks.count(steps=steps)
    low, high = limits(start, bounds or {})
    first = _flat(start)
    splits = np.cumsum([np.size(value) for value in start.values()])[:-1]
    tried: list[Step] = []
    sign = -1 if larger_is_better else 1

    with np.errstate(divide="ignore"):
        lowest, highest = np.log(low / first), np.log(high / first)

    def visit(at, radius, accepted_step):
        values = np.clip(first * np.exp(at), low, high)
        parts = zip(start.items(), np.split(values, splits), strict=True)
        point = {
            name: part.reshape(np.shape(of)) if np.ndim(of) else float(part[0])
            for (name, of), part in parts
        }
        measured = measure(point)
        slopes = {name: slope * point[name] for name, slope in measured.gradients.items()}
        with np.errstate(invalid="ignore"):
            slope = {name: np.mean(slopes[name], axis=0)[()] for name in start}
            error = {name: _standard_error(slopes[name]) for name in start}
        accepted = accepted_step is None or _is_no_worse(measured, accepted_step.objective, sign)
        runs = cost * (len(tried) + 1)
        tried.append(Step(point, measured, slope, error, accepted, radius, runs))
        return tried[-1]

    at, radius = np.zeros(len(first)), LARGEST
    state = optimizer.init(at)
    here = step = visit(at, math.inf, None)
    while True:
        goes_on = on_step is None or on_step(step) is not False
        slope, error = sign * _flat(here.gradient), _flat(here.gradient_error)
        steep = np.abs(slope) > error
        outwards = ((at <= lowest) & (slope > 0)) | ((at >= highest) & (slope < 0))
        reasons = {
            NOT_FINITE: not here.objective.finite,
            STOPPED: not goes_on,
            FLAT: not np.any(steep),
            BOUNDED: not np.any(steep & ~outwards),
            SPENT: len(tried) > steps,
            SHORT: radius < SMALLEST,
        }
        for reason, holds in reasons.items():
            if holds:
                return TuningTrace(tuple(tried), reason, larger_is_better)
        update, state = optimizer.update(slope, state, at)
        change = np.asarray(update, np.float64)
        change *= min(1.0, radius / max(np.max(np.abs(change)), 1e-300))
        there = np.clip(at + change, lowest, highest)
        step = visit(there, radius, here)
        if step.accepted:
            at, here, radius = there, step, min(1.5 * radius, LARGEST)
        else:
            state, radius = optimizer.init(at), float(np.max(np.abs(there - at))) / 2


def _flat(point: Mapping[str, Any]) -> np.ndarray:
    """Return all numbers of a point as one vector, (k,)."""
    return np.concatenate([np.ravel(np.asarray(value, np.float64)) for value in point.values()])


def _standard_error(values: np.ndarray) -> Any:
    """Return the sample standard deviation over √S, for each number; 0 for S = 1."""
    if len(values) == 1:
        return np.zeros(values.shape[1:])[()]
    return (np.std(values, axis=0, ddof=1) / math.sqrt(len(values)))[()]


def _is_no_worse(candidate: ObjectiveValue, current: ObjectiveValue, sign: int) -> bool:
    """Return whether all values are finite, and `sign` times the rise is at most its error."""
    if not candidate.finite:
        return False
    rise = sign * (candidate.values - current.values)
    return bool(np.mean(rise) <= _standard_error(rise))


def limits(
    start: Mapping[str, Any], bounds: Mapping[str, tuple[float, float]]
) -> tuple[np.ndarray, np.ndarray]:
    """Check the start, and return the smallest and largest values, (k,) each."""
    if not start:
        raise ValueError("there must be at least one hyperparameter to tune, got none")
    for name in bounds:
        checks.one_of(start, bounds=name)
    limits = [bounds.get(name, (0.0, math.inf)) for name in start]
    for (name, value), (low, high) in zip(start.items(), limits, strict=True):
        least, most = np.min(value), np.max(value)
        if not 0 < least <= most < math.inf:
            raise SettingError(Name(name), f" must start at a positive, finite value, got {value}")
        if not low <= least <= most <= high:
            raise SettingError(Name(name), f" must start within [{low}, {high}], got {value}")
    sizes = [np.size(value) for value in start.values()]
    lows, highs = np.repeat(np.array(limits, np.float64), sizes, axis=0).T
    return np.maximum(lows, 0), highs
