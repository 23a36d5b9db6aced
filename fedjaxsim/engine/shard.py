"""`shard`: a program over a mesh of devices, clients along one axis and runs along another.

Each device holds the personal states and rows of its clients, runs those in the cohort and adds its
accumulator to the others': one sum over devices a round. Each device computes everything else
(cohorts, noise, server, ledger) from the same keys. So any number of devices gives the same cohorts
and noise, and the same numbers up to the rounding of that sum. Runs of a batch do not communicate.

One `jax.shard_map` contains the whole scan over rounds.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjaxsim.data.population import Population
from fedjaxsim.engine.batch import batch
from fedjaxsim.engine.processes import SAME, across, placed
from fedjaxsim.engine.program import Program, traced_for_its_devices
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.state import (
    AllClients,
    SimulationState,
    StatePart,
    map_clients_leaves,
    map_parts,
)
from fedjaxsim.engine.work import CohortSlots
from fedjaxsim.privacy.samplers import Cohort

PyTree = Any


class _Axis(str):
    """The name of a mesh axis, equal to itself alone: no function of a client can guess it."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other


CLIENTS, RUNS = _Axis("clients"), _Axis("runs")
"""The mesh axes."""
_LARGEST_UNIT = 4096
"""The most rows by which a device's piece may be longer than it must be."""


