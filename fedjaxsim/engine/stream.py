"""`stream`: rows and states on the host or on disk, one cohort's at a time on the device.

Cohorts of the next rounds are known from the key alone. So while a round computes, one thread reads
the rows of the cohorts to come, and another one writes back the states of the previous round and
fetches the next cohort's. A client in two rounds in a row is fetched before its state is
written back; the state then comes from the previous round, on the device.

Rows are read from the arrays of the population, which may be mapped files; states are in the host's
memory. Between calls every state has been written, so checkpoints are complete.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.algorithm import Metrics
from fedjaxsim.data.arrays import Ranges, aligned
from fedjaxsim.data.population import Population
from fedjaxsim.engine.program import ClientMetrics, Draw, Functions, Program
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.shape_bytes import bytes_of
from fedjaxsim.engine.state import AllClients, SimulationState
from fedjaxsim.engine.work import CohortSlots
from fedjaxsim.hyperparameters import Hyperparameters, per_client
from fedjaxsim.privacy.samplers import Cohort

PyTree = Any
BLOCK, BLOCK_BYTES = 4096, 64 * 10**6
"""Most clients that are evaluated at once, and most bytes of their states."""
DRAWS = 16
"""Rounds whose cohorts are drawn at once: starting to draw takes as long as drawing."""
BUFFERS = 3
"""Rounds whose rows are in memory at once: the computing one and those to come."""


@dataclasses.dataclass(frozen=True)
class StreamedClients(AllClients):
    """Clients whose states and rows were fetched: (s,) sorted int32 ids, padded with m."""

    fetched: jax.Array

    @property
    def size(self) -> int:
        return self.fetched.shape[0]

    @property
    def even(self) -> bool:
        return False

    def ids(self) -> jax.Array:
        return self.fetched

    def known_ids(self) -> jax.Array:
        return jnp.where(self.fetched < self.num_clients, self.fetched, self.anybody())

    def anybody(self) -> jax.Array:
        return jnp.where(self.fetched[0] < self.num_clients, self.fetched[0], 0)

    def slots_of(self, cohort: Cohort, *, full: bool) -> CohortSlots:
        slots = jnp.searchsorted(self.fetched, cohort.ids, method="sort")
        return CohortSlots(slots.astype(jnp.int32), cohort.ids, cohort.mask)


class HostRows(NamedTuple):
    """Every client's rows of one split, on the host: arrays (N, ...), which may be mapped files.

    `empty` are `Rows` of no client, with their static fields. `training` are each client's training
    rows, which are gathered, too; None if nobody reads them.
    """

    fields: dict[str, np.ndarray]
    ranges: Ranges
    empty: Rows
    training: Ranges | None = None

    def room(self, clients: int) -> int:
        """Return the largest number of rows that `clients` clients can have."""
        count = self.ranges.count
        return int(np.partition(count, len(count) - clients)[len(count) - clients :].sum())

    def buffers(self, room: int) -> dict[str, np.ndarray]:
        """Return zeroed fields of `room` rows that a CPU's device can share with the host."""
        buffers = {}
        for name, values in self.fields.items():
            buffers[name] = aligned((room, *values.shape[1:]), values.dtype)
            buffers[name].fill(0)
        return buffers

    def of(self, ids: np.ndarray, buffers: dict[str, np.ndarray]) -> Rows:
        """Gather the rows of clients, (s,) sorted ids with padding, into `buffers`."""
        count = np.searchsorted(ids, len(self.ranges.count))
        present = ids[:count] if count else ids[:1] * 0  # padding reads the first one's rows
        splits = [self.ranges] if self.training is None else [self.ranges, self.training]
        ranges = [Ranges(split.start[present], split.count[present]) for split in splits]
        index = np.concatenate([split_ranges.all_rows() for split_ranges in ranges])
        for name, values in self.fields.items():
            # The only mode that writes straight to `out`; no index is out of bounds.
            np.take(values, index, axis=0, out=buffers[name][: len(index)], mode="clip")
        counts = np.stack([split_ranges.count for split_ranges in ranges])
        starts = (np.cumsum(counts) - counts.ravel()).reshape(counts.shape)
        padding = ((0, 0), (0, len(ids) - len(present)))
        start, count = (np.pad(numbers, padding) for numbers in (starts, counts))
        start[:, len(present) :], count[:, len(present) :] = starts[:, :1], counts[:, :1]
        start, count = start.astype(np.int32), count.astype(np.int32)
        rows = dataclasses.replace(self.empty, start=start[0], count=count[0], ids=ids)
        if rows.training is not None:
            training = dataclasses.replace(rows.training, start=start[1], count=count[1], ids=ids)
            rows = dataclasses.replace(rows, training=training)
        return dataclasses.replace(rows, fields=buffers)


class Turn(NamedTuple):
    """Inputs of one round: the draws of some rounds, leaves (r, ...); it is at `position`.

    Rows and states, leaves (s, ...), are the cohort's, in the order of `rows.ids`; `earlier`, (s,)
    int32, is each client's index in the previous cohort, −1 if it was not in it.
    """

    draws: Draw
    position: np.int32
    rows: Rows
    states: PyTree = None
    earlier: Any = None


