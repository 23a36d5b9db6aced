"""The layout: choices for speed and memory, which change no result beyond rounding."""

import contextlib
import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim import checks
from fedjaxsim.data.minibatches import Batch, BatchReadOptions, Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.engine.shape_bytes import bytes_of, products_in
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.kernels import backend, products
from fedjaxsim.models.model import bound
from fedjaxsim.privacy.samplers import Sampling
from fedjaxsim.tasks.task import Task

PyTree = Any
ChunkMap = Literal["scan", "vmap"]

LARGEST_PASS = 16
"""Rows in a batch of an exact pass, unless every client has fewer."""
CACHE = 2**20
"""Bytes of a core's second-level cache."""
SMALL_MODEL = 2**12
"""Largest models of several settings, in bytes, with which a CPU runs a chunk as one batch."""
LARGE_STEP = 2**22
"""Multiplications of a local step's outputs from which on the products of one client fill a core:
a CPU then runs clients one after another."""
LEAST_IN_BATCH, MOST_WAITING = 4, 2.0
"""A chunk that waits for its longest client may take twice the steps that its clients have; if even
the best choice takes more, clients run one after another."""
STEP = 3.0
"""The fixed time of a batch's step, in steps of one client of the batch."""
_IN_SCAN, _IN_BATCH = 16, 64
PART_OF_MEMORY = 4
"""Client work on an accelerator may use a quarter of the memory left by rows and states."""
MOST_AT_ONCE = 2**16 - 1
"""Most clients in one batch: the limit of the axis of CUDA's grids that batched products use."""
DEFAULT_MEMORY = 2**33
"""Bytes assumed of an accelerator that does not report its memory: 8 GiB, as small ones have."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The grouping of clients and the order of their work.

    Attributes:
      chunk_size: clients per chunk; at least 2, because writing one row at a time into a large
        array makes XLA copy the whole array.
      chunk_map: inside a chunk, "scan" runs one client after another, which keeps a client's work
        in cache and skips empty slots; "vmap" runs them as one batch.
      chosen: whether the layout is fixed; otherwise it follows what clients send and keep.
      linear: whether the model is linear, so that rows of clients who share it are one product.
      rematerialize: whether reverse mode recomputes a client's work instead of keeping it, and
        writes into the clients' states in place. No effect otherwise.
      most_rows: a static bound on a client's rows, which reverse mode needs.
      in_step: whether the exact passes of clients mapped together have one length, padded by empty
        batches; with unequal lengths every step copies the carry. Off in training: a client's
        computation must not depend on other clients' row counts.
      memory: bytes of an accelerator's memory if the chunk size follows from it, which is
        `chunk_size` until the shapes of the work are known; None otherwise, as on a CPU.
      most: largest chunk size that follows from memory.
      useful: most clients in a batch on a CPU that suit the cohort and the clients' row counts.
      model_bytes: bytes of one client's parameters.
      asked: the chunk size and map that a user gave.
      by_length: whether batches are of clients with similar numbers of rows, since all clients of a
        batch wait for the longest.
      longest: how many clients of a cohort, the longest, run in batches of `LEAST_IN_BATCH`.
    """

    chunk_size: int
    chunk_map: ChunkMap
    chosen: bool = True
    linear: bool = False
    rematerialize: bool = False
    most_rows: int | None = None
    in_step: bool = False
    memory: int | None = None
    most: int = MOST_AT_ONCE
    useful: int = MOST_AT_ONCE
    model_bytes: int = 0
    asked: tuple[int | None, ChunkMap | None] = (None, None)
    by_length: bool = False
    longest: int = 0

    def __post_init__(self):
        checks.count(2, chunk_size=self.chunk_size)
        checks.one_of(("scan", "vmap"), chunk_map=self.chunk_map)

    @property
    def scans(self) -> bool:
        """Return whether the clients of a chunk run one after another."""
        return self.chunk_map == "scan"

    def even_size(self, slots: int) -> int:
        """Return the largest useful chunk size that divides the slots; else `chunk_size`.

        Without empty slots no branch per client is needed, which would cost copies. But a batch of
        few clients costs more than empty slots do.
        """
        least = 2 if self.scans else self.chunk_size // 4
        sizes = range(min(least, slots), self.chunk_size + 1)
        return max(
            (size for size in sizes if size > 1 and slots % size == 0), default=self.chunk_size
        )

    def reading(self, pass_size: int) -> BatchReadOptions:
        """Return the options for reading rows, with exact passes in batches of `pass_size`."""
        # Reverse mode would keep the inputs of both branches.
        cuts = self.scans and self.most_rows is None
        return BatchReadOptions(pass_size, self.most_rows, cuts)

    def batched(self, size: int = _IN_BATCH) -> "Layout":
        """Return the layout with chunks of up to `size` clients, each one batch."""
        size = max(2, min(size, self.useful))
        return dataclasses.replace(self, chunk_size=size, chunk_map="vmap")

    def for_messages(self, message: PyTree) -> "Layout":
        """Return the layout for messages of these shapes.

        Products are summed by one matrix product a chunk, so clients run as one batch on a CPU,
        too, whose messages fit a core's cache.
        """
        if self.chosen or not products.any_of(message) or backend.platform() != "cpu":
            return self
        return self.batched(CACHE // bytes_of(message))

    def for_evaluation(self, personal: PyTree) -> "Layout":
        """Return the layout of an evaluation: clients that share a linear model go in batches."""
        shared = not jax.tree.leaves(personal)
        layout = self.batched() if self.linear and shared and not self.chosen else self
        return dataclasses.replace(layout, in_step=True)

    def for_memory(self, rows: int, states: int, client: int, slots: int) -> "Layout":
        """Return the layout with chunks as large as memory holds, if they follow from it.

        Args:
          rows: bytes of all rows on the device.
          states: bytes of the states of all clients there.
          client: bytes that one client of a batch takes, as from `bytes_of_work`.
          slots: number of clients' slots on the device.
        """
        if self.memory is None:
            return self
        free = self.memory - rows - states  # updated in place
        return dataclasses.replace(self, chunk_size=at_once(free, client, slots, self.most))

    def with_capped_batches(self) -> "Layout":
        """Return the layout with at most `chunk_size` clients in a batch.

        Settings, seeds and derivatives enlarge a batch beyond the shapes of one client's work.
        """
        return dataclasses.replace(self, most=self.chunk_size)

    def for_settings(self, size: int, row_bytes: float) -> "Layout":
        """Return the layout of `size` settings in one program.

        In a scan the personal states of a chunk, `row_bytes` a client, fit a core's cache. If a
        cohort fills few of its slots, more of these smaller chunks are skipped.
        """
        layout = default_layout(size * self.model_bytes, *self.asked, linear=self.linear)
        if not layout.scans:
            return layout.with_capped_batches()
        fitting = max(2, int(CACHE // max(1.0, row_bytes)))
        return dataclasses.replace(layout, chunk_size=min(layout.chunk_size, fitting), chosen=True)


def default_layout(
    model_bytes: int,
    chunk_size: int | None = None,
    chunk_map: ChunkMap | None = None,
    *,
    linear: bool = False,
) -> Layout:
    """Return the layout of models of this size on the default backend.

    On a CPU clients run one after another, so that the data of each stays in cache, unless models
    are so small that operations take longer to start than to run; `layout_of` knows more. On an
    accelerator they run as one batch, as large as its memory holds.

    Args:
      model_bytes: bytes of one client's parameters.
      chunk_size: clients per chunk, if given.
      chunk_map: "scan" or "vmap" inside a chunk, if given.
      linear: whether the model is linear.
    """
    chosen = chunk_size is not None or chunk_map is not None
    asked = chunk_size, chunk_map
    on_cpu = backend.platform() == "cpu"
    scans = on_cpu and model_bytes > SMALL_MODEL
    if chunk_map is None:
        chunk_map = "scan" if scans else "vmap"
    follows = not on_cpu and chunk_map == "vmap" and chunk_size is None
    if chunk_size is None:
        chunk_size = _IN_SCAN if chunk_map == "scan" else _IN_BATCH
    memory = device_memory() if follows else None
    return Layout(
        chunk_size, chunk_map, chosen, linear, memory=memory, model_bytes=model_bytes, asked=asked
    )


def at_once(free: int, client: int, slots: int, most: int = MOST_AT_ONCE) -> int:
    """Return the number of clients that an accelerator runs as one batch, at least 2.

    It fits into a `PART_OF_MEMORY`-th of the free memory. Chunks have one size as far as possible,
    so that the last one is not almost empty.

    Args:
      free: bytes of memory that neither rows nor states take.
      client: bytes that one client takes.
      slots: number of slots of the cohort.
      most: the largest batch.
    """
    fitting = min(most, max(2, free // (PART_OF_MEMORY * max(1, client))))
    chunks = -(-slots // fitting)
    return max(2, -(-slots // max(1, chunks)))


def device_memory() -> int:
    """Return the bytes that JAX may allocate on the first device, by default `DEFAULT_MEMORY`."""
    return backend.memory() or DEFAULT_MEMORY


def layout_of(
    task: Task,
    population: Population,
    sampling: Sampling,
    minibatches: Minibatches,
    chunk_size: int | None = None,
    chunk_map: ChunkMap | None = None,
) -> Layout:
    """Choose the layout of a run on the default backend.

    A CPU runs the clients of a chunk as one batch, unless the products of one client fill a core
    by themselves or the clients with most rows keep the others waiting. The models of a chunk fit
    the core's cache, and half of a small cohort fills it, so that few slots stay empty.

    Args:
      task: its models are trained.
      population: all clients.
      sampling: its default rate tells the size of a cohort.
      minibatches: of the local steps.
      chunk_size: clients per chunk, if given.
      chunk_map: "scan" or "vmap" inside a chunk, if given.
    """
    params = jax.eval_shape(task.init, jax.random.key(0))
    linear = task.linear is not None
    steps = np.ones(1)
    if minibatches.epochs is not None:
        steps = -(-population.splits["train"].count // minibatches.size)
    layout = default_layout(bytes_of(params), chunk_size, chunk_map, linear=linear)
    layout = dataclasses.replace(layout, by_length=bool(np.ptp(steps) > 0))
    if layout.chosen or backend.platform() != "cpu":
        return layout
    lengths = expected_lengths(steps, _expected_cohort(sampling, population.num_clients))
    fitting = 1 << max(1, CACHE // max(1, layout.model_bytes)).bit_length() - 1
    most = min(_IN_BATCH, max(2 * LEAST_IN_BATCH, fitting))
    while most > LEAST_IN_BATCH and 2 * most > len(lengths):
        most //= 2
    size, longest = _batches(lengths, most)
    layout = dataclasses.replace(layout, useful=size, longest=longest)
    waiting = sum(steps_of(lengths, size, longest)) / np.sum(lengths)
    large = multiplications(task, population, minibatches.size) > LARGE_STEP
    if large or waiting > MOST_WAITING:
        return dataclasses.replace(layout, chunk_size=_IN_SCAN, chunk_map="scan")
    return layout.batched(size)


def _batches(lengths: np.ndarray, most: int) -> tuple[int, int]:
    """Choose the size of batches, and how many of the longest clients run in the smallest ones.

    These are a second program to compile, so they must save a fifth of the time.
    """

    def cost(size, longest):
        in_small, in_large = steps_of(lengths, size, longest)
        return in_small * (1 + STEP / LEAST_IN_BATCH) + in_large * (1 + STEP / size)

    sizes = _powers(LEAST_IN_BATCH, most)
    alone = min(sizes, key=lambda size: cost(size, 0))
    heads = [(size, longest) for size in sizes for longest in _powers(16, len(lengths) // 2)]
    best = min(heads, key=lambda choice: cost(*choice), default=(alone, 0))
    return best if cost(*best) < 0.8 * cost(alone, 0) else (alone, 0)


def _powers(least: int, most: int) -> list[int]:
    """Return the powers of two from one to another, at least the first."""
    return [least] + [1 << k for k in range(least.bit_length(), most.bit_length())]


def _expected_cohort(sampling: Sampling, num_clients: int) -> float:
    """Return the expected number of clients in a round at the default rate, or the capacity."""
    sampler = sampling.sampler(num_clients)
    defaults = {record.name: record.default for record in sampling.hyperparameters}
    if None in defaults.values():
        return sampler.scheme.capacity
    rates = {name: value for name, value in defaults.items() if isinstance(value, float)}
    return num_clients * float(sampler.rate(Hyperparameters(**rates).as_arrays()))


def expected_lengths(steps: np.ndarray, cohort: float) -> np.ndarray:
    """Return the steps of a cohort's clients as they are expected, the longest first.

    Args:
      steps: (m,) steps of each client of the population.
      cohort: expected number of clients, drawn at random.
    """
    steps, drawn = np.sort(steps), max(1, round(cohort))
    longest = np.sum(steps * np.diff(np.linspace(0, 1, len(steps) + 1) ** drawn))
    others = np.quantile(steps, 1 - np.arange(1, drawn) / drawn)
    return np.maximum([longest, *others], 1e-9)


def steps_of(lengths: np.ndarray, size: int, longest: int = 0) -> tuple[float, float]:
    """Return the steps, of clients that take one or wait, in small batches and in large ones.

    Args:
      lengths: each client's steps, the longest first.
      size: clients in a large batch.
      longest: how many clients run in batches of `LEAST_IN_BATCH`.
    """

    def taken(part, size):
        return float(np.sum(np.repeat(part[::size], size)[: len(part)]))

    return taken(lengths[:longest], LEAST_IN_BATCH), taken(lengths[longest:], size)


def multiplications(task: Task, population: Population, size: int) -> int:
    """Count the multiplications of matrix products and convolutions in the loss of a minibatch.

    A loss that fails counts none: `Simulation.init` says why it does.
    """

    def loss(key):
        first = {name: jnp.asarray(field[:1]) for name, field in population.fields.items()}
        fields = {name: jnp.repeat(row, size, axis=0) for name, row in first.items()}
        if population.generate is not None:
            fields = population.generate(key, {name: row[0] for name, row in first.items()}, size)
        return task.loss(task.init(key), Batch(fields, jnp.ones(size)))

    with contextlib.suppress(Exception), bound(task.frozen, task.frozen and task.frozen.weights):
        return products_in(jax.make_jaxpr(loss)(jax.random.key(0)).jaxpr)
    return 0
