"""The objective of a tuning: the mean over seeds of a metric after a whole run, and its gradient.

Axes: S seeds, T rounds, k hyperparameters, G points of a grid.
"""

import math
from collections.abc import Mapping, Sequence
from threading import Event
from typing import NamedTuple

import jax
import numpy as np
from scipy import stats

from fedjaxsim.engine.batch import varying
from fedjaxsim.engine.devices import SAME, across, divided, mesh_of
from fedjaxsim.engine.memory import bytes_per_run
from fedjaxsim.gradients.objectives import check_names, mean_metric
from fedjaxsim.gradients.seeds import map_seeds
from fedjaxsim.gradients.whole_run import Mode, hypergradient
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.simulation import Simulation
from fedjaxsim.sweep import SimulationBatch
from fedjaxsim.tune.descent import ObjectiveValue, Point, standard_error

MOST_FORWARD = 5
"""Largest k of forward mode, which costs 1 + k runs and keeps nothing of the rounds."""
REVERSE_RUNS = 4
"""Run-equivalents of reverse mode: two runs forwards, and two for the way back."""
_GRID_MEMORY = 2 * 10**9
"""Bytes for the runs of a grid that are computed at once."""
_SEEDS = divided("seeds")


class Grid(NamedTuple):
    """The objective on a grid of hyperparameters.

    Attributes:
      points: G hyperparameters by name; the last name varies fastest.
      values: (G, S), by seed; not finite where a run diverged.
      runs: G · S, run-equivalents spent.
    """

    points: tuple[Point, ...]
    values: np.ndarray
    runs: int

    @property
    def best(self) -> int:
        """The index of the lowest mean; 0 if none is finite."""
        means = np.mean(self.values, axis=1)
        return int(np.argmin(np.where(np.isfinite(means), means, np.inf)))


class SeedGradient:
    """A metric after T rounds and its gradient, for each of S seeds, as `descend` takes it.

    One program is compiled for all points and all keys. Seeds follow one another on a CPU, are
    divided evenly over several devices, and run as one batch on one device of another kind.

    Args:
      simulation: the simulation with the clients to tune on.
      hparams: hyperparameters; the tuned ones are replaced.
      rounds: T.
      wrt: names of the hyperparameters to tune, each ().
      keys: (S,) typed keys.
      metric: a metric of the task.
      split: rows of the metric.
      mode: "forward" or "reverse"; by default forward for at most `MOST_FORWARD` hyperparameters.

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
        mode: Mode | None = None,
    ):
        check_names(wrt, hparams)
        if keys.ndim != 1:
            raise ValueError(f"keys must have shape (S,), got {keys.shape}")
        simulation.setup.check_start(keys[0], hparams)
        self.mode: Mode = mode or ("forward" if len(wrt) <= MOST_FORWARD else "reverse")
        self.runs = len(keys) * (1 + len(wrt) if self.mode == "forward" else REVERSE_RUNS)
        self._simulation, self._hparams, self._keys = simulation, hparams, keys
        self._rounds, self._metric, self._split = rounds, metric, split
        objective = mean_metric(simulation, metric, split)
        run = hypergradient(simulation, objective, rounds, tuple(wrt), mode=self.mode)

        def for_seeds(keys, hparams):
            return map_seeds(lambda key: run(key, hparams), keys)

        count = math.gcd(len(keys), len(jax.devices()))
        mesh = mesh_of(jax.devices()[:count], "seeds")
        self._measure = jax.jit(across(for_seeds, mesh, (_SEEDS, SAME), _SEEDS))

    def __call__(self, point: Point, keys: jax.Array | None = None) -> ObjectiveValue:
        """Measure the metric and its gradient at a point, with other keys (S,) if given.

        Raises:
          ValueError: if a hyperparameter is out of range.
        """
        hparams = self._simulation.setup.check(self._hparams.replace(**point))
        values, gradients = self._measure(self._keys if keys is None else keys, hparams)
        slopes = {name: np.asarray(each, np.float64) for name, each in gradients.items()}
        return ObjectiveValue(np.asarray(values, np.float64), slopes)

    def on_grid(self, points: Sequence[Point], stop: Event | None = None) -> Grid | None:
        """Measure the metric of the same runs at G points, many in one program.

        Once `stop` is set, the grid is given up after the runs in flight, and None is returned.
        """
        simulation = self._simulation
        settings = [self._hparams.replace(**point) for point in points]
        fitting = max(1, _GRID_MEMORY // bytes_per_run(simulation.setup, settings[0]))
        parts = np.array_split(np.arange(len(points)), -(-len(points) // fitting))
        shared = SimulationBatch(
            simulation, [settings[i] for i in parts[0]], axes=varying(settings)
        )
        values = np.empty((len(points), len(self._keys)))
        for part in parts:
            many = shared.with_runs(simulation, [settings[i] for i in part])
            for seed, key in enumerate(self._keys):
                if stop is not None and stop.is_set():
                    return None
                state, _ = many.run(many.init(key), self._rounds)
                values[part, seed] = many.evaluate(state, self._split).mean(self._metric)
        return Grid(tuple(points), values, values.size)


class PairedTest(NamedTuple):
    """The fall of an objective between two points on the same seeds.

    Attributes:
      gain: the mean fall.
      standard_error: its standard error.
      p: two-sided p-value of Student's paired t test; NaN where no seeds differ.
    """

    gain: float
    standard_error: float
    p: float


def paired_test(before: np.ndarray, after: np.ndarray) -> PairedTest:
    """Test the difference of two points on the same seeds, (S,) values each."""
    with np.errstate(invalid="ignore"):
        fall = before - after
        differ = bool(np.all(np.isfinite(fall)) and np.ptp(fall) > 0)
        p = float(stats.ttest_rel(before, after).pvalue) if differ else math.nan
        return PairedTest(float(np.mean(fall)), standard_error(fall), p)


def grid_around(start: Mapping[str, float], count: int) -> tuple[Point, ...]:
    """Return a logarithmic grid from a tenth of the positive start to ten times the start.

    Each hyperparameter has `count` values; an odd number has the start among them.

    Raises:
      ValueError: if there are fewer than two values.
    """
    if count < 2:
        raise ValueError(f"a grid needs at least 2 values of each hyperparameter, got {count}")
    axes = [value * np.geomspace(0.1, 10, count) for value in start.values()]
    places = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))
    return tuple(dict(zip(start, map(float, place), strict=True)) for place in places)
