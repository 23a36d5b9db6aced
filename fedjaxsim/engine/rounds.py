"""One round over a store of personal states and the slots of the cohort in it.

The store may be the whole population, one device's share of it, or only the cohort's rows fetched
from elsewhere: the functions here see rows and slots, never which of these it is. No array of
cohort × parameters exists: a chunk of clients is gathered, run, added to the mechanism's
accumulator and scattered back before the next.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from fedjaxsim.algorithm import Algorithm, Context, Metrics
from fedjaxsim.data.minibatches import ClientData, Generate, Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.fast import products, threefry
from fedjaxsim.fast.in_place import put, take
from fedjaxsim.fast.products import Product
from fedjaxsim.hparams import Hyperparameters
from fedjaxsim.privacy.mechanisms import Accumulator, Mechanism
from fedjaxsim.privacy.messages import Messages, along_clients, widened
from fedjaxsim.privacy.sampling import Cohort

PyTree = Any
LARGEST_PASS = 16
"""Rows in a batch of an exact pass, unless every client has fewer."""
CACHE = 2**20
"""Bytes, of a core's second-level cache."""
SMALL_MODEL = 2**12
"""Bytes of a model up to which a CPU, too, runs the clients of a chunk as one batch."""
ChunkMap = Literal["scan", "vmap"]


@dataclasses.dataclass(frozen=True)
class Chunking:
    """How the clients of a cohort are laid out in time and memory.

    Attributes:
      size: clients per chunk; at least 2, because writing one row at a time into a large array
        makes XLA copy the whole array.
      map: inside a chunk, "scan" runs one client after another, which keeps a client's work in
        cache and skips empty places; "vmap" runs them as one batch.
      fixed: whether that is to be so whatever clients send; see `_for_messages`.
    """

    size: int
    map: ChunkMap
    fixed: bool = True

    def __post_init__(self):
        if self.size < 2:
            raise ValueError(f"chunk_size must be at least 2, got {self.size}")
        if self.map not in ("scan", "vmap"):
            raise ValueError(f"chunk_map must be 'scan' or 'vmap', got {self.map!r}")


TOGETHER = Chunking(64, "vmap")
"""Clients in batches."""


def default_chunking(size: int | None, chunk_map: ChunkMap | None, model_bytes: int) -> Chunking:
    """The settings that suit the default backend, where none are given.

    On a CPU clients run one after another, so that what each of them works on stays in cache;
    unless models are so small that starting every operation takes longer than carrying it out.

    Args:
      size: clients per chunk, where it is given.
      chunk_map: likewise.
      model_bytes: of one client's parameters.
    """
    fixed = size is not None or chunk_map is not None
    scans = jax.default_backend() == "cpu" and model_bytes > SMALL_MODEL
    if chunk_map is None:
        chunk_map = "scan" if scans else "vmap"
    if size is None:
        size = 16 if chunk_map == "scan" else TOGETHER.size
    return Chunking(size, chunk_map, fixed)


