"""The memory of a run in every placement; nothing of the population's size is allocated.

Rows, ranges, states and the metrics of an evaluation are counted. The compiler says the working
memory of a device, and this process how much memory Python, JAX and compiled programs take.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjaxsim.data.ranges import SPLITS
from fedjaxsim.engine import stream as streaming
from fedjaxsim.engine.accounts import (
    accounts_of,
    example_event,
    no_charges,
    read_by,
    with_views,
)
from fedjaxsim.engine.checkpoint import KEPT
from fedjaxsim.engine.client_partition import AllClients
from fedjaxsim.engine.evaluation import measure_with
from fedjaxsim.engine.layout import layout_of
from fedjaxsim.engine.memory import Memory, memory_of
from fedjaxsim.engine.program import Program, with_rate
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.shape_bytes import bytes_of
from fedjaxsim.engine.work import CohortSlots
from fedjaxsim.hyperparameters import Hyperparameters, compose
from fedjaxsim.privacy.samplers import Cohort
from fedjaxsim.report.files import Record
from fedjaxsim.runs.assemble import check_accountant, parts_of
from fedjaxsim.runs.build import resolved
from fedjaxsim.runs.memory import Machine, private_bytes
from fedjaxsim.runs.settings import RunConfig
from fedjaxsim.runs.sizes import Sizes
from fedjaxsim.tasks.task import check_rows

_RANGES = len(SPLITS) * 2 * 4
"""Bytes of a client's first row and number of rows, of all splits."""
_NAME = 4
"""Bytes of a client's name if it is a number."""
_SORTED = 28
"""Bytes for each client while a metric is summarized: its values, those with rows, and sorted."""
_ALIGNMENT = 64
"""CPU devices share arrays that begin at multiples of this, and copy others."""


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes that a run needs in one memory.

    Attributes:
      rows: the examples.
      ranges: each client's range of rows, and on the host its name.
      states: personal states.
      server: the rest of the state.
      process: Python, JAX and compiled programs, on the host.
      round: working memory of rounds.
      evaluation: working memory of an evaluation.
    """

    rows: int = 0
    ranges: int = 0
    states: int = 0
    server: int = 0
    process: int = 0
    round: int = 0
    evaluation: int = 0

    @property
    def lasting(self) -> int:
        """Bytes between rounds."""
        return self.rows + self.ranges + self.states + self.server + self.process

    @property
    def peak(self) -> int:
        """The peak."""
        return self.lasting + max(self.round, self.evaluation)

    @property
    def largest(self) -> str:
        """The largest part."""
        sizes = dataclasses.asdict(self)
        return max(sizes, key=lambda name: sizes[name])


class Placement(NamedTuple):
    """The memory of a placement of rows and states.

    Attributes:
      name: "in memory", "over N devices", "mapped" or "streamed".
      devices: the number of devices.
      device: on each device; None if devices use the host's memory.
      host: on the host.
      impossible: reason why the run cannot be placed so, or None.
    """

    name: str
    devices: int
    device: Need | None
    host: Need
    impossible: str | None = None

    def memories(self, machine: Machine) -> list[tuple[str, Need, int]]:
        """Return each memory's name, need and size."""
        host = [("host", self.host, machine.host)]
        if self.device is None or machine.device is None:
            return host
        return [("device", self.device, machine.device), *host]

    def binding(self, machine: Machine) -> tuple[str, Need, int]:
        """Return name, need and size of the memory that is shortest."""
        return max(self.memories(machine), key=lambda each: each[1].peak / each[2])

    def load(self, machine: Machine) -> float:
        """Return the needed share of the memory that is shortest."""
        _, need, size = self.binding(machine)
        return need.peak / size

    def fits(self, machine: Machine) -> bool:
        """Return whether the machine has the memory."""
        return self.impossible is None and self.load(machine) <= 1


class Capacity(NamedTuple):
    """The memory of a run.

    Attributes:
      sizes: sizes of the population.
      parameters: numbers in one client's personal state.
      capacity: slots of a cohort.
      machine: the machine.
      placed: the placements.
      folder: bytes of the rows as a folder on disk.
      checkpoints: bytes of the run's checkpoints on disk.
    """

    sizes: Sizes
    parameters: int
    capacity: int
    machine: Machine
    placed: tuple[Placement, ...]
    folder: int
    checkpoints: int

    @property
    def fitting(self) -> tuple[Placement, ...]:
        """Placements that fit."""
        return tuple(each for each in self.placed if each.fits(self.machine))

    @property
    def nearest(self) -> Placement:
        """The possible placement that needs the smallest share of the machine."""
        possible = [each for each in self.placed if each.impossible is None]
        return min(possible, key=lambda each: each.load(self.machine))

    def to_json(self) -> Record:
        """Return everything in bytes."""

        def record(need: Need | None) -> Record | None:
            return None if need is None else {**dataclasses.asdict(need), "peak": need.peak}

        return {
            "clients": self.sizes.clients,
            "rows": dict(self.sizes.rows),
            "own_parameters": self.parameters,
            "capacity": self.capacity,
            "machine": self.machine._asdict(),
            "folder_bytes": self.folder,
            "checkpoint_bytes": self.checkpoints,
            "placements": [
                each._asdict()
                | {"device": record(each.device), "host": record(each.host)}
                | {"fits": each.fits(self.machine)}
                for each in self.placed
            ],
        }