def stream(program: Program) -> Program:
    """Keep rows and states on the host, and a cohort's on the first device.

    The compiled functions are not pure: they change the personal states, numpy arrays, in place, so
    a state that rounds started from is used up, as where its buffers are donated.
    There is no `step`, since cohorts are drawn and read many rounds ahead. The program computes one
    run with samples of clients.

    Example:
      >>> few = fjs.Simulation(fjs.fedavg(task), population, fjs.fixed_size(cohort=1))
      >>> fjs.stream(few.program).num_clients  # `task` and `population` as in `Simulation`
      2
    """
    if program.sampling.scheme.kind == "full":
        raise ValueError("full participation cannot be streamed: sample clients")
    if program.runs is not None:
        raise ValueError("several runs in one program cannot be streamed: run them one by one")
    return Streamed(**program.parts())


class Streamed(Program):
    """A program whose rows and states are on the host, as from `stream`."""

    def place(self, population: Population) -> dict[str, Any]:
        nobody, placed = np.zeros(0, np.int32), {}
        for split, ranges in population.splits.items():
            rows = Rows.place(population, split, {}, self.algorithm)
            empty = dataclasses.replace(rows, start=nobody, count=nobody)
            training = None if rows.training is None else population.splits["train"]
            placed[split] = HostRows(population.fields, ranges, empty, training)
        return placed

    def compiled(self) -> Functions:
        program = Program(**self.parts())
        clients = program.num_clients
        everybody = np.arange(clients, dtype=np.int32)
        work, measure = map(jax.jit, functions_of_fetched(program))

        @jax.jit
        def start(key, hparams, ids):
            return _of_fetched(program, ids).init(key, hparams)

        @functools.partial(jax.jit, static_argnames="count")
        def draw(state, first, hparams, count):
            """Draw `count` rounds, leaves (count, ...)."""

            def one(round_):
                return program.draw(dataclasses.replace(state, round=round_), hparams)

            return jax.lax.map(one, first + jnp.arange(count, dtype=jnp.int32))

        def write(on_host: PyTree, ids: np.ndarray, states: PyTree) -> None:
            there = slice(np.searchsorted(ids, clients))
            for host, leaf in zip(jax.tree.leaves(on_host), jax.tree.leaves(states), strict=True):
                host[ids[there]] = np.asarray(leaf)[there]

        def init(key: jax.Array, hparams: Hyperparameters) -> SimulationState:
            state = start(key, hparams, everybody[:1])
            first = state.of_clients
            on_host = jax.tree.map(
                lambda leaf: np.empty((clients, *leaf.shape[1:]), leaf.dtype), first
            )
            if per_client(program.algorithm.hyperparameters, hparams):
                for ids in blocks_of(everybody, clients, bytes_of(first)):
                    write(on_host, ids, start(key, hparams, ids).of_clients)
            else:  # all clients begin alike
                jax.tree.map(lambda host, leaf: np.copyto(host, np.asarray(leaf)), on_host, first)
            return state.with_clients(on_host)

        def rounds(
            state: SimulationState, hparams: Hyperparameters, rows: HostRows, rounds: int
        ) -> tuple[SimulationState, Metrics]:
            state = _spend(state)
            on_host = jax.tree.map(_writable, state.of_clients)
            room = rows.room(program.sampling.scheme.capacity)
            first = int(state.round)
            last = first + rounds
            # A draw reads the round's number and parts that no round changes.
            fixed = dataclasses.replace(state, shared=(), personal=(), mechanism=(), consumed=None)

            def cohorts() -> Iterator[tuple[Draw, np.int32, np.ndarray]]:
                """Yield for each round a block of draws, its index there, and the sorted cohort."""
                size = min(DRAWS, rounds)
                draws = draw(fixed, first, hparams, size)
                for begin in range(first, last, size):
                    after = begin + size
                    # Computed during these rounds.
                    following = draw(fixed, after, hparams, size) if after < last else draws
                    ids = np.where(draws.cohort.mask, draws.cohort.ids, clients).astype(np.int32)
                    ids.sort()
                    for index in range(min(size, last - begin)):
                        yield draws, np.int32(index), ids[index]
                    draws = following

            coming = cohorts()

            def read(buffers: dict[str, np.ndarray], last_use: jax.Array | None) -> Turn:
                # A CPU's device may share the buffers instead of copying them.
                jax.block_until_ready(last_use)
                draws, index, ids = next(coming)
                return Turn(draws, index, rows.of(ids, buffers))

            def fetch(turn: Turn, before: np.ndarray) -> Turn:
                ids = np.asarray(turn.rows.ids)
                index = np.minimum(np.searchsorted(before, ids), len(ids) - 1)
                again = (before[index] == ids) & (ids < clients)
                return turn._replace(states=_of(on_host, ids), earlier=np.where(again, index, -1))

            history, writes = [], []
            ring = [rows.buffers(room) for _ in range(min(BUFFERS, rounds))]
            with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as keeper:
                reads = collections.deque(reader.submit(read, buffers, None) for buffers in ring)
                nobody = np.full(program.sampling.scheme.capacity, clients, np.int32)
                turn = fetch(reads.popleft().result(), nobody)
                after = state.with_clients(turn.states)
                for round_ in range(first, last):
                    after, metrics = work(after, turn, hparams)
                    history.append(metrics)
                    ids = np.asarray(turn.rows.ids)
                    if round_ + BUFFERS < last:
                        used = ring[(round_ - first) % BUFFERS]
                        reads.append(reader.submit(read, used, after.round))
                    following = None
                    if round_ + 1 < last:
                        following = keeper.submit(fetch, reads.popleft().result(), ids)
                    writes.append(keeper.submit(write, on_host, ids, after.of_clients))
                    turn = turn if following is None else following.result()
            for written in writes:
                written.result()  # raises the error of a write
            metrics = jax.tree.map(lambda *blocks: np.stack(blocks), *history)
            return after.with_clients(on_host), metrics

        def evaluate(
            state: SimulationState,
            hparams: Hyperparameters,
            rows: HostRows,
            sample: np.ndarray | None = None,
        ) -> ClientMetrics:
            chosen = everybody if sample is None else sample
            blocks = blocks_of(chosen, clients, bytes_of(state.of_clients) // clients)
            row_counts = rows.ranges.count
            row_counts = row_counts if rows.training is None else row_counts + rows.training.count
            counts = [int(row_counts[ids[ids < clients]].sum()) for ids in blocks]
            room = max(1, *counts)

            def fetch(ids: np.ndarray) -> tuple[Rows, PyTree]:
                return rows.of(ids, rows.buffers(room)), _of(state.of_clients, ids)

            measurements = []
            for fetched, states in _ahead(fetch, blocks):
                measured = measure(state.with_clients(states), hparams, fetched)
                # Wait: a device would start on all blocks at once.
                measurements.append(jax.tree.map(np.asarray, measured))
            return jax.tree.map(
                lambda *pieces: np.concatenate(pieces)[: len(chosen)], *measurements
            )

        return Functions(init, _refuse, rounds, evaluate)


def _of(states: PyTree, ids: np.ndarray) -> PyTree:
    """Gather the states of `ids` into an aligned buffer; padding ids return the first one's."""

    def of(leaf: Any) -> np.ndarray:
        existing = np.where(ids < len(leaf), ids, ids[0] if ids[0] < len(leaf) else 0)
        gathered = aligned((len(ids), *leaf.shape[1:]), leaf.dtype)
        return np.take(np.asarray(leaf), existing, axis=0, out=gathered, mode="clip")

    return jax.tree.map(of, states)


def blocks_of(ids: np.ndarray, clients: int, state_bytes: int) -> np.ndarray:
    """Return ids in blocks of one size, (blocks, size); m is padding."""
    size = min(len(ids), BLOCK, max(2, BLOCK_BYTES // max(1, state_bytes)))
    return np.pad(ids, (0, -len(ids) % size), constant_values=clients).reshape(-1, size)


def functions_of_fetched(program: Program) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a program's round and evaluation of states with the fetched clients' parts.

    They are `(state, turn, hparams) -> (state, metrics)` and `(state, hparams, rows) -> metrics`.
    """

    def work(state: SimulationState, turn: Turn, hparams: Hyperparameters):
        part = _of_fetched(program, turn.rows.ids)

        def newest(fetched, earlier):
            stays = (turn.earlier < 0).reshape(-1, *[1] * (fetched.ndim - 1))
            return jnp.where(stays, fetched, earlier[turn.earlier])

        state = state.with_clients(jax.tree.map(newest, turn.states, state.of_clients))
        drawn = jax.tree.map(lambda leaf: leaf[turn.position], turn.draws)
        return part.drawn_round(state, hparams, turn.rows, drawn)

    def measure(state: SimulationState, hparams: Hyperparameters, rows: Rows):
        return _of_fetched(program, rows.ids).evaluate(state, hparams, rows)

    return work, measure


def _of_fetched(program: Program, ids: Any) -> Program:
    return dataclasses.replace(program, partition=StreamedClients(program.num_clients, ids))


def _ahead(function: Any, arguments: Iterable[Any]) -> Iterator[Any]:
    """Yield a function's results, computing the next one meanwhile."""
    with ThreadPoolExecutor(1) as thread:
        waiting = collections.deque()
        for argument in arguments:
            waiting.append(thread.submit(function, argument))
            if len(waiting) > 1:
                yield waiting.popleft().result()
        yield waiting.popleft().result()


def _refuse(*_: Any) -> NoReturn:
    raise ValueError("a streamed simulation changes its states in place: use `run`, not `round`")


def _spend(state: SimulationState) -> SimulationState:
    """Return the state, and leave the one of the caller used up: rounds change it in place."""
    round_ = jnp.copy(state.round)
    if isinstance(state.round, jax.Array):
        state.round.delete()
    return dataclasses.replace(state, round=round_)


def _writable(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    ready = array.flags.writeable and array.flags.c_contiguous
    return array if ready else np.array(array, order="C")
