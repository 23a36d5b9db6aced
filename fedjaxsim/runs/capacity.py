"""What memory a run would need, by where its rows and states lie: from shapes, before any data.

What lies there between rounds is counted. What a round and an evaluation need besides is what the
compiler says of their programs, compiled for shapes: nothing of the population's size is allocated.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.data.population import Population
from fedjaxsim.data.ranges import MOST_ROWS, SPLITS, consecutive
from fedjaxsim.data.splitting import numbers_of_rows
from fedjaxsim.engine import stream as streamed
from fedjaxsim.engine.checkpoint import KEPT
from fedjaxsim.engine.client_partition import AllClients, Shard
from fedjaxsim.engine.devices import SAME, across, divided, mesh_of
from fedjaxsim.engine.layout import bytes_of
from fedjaxsim.engine.program import Program, measure_with
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.setup import layout_of
from fedjaxsim.engine.shard import CLIENTS as AXIS
from fedjaxsim.engine.shard import pieces_of, shard, specs_of_rows
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.hyperparameters import Hyperparameters, compose
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.samplers import Sampler
from fedjaxsim.report.files import Record
from fedjaxsim.runs.assemble import Parts, parts_of
from fedjaxsim.runs.build import fill_settings
from fedjaxsim.runs.memory import Machine
from fedjaxsim.runs.parts import OF_TOKENS
from fedjaxsim.runs.settings import RunConfig

PyTree = Any

_RANGE = 2 * 4
"""Bytes that say where a client's rows of one split lie."""
_NAME = 4
"""Bytes of a client's name, where it is a number."""
_LOADING = 36
"""Bytes for each client while a population is checked: sums of 64 bits, and ranges once more."""
_FACTS = 20
"""Bytes for each row of the test split while the variance of its targets is computed."""
_SUMMARY = 28
"""Bytes for each client while one metric is summed up: those with rows, and sorted."""
_ALIGNED = 64
"""A CPU's device shares arrays that begin at multiples of so many bytes, and copies others."""
PROCESS = 135_000_000
"""Bytes of a process before it has a run's programs: Python, this package and JAX with its threads
(104 MB), and the small programs of every run. Like `PER_STORED_BYTE` measured by
`benchmarks/planner.py` with 40 clients, on two CPU cores with Python 3.11 and JAX 0.10."""
PER_STORED_BYTE = 35
"""Bytes that a program takes in a process for each byte of its stored form: XLA keeps what it has
compiled as a graph of objects, and glibc what lies between them."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large a population is.

    Attributes:
      clients: m.
      rows: of all clients together, by split.
      largest: rows of the client that has most, by split.
      few: the population itself, or another one with the same fields, for which models are made.
    """

    clients: int
    rows: Mapping[str, int]
    largest: Mapping[str, int]
    few: Population

    @property
    def num_rows(self) -> int:
        """Rows of all splits together."""
        return sum(self.rows.values())

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, on the host."""
        return sum(v.nbytes // len(v) for v in self.few.fields.values())

    def fields(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """So many rows on a device, as shapes: numbers of 64 bits become such of 32 there."""
        return {
            name: jax.ShapeDtypeStruct((rows, *v.shape[1:]), jax.dtypes.canonicalize_dtype(v.dtype))
            for name, v in self.few.fields.items()
        }

    def pieces(self, devices: int) -> tuple[list[int], int]:
        """As `pieces_of`; where only sizes are known, all clients have as many rows."""
        if self.few.num_clients == self.clients:
            return pieces_of(self.few, devices)
        of_one = self.num_rows // self.clients
        longest = -(-self.clients // devices) * of_one
        return [min(k * longest, self.num_rows - longest) for k in range(devices)], longest


def sizes_of(population: Population) -> Sizes:
    """The sizes of a population that is there."""
    counts = {name: ranges.count for name, ranges in population.splits.items()}
    return Sizes(
        population.num_clients,
        {name: int(count.sum(dtype=np.int64)) for name, count in counts.items()},
        {name: int(count.max()) for name, count in counts.items()},
        population,
    )


def sizes_without_data(config: RunConfig, shape: tuple[int, ...], clients: int, rows: int) -> Sizes:
    """The sizes of a population that is not there, whose clients have as many rows each.

    Args:
      config: says how many classes there are, and which part of the rows is for testing.
      shape: of one example.
      clients: m.
      rows: of each client, of all splits together.

    Raises:
      ValueError: naming the number that is out of range, or what int32 cannot count.
    """
    if not shape or min(shape) < 1:
        raise ValueError(f"features must be positive numbers, got {','.join(map(str, shape))}")
    if config.model in OF_TOKENS:
        raise ValueError(f"model {config.model} is planned from data: it needs to know the tokens")
    for name, value, least in (("clients", clients, 1), ("rows-per-client", rows, 2)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if clients * rows > MOST_ROWS:
        raise ValueError(
            f"rows are counted in int32, at most {MOST_ROWS} of all clients together, and "
            f"{clients} clients with {rows} each have {clients * rows}: rows-per-client must be at "
            f"most {MOST_ROWS // clients}, or clients at most {MOST_ROWS // rows}"
        )
    given = config.get("test_fraction")
    test = 0.2 if given is None else given
    count = np.array([rows], np.int32)
    parts = numbers_of_rows(count, config.get("validation_fraction", 0.0), test)
    of_one = {name: int(part[0]) for name, part in zip(SPLITS, parts, strict=True)}
    classes = None if config.loss in ("squared", "logistic") else config.get("classes")
    if classes is None and config.loss not in ("squared", "logistic"):
        raise ValueError(f"loss {config.loss} needs classes, got none")
    y = np.zeros(rows, np.float32) if classes is None else np.arange(rows, dtype=np.int32)
    few = Population(
        {"x": np.zeros((rows, *shape), np.float32), "y": y if classes is None else y % classes},
        consecutive(*parts),
        np.zeros(1, np.int32),
        categories={} if classes is None else {"y": tuple(map(str, range(classes)))},
    )
    return Sizes(clients, {k: clients * n for k, n in of_one.items()}, of_one, few)


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes in one memory, by what they hold.

    Attributes:
      rows: the examples.
      ranges: whose they are, and the clients' names.
      states: personal states.
      server: the rest of the state: billboard, mechanism, ledger.
      process: Python, JAX and the compiled programs, whatever the size of the data; in the host's
        memory alone.
      loading: besides rows and ranges, while a population is loaded and checked.
      round: besides what lies there, while rounds are computed.
      evaluation: likewise, while an evaluation is.
    """

    rows: int = 0
    ranges: int = 0
    states: int = 0
    server: int = 0
    process: int = 0
    loading: int = 0
    round: int = 0
    evaluation: int = 0

    @property
    def lasting(self) -> int:
        """What lies there between rounds."""
        return self.rows + self.ranges + self.states + self.server + self.process

    @property
    def peak(self) -> int:
        """The most at any time."""
        loaded = self.rows + self.ranges + self.process + self.loading
        return max(loaded, self.lasting + max(self.round, self.evaluation))

    @property
    def largest(self) -> str:
        """What takes most of the peak."""
        sizes = dataclasses.asdict(self)
        if self.lasting + max(self.round, self.evaluation) == self.peak:
            sizes.pop("loading")
        return max(sizes, key=lambda name: sizes[name])

    def plus(self, other: "Need", times: int = 1) -> "Need":
        """With another one, so many times, in the same memory."""
        one, more = dataclasses.asdict(self), dataclasses.asdict(other)
        return Need(**{name: one[name] + times * more[name] for name in one})


