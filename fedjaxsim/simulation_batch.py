"""S runs of one simulation as one program on a grid of devices, settings by clients."""

import copy
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fedjaxsim.checks import described
from fedjaxsim.engine.accounts import charged_alone, current_part
from fedjaxsim.engine.batch import batch, stack, varying
from fedjaxsim.engine.checks import require_state, require_values
from fedjaxsim.engine.evaluation import SAMPLE, Evaluation, sample_of
from fedjaxsim.engine.fixed import Fixed
from fedjaxsim.engine.loop import Callbacks, History, RunLoop
from fedjaxsim.engine.processes import (
    agree,
    mesh_of,
    require_devices,
    spans_processes,
    to_host,
)
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.shard import CLIENTS, RUNS, shard
from fedjaxsim.engine.state import SimulationState, evaluated_part, with_public
from fedjaxsim.engine.transfers import moves_data
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy.assumptions import SHARED_SEED, default_delta
from fedjaxsim.simulation import Simulation, facts_of, facts_of_state


@moves_data
class SimulationBatch(Fixed):
    """Runs of one simulation that differ in hyperparameters, as one program.

    Each run equals `Simulation.run` with the same seed, up to rounding. The runs share cohorts,
    minibatches and the standard normal numbers behind the noise, so at most one of them may be
    published under its guarantee. A run that diverges does not affect the others. Another seed
    compiles nothing: `[many.run(many.init(seed), rounds) for seed in range(8)]`. Methods raise
    ValueError as methods of `Simulation` do, for any of the settings.

    Args:
      simulation: the simulation.
      settings: S hyperparameters with equal sampling rates.
      devices: JAX devices, by default all, also other processes' devices. They divide the
        settings, and the last one is repeated to divide evenly; only states show the repetitions.
        With more devices than settings they divide the clients, too (see `grid`).
      axes: the hyperparameters that may differ, as from `varying`; by default those that do.

    Attributes:
      size: S.
      capacity: number of settings that the program holds, repetitions included.
      program: the batched and sharded program.

    Example:
      >>> rates = [hparams.replace(learning_rate=rate) for rate in (0.1, 0.3, 1.0)]
      >>> many = fjs.SimulationBatch(sim, rates)  # sim and hparams as in `Simulation`
      >>> many.size
      3
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
        devices = jax.devices() if devices is None else devices
        require_devices(devices)
        devices = list(devices)
        by_settings, by_clients = grid(len(devices), self.size, simulation.num_clients)
        mesh = mesh_of(
            devices[: by_settings * by_clients], {RUNS: by_settings, CLIENTS: by_clients}
        )
        self.capacity = self.size + -self.size % by_settings
        self._axes = varying(settings) if axes is None else axes
        self._hparams = self._stack(settings)
        self.program = shard(batch(simulation.program, self._axes, self.capacity), mesh)
        self._compiled = self.program.compiled()
        self._rows = self._placed()

    def with_runs(
        self, simulation: Simulation, settings: Sequence[Hyperparameters]
    ) -> "SimulationBatch":
        """Return the same program for at most `capacity` other settings, perhaps on other data.

        They differ only in the hyperparameters of `axes`. Compiled code is shared with a
        `simulation` from `with_population` if both populations have equally many rows, and no
        client of the new one has far more of them.
        """
        self._check(simulation, settings)
        if len(settings) > self.capacity:
            raise ValueError(f"the program holds {self.capacity} settings, got {len(settings)}")
        if simulation.program is not self.simulation.program:  # other parts than these ran
            padded = [*settings, *[settings[-1]] * (self.capacity - len(settings))]
            devices = list(self.program.mesh.devices.flat)
            other_batch = SimulationBatch(simulation, padded, devices, self._axes)
            return other_batch.with_runs(simulation, settings)
        other = copy.copy(self)
        for of_runs in ("simulation", "settings", "size"):
            del vars(other)[of_runs]
        other.simulation, other.settings, other.size = simulation, tuple(settings), len(settings)
        other._hparams = self._stack(settings)
        if simulation.population is not self.simulation.population:
            other._rows = other._placed()
            if simulation.examples is None:
                placed = other._rows.items()
                other._rows = {split: rows.bounded_as(self._rows[split]) for split, rows in placed}
        return other

    @staticmethod
    def _check(simulation: Simulation, settings: Sequence[Hyperparameters]) -> None:
        if not isinstance(simulation, Simulation) or isinstance(settings, Hyperparameters | dict):
            raise ValueError(
                "a sweep needs a Simulation and a list of its hyperparameters, got "
                f"{described(simulation)} and {described(settings)}"
            )
        if not settings:
            raise ValueError("a sweep needs at least one setting, got none")
        for setting in settings:
            simulation.check(setting)
        rates = sorted({float(np.asarray(s.get("sampling_rate", 1.0))) for s in settings})
        if len(rates) > 1:
            raise ValueError(
                "runs in one program share their cohorts, so they need one sampling_rate, "
                f"got {rates}"
            )

    def _stack(self, settings: Sequence[Hyperparameters]) -> Hyperparameters:
        padding = [settings[-1]] * (self.capacity - len(settings))
        return stack([*settings, *padding], self._axes).as_arrays()

    def _placed(self) -> dict[str, Rows]:
        """Return the rows of each split on the devices; one device shares the simulation's."""
        simulation, devices = self.simulation, list(self.program.mesh.devices.flat)
        simulation.check_in_memory()
        alone = devices == jax.local_devices()[:1]
        return simulation.rows if alone else self.program.place(simulation.population)

    def init(self, key: jax.Array | int) -> SimulationState:
        """Return the state before the first round, with an axis of runs in the parts that vary.

        A report of any of several runs says that they share their noise. `key` is as in
        `Simulation.init`.
        """
        key, _ = self.simulation.check_start(key, self.settings[0])
        state = with_public(self._compiled.init(key, self._hparams), self.simulation.public)
        assumed = (self.simulation.assumed_of(setting) for setting in self.settings)
        public = dict.fromkeys(sentence for sentences in assumed for sentence in sentences)
        return with_public(state, (*public, *((SHARED_SEED,) if self.size > 1 else ())))

    def lower(self, key: jax.Array | int, rounds: int) -> list[jax.stages.Lowered]:
        """Return the traced programs of `rounds` rounds and of an evaluation of all clients.

        JAX takes what another thread has compiled of them.
        """
        state, rows = self.init(key), self._rows
        state = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
        )
        part = current_part(state, self.simulation.accounts)
        functions: Any = self._compiled
        return [
            functions.rounds.lower(part, self._hparams, rows["train"], rounds=rounds),
            functions.evaluate.lower(evaluated_part(state), self._hparams, rows["test"], None),
        ]

    def run(
        self,
        state: SimulationState,
        rounds: int,
        *,
        eval_every: int | None = None,
        callbacks: Callbacks = (),
        delta: float | None = None,
        keep: int | None = None,
        eval_clients: int | None = SAMPLE,
    ) -> tuple[SimulationState, History]:
        """Run as `Simulation.run`, all runs at once; return the state and the history.

        Metrics of a segment are (rounds, S), or (rounds,) if the runs share them; the values of its
        evaluation are (m, S).
        """
        require_state(state)
        require_values("run", state)
        done = int(state.round)
        for setting in self.settings:
            self.simulation.check_rounds(setting, done, rounds, eval_every, eval_clients)
        if spans_processes(list(self.program.mesh.devices.flat)):
            part = current_part(state, self.simulation.accounts)
            code = facts_of(self.program, part, self._hparams, self._rows["train"])
            agree(code | facts_of_state(state, self._hparams))

        charged = charged_alone(self._compiled.rounds, self.simulation.accounts)

        def advance(state, length):
            rows = self._rows["train"]
            state, metrics = charged(state, self._hparams, rows, rounds=length)
            metrics = to_host(metrics)
            asked = {k: v[..., : self.size] if v.ndim > 1 else v for k, v in metrics.items()}
            return state, asked

        delta = default_delta(self.simulation.num_clients) if delta is None else delta
        run = RunLoop(
            advance,
            self.evaluate,
            done + rounds,
            delta,
            self.size,
            sample=sample_of(state.key, self.simulation.num_clients, eval_clients),
        )
        return run.segments(state, eval_every, callbacks, keep)

    def evaluate(
        self, state: SimulationState, split: str = "test", clients: np.ndarray | None = None
    ) -> Evaluation:
        """Compute per-client metrics of all runs, (m, S), or of k `clients` by id, (k, S)."""
        require_state(state)
        require_values("evaluate", state)
        clients = self.simulation.check_evaluated(split, clients)
        rows = self._rows[split]
        part = evaluated_part(state)
        measured = to_host(self._compiled.evaluate(part, self._hparams, rows, clients))
        asked = jax.tree.map(lambda values: values[:, : self.size], measured)
        return self.simulation.summarize(split, asked, clients)


def grid(devices: int, settings: int, clients: int) -> tuple[int, int]:
    """Return the numbers of devices that divide S settings and m clients.

    All devices divide the settings if these are enough; otherwise the load of a device, settings
    times clients, is the least possible.
    """
    if settings >= devices:
        return devices, 1
    pairs = [(by, min(devices // by, clients)) for by in range(1, settings + 1)]
    return min(pairs, key=lambda by: (-(-settings // by[0]) * -(-clients // by[1]), -by[0]))
