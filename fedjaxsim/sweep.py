"""S runs of one simulation as one program, over a grid of devices: settings by clients."""

import copy
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fedjaxsim.engine.batch import batch, stack, varying
from fedjaxsim.engine.devices import grid_of
from fedjaxsim.engine.evaluation import Evaluation
from fedjaxsim.engine.loop import Callbacks, Run
from fedjaxsim.engine.processes import to_host
from fedjaxsim.engine.segments import History
from fedjaxsim.engine.shard import CLIENTS, RUNS, shard
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy.assumptions import default_delta
from fedjaxsim.simulation import Simulation


class SimulationBatch:
    """Runs of one simulation that differ in hyperparameters, as one program.

    Each of them computes what `Simulation.run` would with the same seed, up to rounding: the runs
    share cohorts, minibatches and the standard normal numbers behind the noise, which are made
    once. So at most one of them may be published under its own guarantee. A run that diverges does
    so alone: no number of one run enters another.

    Args:
      simulation: what is run.
      settings: S hyperparameters, with one and the same sampling rate.
      devices: JAX devices, by default all, those of other processes included. The settings are
        divided over them, the last one repeated until they can be divided evenly; the repetitions
        are part of states only. Where there are more devices than settings, the clients are
        divided, too (see `grid`).
      axes: which hyperparameters may differ, as from `varying`; by default those that do.

    Attributes:
      simulation: as given.
      settings: as given.
      size: S.
      capacity: how many settings the program holds, repetitions included.
      program: the batched and sharded program.

    Raises:
      ValueError: if there is no setting, one is out of range, or sampling rates differ.
    """

    def __init__(
        self,
        simulation: Simulation,
        settings: Sequence[Hyperparameters],
        devices: Sequence[Any] | None = None,
        axes: Hyperparameters | None = None,
    ):
        self._check(simulation, settings)
        self.simulation, self.settings, self.size = simulation, tuple(settings), len(settings)
        devices = list(jax.devices() if devices is None else devices)
        by_settings, by_clients = grid(len(devices), self.size, simulation.num_clients)
        mesh = grid_of(
            devices[: by_settings * by_clients], {RUNS: by_settings, CLIENTS: by_clients}
        )
        self.capacity = self.size + -self.size % by_settings
        self._axes = varying(settings) if axes is None else axes
        self._hparams = self._stack(settings)
        self.program = shard(batch(simulation.program, self._axes, self.capacity), mesh)
        self._compiled = self.program.compiled()
        self._place()

    def with_runs(
        self, simulation: Simulation, settings: Sequence[Hyperparameters]
    ) -> "SimulationBatch":
        """Return the same program for other runs, perhaps on another population.

        What is compiled is shared, where the populations have as many rows.

        Args:
          simulation: as before, or its `with_population`.
          settings: at most as many as before, that differ in nothing the first ones did not.

        Raises:
          ValueError: if there are none or more, or they differ in other hyperparameters; and as
            `SimulationBatch`.
        """
        self._check(simulation, settings)
        if len(settings) > self.capacity:
            raise ValueError(f"the program holds {self.capacity} settings, got {len(settings)}")
        other = copy.copy(self)
        other.simulation, other.settings = simulation, tuple(settings)
        if simulation.population is not self.simulation.population:
            other._place()
        other.size = len(settings)
        other._hparams = self._stack(settings)
        return other

    @staticmethod
    def _check(simulation: Simulation, settings: Sequence[Hyperparameters]) -> None:
        if not settings:
            raise ValueError("a sweep needs at least one setting, got none")
        for setting in settings:
            simulation.setup.check(setting)
        rates = sorted({float(np.asarray(s.get("sampling_rate", 1.0))) for s in settings})
        if len(rates) > 1:
            raise ValueError(
                "runs in one program share their cohorts, so they need one sampling_rate, "
                f"got {rates}"
            )

    def _stack(self, settings: Sequence[Hyperparameters]) -> Hyperparameters:
        padding = [settings[-1]] * (self.capacity - len(settings))
        return stack([*settings, *padding], self._axes).as_arrays()

    def _place(self) -> None:
        """Put every split's rows on the devices."""
        self.simulation.setup.check_in_memory()
        self._rows = self.program.place(self.simulation.population)

    def init(self, key: jax.Array | int) -> SimulationState:
        """Return the state before the first round; parts that vary have an axis of runs.

        Args:
          key: as in `Simulation.init`.

        Raises:
          ValueError: as `Simulation.init`.
        """
        key = self.simulation.setup.check_start(key, self.settings[0])
        return self._compiled.init(key, self._hparams)

    def run(
        self,
        state: SimulationState,
        rounds: int,
        *,
        eval_every: int | None = None,
        callbacks: Callbacks = (),
        delta: float | None = None,
        keep: int | None = None,
    ) -> tuple[SimulationState, History]:
        """Run as `Simulation.run`, all runs at once.

        Returns:
          The state, and the history. The segments' metrics are (rounds, S), or (rounds,) where the
          runs share them; the values of their evaluations are (m, S).

        Raises:
          ValueError: as `Simulation.run`, for any of the settings.
        """
        for setting in self.settings:
            self.simulation.setup.check_rounds(setting, int(state.round), rounds, eval_every)

        def advance(state, length):
            rows = self._rows["train"]
            state, metrics = self._compiled.rounds(state, self._hparams, rows, rounds=length)
            metrics = to_host(metrics)
            asked = {k: v[..., : self.size] if v.ndim > 1 else v for k, v in metrics.items()}
            return state, asked

        delta = default_delta(self.simulation.num_clients) if delta is None else delta
        last = int(state.round) + rounds
        run = Run(advance, self.evaluate, last, delta, self.simulation.setup.accountant, self.size)
        return run.segments(state, eval_every, callbacks, keep)

    def evaluate(self, state: SimulationState, split: str = "test") -> Evaluation:
        """Compute per-client metrics of all runs, (m, S).

        Raises:
          ValueError: if there is no such split.
        """
        self.simulation.setup.check_split(split)
        measured = to_host(self._compiled.evaluate(state, self._hparams, self._rows[split]))
        asked = jax.tree.map(lambda values: values[:, : self.size], measured)
        return self.simulation.setup.summarize(split, asked)


def grid(devices: int, settings: int, clients: int) -> tuple[int, int]:
    """Return the number of devices that divide the settings, and the clients.

    Settings come first. Devices that they leave idle divide the clients, so that no device computes
    more of settings times clients than it must.

    Args:
      devices: that there are.
      settings: S.
      clients: m.
    """
    if settings >= devices:
        return devices, 1

    def load(pair):
        by_settings, by_clients = pair
        return -(-settings // by_settings) * -(-clients // by_clients), -by_settings

    pairs = [(by, devices // by) for by in range(1, settings + 1)]
    return min(((by, min(most, clients)) for by, most in pairs), key=load)
