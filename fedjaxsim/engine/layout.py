"""The layout: choices for speed and memory, which change no result beyond rounding."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim import checks
from fedjaxsim.algorithm import row_shapes
from fedjaxsim.data.minibatches import Batch, BatchReadOptions, Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.engine.shape_bytes import bytes_of, products_in
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.kernels import backend, products
from fedjaxsim.kernels.backend import Backend
from fedjaxsim.models.model import bound
from fedjaxsim.privacy.samplers import Sampling
from fedjaxsim.tasks.task import Task

PyTree = Any
ChunkMap = Literal["scan", "vmap"]

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
class Layout:
    """The grouping of clients and the order of their work, as `Workload.layout` chooses it.

    Attributes:
      chunk_size: clients per chunk; at least 2, because writing one row at a time into a large
        array makes XLA copy the whole array.
      chunk_map: inside a chunk, "scan" runs one client after another, which keeps a client's work
        in cache and skips empty slots; "vmap" runs them as one batch.
      sorts, rematerialize, most_rows: as in `Workload`.
    """

    chunk_size: int
    chunk_map: ChunkMap
    sorts: bool = False
    rematerialize: bool = False
    most_rows: int | None = None

    @property
    def scans(self) -> bool:
        """Return whether the clients of a chunk run one after another."""
        return self.chunk_map == "scan"

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


@dataclasses.dataclass(frozen=True)
class Workload:
    """The facts about a run from which its layout follows; all of them are public.

    A user may have given `chunk_size` and `chunk_map`; `model_bytes` are one client's.

    Attributes:
      backend: the devices that the program is traced for, whatever else the process has.
      linear: whether the model is linear, so that rows of clients who share it are one product.
      one_by_one: whether a CPU runs the clients of a single run one after another.
      useful: most clients in a batch on a CPU that suit the cohort and the clients' row counts.
      lengths: the expected steps of the clients of a cohort on one accelerator, the longest first.
      sorts: whether batches are of clients with similar numbers of rows, as all wait for the
        longest.
      capped: whether derivatives enlarge a batch beyond the shapes of one client's work,
        so that memory may not ask for larger ones.
      rematerialize: whether reverse mode recomputes a client's work instead of keeping it, and
        writes into the clients' states in place. No effect otherwise.
      most_rows: a static bound on a client's rows, which reverse mode needs.
      narrow_rows: whether a CPU runs the rounds, and rows have a length in `NARROW`.
    """

    chunk_size: int | None = None
    chunk_map: ChunkMap | None = None
    model_bytes: int = 0
    linear: bool = False
    one_by_one: bool = False
    useful: int = MOST_AT_ONCE
    lengths: tuple[float, ...] = ()
    sorts: bool = False
    capped: bool = False
    rematerialize: bool = False
    most_rows: int | None = None
    narrow_rows: bool = False
    backend: Backend = dataclasses.field(default_factory=backend.current)

    def __post_init__(self):
        if self.chunk_size is not None:
            checks.count(2, chunk_size=self.chunk_size)
        if self.chunk_map is not None:
            checks.one_of(("scan", "vmap"), chunk_map=self.chunk_map)

    @property
    def chosen(self) -> bool:
        """Return whether a user gave a part of the layout."""
        return self.chunk_size is not None or self.chunk_map is not None

    def layout(
        self,
        runs: int = 1,
        row_bytes: float = 0.0,
        *,
        message: PyTree = (),
        evaluates: bool = False,
        alike: bool = False,
        slots: int = 0,
        memory: Callable[[], tuple[int, int]] | None = None,
    ) -> Layout:
        """Choose the layout, given what is known of the work.

        `runs` settings are one program, in which a client's personal states have `row_bytes`;
        `message` are the shapes of what it sends. If `alike`, all clients have the same parameters.
        A device has `slots` of clients; `memory` returns the bytes that rows and states take there,
        and one client of a batch takes, as from `bytes_of_work`.
        """
        single = runs == 1
        if self.backend.platform != "cpu":
            lengths = np.array(() if evaluates else self.lengths)
            capped = self.capped or not single
            kind, size = self._on_accelerator(slots, memory, lengths, capped=capped)
        elif self.chosen or not single:
            # Models of all settings of a client are one batch in any case. Clients run one after
            # another, unless operations take longer to start than to run.
            small = runs * self.model_bytes <= SMALL_MODEL
            kind, size = self._asked_for("vmap" if small else "scan")
            if kind == "scan" and not single:
                # The states of a chunk fit a core's cache, and more of its slots may be skipped.
                size = min(size, max(2, int(CACHE // max(1.0, row_bytes))))
        elif products.any_of(message) or (evaluates and alike and self.linear):
            # One matrix product for all clients of a chunk.
            fitting = _IN_BATCH if evaluates else CACHE // bytes_of(message)
            kind, size = "vmap", max(2, min(fitting, self.useful))
        elif self.one_by_one:
            kind, size = "scan", _IN_SCAN
        else:
            kind, size = "vmap", min(_IN_BATCH, self.useful)
        return Layout(
            size,
            kind,
            self.sorts and single,
            self.rematerialize,
            self.most_rows,
        )

    def _asked_for(self, default: ChunkMap) -> tuple[ChunkMap, int]:
        """Return the map and the size of chunks that a user gave, completed."""
        kind = self.chunk_map or default
        return kind, self.chunk_size or (_IN_SCAN if kind == "scan" else _IN_BATCH)

    def _on_accelerator(
        self,
        slots: int,
        memory: Callable[[], tuple[int, int]] | None,
        lengths: np.ndarray,
        *,
        capped: bool,
    ) -> tuple[ChunkMap, int]:
        """Choose a batch as large as memory holds, if it is known and `capped` does not forbid.

        Batches are smaller where that saves more than it costs to start them: if clients have
        unequal `lengths`, the longest first, and if a smaller batch holds almost every random
        cohort, while the slots hold all that are drawn in practice.
        """
        kind, size = self._asked_for("vmap")
        if memory is None or kind == "scan" or self.chunk_size is not None:
            return kind, size
        held, client = memory()
        most = size if capped else MOST_AT_ONCE
        free = (self.backend.memory or DEFAULT_MEMORY) - held
        largest = at_once(free, client, slots, most)
        cohort = len(lengths)
        if capped or cohort == 0 or (cohort == slots and not self.sorts):
            return kind, largest
        usual = math.ceil(cohort + 3 * math.sqrt(cohort))
        sizes = {-(-slots // k) for k in range(1, MOST_CHUNKS + 1)}
        sizes = {n for n in sizes if n < cohort or n >= usual} | {usual}
        sizes = {max(2, min(largest, n)) for n in sizes}
        costs = {n: _moved(lengths, n, client) + LOOP_BYTES * (n < slots) for n in sizes}
        return kind, _about_cheapest(costs)


def at_once(free: int, client: int, slots: int, most: int = MOST_AT_ONCE) -> int:
    """Return the number of clients that an accelerator runs as one batch, at least 2.

    At `client` bytes each they fit into a `PART_OF_MEMORY`-th of the `free` ones. The chunks of the
    slots have one size as far as possible, so that the last one is not almost empty.
    """
    fitting = min(most, max(2, free // (PART_OF_MEMORY * max(1, client))))
    chunks = -(-slots // fitting)
    return max(2, -(-slots // max(1, chunks)))


def workload_of(
    task: Task,
    population: Population,
    sampling: Sampling,
    minibatches: Minibatches,
    chunk_size: int | None = None,
    chunk_map: ChunkMap | None = None,
    devices: Sequence[Any] | None = None,
) -> Workload:
    """Return the workload of a run on some devices, by default the first one.

    It follows from public numbers alone, or a client's rounding would follow from other clients'
    numbers of rows: their logarithms are taken as spread evenly up to the population's bound. A CPU
    runs the clients of a chunk as one batch, unless the products of one client fill a core by
    themselves. What the steps of a chunk read and write fits the core's cache, and half of a small
    cohort fills the chunk, so that few slots stay empty. The default rate of `sampling` tells the
    size of a cohort.
    """
    model, most_steps = bytes_of(jax.eval_shape(task.init, jax.random.key(0))), 1
    if minibatches.epochs is not None:
        most_steps = -(-population.bound("train") // minibatches.size)
    uneven = most_steps > 1
    fields, on = population.fields.values(), backend.current(devices)
    narrow = any(field.ndim == 2 and field.shape[1] in NARROW for field in fields)
    workload = Workload(
        chunk_size, chunk_map, model, task.linear is not None, sorts=uneven,
        narrow_rows=narrow and on.platform == "cpu", backend=on,
    )  # fmt: skip
    if workload.chosen:
        return workload
    m = population.num_clients
    # Few are long: this costs equal clients some per cent, and long tails far less than others.
    steps = np.ceil(float(most_steps) ** np.linspace(0, 1, m))
    lengths = expected_lengths(steps, _expected_cohort(sampling, m))
    if on.platform != "cpu":
        times = minibatches.epochs or minibatches.steps or 1
        of_device = times * lengths[:: max(1, len(devices or ()))]
        return dataclasses.replace(workload, lengths=tuple(of_device.tolist()))
    fitting = 1 << max(1, CACHE // max(1, _COPIES * model)).bit_length() - 1
    most = min(_IN_BATCH, max(LEAST_IN_BATCH, fitting))
    while most > LEAST_IN_BATCH and 2 * most > len(lengths):
        most //= 2
    costs = {size: _cost(lengths, size) for size in _powers(LEAST_IN_BATCH, most)}
    size = _about_cheapest(costs)
    large = multiplications(task, population, minibatches.size) > LARGE_STEP
    return dataclasses.replace(workload, useful=size, one_by_one=large)


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
    shorter = np.quantile(steps, 1 - np.arange(1, drawn) / drawn)
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

    with contextlib.suppress(Exception), bound(task.frozen, task.frozen and task.frozen.weights):
        return products_in(jax.make_jaxpr(loss)(jax.random.key(0), shapes).jaxpr)
    return 0