def _for_messages(chunking: Chunking, message: PyTree) -> Chunking:
    """The chunking that suits messages of these shapes.

    Products are summed by one matrix product a chunk, so on a CPU, too, clients run as one batch,
    as many as have their messages in a core's cache.
    """
    send_products = any(isinstance(leaf, Product) for leaf in products.leaves(message))
    if chunking.fixed or not send_products or jax.default_backend() != "cpu":
        return chunking
    return Chunking(max(2, CACHE // bytes_of(message)), "vmap")


def bytes_of(arrays: PyTree) -> int:
    """The size of a pytree of arrays, or of their shapes."""
    leaves = jax.tree.leaves(arrays)
    return sum(leaf.size * getattr(leaf.dtype, "itemsize", 4) for leaf in leaves)


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Where every client's rows of one split lie: flat fields and ranges.

    Attributes:
      fields: each (N, ...).
      start: (m,) int32.
      count: (m,) int32.
      generate: static; what makes fresh minibatches, where the population has it.
      pass_size: static; rows in a batch of an exact pass.
      longest: static; no fewer rows than any client has, where loops over a client's own rows are
        to have a static bound. Reverse mode needs one.
    """

    fields: dict[str, jax.Array]
    start: jax.Array
    count: jax.Array
    generate: Generate | None = dataclasses.field(default=None, metadata={"static": True})
    pass_size: int = dataclasses.field(default=16, metadata={"static": True})
    longest: int | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def place(cls, population: Population, split: str, fields: dict[str, jax.Array]) -> "Rows":
        """One split of a population, its fields being on the device already."""
        ranges = population.splits[split]
        # Small batches where every client has few rows; a cap, so that what is compiled depends
        # little on the data.
        pass_size = max(1, min(LARGEST_PASS, int(ranges.count.max())))
        start, count = jnp.asarray(ranges.start), jnp.asarray(ranges.count)
        return cls(fields, start, count, population.generate, pass_size)

    def of(
        self,
        client_id: jax.Array,
        key: jax.Array,
        minibatches: Minibatches,
        taken: jax.Array | None = None,
        order: jax.Array | None = None,
        *,
        alone: bool = False,
    ) -> ClientData:
        """One client's view.

        Args:
          client_id: () int32, whose.
          key: what the choice of minibatches in this round depends on.
          minibatches: of the local steps.
          taken: () int32, how many minibatches the client has consumed in earlier rounds; None
            where minibatches are not consumed.
          order: the key of the orders in which they are consumed, the same in all rounds; or None.
          alone: static; whether clients run one after another, so that a branch costs what it does.
        """
        return ClientData(
            self.fields,
            self.start[client_id],
            self.count[client_id],
            key,
            minibatches,
            taken,
            order,
            self.generate,
            self.pass_size,
            self.longest,
            # Reverse mode would keep what both branches need.
            _halves=alone and self.longest is None,
        )


class Shard(NamedTuple):
    """The clients that one of several devices holds: those with ids from size·index on.

    Attributes:
      axis: name of the mesh axis over which the clients are divided.
      devices: how many there are.
      num_clients: m, on all devices together.
    """

    axis: str
    devices: int
    num_clients: int

    @property
    def size(self) -> int:
        """Clients on each device; on the last ones some places may belong to none."""
        return -(-self.num_clients // self.devices)

    @property
    def even(self) -> bool:
        """Whether all devices hold as many clients."""
        return self.num_clients % self.devices == 0

    def ids(self) -> tuple[jax.Array, jax.Array]:
        """The ids of this device's clients, (size,) int32, and which of them exist, (size,)."""
        ids = jax.lax.axis_index(self.axis) * self.size + jnp.arange(self.size, dtype=jnp.int32)
        return jnp.minimum(ids, self.num_clients - 1), ids < self.num_clients

    def own(self, cohort: Cohort) -> tuple[Cohort, jax.Array]:
        """This device's part of a cohort, and its slots here; each in min(capacity, size) places.

        As many places as that are enough whoever is drawn, so that no cohort overflows here that
        would not on one device.
        """
        slots = cohort.ids - jax.lax.axis_index(self.axis) * self.size
        mine = cohort.mask & (slots >= 0) & (slots < self.size)
        capacity = min(mine.shape[0], self.size)
        kept = jnp.nonzero(mine, size=capacity, fill_value=0)[0]
        mask = jnp.arange(capacity) < jnp.sum(mine)
        return Cohort(cohort.ids[kept], mask, cohort.overflow), slots[kept]

    def total(self, sums: PyTree) -> PyTree:
        """Sums over all devices."""
        return jax.lax.psum(sums, self.axis)


class Store(NamedTuple):
    """What each of some clients keeps from round to round, leaves (s, ...).

    Attributes:
      personal: the algorithm's personal states.
      taken: int32, how many minibatches each has consumed; None where they are not consumed.
    """

    personal: PyTree
    taken: jax.Array | None


class CohortResult(NamedTuple):
    """What a cohort's work comes to.

    Attributes:
      store: the clients' rows, those of the cohort updated.
      accumulator: the sum of the bounded messages; for the mechanism's `release` only.
      metrics: sums over the cohort of the clients' metrics; for the researcher only.
    """

    store: Store
    accumulator: Accumulator
    metrics: Metrics


def run_cohort(
    algorithm: Algorithm,
    mechanism: Mechanism,
    minibatches: Minibatches,
    chunking: Chunking,
    store: Store,
    slots: jax.Array,
    cohort: Cohort,
    rows: Rows,
    shared: PyTree,
    mechanism_state: PyTree,
    hparams: Hyperparameters,
    round_: jax.Array,
    key: jax.Array,
    order: jax.Array,
    num_clients: int,
    everyone: bool,
    rematerialize: bool = False,
) -> CohortResult:
    """Runs `algorithm.client` for every client of a cohort and adds up the bounded messages.

    Args:
      algorithm: whose `client` is run.
      mechanism: whose `add` takes the messages.
      minibatches: of the local steps.
      chunking: static settings; they change no result beyond rounding.
      store: the clients' rows, leaves (s, ...).
      slots: (q,) int32: the row in the store of each place of the cohort; distinct.
      cohort: ids and mask, (q,).
      rows: the training rows.
      shared: the billboard.
      mechanism_state: public.
      hparams: hyperparameters.
      round_: () int32.
      key: the round's key for clients; each client's own is `fold_in(key, id)`.
      order: likewise, the run's key for the orders in which minibatches are consumed.
      num_clients: m.
      everyone: static; whether every place of the cohort is filled.
      rematerialize: static; whether reverse mode does a client's work again instead of keeping what
        it needs of it. Of no effect otherwise.
    """
    # How many rows the others have must not show in the rounding of a client's own sums.
    rows = dataclasses.replace(rows, pass_size=LARGEST_PASS)

    def one(row, client_id):
        alone = chunking.map == "scan"
        batch_key, context_key = threefry.split(threefry.fold_in(key, client_id))
        own_order = threefry.fold_in(order, client_id)
        data = rows.of(client_id, batch_key, minibatches, row.taken, own_order, alone=alone)
        context = Context(round_, context_key, client_id, num_clients)
        personal, message, metrics = algorithm.client(shared, row.personal, data, hparams, context)
        taken = None if row.taken is None else row.taken + data.num_steps()
        return Store(personal, taken), widened(message), metrics

    row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), store)
    _, message, metrics = jax.eval_shape(one, row, jax.ShapeDtypeStruct((), jnp.int32))
    zero_metrics = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), metrics)
    chunking = _for_messages(chunking, message)
    size = _even_size(cohort.ids.shape[0], chunking.size) if everyone else chunking.size
    full = everyone and cohort.ids.shape[0] % size == 0
    chunk = _scanned_chunk if chunking.map == "scan" else _mapped_chunk

    def add(accumulator, messages, mask, ids):
        return mechanism.add(accumulator, Messages(messages), mask, ids, mechanism_state, hparams)

    def run_chunk(operands):
        (store, accumulator, totals), (slots, ids, mask) = operands
        old, store = take(store, slots, reverse=rematerialize)
        new, accumulator, totals = chunk(
            one, add, old, ids, mask, accumulator, totals, full, rematerialize
        )
        return put(store, slots, new, reverse=rematerialize), accumulator, totals

    def body(carry, places):
        if full or rematerialize:
            return run_chunk((carry, places)), None
        # The filled places come first, so the first one tells whether any of the chunk is.
        filled = places[2][0]
        return jax.lax.cond(filled, run_chunk, lambda operands: operands[0], (carry, places)), None

    places = _pad(slots, cohort, jax.tree.leaves(store), size)
    start = (store, mechanism.zero(products.shapes(message)), zero_metrics)
    (store, accumulator, totals), _ = jax.lax.scan(body, start, places)
    return CohortResult(store, accumulator, totals)


