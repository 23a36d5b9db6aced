"""The clients of one simulation divided over several devices.

Every device holds the personal states and the rows of as many clients, runs those of a cohort that
are its own, and adds its accumulator to those of the others: accumulators are additive, so that is
one sum over devices a round. All else (who takes part, noise, server, ledger) every device computes
for itself from the same keys. So a run gives the same cohorts and the same noise on any number of
devices, and the same numbers up to the rounding of that sum.

The whole scan over rounds lies inside one `jax.shard_map`, and so do the gradients of a client:
what is replicated stays each device's own there (`check_vma=False`), where derivatives would
otherwise be summed over the devices.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fedjaxsim.algorithm import Metrics
from fedjaxsim.data.population import Population
from fedjaxsim.engine.program import Program, SimulationState
from fedjaxsim.engine.rounds import Rows, Shard
from fedjaxsim.hparams import Hyperparameters

PyTree = Any
_AXIS = "clients"
_SAME = PartitionSpec()
_DIVIDED = PartitionSpec(_AXIS)


def use_all_cores() -> None:
    """One device per core of a CPU, for clients or settings to be divided over.

    What needs one device takes the first, which still uses all cores inside an operation. To be
    called before JAX computes anything: later, devices stay what they are.
    """
    # As in a notebook, or in tests.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)


class ShardedProgram:
    """A `Program` over several devices, with the same functions.

    States have the same shapes, (m, ...) for what belongs to clients, on any number of devices.
    Where that number divides m, each device holds its clients' part of them; otherwise states are
    on every device, and are divided anew by each call of `rounds`, at the cost of a copy.

    Args:
      program: of one device.
      devices: one or more.
    """

    def __init__(self, program: Program, devices: Sequence[Any]):
        self._mesh = _mesh(devices)
        self._shard = Shard(_AXIS, len(devices), program.num_clients)
        self._part = dataclasses.replace(program, shard=self._shard)
        of_clients: Any = _DIVIDED
        same: Any = _SAME
        consumes = program.minibatches.passes is not None
        self._specs = SimulationState(
            round=same,
            shared=same,
            personal=of_clients,
            mechanism=same,
            privacy=same,
            key=same,
            fingerprint=same,
            taken=of_clients if consumes else None,
        )

    def init(self, key: jax.Array, hparams: Hyperparameters) -> SimulationState:
        """As `Program.init`."""
        divided = self._divided(self._part.init, (_SAME, _SAME), self._specs)
        return self._without_padding(divided(key, hparams))

    def round(
        self, state: SimulationState, hparams: Hyperparameters, rows: Rows
    ) -> tuple[SimulationState, Metrics]:
        """As `Program.round`."""
        return self._advance(self._part.round, state, hparams, rows)

    def rounds(
        self, state: SimulationState, hparams: Hyperparameters, rows: Rows, rounds: int
    ) -> tuple[SimulationState, Metrics]:
        """As `Program.rounds`."""
        several = functools.partial(self._part.rounds, rounds=rounds)
        return self._advance(several, state, hparams, rows)

    def evaluate(
        self, state: SimulationState, hparams: Hyperparameters, rows: Rows
    ) -> dict[str, jax.Array]:
        """As `Program.evaluate`."""
        inputs = (self._specs, _SAME, _specs_of(rows))
        divided = self._divided(self._part.evaluate, inputs, _DIVIDED)
        sums = divided(self._with_padding(state), hparams, rows)
        return jax.tree.map(lambda leaf: leaf[: self._shard.num_clients], sums)

    def _advance(self, function, state, hparams, rows):
        """The state and the metrics after what a function of one device's part does."""
        inputs = (self._specs, _SAME, _specs_of(rows))
        divided = self._divided(function, inputs, (self._specs, _SAME))
        state, metrics = divided(self._with_padding(state), hparams, rows)
        return self._without_padding(state), metrics

    def _divided(self, function, in_specs, out_specs):
        return jax.shard_map(
            function, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def _with_padding(self, state: SimulationState) -> SimulationState:
        """States of clients that do not exist after those of the last one, to divide evenly."""
        extra = self._shard.devices * self._shard.size - self._shard.num_clients
        if extra == 0:
            return state

        def pad(leaf):
            return jnp.pad(leaf, [(0, extra)] + [(0, 0)] * (leaf.ndim - 1))

        return _of_clients(pad, state)

    def _without_padding(self, state: SimulationState) -> SimulationState:
        if self._shard.even:
            return state
        return _of_clients(lambda leaf: leaf[: self._shard.num_clients], state)


def _mesh(devices: Sequence[Any]) -> Mesh:
    return Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))


def _of_clients(function, state: SimulationState) -> SimulationState:
    """The state with a function applied to every leaf that belongs to clients."""
    return dataclasses.replace(
        state,
        personal=jax.tree.map(function, state.personal),
        taken=jax.tree.map(function, state.taken),
    )


def _specs_of(rows: Rows) -> Any:
    fields: Any = dict.fromkeys(rows.fields, _DIVIDED)
    same: Any = _SAME
    return dataclasses.replace(rows, fields=fields, start=same, count=same)


def place_rows(population: Population, devices: Sequence[Any]) -> dict[str, Rows]:
    """Every split of a population, each device holding the rows of its own clients.

    Rows lie as they do in the population, one client after another, so a device holds one piece of
    every field. Pieces are as long as the longest one and may overlap.

    Args:
      population: m clients.
      devices: over which they are divided.
    """
    size = -(-population.num_clients // len(devices))
    first, last = _spans(population)
    length = population.num_rows
    spans = [(first[k : k + size], last[k : k + size]) for k in range(0, len(first), size)]
    begins = [int(np.min(low)) for low, _ in spans]
    longest = max(int(np.max(high)) - begin for begin, (_, high) in zip(begins, spans, strict=True))
    begins = [min(begin, length - longest) for begin in begins]
    begins += [0] * (len(devices) - len(begins))
    mesh = _mesh(devices)
    divided, everywhere = NamedSharding(mesh, _DIVIDED), NamedSharding(mesh, _SAME)

    def pieces(field) -> jax.Array:
        def piece(index):
            begin = begins[(index[0].start or 0) // longest]
            return field[begin : begin + longest]

        shape = (len(devices) * longest, *field.shape[1:])
        return jax.make_array_from_callback(shape, divided, piece)

    fields = {name: pieces(np.asarray(value)) for name, value in population.fields.items()}
    owner = np.arange(population.num_clients) // size
    shift = np.asarray(begins, np.int32)[owner]
    placed = {}
    for name, ranges in population.splits.items():
        rows = Rows.place(population, name, fields)
        # A client without rows in this split may start anywhere, outside its device's piece too.
        start = np.where(ranges.count > 0, ranges.start - shift, 0)
        start, count = jax.device_put((start, ranges.count), everywhere)
        placed[name] = dataclasses.replace(rows, start=start, count=count)
    return placed


def _spans(population: Population) -> tuple[np.ndarray, np.ndarray]:
    """The first row of each client and the one after its last, (m,), over all splits."""
    starts = np.stack([r.start for r in population.splits.values()])
    counts = np.stack([r.count for r in population.splits.values()])
    first = np.where(counts > 0, starts, population.num_rows).min(axis=0)
    return first, np.where(counts > 0, starts + counts, 0).max(axis=0)