def plan(config: RunConfig, sizes: Sizes, machine: Machine) -> Capacity:
    """Return what a run needs on a machine.

    Working memory is that of programs compiled for this process's devices; for machines whose
    devices have their own memory the clients of a chunk run as one batch, as on accelerators.

    Args:
      config: settings; those of data and results are not read. A streamed run is planned only so.
      sizes: sizes of the population.
      machine: the machine.

    Raises:
      ValueError: if a setting is out of range, or the data do not suit the model.
    """
    parts = parts_of(config, sizes.few, sizes.clients)
    check_rows(parts.algorithm.task, sizes.few.fields)
    read = read_by(parts.algorithm.task)
    declared = (parts.algorithm, parts.mechanism, parts.sampling, *read)
    sampler = parts.sampling.sampler(sizes.clients)
    check_accountant(config, sampler.scheme, parts.mechanism.event)
    records = compose(part.hyperparameters for part in declared)
    hparams = resolved(config, records, sampler, parts.mechanism.event)
    for part in (parts.algorithm, parts.mechanism, sampler):
        part.check(hparams)
    if config.streamed and sampler.scheme.kind == "full":
        raise ValueError("full participation cannot be streamed: sample clients")
    batched = None if machine.device is None else "vmap"
    layout = layout_of(parts.algorithm.task, config.chunk_size, config.chunk_map or batched)
    if batched and layout.chunk_map == batched and config.chunk_size is None:
        layout = dataclasses.replace(layout, memory=machine.device)
    examples = example_event(parts.algorithm, parts.minibatches, sizes.few)
    accounts = accounts_of(parts.algorithm, parts.mechanism, sampler, examples)
    program = Program(
        with_views(with_rate(parts.algorithm, sampler), examples),
        parts.mechanism,
        sampler,
        measure_with(parts.algorithm.task),
        parts.minibatches,
        layout,
        AllClients(sizes.clients),
        no_charges(accounts, parts.ledger_entries),
        examples=examples,
    )
    hparams = hparams.as_arrays()
    state = jax.eval_shape(program.init, jax.random.key(0, impl="threefry2x32"), hparams)
    of_one = bytes_of((state.personal, state.consumed)) // sizes.clients
    planner = _Planner(sizes, machine, program, hparams, of_one)
    return Capacity(
        sizes,
        sum(leaf.size for leaf in jax.tree.leaves(state.personal)) // sizes.clients,
        sampler.scheme.capacity,
        machine,
        planner.placements(streamed=config.streamed),
        sizes.num_rows * sizes.row_bytes + 12 * sizes.clients,
        (KEPT + 1) * bytes_of(state),
    )


@dataclasses.dataclass(frozen=True)
class _Part(AllClients):
    """`held` of the clients, as on one of several devices, without a mesh: for shapes alone."""

    held: int

    @property
    def size(self) -> int:
        return self.held

    @property
    def even(self) -> bool:
        return self.num_clients % self.held == 0

    def ids(self) -> tuple[jax.Array, jax.Array]:
        return jnp.arange(self.held, dtype=jnp.int32), jnp.ones(self.held, bool)

    def slots_of(self, cohort: Cohort, *, full: bool) -> CohortSlots:
        slots, mask = cohort.ids[: self.held], cohort.mask[: self.held]
        return CohortSlots(slots, slots, mask)