class Placed(NamedTuple):
    """What one placement needs.

    Attributes:
      name: of the placement.
      devices: over how many clients are divided.
      device: on each of them; None where they use the host's memory.
      host: in the host's memory.
      impossible: why the run cannot be placed so; None where it can.
    """

    name: str
    devices: int
    device: Need | None
    host: Need
    impossible: str | None = None

    def fits(self, machine: Machine) -> bool:
        """Whether a machine has the memory."""
        return self.impossible is None and self.load(machine) <= 1

    def load(self, machine: Machine) -> float:
        """The larger share of a machine's memories that it needs."""
        host = self.host.peak / machine.host
        if self.device is None or machine.device is None:
            return host
        return max(host, self.device.peak / machine.device)

    def binding(self, machine: Machine) -> tuple[str, Need, int]:
        """The memory that is shortest: its name, what is needed there, and what there is."""
        if self.device is None or machine.device is None:
            return "the host", self.host, machine.host
        if self.device.peak / machine.device < self.host.peak / machine.host:
            return "the host", self.host, machine.host
        return "each device", self.device, machine.device


class Capacity(NamedTuple):
    """A plan.

    Attributes:
      sizes: of the population.
      parameters: of one client's own state.
      capacity: places in a cohort.
      machine: what there is.
      placed: what each placement needs.
      folder: bytes of the rows as a folder on disk.
      checkpoints: bytes of a run's checkpoints on disk.
    """

    sizes: Sizes
    parameters: int
    capacity: int
    machine: Machine
    placed: tuple[Placed, ...]
    folder: int
    checkpoints: int

    @property
    def fitting(self) -> tuple[Placed, ...]:
        """The placements for which there is memory."""
        return tuple(each for each in self.placed if each.fits(self.machine))

    @property
    def nearest(self) -> Placed:
        """The possible placement that needs the smallest share of what there is."""
        possible = [each for each in self.placed if each.impossible is None]
        return min(possible, key=lambda each: each.load(self.machine))

    def to_json(self) -> Record:
        """All of it, in bytes."""
        return {
            "clients": self.sizes.clients,
            "rows": dict(self.sizes.rows),
            "own_parameters": self.parameters,
            "capacity": self.capacity,
            "machine": self.machine._asdict(),
            "folder_bytes": self.folder,
            "checkpoint_bytes": self.checkpoints,
            "placements": [
                {
                    "name": each.name,
                    "devices": each.devices,
                    "device": _record(each.device),
                    "host": _record(each.host),
                    "fits": each.fits(self.machine),
                    "impossible": each.impossible,
                }
                for each in self.placed
            ],
        }


