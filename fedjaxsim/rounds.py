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

import chex
import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from fedjaxsim.algorithm import Algorithm, Context, Metrics
from fedjaxsim.data.minibatches import ClientData, Minibatches
from fedjaxsim.hparams import Hyperparameters
from fedjaxsim.privacy.mechanisms import Accumulator, Mechanism
from fedjaxsim.privacy.sampling import Cohort

PyTree = Any
ChunkMap = Literal["scan", "vmap"]


@dataclasses.dataclass(frozen=True)
class Chunking:
    """How the clients of a cohort are laid out in time and memory.

    Attributes:
      size: clients per chunk; at least 2, because writing one row at a time into a large array
        makes XLA copy the whole array.
      map: inside a chunk, "scan" runs one client after another, which keeps a client's work in
        cache and skips empty places (best on a CPU); "vmap" runs them as one batch (best on a GPU).
    """

    size: int
    map: ChunkMap

    def __post_init__(self):
        if self.size < 2:
            raise ValueError(f"chunk_size must be at least 2, got {self.size}")
        if self.map not in ("scan", "vmap"):
            raise ValueError(f"chunk_map must be 'scan' or 'vmap', got {self.map!r}")


def default_chunking(size: int | None, chunk_map: ChunkMap | None) -> Chunking:
    """The settings that suit the default backend, where none are given."""
    on_cpu = jax.default_backend() == "cpu"
    return Chunking(
        (16 if on_cpu else 64) if size is None else size,
        ("scan" if on_cpu else "vmap") if chunk_map is None else chunk_map,
    )


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Where every client's rows of one split lie: flat fields and ranges.

    Attributes:
      fields: each (N, ...).
      start: (m,) int32.
      count: (m,) int32.
    """

    fields: dict[str, jax.Array]
    start: jax.Array
    count: jax.Array

    def of(self, client_id: jax.Array, key: jax.Array, minibatches: Minibatches) -> ClientData:
        """One client's view."""
        return ClientData(
            self.fields, self.start[client_id], self.count[client_id], key, minibatches
        )


class CohortResult(NamedTuple):
    """What a cohort's work comes to.

    Attributes:
      store: the personal states, those of the cohort updated.
      accumulator: the sum of the bounded messages; for the mechanism's `release` only.
      metrics: sums over the cohort of the clients' metrics; for the researcher only.
    """

    store: PyTree
    accumulator: Accumulator
    metrics: Metrics


def run_cohort(
    algorithm: Algorithm,
    mechanism: Mechanism,
    minibatches: Minibatches,
    chunking: Chunking,
    store: PyTree,
    slots: jax.Array,
    cohort: Cohort,
    rows: Rows,
    shared: PyTree,
    mechanism_state: PyTree,
    hparams: Hyperparameters,
    round_: jax.Array,
    key: jax.Array,
    num_clients: int,
) -> CohortResult:
    """Runs `algorithm.client` for every client of a cohort and adds up the bounded messages.

    Args:
      algorithm: whose `client` is run.
      mechanism: whose `add` takes the messages.
      minibatches: of the local steps.
      chunking: static settings; they change no result beyond rounding.
      store: personal states, leaves (s, ...).
      slots: (q,) int32: the row in the store of each place of the cohort; distinct.
      cohort: ids and mask, (q,).
      rows: the training rows.
      shared: the billboard.
      mechanism_state: public.
      hparams: hyperparameters.
      round_: () int32.
      key: the round's key for clients; each client's own is `fold_in(key, id)`.
      num_clients: m.

    Raises:
      AssertionError: if `client` returns a personal state of another shape than it was given, or
        metrics that are not scalars.
    """

    def one(personal, client_id):
        batch_key, context_key = jax.random.split(jax.random.fold_in(key, client_id))
        data = rows.of(client_id, batch_key, minibatches)
        context = Context(round_, context_key, client_id, num_clients)
        return algorithm.client(shared, personal, data, hparams, context)

    row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), store)
    kept, message, metrics = jax.eval_shape(one, row, jax.ShapeDtypeStruct((), jnp.int32))
    # A wrong client function would otherwise fail far from here, in a scatter or a scan.
    chex.assert_trees_all_equal_shapes_and_dtypes(row, kept)
    chex.assert_rank(jax.tree.leaves(metrics), 0)
    zero_metrics = jax.tree.map(lambda leaf: jnp.zeros((), leaf.dtype), metrics)
    chunk = _scanned_chunk if chunking.map == "scan" else _mapped_chunk

    def add(accumulator, messages, mask, ids):
        return mechanism.add(accumulator, messages, mask, ids, mechanism_state, hparams)

    def body(carry, places):
        store, accumulator, totals = carry
        slots, ids, mask = places
        personal = jax.tree.map(lambda leaf: leaf.at[slots].get(mode="clip"), store)
        personal, accumulator, totals = chunk(one, add, personal, ids, mask, accumulator, totals)
        # Distinct slots let XLA write in place and keep reverse mode from saving masks.
        store = jax.tree.map(
            lambda leaf, new: leaf.at[slots].set(new, mode="drop", unique_indices=True),
            store,
            personal,
        )
        return (store, accumulator, totals), None

    places = _pad(slots, cohort, jax.tree.leaves(store), chunking.size)
    start = (store, mechanism.zero(message), zero_metrics)
    (store, accumulator, totals), _ = jax.lax.scan(body, start, places)
    return CohortResult(store, accumulator, totals)


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


def _scanned_chunk(one, add, personal, ids, mask, accumulator, totals):
    """One client after another; each is bounded and added before the next one starts."""

    def work(operands):
        personal, client_id, accumulator, totals = operands
        personal, message, metrics = one(personal, client_id)
        messages = jax.tree.map(lambda leaf: leaf[None], message)
        accumulator = add(accumulator, messages, jnp.ones(1, bool), client_id[None])
        return personal, accumulator, jax.tree.map(jnp.add, totals, metrics)

    def skip(operands):
        personal, _, accumulator, totals = operands
        return personal, accumulator, totals

    def body(carry, place):
        accumulator, totals = carry
        personal, client_id, present = place
        personal, accumulator, totals = jax.lax.cond(
            present, work, skip, (personal, client_id, accumulator, totals)
        )
        return (accumulator, totals), personal

    (accumulator, totals), personal = jax.lax.scan(
        body, (accumulator, totals), (personal, ids, mask)
    )
    return personal, accumulator, totals


def _mapped_chunk(one, add, personal, ids, mask, accumulator, totals):
    """All clients of the chunk as one batch; a chunk without clients is skipped."""

    def work(operands):
        personal, accumulator, totals = operands
        personal, messages, metrics = jax.vmap(one)(personal, ids)
        accumulator = add(accumulator, messages, mask, ids)
        sums = jax.tree.map(lambda leaf: jnp.sum(jnp.where(mask, leaf, 0)), metrics)
        return personal, accumulator, jax.tree.map(jnp.add, totals, sums)

    operands = (personal, accumulator, totals)
    return jax.lax.cond(jnp.any(mask), work, lambda operands: operands, operands)


def map_clients(
    function: Callable[[PyTree, jax.Array], PyTree],
    store: PyTree,
    num_clients: int,
    chunking: Chunking,
) -> PyTree:
    """Maps `(personal, client_id) -> outputs` over all clients, in chunks; outputs (m, ...)."""
    ids = jnp.arange(num_clients, dtype=jnp.int32)
    batch = None if chunking.map == "scan" else chunking.size
    return jax.lax.map(lambda args: function(*args), (store, ids), batch_size=batch)
