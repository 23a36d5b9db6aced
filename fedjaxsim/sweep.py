"""S runs of one simulation as one program, over a grid of devices: settings by clients."""

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fedjaxsim.engine.client_partition import Shard
from fedjaxsim.engine.devices import SAME, across, divided, grid_of
from fedjaxsim.engine.evaluation import Evaluation
from fedjaxsim.engine.layout import bytes_of
from fedjaxsim.engine.loop import Callbacks, Run
from fedjaxsim.engine.placement.devices import AXIS as CLIENTS
from fedjaxsim.engine.placement.devices import rows_over, specs_of_rows
from fedjaxsim.engine.program import Program
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.segments import History
from fedjaxsim.engine.settings_axis import over_settings, stack, varying
from fedjaxsim.engine.state import Part, SimulationState, map_parts
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy.assumptions import default_delta
from fedjaxsim.simulation import Simulation

PyTree = Any
_AXIS = "settings"


class ManyRuns:
    """Runs of one simulation that differ in hyperparameters, as one program.

    Each of them computes what `Simulation.run` would with the same seed, up to rounding: the runs
    share cohorts, minibatches and the standard normal numbers behind the noise, which are made
    once. So at most one of them may be published under its own guarantee. A run that diverges does
    so alone: no number of one run enters another.

    Args:
      simulation: what is run.
      settings: S hyperparameters, with one and the same sampling rate.
      devices: JAX devices, by default all. The settings are divided over them, the last one
        repeated until they can be divided evenly; the repetitions are part of states only. Where
        there are more devices than settings, the clients are divided, too (see `grid`).
      axes: which hyperparameters may differ, as from `varying`; by default those that do.

    Attributes:
      simulation: as given.
      settings: as given.
      size: S.
      capacity: how many settings the program holds, repetitions included.
      state_shapes: a state, as shapes.

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
        self._mesh = grid_of(
            devices[: by_settings * by_clients], {_AXIS: by_settings, CLIENTS: by_clients}
        )
        self.capacity = self.size + -self.size % by_settings
        self._axes = varying(settings) if axes is None else axes
        self._hparams = self._stack(settings)
        self._compile()

    def with_runs(self, simulation: Simulation, settings: Sequence[Hyperparameters]) -> "ManyRuns":
        """The same program for other runs, of the same simulation or on another population.

        What is compiled is shared, where the populations have as many rows.

        Args:
          simulation: as before, or its `with_population`.
          settings: at most as many as before, that differ in nothing the first ones did not.

        Raises:
          ValueError: if there are none or more, or they differ in other hyperparameters; and as
            `ManyRuns`.
        """
        self._check(simulation, settings)
        if len(settings) > self.capacity:
            raise ValueError(f"the program holds {self.capacity} settings, got {len(settings)}")
        other = copy.copy(self)
        other.__dict__.pop("_rows", None)
        other.simulation, other.settings = simulation, tuple(settings)
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

    def _compile(self) -> None:
        """Maps the program over the settings of each device, and over the devices."""
        axes, one = self._axes, self._laid_out(self.simulation.program)
        by_settings, by_clients = self._mesh.shape[_AXIS], self._mesh.shape[CLIENTS]
        whole = over_settings(one, axes, self.capacity)
        if by_clients > 1:
            one = dataclasses.replace(one, share=Shard(CLIENTS, by_clients, one.num_clients))
        part = over_settings(one, axes, self.capacity // by_settings)
        key = jax.random.key(0, impl="threefry2x32")
        rows = self._rows["train"]
        state = jax.eval_shape(whole.init, key, self._hparams)
        _, metrics = jax.eval_shape(whole.round, state, self._hparams, rows)
        self.state_shapes = state
        self._specs = map_parts(_specs_of, state)
        hparams_specs: Any = jax.tree.map(
            lambda axis: SAME if axis is None else divided(_AXIS),
            axes,
            is_leaf=lambda axis: axis is None,
        )
        metric_specs = jax.tree.map(lambda leaf: divided(_AXIS, 1) if leaf.ndim else SAME, metrics)
        measured = PartitionSpec(CLIENTS, _AXIS)

        def divided_over(function, state, hparams, rows, outputs):
            inputs = (self._specs, hparams_specs, SAME if by_clients == 1 else specs_of_rows(rows))
            return across(function, self._mesh, inputs, outputs)(state, hparams, rows)

        def several(state, hparams, rows, rounds):
            of_device = functools.partial(part.rounds, rounds=rounds)
            return divided_over(of_device, state, hparams, rows, (self._specs, metric_specs))

        def evaluate(state, hparams, rows):
            return divided_over(part.evaluate, state, hparams, rows, measured)

        self._init = jax.jit(across(part.init, self._mesh, (SAME, hparams_specs), self._specs))
        self._rounds = jax.jit(several, static_argnames="rounds", donate_argnums=0)
        self._evaluate = jax.jit(evaluate)

    @functools.cached_property
    def _rows(self) -> dict[str, Rows]:
        """Every split's rows: whole on each device, or divided with the clients."""
        self.simulation.setup.check_in_memory()
        if self._mesh.shape[CLIENTS] == 1:
            return self.simulation.setup.rows
        return rows_over(self._mesh, self.simulation.population)

    def _laid_out(self, program: Program) -> Program:
        """The program with a layout for the models of all settings."""
        state = jax.eval_shape(program.init, jax.random.key(0), self.settings[0].as_arrays())
        row = (
            bytes_of(state.personal) / program.num_clients * self.capacity / self._mesh.shape[_AXIS]
        )
        layout = self.simulation.setup.layout_of(self.capacity).for_settings(row)
        return dataclasses.replace(program, layout=layout)

    def init(self, key: jax.Array | int) -> SimulationState:
        """The state before the first round: what differs between runs has an axis of them.

        Args:
          key: as of `Simulation.init`.

        Raises:
          ValueError: as `Simulation.init`.
        """
        key = self.simulation.setup.check_start(key, self.settings[0])
        return self._init(key, self._hparams)

    def place(self, state: SimulationState) -> SimulationState:
        """A state that comes from elsewhere, a file say, on the devices."""
        return jax.tree.map(
            lambda spec, part: jax.device_put(part, NamedSharding(self._mesh, spec)),
            self._specs,
            state,
            is_leaf=lambda node: isinstance(node, PartitionSpec),
        )

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
            state, metrics = self._rounds(state, self._hparams, rows, rounds=length)
            own: Any = {
                name: np.asarray(value)[..., : self.size] if value.ndim > 1 else value
                for name, value in metrics.items()
            }
            return state, own

        delta = default_delta(self.simulation.num_clients) if delta is None else delta
        last = int(state.round) + rounds
        run = Run(advance, self.evaluate, last, delta, self.simulation.setup.accountant, self.size)
        return run.segments(state, eval_every, callbacks, keep)

    def evaluate(self, state: SimulationState, split: str = "test") -> Evaluation:
        """As `Simulation.evaluate`; values are (m, S).

        Raises:
          ValueError: if there is no such split.
        """
        self.simulation.setup.check_split(split)
        measured = self._evaluate(state, self._hparams, self._rows[split])
        own = jax.tree.map(lambda values: np.asarray(values)[:, : self.size], measured)
        return self.simulation.setup.summarize(split, own)


def grid(devices: int, settings: int, clients: int) -> tuple[int, int]:
    """Over how many of the devices settings are divided, and over how many of each the clients.

    Settings come first. Devices that they leave idle divide the clients, evenly: so that no device
    has more of settings times clients to compute than it must.

    Args:
      devices: that there are.
      settings: S.
      clients: m.
    """
    if settings >= devices:
        return devices, 1

    def load(pair):
        by_settings, by_clients = pair
        return -(-settings // by_settings) / by_clients, -by_settings

    pairs = []
    for by_settings in range(1, settings + 1):
        most = devices // by_settings
        pairs.append((by_settings, max(c for c in range(1, most + 1) if clients % c == 0)))
    return min(pairs, key=load)


def _specs_of(part: Part, tree: PyTree) -> PyTree:
    """Return how a part of the state is divided, by clients and by settings."""

    def spec(leaf):
        axes: list[str | None] = [None] * leaf.ndim
        if part.owner == "clients":
            axes[0] = CLIENTS
        if part.varies:
            axes[part.runs_axis] = _AXIS
        return PartitionSpec(*axes)

    return jax.tree.map(spec, tree)