def _record(need: Need | None) -> Record | None:
    return None if need is None else {**dataclasses.asdict(need), "peak": need.peak}


def plan(config: RunConfig, sizes: Sizes, machine: Machine) -> Capacity:
    """What a run of some settings needs, on a population of some size, on a machine.

    What a round and an evaluation need is that of programs compiled for the devices of this
    process, and of one layout for machines whose devices have a memory of their own: that of
    accelerators, where the clients of a chunk are worked on as one batch.

    Args:
      config: the settings; where data come from and where results go are not read. A streamed run
        is planned as such only.
      sizes: of the population.
      machine: what there is.

    Raises:
      ValueError: a setting is out of range.
    """
    parts = parts_of(config, sizes.few, sizes.clients)
    declared = (parts.algorithm, parts.mechanism, parts.sampling)
    hparams = fill_settings(config, compose(part.hyperparameters for part in declared))
    sampler = parts.sampling.for_clients(sizes.clients)
    scheme = sampler.scheme
    for part in (parts.algorithm, parts.mechanism, sampler):
        part.check(hparams)
    if config.streamed and scheme.kind == "full":
        raise ValueError("where everyone takes part nothing can be streamed: sample clients")
    planner = _Planner(config, sizes, machine, parts, sampler, hparams.as_arrays())
    placed = [planner.streamed()] if config.streamed else planner.placed()
    state = planner.state_bytes
    return Capacity(
        sizes,
        planner.parameters,
        scheme.capacity,
        machine,
        tuple(placed),
        sizes.num_rows * sizes.row_bytes + 12 * sizes.clients,
        (KEPT + 1) * state,
    )


