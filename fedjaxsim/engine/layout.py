"""The layout: choices for speed and memory, which change no result beyond rounding."""

import contextlib
import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim import checks
from fedjaxsim.algorithm import row_shapes
from fedjaxsim.data.minibatches import Batch, BatchReadOptions, Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.engine.shape_bytes import bytes_of, products_in
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.kernels import products
from fedjaxsim.kernels.backend import Backend
from fedjaxsim.models.model import bind_weights
from fedjaxsim.privacy.samplers import Sampling
from fedjaxsim.tasks.task import Task

PyTree = Any
ChunkMap = Literal["scan", "vmap"]
Given = tuple[int | None, ChunkMap | None]
"""The size and the map of chunks that a user gave."""

CACHE = 2**20
"""Bytes of a core's second-level cache."""
_COPIES = 4
"""Arrays of a model's size that a client's step reads and writes."""
SMALL_MODEL = 2**12
"""Largest models, in bytes, with which a CPU runs a chunk of several settings as one batch, or one
whose layout a user gave in part."""
LARGE_STEP = 2**22
"""Multiplications of a local step's outputs from which on the products of one client fill a core:
a CPU then runs clients one after another."""
LEAST_IN_BATCH = 4
"""Clients in the smallest batches that a CPU runs by default."""
STEP = 3.0
"""The fixed time of a batch's step, in steps of one client of the batch."""
_IN_SCAN, _IN_BATCH = 16, 64
NARROW = range(32, 80)
"""Numbers in a row that a CPU copies one by one at LLVM's default optimization level, since a loop
of so few steps is unrolled; one level lower it copies whole vectors, three times faster. Results
differ by rounding."""
PART_OF_MEMORY = 4
"""Client work on an accelerator may use a quarter of the memory left by rows and states."""
STEP_BYTES, CHUNK_BYTES, LOOP_BYTES = 10**8, 3 * 10**8, 10**8
"""What an accelerator moves while it starts a batch's step, a batch, and a loop over batches: 40
and 120 kernels of 2 µs, and waits of the host, at the TB/s that a round of CNNs reached."""
MOST_CHUNKS = 16
"""Most chunks into which an accelerator divides a cohort."""
MOST_AT_ONCE = 2**16 - 1
"""Most clients in one batch: the limit of the axis of CUDA's grids that batched products use."""
DEFAULT_MEMORY = 2**33
"""Bytes assumed of an accelerator that does not report its memory: 8 GiB, as small ones have."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The grouping of clients and the order of their work, on one kind of device.

    A program has one from the start, by `plan_of`. `batch` and derivatives replace it, and what a
    trace tells refines it: `in_cache`, `in_memory`, `for_message` and `for_shared_model` answer
    from numbers alone.

    Attributes:
      backend: the devices that the program is traced for, whatever else the process has.
      chunk_size: clients per chunk; at least 2, because writing one row at a time into a large
        array makes XLA copy the whole array.
      chunk_map: inside a chunk, "scan" runs one client after another, which keeps a client's work
        in cache and skips empty slots; "vmap" runs them as one batch.
      given: the size and the map of chunks that a user gave, if any.
      model_bytes: bytes of one client's model.
      useful: most clients in a batch on a CPU that suit the cohort and the clients' row counts.
      lengths: the expected steps of the clients of a cohort on one accelerator, the longest first.
      sorts: whether batches are of clients with similar numbers of rows, as all wait for the
        longest.
      capped: whether derivatives or settings enlarge a batch beyond the shapes of one client's
        work, so that memory may not ask for larger ones.
      rematerialize: whether reverse mode recomputes a client's work instead of keeping it, and
        writes into the clients' states in place. No effect otherwise.
      most_rows: a static bound on a client's rows, which reverse mode needs.
      narrow_rows: whether a CPU runs the rounds, and rows have a length in `NARROW`.
      runs: the settings that are one program.
    """

    backend: Backend
    chunk_size: int
    chunk_map: ChunkMap
    given: Given = (None, None)
    model_bytes: int = 0
    useful: int = MOST_AT_ONCE
    lengths: tuple[float, ...] = ()
    sorts: bool = False
    capped: bool = False
    rematerialize: bool = False
    most_rows: int | None = None
    narrow_rows: bool = False
    runs: int = 1

    def __str__(self) -> str:
        clients, kind = self.chunk_size, self.backend.platform
        return f"chunks of {clients} clients, {self.chunk_map} inside, for a {kind}"

    @property
    def scans(self) -> bool:
        """Return whether the clients of a chunk run one after another."""
        return self.chunk_map == "scan"

    @property
    def on_cpu(self) -> bool:
        """Return whether a CPU runs the program."""
        return self.backend.platform == "cpu"

    @property
    def asks_memory(self) -> bool:
        """Return whether the size of a chunk follows from an accelerator's memory."""
        return not (self.on_cpu or self.scans or self.given[0])

    def even_size(self, slots: int) -> int:
        """Return the largest useful chunk size that divides the slots.

        Without empty slots no branch per client is needed, which would cost copies. But batches of
        few clients cost more than empty slots: if only such sizes divide the slots, it is the size
        that leaves fewest of them empty in as few chunks as possible.
        """
        most = self.chunk_size
        least = 2 if self.scans else most // 4
        sizes = range(min(least, slots), most + 1)
        fewest = most if self.scans else max(2, -(-slots // -(-slots // most)))
        return max((size for size in sizes if size > 1 and slots % size == 0), default=fewest)

    @property
    def reading(self) -> BatchReadOptions:
        """Return the options for reading rows."""
        # Reverse mode would keep the inputs of both branches.
        cuts = self.scans and self.most_rows is None
        return BatchReadOptions(self.most_rows, cuts)

    def for_runs(self, runs: int) -> "Plan":
        """Return the plan of several settings as one program, made of the plan of one.

        Models of all settings of a client are one batch in any case. On a CPU clients run one
        after another, unless operations take longer to start than to run.
        """
        if runs == 1:
            return self
        size, kind = self.chunk_size, self.chunk_map
        if self.on_cpu:
            small = runs * self.model_bytes <= SMALL_MODEL
            size, kind = _completed(self.given, "vmap" if small else "scan")
        return dataclasses.replace(
            self, runs=runs, chunk_size=size, chunk_map=kind, sorts=False, capped=True
        )

    def in_cache(self, row_bytes: float) -> "Plan":
        """Return the plan of clients whose personal states have `row_bytes` in all settings.

        The states of a chunk fit a core's cache, and more of its slots may be skipped.
        """
        if not (self.on_cpu and self.scans and self.runs > 1):
            return self
        fitting = max(2, int(CACHE // max(1.0, row_bytes)))
        return dataclasses.replace(self, chunk_size=min(self.chunk_size, fitting))

    def for_message(self, message: PyTree) -> "Plan":
        """Return the plan of clients who send such shapes: products of a chunk are one."""
        if not products.any_of(message):
            return self
        return self._one_product(CACHE // bytes_of(message))

    def for_shared_model(self) -> "Plan":
        """Return the plan of clients who apply one linear model: one product for a chunk's rows."""
        return self._one_product(_IN_BATCH)

    def _one_product(self, most: int) -> "Plan":
        if not self.on_cpu or any(self.given) or self.runs > 1:
            return self
        size = max(2, min(most, self.useful))
        return dataclasses.replace(self, chunk_size=size, chunk_map="vmap")

    def in_memory(self, slots: int, held: int, client: int) -> "Plan":
        """Return the plan of a device's `slots` of clients, in batches that its memory holds.

        Rows and states take `held` bytes, and a client of a batch takes `client`, as from
        `bytes_of_work`. Batches are smaller where that saves more than it costs to start them: if
        clients have unequal `lengths`, and if a smaller batch holds almost every random cohort,
        while the slots hold all that are drawn in practice.
        """
        if not self.asks_memory:
            return self
        lengths = np.array(self.lengths)
        most = self.chunk_size if self.capped else MOST_AT_ONCE
        free = (self.backend.memory or DEFAULT_MEMORY) - held
        size, cohort = at_once(free, client, slots, most), len(lengths)
        if not (self.capped or cohort == 0 or (cohort == slots and not self.sorts)):
            usual = math.ceil(cohort + 3 * math.sqrt(cohort))
            sizes = {-(-slots // k) for k in range(1, MOST_CHUNKS + 1)}
            sizes = {n for n in sizes if n < cohort or n >= usual} | {usual}
            sizes = {max(2, min(size, n)) for n in sizes}
            costs = {n: _moved(lengths, n, client) + LOOP_BYTES * (n < slots) for n in sizes}
            size = _about_cheapest(costs)
        return dataclasses.replace(self, chunk_size=size)


def _completed(given: Given, default: ChunkMap, in_batch: int = _IN_BATCH) -> tuple[int, ChunkMap]:
    """Return the size and the map of chunks that a user gave, completed."""
    size, kind = given[0], given[1] or default
    return size or (_IN_SCAN if kind == "scan" else in_batch), kind


def at_once(free: int, client: int, slots: int, most: int = MOST_AT_ONCE) -> int:
    """Return the number of clients that an accelerator runs as one batch, at least 2.

    At `client` bytes each they fit into a `PART_OF_MEMORY`-th of the `free` ones. The chunks of the
    slots have one size as far as possible, so that the last one is not almost empty.
    """
    fitting = min(most, max(2, free // (PART_OF_MEMORY * max(1, client))))
    chunks = -(-slots // fitting)
    return max(2, -(-slots // max(1, chunks)))


class Workload(NamedTuple):
    """The facts about a run from which its plan follows; all of them are public.

    Attributes:
      num_clients: m.
      cohort: the expected number of clients in a round, at the default rate of the sampling.
      most_steps: local steps of a client with as many rows as the population's bound allows, in one
        epoch; 1 if all clients take as many.
      repeats: epochs of a round, or its local steps.
      model_bytes: bytes of one client's model.
      multiplications: of matrix products and convolutions in a local step; 0 if a user gives
        chunks, which do not follow from them.
      row_lengths: the numbers in a row of each field that is a table.
    """

    num_clients: int
    cohort: float
    most_steps: int
    repeats: int
    model_bytes: int
    multiplications: int
    row_lengths: tuple[int, ...] = ()


def workload_of(
    task: Task,
    population: Population,
    sampling: Sampling,
    minibatches: Minibatches,
    given: Given = (None, None),
) -> Workload:
    """Return the facts about a run whose user gave the size and the map of chunks, if any.

    They are public numbers, or a client's rounding would follow from other clients' numbers of
    rows.
    """
    m, size, epochs = population.num_clients, minibatches.size, minibatches.epochs
    return Workload(
        m,
        _expected_cohort(sampling, m),
        most_steps=1 if epochs is None else -(-population.bound("train") // size),
        repeats=epochs or minibatches.steps or 1,
        model_bytes=bytes_of(jax.eval_shape(task.init, jax.random.key(0))),
        multiplications=0 if any(given) else multiplications(task, population, size),
        row_lengths=tuple(f.shape[1] for f in population.fields.values() if f.ndim == 2),
    )


def plan_of(
    workload: Workload,
    backend: Backend,
    chunk_size: int | None = None,
    chunk_map: ChunkMap | None = None,
    devices: int = 1,
) -> Plan:
    """Return the plan of a run whose clients are divided over some devices of a kind.

    Logarithms of the clients' numbers of rows are taken as spread evenly up to the population's
    bound. A CPU runs the clients of a chunk as one batch, unless the products of one client fill a
    core by themselves. What the steps of a chunk read and write fits the core's cache, and half of
    a small cohort fills the chunk, so that few slots stay empty. If a user gives a part, models
    above `SMALL_MODEL` run one after another there.
    """
    if chunk_size is not None:
        checks.count(2, chunk_size=chunk_size)
    if chunk_map is not None:
        checks.one_of(("scan", "vmap"), chunk_map=chunk_map)
    on_cpu, model = backend.platform == "cpu", workload.model_bytes
    given: Given = chunk_size, chunk_map
    useful, lengths = _IN_BATCH, np.zeros(0)
    if any(given):
        one_by_one = on_cpu and model > SMALL_MODEL
    else:
        # Few are long: this costs equal clients some per cent, and long tails far less than others.
        spread = np.linspace(0, 1, workload.num_clients)
        steps = np.ceil(float(workload.most_steps) ** spread)
        lengths = expected_lengths(steps, workload.cohort)
        one_by_one = on_cpu and workload.multiplications > LARGE_STEP
        if on_cpu:
            useful, lengths = _useful_size(lengths, model), lengths[:0]
    size, kind = _completed(given, "scan" if one_by_one else "vmap", useful)
    narrow = on_cpu and any(length in NARROW for length in workload.row_lengths)
    return Plan(
        backend, size, kind, given, model, useful,
        tuple((workload.repeats * lengths[::devices]).tolist()),
        sorts=workload.most_steps > 1, narrow_rows=narrow,
    )  # fmt: skip


def _useful_size(lengths: np.ndarray, model_bytes: int) -> int:
    """Return the size of a CPU's batches of clients who take `lengths` steps, the longest first."""
    fitting = 1 << max(1, CACHE // max(1, _COPIES * model_bytes)).bit_length() - 1
    most = min(_IN_BATCH, max(LEAST_IN_BATCH, fitting))
    while most > LEAST_IN_BATCH and 2 * most > len(lengths):
        most //= 2
    return _about_cheapest({size: _cost(lengths, size) for size in _powers(LEAST_IN_BATCH, most)})


def _about_cheapest(costs: dict[int, float]) -> int:
    """Return the largest size of about the least cost: the numbers of rows may well be equal."""
    return max(size for size, cost in costs.items() if cost <= 1.05 * min(costs.values()))


def _moved(lengths: np.ndarray, size: int, client: int) -> float:
    """Return the bytes of all batches of an accelerator, of clients who take `lengths` steps.

    A step moves about half of the bytes that a `client` is thought to need.
    """
    longest = lengths[::size]
    steps, chunks = np.sum(longest), len(longest)
    if chunks > 1:  # about every other cohort needs one more
        steps, chunks = steps + lengths[-1] / 2, chunks + 0.5
    return float(steps * (size * client / 2 + STEP_BYTES) + chunks * CHUNK_BYTES)


def _cost(lengths: np.ndarray, size: int) -> float:
    """Return the time of batches of clients who take `lengths`, the longest first, in steps."""
    return steps_of(lengths, size) * (1 + STEP / size)


def _powers(least: int, most: int) -> list[int]:
    """Return the powers of two from one to another, at least the first."""
    return [least] + [1 << k for k in range(least.bit_length(), most.bit_length())]


def _expected_cohort(sampling: Sampling, num_clients: int) -> float:
    """Return the expected number of clients in a round at the default rate, or the capacity."""
    sampler = sampling.sampler(num_clients)
    records = sampling.hyperparameters
    if any(record.default is None for record in records):
        return sampler.scheme.capacity
    rates = {r.name: r.of_shape(r.default) for r in records if isinstance(r.default, float)}
    return num_clients * float(sampler.rate(Hyperparameters(**rates).as_arrays()))


def expected_lengths(steps: np.ndarray, cohort: float) -> np.ndarray:
    """Return the expected steps of a random cohort's clients, the longest first.

    Each client of the population takes `steps` (m,); `cohort` is an expected number of clients.
    """
    steps, drawn = np.sort(steps), max(1, round(cohort))
    longest = np.sum(steps * np.diff(np.linspace(0, 1, len(steps) + 1) ** drawn))
    # Quantiles of sorted numbers: `np.quantile` of k of them takes the time of n·k.
    ranks = (1 - np.arange(1, drawn) / drawn) * (len(steps) - 1)
    shorter = np.interp(ranks, np.arange(len(steps)), steps)
    return np.maximum([longest, *shorter], 1e-9)


def steps_of(lengths: np.ndarray, size: int) -> float:
    """Return the steps of all batches, of clients that take one or wait.

    Clients take `lengths`, the longest first.
    """
    return float(np.sum(np.repeat(lengths[::size], size)[: len(lengths)]))


def multiplications(task: Task, population: Population, size: int) -> int:
    """Count the multiplications of matrix products and convolutions in the loss of a minibatch.

    A loss that fails counts none: `Simulation.init` says why it does.
    """
    # No values: a user's loss sees rows of its own client alone.
    shapes = row_shapes(population.fields)

    def loss(key, first):
        fields = {name: jnp.repeat(row, size, axis=0) for name, row in first.items()}
        if population.generate is not None:
            fields = population.generate(key, {name: row[0] for name, row in first.items()}, size)
        return task.loss(task.init(key), Batch(fields, jnp.ones(size)))

    with (
        contextlib.suppress(Exception),
        bind_weights(task.frozen, task.frozen and task.frozen.weights),
    ):
        return products_in(jax.make_jaxpr(loss)(jax.random.key(0), shapes).jaxpr)
    return 0
