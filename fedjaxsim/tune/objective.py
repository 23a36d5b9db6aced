"""The objective of a tuning: the mean over seeds of a metric after a whole run, and its gradient.

Axes: S seeds, T rounds, k hyperparameters.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np

from fedjaxsim.engine.processes import SAME, across, divided, mesh_of
from fedjaxsim.gradients.modes import Forward, Mode, Reverse
from fedjaxsim.gradients.whole_run import check_names, hypergradient, map_seeds, mean_metric
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.simulation import Simulation
from fedjaxsim.tune.descent import ObjectiveValue, Point

MOST_FORWARD = 5
"""Largest k of forward mode, which costs 1 + k runs and keeps nothing of the rounds."""
_SEEDS = divided("seeds")


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
        mode: Mode | None = None,
    ):
        check_names(wrt, hparams)
        if keys.ndim != 1:
            raise ValueError(f"keys must have shape (S,), got {keys.shape}")
        simulation.check_start(keys[0], hparams)
        count = sum(np.size(getattr(hparams, name)) for name in wrt)
        self.mode = mode or (Forward() if count <= MOST_FORWARD else Reverse())
        self.runs = len(keys) * self.mode.runs(count)
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
        hparams = self._simulation.check(self._hparams.replace(**point))
        values, gradients = self._measure(self._keys if keys is None else keys, hparams)
        slopes = {name: np.asarray(each, np.float64) for name, each in gradients.items()}
        return ObjectiveValue(np.asarray(values, np.float64), slopes)