def _even_size(places: int, size: int) -> int:
    """The largest size of at most `size`, and at least 2, that divides the places; else `size`.

    Without empty places nothing need be skipped, and a branch per client costs copies.
    """
    return next((s for s in range(size, 1, -1) if places % s == 0), size)


def _pad(slots, cohort, store_leaves, size):
    """Chunks of (slots, ids, mask), each (chunks, size); empty places point outside the store."""
    places = slots.shape[0]
    chunks = math.ceil(places / size)
    extra = chunks * size - places
    outside = (store_leaves[0].shape[0] if store_leaves else places) + jnp.arange(chunks * size)
    mask = jnp.pad(cohort.mask, (0, extra))
    slots = jnp.where(mask, jnp.pad(slots, (0, extra)), outside)
    ids = jnp.where(mask, jnp.pad(cohort.ids, (0, extra)), 0)
    return jax.tree.map(lambda leaf: leaf.reshape(chunks, size), (slots, ids, mask))


def _scanned_chunk(one, add, rows, ids, mask, accumulator, totals, full, rematerialize):
    """One client after another; each is bounded and added before the next one starts."""

    def work(operands):
        row, client_id, accumulator, totals = operands
        row, message, metrics = one(row, client_id)
        messages = jax.tree.map(lambda leaf: leaf[None], message)
        accumulator = add(accumulator, messages, jnp.ones(1, bool), client_id[None])
        return row, accumulator, jax.tree.map(jnp.add, totals, metrics)

    def skip(operands):
        row, _, accumulator, totals = operands
        return row, accumulator, totals

    def body(carry, place):
        accumulator, totals = carry
        row, client_id, present = place
        operands = (row, client_id, accumulator, totals)
        row, accumulator, totals = (
            work(operands) if full else jax.lax.cond(present, work, skip, operands)
        )
        return (accumulator, totals), row

    # Around the branch and not inside it, where all that the work reads would be kept.
    body = jax.checkpoint(body, prevent_cse=False) if rematerialize else body
    (accumulator, totals), rows = jax.lax.scan(body, (accumulator, totals), (rows, ids, mask))
    return rows, accumulator, totals