@dataclasses.dataclass(frozen=True)
class Shard(AllClients):
    """The clients of one of several devices on a mesh axis, ids from size·index on.

    Its methods are for use inside `jax.shard_map`.
    """

    axis: str
    devices: int

    @property
    def size(self) -> int:
        return -(-self.num_clients // self.devices)

    @property
    def even(self) -> bool:
        return self.num_clients % self.devices == 0

    def ids(self) -> jax.Array:
        return jax.lax.axis_index(self.axis) * self.size + jnp.arange(self.size, dtype=jnp.int32)

    def anybody(self) -> jax.Array:
        first = jax.lax.axis_index(self.axis) * self.size
        return jnp.minimum(first, self.num_clients - 1)

    def slots_of(self, cohort: Cohort, *, full: bool) -> CohortSlots:
        if full:
            ids, slots = self.ids(), jnp.arange(self.size, dtype=jnp.int32)
            return CohortSlots(slots, ids, ids < self.num_clients)
        slots = cohort.ids - jax.lax.axis_index(self.axis) * self.size
        mine = cohort.mask & (slots >= 0) & (slots < self.size)
        capacity = min(mine.shape[0], self.size)
        places = jnp.nonzero(mine, size=capacity, fill_value=0)[0]
        mask = jnp.arange(capacity) < jnp.sum(mine)
        return CohortSlots(slots[places], cohort.ids[places], mask)

    def total(self, sums: PyTree) -> PyTree:
        return jax.lax.psum(sums, self.axis)


def shard(program: Program, mesh: Mesh) -> "Sharded":
    """Divide a program over a mesh with an axis "clients" and, to divide a batch, an axis "runs".

    States keep their shapes, (m, ...) for the clients' parts, on any number of devices. If it does
    not divide m, each call pads the clients' axis and divides it anew, at the cost of a copy.

    Example:
      >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("clients",))
      >>> fjs.shard(sim.program, mesh).num_clients  # `sim` as in `Simulation`
      2
    """
    axes = {str(axis): axis for axis in (CLIENTS, RUNS)}
    names = [*map(str, mesh.axis_names)]
    if sorted(names) not in (sorted(axes), ["clients"]):
        raise ValueError(f"the mesh must have axes 'clients' and 'runs', got {mesh.axis_names}")
    mesh = Mesh(mesh.devices, [axes[name] for name in names], axis_types=mesh.axis_types)
    runs, along = program.runs, mesh.shape.get(RUNS, 1)
    if runs is None and along > 1:
        raise ValueError(f"a single run cannot be divided over {along} devices: batch it first")
    if runs is not None and runs.size % along:
        raise ValueError(f"{along} devices must divide the number of runs, got {runs.size}")
    return Sharded(**program.parts(), mesh=mesh)


@dataclasses.dataclass(frozen=True)
class Sharded(Program):
    """A program over a mesh, as from `shard`."""

    mesh: Mesh = dataclasses.field(kw_only=True)

    @traced_for_its_devices
    def init(self, key, hparams):
        specs = self.specs(jax.eval_shape(Program(**self.parts()).init, key, hparams))
        sharded_init = across(self._local().init, self.mesh, (SAME, self._hparams), specs)
        return map_clients_leaves(self._unpadded, sharded_init(key, hparams))

    @traced_for_its_devices
    def step(self, state, hparams, rows):
        return self._advance(self._local().step, state, hparams, rows, ())

    @traced_for_its_devices
    def rounds(self, state, hparams, rows, rounds):
        local_rounds = functools.partial(self._local().rounds, rounds=rounds)
        return self._advance(local_rounds, state, hparams, rows, (None,))

    @traced_for_its_devices
    def evaluate(self, state, hparams, rows, clients=None):
        inputs = (self.specs(state), self._hparams, specs_of_rows(rows), SAME)
        outputs = self._spec(StatePart("clients", varies=True))
        if clients is not None:
            outputs = PartitionSpec(*(None if axis == CLIENTS else axis for axis in outputs))
        sharded_evaluate = across(self._local().evaluate, self.mesh, inputs, outputs)
        measured = sharded_evaluate(self._with_padding(state), hparams, rows, clients)
        return jax.tree.map(self._unpadded, measured) if clients is None else measured

    def place(self, population: Population) -> dict[str, Any]:
        """Put each device's clients' rows on it.

        Clients' rows are consecutive, so a device holds one piece of every field. All pieces have
        the length of the longest one, so they may overlap.
        """
        mesh, devices = self.mesh, self.mesh.shape[CLIENTS]
        size = -(-population.num_clients // devices)
        begins, longest = pieces_of(population, devices)
        by_client, everywhere = (
            NamedSharding(mesh, PartitionSpec(CLIENTS)),
            NamedSharding(mesh, SAME),
        )

        def pieces(field) -> jax.Array:
            def piece(index):
                begin = begins[(index[0].start or 0) // longest]
                return field[begin : begin + longest]

            shape = (devices * longest, *field.shape[1:])
            return jax.make_array_from_callback(shape, by_client, piece)

        owner = np.arange(population.num_clients) // size
        shift = np.asarray(begins, np.int32)[owner]

        def on_devices(name: str, rows: Rows) -> Rows:
            ranges = population.splits[name]
            # A client without rows in this split may start outside its device's piece.
            start = np.where(ranges.count > 0, ranges.start - shift, 0)
            start, count = (placed(array, everywhere) for array in (start, ranges.count))
            of = None if rows.training is None else on_devices("train", rows.training)
            frozen = jax.tree.map(lambda leaf: placed(leaf, everywhere), rows.frozen)
            return dataclasses.replace(rows, start=start, count=count, training=of, frozen=frozen)

        with jax.ensure_compile_time_eval():  # also while a run is being traced
            fields = {
                name: pieces(np.asarray(values)) for name, values in population.fields.items()
            }
            return {
                name: on_devices(name, Rows.place(population, name, fields, self.algorithm))
                for name in population.splits
            }

    def specs(self, state: SimulationState) -> Any:
        """Return how a state is divided: a `PartitionSpec` for each leaf."""
        return map_parts(lambda part, tree: jax.tree.map(lambda _: self._spec(part), tree), state)

    # --- one device's part ------------------------------------------------------------------------

    def _local(self) -> Program:
        """Return the program of one device's clients and runs, for use inside `jax.shard_map`."""
        local = self if self.runs is None else self.runs.program
        local = Program(**local.parts())
        if self.mesh.shape[CLIENTS] > 1:
            local = dataclasses.replace(local, partition=self._partition)
        if self.runs is None:
            return local
        _, axes, size = self.runs
        return batch(local, axes, size // self.mesh.shape.get(RUNS, 1))

    def _advance(self, function, state, hparams, rows, before):
        """Run rounds on all devices; metrics of runs have their axis after `before`."""

        def local(state, hparams, rows):
            state, metrics = function(state, hparams, rows)
            varies = {k: v for k, v in metrics.items() if v.ndim > len(before)}
            return state, varies, {k: v for k, v in metrics.items() if k not in varies}

        specs = self.specs(state)
        of_runs = PartitionSpec(*before, self._runs_axis)
        sharded = across(
            local, self.mesh, (specs, self._hparams, specs_of_rows(rows)), (specs, of_runs, SAME)
        )
        state, varies, shared = sharded(self._with_padding(state), hparams, rows)
        return map_clients_leaves(self._unpadded, state), varies | shared

    # --- how arrays are divided -------------------------------------------------------------------

    @property
    def _partition(self) -> Shard:
        return Shard(self.num_clients, CLIENTS, self.mesh.shape[CLIENTS])

    @property
    def _runs_axis(self) -> str | None:
        return RUNS if RUNS in self.mesh.axis_names else None

    @property
    def _hparams(self) -> Any:
        """Specs of the hyperparameters: runs divide those that differ."""
        if self.runs is None:
            return SAME
        by_runs = PartitionSpec(self._runs_axis)
        return self.runs.axes.map(lambda axis: SAME if axis is None else by_runs)

    def _spec(self, part: StatePart) -> PartitionSpec:
        """Return how a part of the state is divided, by clients and by runs."""
        clients = [CLIENTS] if part.owner == "clients" else []
        runs = [self._runs_axis] if part.varies and self.runs is not None else []
        return PartitionSpec(*clients, *runs)

    def _with_padding(self, state: SimulationState) -> SimulationState:
        """Pad the clients' axis to a multiple of the number of devices, by the last client."""
        extra = self._partition.devices * self._partition.size - self.num_clients

        def pad(leaf):
            by_axis = [(0, extra * (axis == 0)) for axis in range(leaf.ndim)]
            return jnp.pad(leaf, by_axis, mode="edge")

        return state if extra == 0 else map_clients_leaves(pad, state)

    def _unpadded(self, leaf: jax.Array) -> jax.Array:
        return leaf if self._partition.even else leaf[: self.num_clients]


def specs_of_rows(rows: Rows) -> Any:
    """Return how rows are divided over devices: their fields by clients."""
    fields: Any = dict.fromkeys(rows.fields, PartitionSpec(CLIENTS))
    training = None if rows.training is None else specs_of_rows(rows.training)
    frozen = None if rows.frozen is None else SAME
    return dataclasses.replace(
        rows, fields=fields, start=SAME, count=SAME, training=training, frozen=frozen
    )


def pieces_of(population: Population, devices: int) -> tuple[list[int], int]:
    """Return the first row of each device's piece of the rows, and the length of a piece."""
    size = -(-population.num_clients // devices)
    starts = np.stack([ranges.start for ranges in population.splits.values()])
    counts = np.stack([ranges.count for ranges in population.splits.values()])
    first = np.where(counts > 0, starts, population.num_rows).min(axis=0)
    last = np.where(counts > 0, starts + counts, 0).max(axis=0)
    spans = [(first[k : k + size], last[k : k + size]) for k in range(0, len(first), size)]
    begins = [int(np.min(low)) for low, _ in spans]
    longest = max(int(np.max(high)) - begin for begin, (_, high) in zip(begins, spans, strict=True))
    # Rounded up to a power of two, or a multiple of a large one: other splits seldom recompile.
    unit = min(1 << (longest - 1).bit_length(), _LARGEST_UNIT)
    longest = min(-(-longest // unit) * unit, population.num_rows)
    begins = [min(begin, population.num_rows - longest) for begin in begins]
    return begins + [0] * (devices - len(begins)), longest