@dataclasses.dataclass(frozen=True)
class _Planner:
    """The placements of a program."""

    sizes: Sizes
    machine: Machine
    program: Program
    hparams: Hyperparameters
    state_bytes: int
    before: int = dataclasses.field(default_factory=private_bytes)

    @functools.cached_property
    def process(self) -> int:
        """Memory of this process, which is first asked for with one placement's programs."""
        return self.machine.process + max(0, private_bytes() - self.before)

    def placements(self, *, streamed: bool) -> tuple[Placement, ...]:
        """Return all placements, or the streamed one alone."""
        if streamed:
            return (self._streamed(),)
        devices, stored = self.machine.devices, self.sizes.few.generate is None
        whole = self._resident("in memory", 1)
        divided = [self._resident(f"over {devices} devices", devices)] if devices > 1 else []
        if not stored:
            return whole, *divided
        # A CPU's first device reads mapped rows in place; several devices may copy them.
        copied = whole if self.machine.device is None else [whole, *divided][-1]
        rows = copied.host.rows - self.sizes.num_rows * self.sizes.row_bytes
        mapped = copied._replace(name="mapped", host=dataclasses.replace(copied.host, rows=rows))
        return whole, *divided, mapped, self._streamed()

    def _memory(self, held: int, rows: Mapping[str, Rows]) -> Memory:
        """Compile for `held` clients."""
        program = dataclasses.replace(self.program, partition=_Part(self.sizes.clients, held))
        frozen = program.algorithm.task.frozen
        weights = frozen and frozen.weights
        read = {split: dataclasses.replace(each, frozen=weights) for split, each in rows.items()}
        memory = memory_of(program, self.hparams, read)
        return memory._replace(server=memory.server + bytes_of(weights))

    def _resident(self, name: str, devices: int) -> Placement:
        sizes, m = self.sizes, self.sizes.clients
        length = sizes.num_rows if devices == 1 else sizes.longest_piece(devices)
        rows = {split: sizes.placed(split, m, length) for split in ("train", "test")}
        memory = self._memory(-(-m // devices), rows)
        states, padded, gathered = memory.states, 0, 0
        if m % devices:  # each device has all states; a call copies its share and gathers all anew
            states, padded, gathered = m * self.state_bytes, states, m * self.state_bytes
        device = Need(
            rows=self._copied(rows["train"].fields, devices),
            ranges=_RANGES * m,
            states=states,
            server=memory.server,
            round=padded + max(memory.rounds, gathered),
            evaluation=padded + memory.evaluation,
        )
        host = self._host(memory.metrics * devices, rows=sizes.num_rows * sizes.row_bytes)
        return self._joined(name, devices, device, host)

    def _streamed(self) -> Placement:
        sizes, m, on_cpu = self.sizes, self.sizes.clients, self.machine.device is None
        scheme = self.program.sampling.scheme
        if scheme.kind == "full":
            nothing = None if on_cpu else Need()
            return Placement("streamed", 1, nothing, self._host(0), "all clients take part")

        def fetched(split: str, clients: int) -> tuple[int, Memory]:
            room = max(1, min(sizes.rows[split], clients * sizes.largest[split]))
            rows = sizes.placed(split, clients, room, fetched=True)
            return bytes_of(rows), self._memory(clients, {split: rows})

        block = streaming.block_of(m, self.state_bytes)
        (train, work), (test, measure) = fetched("train", scheme.capacity), fetched("test", block)
        metrics = measure.metrics * m // block
        host = self._host(metrics)
        # A round reads states as fetched and those of the round before, and returns new ones.
        device = Need(
            server=work.server,
            round=train + 3 * work.states + work.rounds,
            evaluation=test + measure.states + measure.evaluation,
        )
        # Rows of the cohorts to come, of which a CPU's device shares one; states of the next cohort
        # while this one's are written back; counts of rows, sorted.
        waiting = (streaming.BUFFERS - on_cpu) * train + 2 * work.states + 4 * m
        blocks = (2 - on_cpu) * test + 2 * measure.states + 2 * metrics
        found = host.round + blocks + on_cpu * device.evaluation
        host = dataclasses.replace(
            host,
            states=m * self.state_bytes,
            round=host.round + waiting,
            evaluation=max(host.evaluation, found),
        )
        return self._joined("streamed", 1, device, host)

    def _host(self, metrics: int, rows: int = 0) -> Need:
        """Return the host's need besides states, for float32 metrics of all clients."""
        m = self.sizes.clients
        found = 2 * metrics + 8 * m  # float64, and the mean over clients of one more
        # The evaluation before, this one as returned and as float64, and one metric while sorted.
        evaluation = 2 * found + metrics + _SORTED * m
        ranges = (_RANGES + _NAME) * m
        return Need(rows, ranges, process=self.process, round=found, evaluation=evaluation)

    def _copied(self, fields: Mapping[str, Any], devices: int) -> int:
        """Return the bytes of rows on a device that it does not share with the host."""
        if self.machine.device is not None:
            return bytes_of(fields)
        copied = 0
        for name, values in fields.items():
            if self.sizes.few.fields[name].dtype != values.dtype:
                copied += bytes_of(values)
            elif bytes_of(values) % _ALIGNMENT:
                copied += bytes_of(values) * (devices - 1) // devices  # the first piece is aligned
        return copied

    def _joined(self, name: str, devices: int, device: Need, host: Need) -> Placement:
        """Count devices that use the host's memory there."""
        if self.machine.device is not None:
            return Placement(name, devices, device, host)
        one, each = dataclasses.asdict(host), dataclasses.asdict(device)
        both = {key: one[key] + devices * each[key] for key in one}
        # An evaluation is summarized when its program is done, the one before still being there.
        both["evaluation"] = max(host.evaluation, host.round + devices * device.evaluation)
        return Placement(name, devices, None, Need(**both))
