"""The second part of a round, and the only one that costs: what the cohort's clients do.

It works on a store of personal states and the slots of the cohort in it. The store may be the whole
population, one device's share of it, or only the cohort's states fetched from elsewhere: the
functions here see rows and slots, never which of these it is. No array of cohort × parameters
exists: a chunk of clients is gathered, run, added to the mechanism's accumulator and scattered back
before the next.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjaxsim.algorithm import Algorithm, Context, Metrics
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.engine.layout import Layout, bytes_of, bytes_of_work
from fedjaxsim.engine.rows import Rows
from fedjaxsim.fast import products, threefry, turned
from fedjaxsim.fast.in_place import put, take
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy.mechanisms import Accumulator, Mechanism
from fedjaxsim.privacy.messages import Messages, along_clients, widened

PyTree = Any


class Store(NamedTuple):
    """What each of some clients keeps from round to round, leaves (s, ...).

    Attributes:
      personal: the algorithm's personal states.
      consumed: int32, how many minibatches each has consumed; None where they are not consumed.
    """

    personal: PyTree
    consumed: jax.Array | None


class Places(NamedTuple):
    """The part of a cohort that is worked on in one place.

    Attributes:
      slots: (q,) int32, distinct: where in the store each client's state lies.
      ids: (q,) int32, who they are.
      mask: (q,) bool, which of the places are filled; those come first.
    """

    slots: jax.Array
    ids: jax.Array
    mask: jax.Array


class Told(NamedTuple):
    """What every client of a round is told.

    Attributes:
      shared: the billboard.
      mechanism: the mechanism's public state.
      hparams: hyperparameters.
      round: () int32.
      sampling_rate: () the probability with which each client was drawn.
      key: the round's key for clients; each one's own is `fold_in(key, id)`.
      order: likewise, the run's key for the orders in which minibatches are consumed.
    """

    shared: PyTree
    mechanism: PyTree
    hparams: Hyperparameters
    round: jax.Array
    sampling_rate: jax.Array
    key: jax.Array
    order: jax.Array


class Worked(NamedTuple):
    """What a cohort's work comes to.

    Attributes:
      store: the clients' states, those of the cohort updated.
      accumulator: the sum of the bounded messages; for the mechanism's `release` only.
      metrics: sums over the cohort of the clients' metrics; for the researcher only.
    """

    store: Store
    accumulator: Accumulator
    metrics: Metrics


def work(
    algorithm: Algorithm,
    mechanism: Mechanism,
    minibatches: Minibatches,
    num_clients: int,
    layout: Layout,
    store: Store,
    places: Places,
    rows: Rows,
    told: Told,
    *,
    filled: bool,
) -> Worked:
    """Runs `algorithm.client` for every client of a cohort and adds up the bounded messages.

    Args:
      algorithm: whose `client` is run.
      mechanism: whose `add` takes the messages.
      minibatches: of the local steps.
      num_clients: m.
      layout: static settings; they change no result beyond rounding.
      store: the clients' states.
      places: the cohort.
      rows: the training rows.
      told: what all clients are told.
      filled: static; whether every place of the cohort is filled.
    """
    client = client_of(algorithm, minibatches, num_clients, layout)
    own = layout.turned
    # Of what clients are told, matrices are turned once for all of them.
    of_shared = turned.which(told.shared) if any(own) else ()
    lying = turned.made_turned(told.shared, of_shared)

    def one(row, client_id):
        given = told._replace(shared=turned.turn(lying, of_shared))
        row = row._replace(personal=turned.turn(row.personal, own))
        row, message, metrics = client(given, rows, row, client_id)
        return row._replace(personal=turned.turn(row.personal, own)), message, metrics

    row = _row_of(store)
    _, message, metrics = jax.eval_shape(one, row, _ID)
    # Products, of messages or in the mechanism, are of matrices as they are.
    sums_turned = any(own) and not mechanism.adds_chunks and not products.any_of(message)
    of_message = turned.which(message) if sums_turned else ()
    zero_metrics = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), metrics)
    layout = layout.for_messages(message)
    rematerialize = layout.rematerialize
    count = places.ids.shape[0]
    if layout.memory is not None:
        each = client_bytes(client, told, rows, store)
        layout = layout.for_memory(bytes_of(rows), bytes_of(store), each, count)
    size = layout.even_size(count) if filled else layout.chunk_size
    full = filled and count % size == 0
    group = layout.group(size)
    kept = message if mechanism.adds_chunks and group < size else None
    # Where every client takes part, a chunk's states are a piece of the store; but one that goes
    # through no loop would be read again by each use, and the store copied for the one that writes.
    piece = full and group < size

    def add(accumulator, messages, mask, ids):
        messages = Messages(turned.made_turned(messages, of_message), of_message)
        accumulator = turned.turn(accumulator, of_sums)
        added = mechanism.add(accumulator, messages, mask, ids, told.mechanism, told.hparams)
        return turned.turn(added, of_sums)

    def run_chunk(operands):
        (store, accumulator, totals), (slots, ids, mask) = operands
        old, store = take(store, slots, reverse=rematerialize, piece=piece)
        new, accumulator, totals = _run_chunk(
            kept, one, add, group, old, ids, mask, accumulator, totals, full, rematerialize
        )
        store = put(store, slots, new, reverse=rematerialize, piece=piece)
        return store, accumulator, totals

    def body(carry, places):
        if full or rematerialize:
            return run_chunk((carry, places)), None
        # The filled places come first, so the first one tells whether any of the chunk is.
        return jax.lax.cond(
            places.mask[0], run_chunk, lambda operands: operands[0], (carry, places)
        ), None

    zero = mechanism.zero(products.shapes(message), num_clients)
    of_sums = turned.which(zero) if sums_turned else ()
    start = (store, turned.turn(zero, of_sums), zero_metrics)
    chunks = _chunks(places, jax.tree.leaves(store), size)
    (store, accumulator, totals), _ = jax.lax.scan(body, start, chunks)
    return Worked(store, turned.turn(accumulator, of_sums), totals)


def client_of(
    algorithm: Algorithm, minibatches: Minibatches, num_clients: int, layout: Layout
) -> Callable[[Told, Rows, Store, jax.Array], tuple[Store, PyTree, Metrics]]:
    """One client's round, `(told, rows, row, client_id) -> row, message, metrics`.

    Args:
      algorithm: as of `work`, like all others.
      minibatches: of the local steps.
      num_clients: m.
      layout: static settings.
    """

    def client(told, rows, row, client_id):
        batch_key, context_key = threefry.split(threefry.fold_in(told.key, client_id))
        own_order = threefry.fold_in(told.order, client_id)
        rows = rows.for_training()
        data = rows.of(client_id, batch_key, minibatches, layout, row.consumed, own_order)
        context = Context(told.round, context_key, client_id, num_clients, told.sampling_rate)
        personal, message, metrics = algorithm.client(
            told.shared, row.personal, data, told.hparams, context
        )
        consumed = None if row.consumed is None else row.consumed + data.num_steps()
        return Store(personal, consumed), widened(message), metrics

    return client


def client_bytes(client: Callable[..., Any], told: Told, rows: Rows, store: Store) -> int:
    """What one client of a batch needs at once, as of `bytes_of_work`.

    Args:
      client: as from `client_of`.
      told: what all clients are told; arrays or shapes, like all others.
      rows: the training rows.
      store: the clients' states.
    """
    row = _row_of(store)
    jaxpr, shapes = jax.make_jaxpr(client, return_shape=True)(told, rows, row, _ID)
    _, message, _ = shapes
    return bytes_of_work(jaxpr.jaxpr, row, message)


_ID = jax.ShapeDtypeStruct((), jnp.int32)
"""Of a client's id."""


