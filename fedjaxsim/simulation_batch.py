"""Runs of one simulation as one program on a grid of devices, settings by clients."""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.checks import Name, SettingError, count, described
from fedjaxsim.engine.accounts import charged_alone, current_part
from fedjaxsim.engine.batch import batch, stack, varying
from fedjaxsim.engine.evaluation import SAMPLE, Evaluation, sample_of
from fedjaxsim.engine.fixed import Fixed
from fedjaxsim.engine.loop import Callbacks, History, RunLoop, run_segments
from fedjaxsim.engine.part_checks import require_key, require_state, require_values
from fedjaxsim.engine.processes import (
    agree,
    mesh_of,
    require_devices,
    spans_processes,
    to_host,
)
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.seeds import over_seeds, state_of_seed
from fedjaxsim.engine.shard import CLIENTS, RUNS, shard
from fedjaxsim.engine.state import SimulationState, evaluated_part, state_of
from fedjaxsim.engine.transfers import moves_data
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy.assumptions import SHARED_SEED, default_delta
from fedjaxsim.simulation import Simulation, facts_of, facts_of_state


@moves_data
class SimulationBatch(Fixed):
    """Runs of one simulation that differ in hyperparameters or seeds, as one program.

    Each run equals `Simulation.run` with the same seed, up to rounding. Runs of one seed share
    cohorts, minibatches and the standard normal numbers behind the noise, so at most one of them
    may be published under its guarantee. A run that diverges does not affect the others. Another
    `init` compiles nothing, and a CPU then skips empty places of random cohorts, so a loop over
    seeds may be faster than `seeds`. Methods raise ValueError as methods of `Simulation` do,
    for any of the settings.

    Args:
      simulation: the simulation.
      settings: S hyperparameters with equal sampling rates.
      devices: JAX devices, by default all, also other processes' devices. They divide the
        settings, and the last one is repeated to divide evenly; only states show the repetitions.
        With more devices than settings they divide the clients, too (see `grid`).
      axes: the hyperparameters that may differ, as from `varying`; by default those that do.
      seeds: R, to run each setting with R seeds at once; by default with the one of `init`.

    Attributes:
      size: the number of runs, S or, with `seeds`, R·S: all settings of one seed, then of the next.
      runs: the numbers of each run's seed and setting, ((0, 0), (0, 1), …).
      capacity: number of settings that the program holds, repetitions included.
      program: the batched and sharded program, of one seed.

    Example:
      >>> rates = [hparams.replace(learning_rate=rate) for rate in (0.1, 0.3, 1.0)]
      >>> many = fjs.SimulationBatch(sim, rates, seeds=8)  # sim and hparams as in `Simulation`
      >>> many.size, many.runs[:4]
      (24, ((0, 0), (0, 1), (0, 2), (1, 0)))
    """

    def __init__(
        self,
        simulation: Simulation,
        settings: Sequence[Hyperparameters],
        devices: Sequence[Any] | None = None,
        axes: Hyperparameters | None = None,
        *,
        seeds: int | None = None,
    ):
        self._check(simulation, settings)
        if seeds is not None:
            count(seeds=seeds)
        self.simulation, self.settings, self.seeds = simulation, tuple(settings), seeds
        devices = jax.devices() if devices is None else devices
        require_devices(devices)
        devices = list(devices)
        by_settings, by_clients = grid(len(devices), len(settings), simulation.num_clients)
        mesh = mesh_of(
            devices[: by_settings * by_clients], {RUNS: by_settings, CLIENTS: by_clients}
        )
        self.capacity = len(settings) + -len(settings) % by_settings
        self._axes = varying(settings) if axes is None else axes
        self._hparams = self._stack(settings)
        self.program = shard(batch(simulation.program, self._axes, self.capacity), mesh)
        self._of_seeds = self.program if seeds is None else over_seeds(self.program, seeds)
        self._compiled = self._of_seeds.compiled()
        self._rows = self._placed()

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The numbers of each run's seed and setting."""
        return tuple(itertools.product(range(self.seeds or 1), range(len(self.settings))))

    @property
    def size(self) -> int:
        """The number of runs."""
        return len(self.runs)

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
            other_batch = SimulationBatch(simulation, padded, devices, self._axes, seeds=self.seeds)
            return other_batch.with_runs(simulation, settings)
        other = copy.copy(self)
        for of_runs in ("simulation", "settings"):
            del vars(other)[of_runs]
        other.simulation, other.settings = simulation, tuple(settings)
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
            raise SettingError(
                "runs in one program share their cohorts, so they need one ",
                Name("sampling_rate"),
                f", got {rates}",
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

        A report of any of several runs of a seed says that they share their noise. `key` is as in
        `Simulation.init`. With R `seeds` it is the first one, s, and runs have the seeds s to
        s + R − 1, or it is their keys, (R,); the state has a first axis of seeds, too.
        """
        seeds = self._keys(key)
        checked = [self.simulation.check_start(key, self.settings[0])[0] for key in seeds]
        keys = checked[0] if self.seeds is None else jnp.stack(checked)
        state = self._compiled.init(keys, self._hparams)
        assumed = (self.simulation.assumed_of(setting) for setting in self.settings)
        sentences = itertools.chain(self.simulation.public, *assumed)
        shared = (SHARED_SEED,) if len(self.settings) > 1 else ()
        return state.announce(sentences=(*sentences, *shared))

    def _keys(self, key: Any) -> list[Any]:
        """Return the seed, or the key, of each of the batch's seeds."""
        if self.seeds is None:
            return [key]
        if isinstance(key, jax.Array) and key.ndim == 1:
            if key.shape != (self.seeds,):
                raise ValueError(f"there are {self.seeds} seeds, got {len(key)} keys")
            if len(np.unique(jax.random.key_data(key), axis=0)) < self.seeds:
                raise ValueError("each seed needs its own key, got one twice")
            return list(key)
        if isinstance(key, jax.Array):
            raise ValueError(f"give the first seed, or {self.seeds} keys, got one key")
        require_key(key)
        return [key + number for number in range(self.seeds)]

    def state_of(self, state: SimulationState, run: int) -> SimulationState:
        """Return the state of one run, as `Simulation` has it."""
        seed, setting = self.runs[run]
        return state_of(state if self.seeds is None else state_of_seed(state, seed), setting)

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

        Metrics of a segment are (rounds, `size`), or (rounds,) if the runs share them; the values
        of its evaluation are (m, `size`). A sample of clients follows from the first seed.
        """
        require_state(state)
        require_values("run", state)
        done = int(state.round)
        for setting in self.settings:
            self.simulation.check_rounds(setting, done, rounds, eval_every, eval_clients)
        if spans_processes(list(self.program.mesh.devices.flat)):
            part = current_part(state, self.simulation.accounts)
            code = facts_of(self._of_seeds, part, self._hparams, self._rows["train"])
            agree(code | facts_of_state(state, self._hparams))

        charged = charged_alone(self._compiled.rounds, self.simulation.accounts)

        def advance(state, length):
            rows = self._rows["train"]
            state, metrics = charged(state, self._hparams, rows, rounds=length)
            return state, {k: self._of_rounds(values) for k, values in to_host(metrics).items()}

        key = state.key if self.seeds is None else state.key[0]
        delta = default_delta(self.simulation.num_clients) if delta is None else delta
        run = RunLoop(
            self.evaluate,
            done + rounds,
            delta,
            self.size,
            sample=sample_of(key, self.simulation.num_clients, eval_clients),
            state_of=self.state_of,
        )
        return run_segments(advance, run, state, eval_every, callbacks, keep)

    def _of_rounds(self, values: Any) -> Any:
        """Return a metric of rounds by run, from those by seed, if any, round and setting."""
        if self.seeds is None:
            return values[:, : self.size] if values.ndim > 1 else values
        of_settings = values[..., : len(self.settings)]
        if values.ndim == 2:  # settings of a seed share it
            of_settings = np.repeat(values[..., None], len(self.settings), axis=2)
        return np.moveaxis(of_settings, 0, 1).reshape(values.shape[1], self.size)

    def evaluate(
        self, state: SimulationState, split: str = "test", clients: np.ndarray | None = None
    ) -> Evaluation:
        """Compute per-client metrics of all runs, (m, `size`), or of k `clients`, (k, `size`)."""
        require_state(state)
        require_values("evaluate", state)
        clients = self.simulation.check_evaluated(split, clients)
        rows = self._rows[split]
        part = evaluated_part(state)
        measured = to_host(self._compiled.evaluate(part, self._hparams, rows, clients))

        def of_runs(values):
            if self.seeds is None:
                return values[:, : self.size]
            of_settings = np.moveaxis(values[:, :, : len(self.settings)], 0, 1)
            return of_settings.reshape(len(of_settings), self.size, *values.shape[3:])

        asked = jax.tree.map(of_runs, measured)
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