def _mapped_chunk(one, add, rows, ids, mask, accumulator, totals, full, rematerialize):
    """All clients of the chunk as one batch; a chunk without clients is skipped."""

    def work(operands):
        rows, accumulator, totals = operands
        rows, messages, metrics = jax.vmap(one)(rows, ids)
        accumulator = add(accumulator, messages, mask, ids)

        def add_present(total, leaf):
            return total + jnp.sum(jnp.where(along_clients(mask, leaf), leaf, 0), axis=0)

        return rows, accumulator, jax.tree.map(add_present, totals, metrics)

    def unless_empty(operands):
        return jax.lax.cond(jnp.any(mask), work, lambda operands: operands, operands)

    chunk = work if full else unless_empty
    chunk = jax.checkpoint(chunk, prevent_cse=False) if rematerialize else chunk
    return chunk((rows, accumulator, totals))


def map_clients(
    function: Callable[[PyTree, jax.Array], PyTree],
    store: PyTree,
    ids: jax.Array,
    chunking: Chunking,
) -> PyTree:
    """Maps `(personal, client_id) -> outputs` over clients, in chunks.

    Args:
      function: of one client.
      store: the clients' personal states, leaves (s, ...).
      ids: (s,) int32, whose they are.
      chunking: static settings; they change no result beyond rounding.

    Returns:
      outputs, leaves (s, ...).
    """
    batch = None if chunking.map == "scan" else chunking.size
    return jax.lax.map(lambda args: function(*args), (store, ids), batch_size=batch)
