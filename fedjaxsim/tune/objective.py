"""What is tuned: the mean over seeds of a metric after a whole run, with its derivatives.

Axes: S seeds, T rounds, k hyperparameters, G points of a grid.
"""

import math
from collections.abc import Mapping, Sequence
from threading import Event
from typing import NamedTuple

import jax
import numpy as np

from fedjaxsim.engine.devices import SAME, across, divided, mesh_of
from fedjaxsim.engine.settings_axis import varying
from fedjaxsim.gradients.whole_run import (
    Mode,
    check_names,
    hypergradient,
    map_seeds,
    mean_metric,
)
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.runs.memory import bytes_per_run
from fedjaxsim.simulation import Simulation
from fedjaxsim.sweep import ManyRuns
from fedjaxsim.tune.descent import Measured, Point

MOST_FORWARD = 5
"""Up to so many hyperparameters go in forward mode, which keeps nothing of the rounds."""
REVERSE_RUNS = 4
"""Run-equivalents of a run in reverse mode: forwards twice, and backwards for two."""
GRID_SPAN = 10.0
"""A grid goes from a tenth of the start to ten times the start."""
_GRID_MEMORY = 2 * 10**9
"""Bytes for the runs of a grid that are computed at once."""
_SEEDS = divided("seeds")


def mode_for(count: int) -> Mode:
    """The mode for k derivatives: forward costs 1 + k run-equivalents, reverse 4 for any number.

    Reverse mode also needs memory that grows with the rounds, and more time to compile: it is taken
    where it is clearly cheaper.

    Args:
      count: k.
    """
    return "forward" if count <= MOST_FORWARD else "reverse"


class SeedGradient:
    """A metric after T rounds and its gradient, for each of S seeds, as `descend` takes it.

    One program is compiled for all points. Seeds follow one another on a CPU, divided over the
    devices as far as they can be evenly, and run as one batch on one device of another kind.

    Args:
      simulation: what is run. Its clients are what is tuned on.
      hparams: hyperparameters; those that are tuned are replaced.
      rounds: T.
      wrt: names of the hyperparameters that are tuned, each ().
      keys: (S,) typed keys.
      metric: one of the task's.
      split: the rows that the metric is on.

    Attributes:
      mode: "forward" or "reverse", see `mode_for`.
      runs: run-equivalents of one call: S (1 + k) in forward mode, 4 S in reverse mode. They are
        counted and not measured: a derivative of a round costs about as much as the round.

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
    ):
        check_names(wrt, hparams)
        if keys.ndim != 1:
            raise ValueError(f"keys must have shape (S,), got {keys.shape}")
        simulation.check_start(keys[0], hparams)
        self.mode = mode_for(len(wrt))
        each = 1 + len(wrt) if self.mode == "forward" else REVERSE_RUNS
        self.runs = keys.shape[0] * each
        self._simulation, self._hparams, self._keys = simulation, hparams, keys
        objective = mean_metric(simulation, metric, split)
        run = hypergradient(simulation, objective, rounds, tuple(wrt), mode=self.mode)

        def for_seeds(keys, hparams):
            return map_seeds(lambda key: run(key, hparams), keys)

        count = math.gcd(keys.shape[0], len(jax.devices()))
        mesh = mesh_of(jax.devices()[:count], "seeds")
        self._measure = jax.jit(across(for_seeds, mesh, (_SEEDS, SAME), _SEEDS))

    def __call__(self, point: Point) -> Measured:
        """The metric and its gradient at a point.

        Raises:
          ValueError: if a hyperparameter is out of range.
        """
        hparams = self._simulation.check(self._hparams.replace(**point))
        values, gradients = self._measure(self._keys, hparams)
        return Measured(
            np.asarray(values, np.float64),
            {name: np.asarray(g, np.float64) for name, g in gradients.items()},
        )


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
        """The index of the point with the lowest mean; that of the first one if none is finite."""
        means = np.mean(self.values, axis=1)
        return int(np.argmin(np.where(np.isfinite(means), means, np.inf)))


def grid_around(start: Mapping[str, float], count: int) -> tuple[Point, ...]:
    """All points of a logarithmic grid, from a tenth of the start to ten times the start.

    Args:
      start: positive hyperparameters by name.
      count: N ≥ 2 values of each; an odd number has the start among them.

    Raises:
      ValueError: if there are fewer than two values.
    """
    if count < 2:
        raise ValueError(f"a grid needs at least 2 values of each hyperparameter, got {count}")
    factors = np.geomspace(1 / GRID_SPAN, GRID_SPAN, count)
    axes = [[float(value * factor) for factor in factors] for value in start.values()]
    places = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))
    return tuple(dict(zip(start, map(float, place), strict=True)) for place in places)


def measure_grid(
    simulation: Simulation,
    hparams: Hyperparameters,
    rounds: int,
    points: Sequence[Point],
    keys: jax.Array,
    *,
    metric: str = "loss",
    split: str = "validation",
    stop: Event | None = None,
) -> Grid | None:
    """The objective at every point of a grid, as a sweep computes it: many runs in one program.

    Args:
      simulation: as of `SeedGradient`.
      hparams: likewise.
      rounds: T.
      points: the grid.
      keys: (S,) typed keys; with those of a `SeedGradient` both measure the same runs.
      metric: one of the task's.
      split: the rows that the metric is on.
      stop: once it is set, the grid is given up after the runs in flight.

    Returns:
      The grid; None if it was given up.
    """
    settings = [hparams.replace(**point) for point in points]
    fitting = max(1, _GRID_MEMORY // bytes_per_run(simulation, settings[0]))
    parts = np.array_split(np.arange(len(points)), -(-len(points) // fitting))
    axes = varying(settings)
    shared = ManyRuns(simulation, [settings[i] for i in parts[0]], axes=axes)
    values = np.empty((len(points), keys.shape[0]))
    for part in parts:
        many = shared.with_runs(simulation, [settings[i] for i in part])
        for seed in range(keys.shape[0]):
            if stop is not None and stop.is_set():
                return None
            state, _ = many.run(many.init(keys[seed]), rounds)
            values[part, seed] = many.evaluate(state, split).mean(metric)
    return Grid(tuple(points), values, values.size)