def _row_of(store: PyTree) -> PyTree:
    """The shapes of one client's states."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), store)


def _chunks(places: Places, store_leaves: list[jax.Array], size: int) -> Places:
    """The places in chunks, (chunks, size); empty ones point outside the store."""
    slots, ids, mask = places
    count = slots.shape[0]
    chunks = math.ceil(count / size)
    extra = chunks * size - count
    outside = (store_leaves[0].shape[0] if store_leaves else count) + jnp.arange(chunks * size)
    mask = jnp.pad(mask, (0, extra))
    slots = jnp.where(mask, jnp.pad(slots, (0, extra)), outside)
    ids = jnp.where(mask, jnp.pad(ids, (0, extra)), 0)
    return jax.tree.map(lambda leaf: leaf.reshape(chunks, size), Places(slots, ids, mask))


def _run_chunk(kept, one, add, size, rows, ids, mask, accumulator, totals, full, rematerialize):
    """Groups of so many clients one after another, each bounded and added before the next starts.

    The clients of a group run as one batch; a group without clients is skipped. Where `kept` is
    given, a message as shapes, all messages of the chunk are kept and added when the last is done.
    """
    together = jax.vmap(one) if size > 1 else _alone(one)

    def run(operands):
        rows, ids, mask, accumulator, totals = operands
        rows, messages, metrics = together(rows, ids)

        def add_present(total, leaf):
            return total + jnp.sum(jnp.where(along_clients(mask, leaf), leaf, 0), axis=0)

        totals = jax.tree.map(add_present, totals, metrics)
        if kept is not None:
            return rows, accumulator, totals, messages
        return rows, add(accumulator, messages, mask, ids), totals, None

    def skip(operands):
        rows, _, _, accumulator, totals = operands
        nothing = jax.tree.map(lambda leaf: jnp.zeros((size, *leaf.shape), leaf.dtype), kept)
        return rows, accumulator, totals, nothing

    def body(carry, places):
        operands = (*places, *carry)
        rows, accumulator, totals, messages = (
            run(operands) if full else jax.lax.cond(places[2][0], run, skip, operands)
        )
        return (accumulator, totals), (rows, messages)

    # Around the branch and not inside it, where all that a client reads would be kept.
    body = jax.checkpoint(body, prevent_cse=False) if rematerialize else body
    carry, places, count = (accumulator, totals), (rows, ids, mask), ids.shape[0]
    if size == count:
        carry, (rows, messages) = body(carry, places)
    else:
        groups = jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), places)
        carry, grouped = jax.lax.scan(body, carry, groups)
        rows, messages = jax.tree.map(lambda leaf: leaf.reshape(count, *leaf.shape[2:]), grouped)
    accumulator, totals = carry
    if kept is not None:
        accumulator = add(accumulator, messages, mask, ids)
    return rows, accumulator, totals


def _alone(one):
    """The function of one client for a group of one, without an axis that is mapped over."""

    def group(rows, ids):
        outputs = one(*jax.tree.map(lambda leaf: leaf[0], (rows, ids)))
        return jax.tree.map(lambda leaf: leaf[None], outputs)

    return group


def map_clients(
    function: Callable[[PyTree, jax.Array], PyTree],
    store: PyTree,
    ids: jax.Array,
    layout: Layout,
    rows: PyTree = (),
) -> PyTree:
    """Maps `(personal, client_id) -> outputs` over clients, in chunks.

    Args:
      function: of one client.
      store: the clients' personal states, leaves (s, ...).
      ids: (s,) int32, whose they are.
      layout: static settings; they change no result beyond rounding.
      rows: all that lie on the device and leave less of its memory.

    Returns:
      outputs, leaves (s, ...).
    """
    if layout.memory is not None:
        row = _row_of(store)
        each = bytes_of_work(jax.make_jaxpr(function)(row, _ID).jaxpr, row)
        layout = layout.for_memory(bytes_of(rows), bytes_of(store), each, ids.shape[0])
    batch = None if layout.scans else layout.chunk_size
    return jax.lax.map(lambda args: function(*args), (store, ids), batch_size=batch)
