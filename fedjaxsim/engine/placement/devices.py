"""The clients of one simulation divided over several devices.

Every device holds the personal states and the rows of as many clients, runs those of a cohort that
are its own, and adds its accumulator to those of the others: accumulators are additive, so that is
one sum over devices a round. All else (who takes part, noise, server, ledger) every device computes
for itself from the same keys. So a run gives the same cohorts and the same noise on any number of
devices, and the same numbers up to the rounding of that sum.

The whole scan over rounds lies inside one `jax.shard_map`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from fedjaxsim.data.population import Population
from fedjaxsim.engine.client_partition import Shard
from fedjaxsim.engine.devices import SAME, across, divided, mesh_of, placed
from fedjaxsim.engine.placement import Functions, jitted
from fedjaxsim.engine.program import Program
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.state import SimulationState, map_clients_leaves, map_parts

PyTree = Any
AXIS = "clients"
_DIVIDED = divided(AXIS)


class OverDevices:
    """The clients of a simulation divided over devices.

    States have the same shapes, (m, ...) for what belongs to clients, on any number of devices.
    Where that number divides m, each device holds its clients' part of them; otherwise states are
    on every device, and are divided anew by each call of `rounds`, at the cost of a copy.

    Args:
      devices: one or more.
    """

    def __init__(self, devices: Sequence[Any]):
        self.devices = tuple(devices)
        if not self.devices:
            raise ValueError("a simulation needs at least one device, got none")
        self._mesh = mesh_of(devices, AXIS)

    def compiled(self, program: Program) -> Functions:
        """As of `Placement`."""
        return jitted(self.functions(program))

    def functions(self, program: Program) -> Functions:
        """The functions of a program as pure functions of whole states."""
        shard = Shard(AXIS, len(self.devices), program.num_clients)
        part = dataclasses.replace(program, share=shard)

        def init(key, hparams):
            state = jax.eval_shape(part.init, key, hparams)
            whole = across(part.init, self._mesh, (SAME, SAME), specs_of(state))
            return _without_padding(whole(key, hparams), shard)

        def advance(state, hparams, rows, *, function):
            specs = specs_of(state)
            whole = across(function, self._mesh, (specs, SAME, specs_of_rows(rows)), (specs, SAME))
            state, metrics = whole(_with_padding(state, shard), hparams, rows)
            return _without_padding(state, shard), metrics

        def rounds(state, hparams, rows, rounds):
            several = functools.partial(part.rounds, rounds=rounds)
            return advance(state, hparams, rows, function=several)

        def evaluate(state, hparams, rows):
            inputs = (specs_of(state), SAME, specs_of_rows(rows))
            whole = across(part.evaluate, self._mesh, inputs, _DIVIDED)
            measured = whole(_with_padding(state, shard), hparams, rows)
            return jax.tree.map(lambda leaf: leaf[: shard.num_clients], measured)

        return Functions(init, functools.partial(advance, function=part.round), rounds, evaluate)

    def rows(self, population: Population) -> dict[str, Rows]:
        """As of `Placement`: each device holds the rows of its own clients."""
        return rows_over(self._mesh, population)


def rows_over(mesh: Mesh, population: Population) -> dict[str, Rows]:
    """Every split's rows divided along the axis of clients of a mesh, which may have others.

    Rows lie as they do in the population, one client after another, so a device holds one piece of
    every field. Pieces are as long as the longest one and may overlap.
    """
    with jax.ensure_compile_time_eval():
        return _place(mesh, population)


def _place(mesh: Mesh, population: Population) -> dict[str, Rows]:
    devices = mesh.shape[AXIS]
    size = -(-population.num_clients // devices)
    begins, longest = pieces_of(population, devices)
    by_client, everywhere = (NamedSharding(mesh, spec) for spec in (_DIVIDED, SAME))

    def pieces(field) -> jax.Array:
        def piece(index):
            begin = begins[(index[0].start or 0) // longest]
            return field[begin : begin + longest]

        shape = (devices * longest, *field.shape[1:])
        return jax.make_array_from_callback(shape, by_client, piece)

    fields = {name: pieces(np.asarray(value)) for name, value in population.fields.items()}
    owner = np.arange(population.num_clients) // size
    shift = np.asarray(begins, np.int32)[owner]
    rows_of = {}
    for name, ranges in population.splits.items():
        rows = Rows.place(population, name, fields)
        # Without rows in this split a client may start anywhere, outside its piece too.
        start = np.where(ranges.count > 0, ranges.start - shift, 0)
        start, count = (placed(each, everywhere) for each in (start, ranges.count))
        rows_of[name] = dataclasses.replace(rows, start=start, count=count)
    return rows_of


def _with_padding(state: SimulationState, shard: Shard) -> SimulationState:
    """States of clients that do not exist after those of the last one, to divide evenly."""
    extra = shard.devices * shard.size - shard.num_clients
    if extra == 0:
        return state

    def pad(leaf):
        return jnp.pad(leaf, [(0, extra)] + [(0, 0)] * (leaf.ndim - 1))

    return map_clients_leaves(pad, state)


def _without_padding(state: SimulationState, shard: Shard) -> SimulationState:
    if shard.even:
        return state
    return map_clients_leaves(lambda leaf: leaf[: shard.num_clients], state)


def specs_of(state: SimulationState) -> Any:
    """How a state is divided over devices: specs, one for each leaf."""

    def spec(part, tree):
        return jax.tree.map(lambda _: _DIVIDED if part.owner == "clients" else SAME, tree)

    return map_parts(spec, state)


def specs_of_rows(rows: Rows) -> Any:
    """How rows are divided over devices, likewise."""
    fields: Any = dict.fromkeys(rows.fields, _DIVIDED)
    return dataclasses.replace(rows, fields=fields, start=SAME, count=SAME)


def pieces_of(population: Population, devices: int) -> tuple[list[int], int]:
    """The first row of each device's piece of the rows, and how many rows a piece has."""
    size = -(-population.num_clients // devices)
    first, last = _spans(population)
    spans = [(first[k : k + size], last[k : k + size]) for k in range(0, len(first), size)]
    begins = [int(np.min(low)) for low, _ in spans]
    longest = max(int(np.max(high)) - begin for begin, (_, high) in zip(begins, spans, strict=True))
    begins = [min(begin, population.num_rows - longest) for begin in begins]
    return begins + [0] * (devices - len(begins)), longest


def _spans(population: Population) -> tuple[np.ndarray, np.ndarray]:
    """The first row of each client and the one after its last, (m,), over all splits."""
    starts = np.stack([r.start for r in population.splits.values()])
    counts = np.stack([r.count for r in population.splits.values()])
    first = np.where(counts > 0, starts, population.num_rows).min(axis=0)
    return first, np.where(counts > 0, starts + counts, 0).max(axis=0)