@dataclasses.dataclass(frozen=True)
class _Planner:
    """Counts and compiles for one plan."""

    config: RunConfig
    sizes: Sizes
    machine: Machine
    parts: Parts
    sampler: Sampler
    hparams: Hyperparameters

    @functools.cached_property
    def program(self) -> Program:
        """For all clients in one place."""
        config, parts, memory = self.config, self.parts, self.machine.device
        chunk_map = config.chunk_map or (None if memory is None else "vmap")
        layout = layout_of(parts.algorithm.task, 1, config.chunk_size, chunk_map)
        if memory is not None and chunk_map == "vmap" and config.chunk_size is None:
            layout = dataclasses.replace(layout, memory=memory)
        scheme, event = self.sampler.scheme, parts.mechanism.event
        return Program(
            parts.algorithm,
            parts.mechanism,
            self.sampler,
            measure_with(parts.algorithm.task),
            parts.minibatches,
            layout,
            AllClients(self.sizes.clients),
            functools.partial(ledger.no_charges, scheme, event, parts.ledger_entries),
        )

    def state(self, program: Program) -> SimulationState:
        """The state of a program, as shapes."""
        return jax.eval_shape(program.init, _key(), self.hparams)

    @functools.cached_property
    def whole(self) -> SimulationState:
        """The state of all clients, as shapes."""
        return self.state(self.program)

    @property
    def state_bytes(self) -> int:
        """Of the state of all clients."""
        return bytes_of(self.whole)

    @property
    def states_of_one(self) -> int:
        """Bytes of what one client keeps from round to round."""
        return bytes_of((self.whole.personal, self.whole.consumed)) // self.sizes.clients

    @property
    def parameters(self) -> int:
        """Numbers in one client's own state."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.whole.personal)) // self.sizes.clients

    @property
    def server(self) -> int:
        """Bytes of the state that are the server's."""
        return self.state_bytes - self.states_of_one * self.sizes.clients

    @functools.cached_property
    def metrics(self) -> int:
        """How many numbers an evaluation measures of one client."""
        program = dataclasses.replace(self.program, partition=AllClients(1))
        rows = self.rows("test", 1, max(1, self.sizes.largest["test"]))
        measured = jax.eval_shape(program.evaluate, self.state(program), self.hparams, rows)
        return len(jax.tree.leaves(measured))

    def rows(self, split: str, clients: int, length: int, ids: Any = None) -> Rows:
        """Rows of one split, as shapes."""
        number = jax.ShapeDtypeStruct((clients,), jnp.int32)
        largest, generate = self.sizes.largest[split], self.sizes.few.generate
        return Rows.lying(self.sizes.fields(length), number, number, largest, generate, ids)

    def placed(self) -> list[Placed]:
        """Every placement."""
        devices = self.machine.devices
        one = self.on_devices(1)
        several = self.on_devices(devices) if devices > 1 else one
        placed = [self.joined("in memory", 1, *one)]
        if devices > 1:
            placed.append(self.joined(f"over {devices} devices", devices, *several))
        if self.sizes.few.generate is None:
            if self.machine.device is None:
                # One device of a CPU reads rows where they are mapped, others may copy them.
                placed.append(self.mapped(1, *one))
            else:
                placed.append(self.mapped(devices, *several))
            placed.append(self.streamed())
        return placed

    def on_devices(self, devices: int) -> tuple[Need, Need]:
        """What each of so many devices holds, and the host with the rows in arrays."""
        m = self.sizes.clients
        begins, length = ([0], self.sizes.num_rows) if devices == 1 else self.sizes.pieces(devices)
        program, states = self.program, m * self.states_of_one
        split = {name: self.rows(name, m, length) for name in ("train", "test")}
        if devices == 1:
            rounds, evaluate = program.rounds, program.evaluate
            spare = gathered = 0
        else:
            part = Shard(m, AXIS, devices)
            program = dataclasses.replace(program, partition=part)
            rounds, evaluate = self._of_one(program)
            # Of clients that do not divide evenly every device has all states, and its own again;
            # rounds gather all of them anew in the end.
            share = part.size * self.states_of_one
            if part.even:
                states, spare, gathered = share, 0, 0
            else:
                spare, gathered = share, states
        state = self.state(program)
        working = _compiled(
            functools.partial(rounds, rounds=2), state, self.hparams, split["train"], donated=True
        )
        measuring = _compiled(evaluate, state, self.hparams, split["test"])
        device = Need(
            rows=self._copied(begins, length),
            ranges=len(SPLITS) * _RANGE * m,
            states=states,
            server=self.server,
            round=spare + max(working.needs, gathered),
            evaluation=measuring.needs + spare,
        )
        rows = self.sizes.num_rows * self.sizes.row_bytes
        return device, self._host(working, measuring, rows=rows)

    def _of_one(self, program: Program) -> tuple[Callable[..., Any], ...]:
        """Rounds and evaluation of one of several devices, as functions for one."""
        mesh = mesh_of(jax.devices()[:1], AXIS)
        whole = shard(program, mesh)
        specs = whole.specs(self.state(program))

        def rounds(state, hparams, rows, rounds):
            several = functools.partial(program.rounds, rounds=rounds)
            inputs = (specs, SAME, specs_of_rows(rows))
            return across(several, mesh, inputs, (specs, SAME))(state, hparams, rows)

        def evaluate(state, hparams, rows):
            inputs = (specs, SAME, specs_of_rows(rows))
            return across(program.evaluate, mesh, inputs, divided(AXIS))(state, hparams, rows)

        return rounds, evaluate

    def _host(self, *programs: "_Compiled", rows: int = 0) -> Need:
        """What the host has of a population and programs, and needs to sum up an evaluation."""
        m, k = self.sizes.clients, self.metrics
        # What was measured becomes float64, with a metric more, and stays until the next time.
        measured, found = 4 * k * m, 8 * (k + 1) * m
        summary = found + measured + _SUMMARY * m + found
        # The variance of targets is computed once, when nothing has been found yet.
        facts = measured + _FACTS * self.sizes.rows["test"]
        ranges = (len(SPLITS) * _RANGE + _NAME) * m
        process = PROCESS + PER_STORED_BYTE * sum(program.stored for program in programs)
        return Need(
            rows,
            ranges,
            process=process,
            loading=_LOADING * m,
            round=found,
            evaluation=max(summary, facts),
        )

    def _copied(self, begins: list[int], length: int) -> int:
        """Bytes of rows that a device holds, besides those that a CPU shares with the host."""
        fields = self.sizes.fields(length)
        if self.machine.device is not None:
            return bytes_of(fields)
        copied = 0
        for name, values in fields.items():
            same = self.sizes.few.fields[name].dtype == values.dtype
            size = bytes_of(values)
            shared = [same and begin * size // length % _ALIGNED == 0 for begin in begins]
            copied += size * shared.count(False)
        return copied // len(begins)

    def joined(self, name: str, devices: int, device: Need, host: Need) -> Placed:
        """A placement, devices that use the host's memory being counted there."""
        if self.machine.device is None:
            # An evaluation is summed up when its program is done, the one before still being there.
            before = self._host().round
            both = host.plus(device, devices)
            evaluation = max(host.evaluation, before + devices * device.evaluation)
            return Placed(name, devices, None, dataclasses.replace(both, evaluation=evaluation))
        return Placed(name, devices, device, host)

    def mapped(self, devices: int, device: Need, host: Need) -> Placed:
        """The same with rows that the host has on disk alone."""
        return self.joined("mapped", devices, device, dataclasses.replace(host, rows=0))

    def streamed(self) -> Placed:
        """Rows on disk and states in the host's memory, those of a cohort on one device."""
        sizes, program, hparams = self.sizes, self.program, self.hparams
        m, places = sizes.clients, program.sampling.scheme.capacity
        if program.sampling.scheme.kind == "full":
            why = "everyone takes part"
            nothing = None if self.machine.device is None else Need()
            return Placed("streamed", 1, nothing, self._host(), why)
        work, measure = streamed.functions_of_fetched(program)
        drawn = streamed.draws_of(program)
        block = streamed.block_of(m, self.states_of_one)

        def fetched(split: str, clients: int) -> tuple[Rows, SimulationState]:
            """Rows and states of so many clients, as shapes."""
            room = max(1, min(sizes.rows[split], clients * sizes.largest[split]))
            ids = jax.ShapeDtypeStruct((clients,), jnp.int32)
            part = dataclasses.replace(program, partition=AllClients(clients))
            return self.rows(split, clients, room, ids), self.state(part)

        rows, state = fetched("train", places)
        own = (state.personal, state.consumed)
        # The cohorts of several rounds are drawn at once.
        draws = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((streamed.DRAWS, *leaf.shape), leaf.dtype),
            jax.eval_shape(program.draw, state, hparams),
        )
        earlier: Any = jax.ShapeDtypeStruct((places,), jnp.int32)
        turn = streamed.Turn(streamed.Cohort(draws, np.int32(0), rows), own, earlier)
        tests, some = fetched("test", block)
        working = _compiled(work, state, turn, hparams, inputs=True)
        measuring = _compiled(measure, some, hparams, tests, inputs=True)
        drawing = _compiled(functools.partial(drawn, count=streamed.DRAWS), state, 0, hparams)
        device = Need(server=self.server, round=working.needs, evaluation=measuring.needs)
        host = self._host(working, measuring, drawing)
        # A CPU's device shares the rows that it works on, and copies states.
        shared = self.machine.device is None
        # Rows of the cohorts to come and of this one; states of the next cohort while this one's
        # are written back; counts are sorted once a call.
        waiting = (streamed.BUFFERS - shared) * bytes_of(rows) + 2 * bytes_of(own) + 4 * m
        # The next clients and these, and what was measured of all, which is joined in the end.
        blocks = (2 - shared) * bytes_of(tests) + 2 * bytes_of(some.personal)
        found = host.round + blocks + 2 * 4 * self.metrics * m
        host = dataclasses.replace(
            host,
            states=m * self.states_of_one,
            round=host.round + waiting,
            evaluation=max(host.evaluation, found + shared * device.evaluation),
        )
        return self.joined("streamed", 1, device, host)


class _Compiled(NamedTuple):
    """A program.

    Attributes:
      needs: bytes while it runs, besides its arguments or with them.
      stored: bytes of the program itself in a file.
    """

    needs: int
    stored: int


def _compiled(
    function: Callable[..., Any], *arguments: Any, donated: bool = False, inputs: bool = False
) -> _Compiled:
    """A function compiled for shapes; what it needs includes its arguments where asked for."""
    jitted = jax.jit(function, donate_argnums=(0,) if donated else ())
    compiled = jitted.lower(*arguments).compile()
    analysis, program = compiled.memory_analysis(), compiled.runtime_executable()
    if analysis is None or program is None:
        raise ValueError(
            "the compiler of this machine's devices does not tell what memory it needs"
        )
    needs = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    given = analysis.argument_size_in_bytes if inputs else 0
    return _Compiled(
        needs - analysis.alias_size_in_bytes + given,
        len(program.serialize()),
    )


def _key() -> jax.Array:
    return jax.random.key(0, impl="threefry2x32")
