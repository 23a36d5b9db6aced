"""The second part of a round, which takes all its time: the work of the cohort's clients.

It sees a store of personal states and the slots of the cohort in it. The store may be the whole
population, one device's share of it, or the cohort's states fetched from elsewhere. No array of
cohort × parameters exists: a chunk of clients is gathered, run, added to the mechanism's
accumulator and scattered back before the next.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjaxsim.algorithm import Metrics
from fedjaxsim.data.minibatches import NO_REVERSE, PASS_SIZE
from fedjaxsim.engine.layout import Plan
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.shape_bytes import bytes_of, bytes_of_work
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.kernels import backend, products
from fedjaxsim.kernels.forward_only import forward_only
from fedjaxsim.kernels.in_place import put, take
from fedjaxsim.privacy.mechanisms import Accumulator, Mechanism
from fedjaxsim.privacy.messages import Messages, along_clients, wide_type

PyTree = Any
INTEGER = jax.ShapeDtypeStruct((), jnp.int32)
"""The shape of a client's id, a round and a number of rows."""


class CohortSlots(NamedTuple):
    """The clients of a cohort whose states are in one store, (q,) each; filled slots come first.

    `slots` are indices of the clients' states in the store, distinct where `mask` holds.
    """

    slots: jax.Array
    ids: jax.Array
    mask: jax.Array


class CohortResult(NamedTuple):
    """The result of a cohort's work: all clients' states, updated for the cohort, and two sums.

    `accumulator` is the sum of bounded messages, for the mechanism's `release` only; `metrics`,
    sums of the clients' metrics, are for the researcher only.
    """

    states: PyTree
    accumulator: Accumulator
    metrics: Metrics


def work(
    client: Callable[[PyTree, jax.Array], tuple[PyTree, PyTree, Metrics]],
    mechanism: Mechanism,
    public: tuple[PyTree, Hyperparameters],
    num_clients: int,
    anybody: jax.Array,
    plan: Plan,
    store: PyTree,
    cohort: CohortSlots,
    rows: Rows,
    *,
    filled: bool,
) -> CohortResult:
    """Run every client of a cohort and add up the bounded messages.

    `public` is the mechanism's state and the hyperparameters, `anybody` the id of some client, ()
    int32, whose state comes first, `store` has the clients' states, leaves (s, ...), `rows` are
    the training rows. If `filled`, static, every slot of the cohort is filled.
    """
    row = row_of(store)
    trace = jax.make_jaxpr(client, return_shape=True)
    jaxpr, (_, message, metrics) = trace(row, INTEGER)
    zero_metrics = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, wide_type(leaf)), metrics)

    slots, plan = cohort.ids.shape[0], plan.for_message(message)
    if plan.asks_memory:
        client_bytes = bytes_of_work(jaxpr.jaxpr, row, message)
        plan = plan.in_memory(slots, bytes_of((rows, store)), client_bytes)
    message_shapes = message if mechanism.adds_chunks and plan.scans else None

    def add(accumulator, messages, mask, ids):
        return mechanism.add(accumulator, Messages(messages), mask, ids, *public)

    if plan.sorts and not plan.scans:
        cohort = _longest_first(cohort, rows)
    size = plan.even_size(slots) if filled else plan.chunk_size
    full = filled and slots % size == 0
    # With full participation a chunk's states are a piece of the store. Outside a loop each use
    # would read the piece again, and the store be copied for the use that writes.
    ways: dict[str, Any] = {"reverse": plan.rematerialize, "piece": full and plan.scans}
    # The last of the cohort, its shortest if it is sorted, stands in for nobody.
    last = jnp.sum(cohort.mask, dtype=jnp.int32) - 1
    stand_in, slot = (
        jnp.where(last >= 0, of_cohort[last], other)
        for of_cohort, other in ((cohort.ids, anybody), (cohort.slots, 0))
    )
    chunks = _chunks(cohort, jax.tree.leaves(store), size, stand_in)
    # On an accelerator the host would wait for the branch, and the store be copied around it.
    several = chunks.mask.shape[0] > 1 and not plan.on_cpu
    alone = not several and not plan.on_cpu
    held = [leaf.shape[0] for leaf in jax.tree.leaves(store)]
    whole = alone and full and held[:1] == [size] and not (plan.sorts or plan.rematerialize)

    def run_chunk(operands):
        (store, accumulator, totals), (slots, ids, mask) = operands
        # Of a whole store in its own order, a gather and a scatter would be copies.
        states, store = (store, ()) if whole else take(store, slots, stand_in=slot, **ways)
        updated, accumulator, totals = _run_chunk(
            client, add, plan, message_shapes, full, states, ids, mask, accumulator, totals
        )
        store = updated if whole else put(store, slots, updated, **ways)
        return store, accumulator, totals

    def body(carry, chunk):
        if full or alone or plan.rematerialize:
            return run_chunk((carry, chunk)), None
        # Filled slots come first, so a chunk whose first slot is empty has none.
        return jax.lax.cond(
            chunk.mask[0], run_chunk, lambda operands: operands[0], (carry, chunk)
        ), None

    carry = store, mechanism.zero(products.shapes(message), num_clients), zero_metrics
    if several and not (full or plan.rematerialize or plan.most_rows):
        # An accelerator would copy the store around a branch; a loop that ends early copies none.
        def at(place, carry):
            return run_chunk((carry, jax.tree.map(lambda leaf: leaf[place], chunks)))

        carry = jax.lax.fori_loop(0, last // size + 1, at, carry)
        return CohortResult(*forward_only(carry, NO_REVERSE))
    return CohortResult(*jax.lax.scan(body, carry, chunks)[0])


def row_of(store: PyTree) -> PyTree:
    """Return the shapes of one client's states."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), store)


def _longest_first(cohort: CohortSlots, rows: Rows) -> CohortSlots:
    """Return the slots by falling numbers of rows; empty ones stay behind."""
    lengths = jnp.where(cohort.mask, -rows.counts(cohort.ids), 1)
    order = _order_of(lengths)
    return jax.tree.map(lambda leaf: leaf[order], cohort)


def _order_of(numbers: jax.Array) -> jax.Array:
    """Return the order of rising integers, (k,) int32; equal ones need no sort on a CPU."""
    places = jnp.arange(numbers.shape[0], dtype=jnp.int32)
    if backend.platform() != "cpu":  # whose host would wait for the branch
        return jax.lax.sort_key_val(numbers, places)[1]
    return jax.lax.cond(
        jnp.all(numbers == numbers[0]),
        lambda: places,
        lambda: jax.lax.sort_key_val(numbers, places)[1],
    )


def _chunks(
    cohort: CohortSlots, store_leaves: list[jax.Array], size: int, stand_in: jax.Array
) -> CohortSlots:
    """Return the slots in chunks, (chunks, size); empty ones have the id of the `stand_in`.

    So a client's function, which may loop until its own rows let it stop, sees no rows but a
    client's; what it makes of them in an empty slot counts nowhere.
    """
    slots, ids, mask = cohort
    count = slots.shape[0]
    chunks = math.ceil(count / size)
    extra = chunks * size - count
    outside = (store_leaves[0].shape[0] if store_leaves else count) + jnp.arange(chunks * size)
    mask = jnp.pad(mask, (0, extra))
    slots = jnp.where(mask, jnp.pad(slots, (0, extra)), outside)
    ids = jnp.where(mask, jnp.pad(ids, (0, extra)), stand_in)
    return jax.tree.map(lambda leaf: leaf.reshape(chunks, size), CohortSlots(slots, ids, mask))


def _run_chunk(client, add, plan, message_shapes, full, rows, ids, mask, accumulator, totals):
    """Run the clients of a chunk one after another or as one batch, and add up their messages.

    A scan bounds and adds each message before the next client starts, and skips empty slots. If
    `message_shapes` is given, it keeps all messages and adds them after the last client.
    """
    scans = plan.scans

    def run(operands):
        rows, ids, mask, accumulator, totals = operands
        rows, messages, metrics = (client if scans else jax.vmap(client))(rows, ids)
        if scans:
            ids, mask, messages, metrics = jax.tree.map(
                lambda leaf: leaf[None], (ids, mask, messages, metrics)
            )

        def add_present(total, leaf):
            present = jnp.where(along_clients(mask, leaf), leaf, 0)
            return total + jnp.sum(present, axis=0, dtype=total.dtype)

        totals = jax.tree.map(add_present, totals, metrics)
        if message_shapes is not None:
            return rows, accumulator, totals, messages
        return rows, add(accumulator, messages, mask, ids), totals, None

    def skip(operands):
        rows, _, _, accumulator, totals = operands
        nothing = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape), leaf.dtype), message_shapes)
        return rows, accumulator, totals, nothing

    # On an accelerator `work` skips batches without a filled slot, if any. A CPU's batch is in a
    # branch even if all slots are filled: outside, XLA computes a step again for each use of its
    # result, which takes up to four times as long.
    branches = not full
    if not scans:
        branches = plan.on_cpu and not (full and plan.rematerialize)

    def body(carry, chunk):
        operands = (*chunk, *carry)
        if not branches:
            rows, accumulator, totals, messages = run(operands)
        else:
            filled = chunk[2] if scans else chunk[2][0]
            rows, accumulator, totals, messages = jax.lax.cond(filled, run, skip, operands)
        return (accumulator, totals), (rows, messages)

    # Around the branch: inside it, all inputs of a client would be kept.
    body = jax.checkpoint(body, prevent_cse=False) if plan.rematerialize else body
    carry, chunk = (accumulator, totals), (rows, ids, mask)
    if scans:
        carry, (rows, messages) = jax.lax.scan(body, carry, chunk)
        messages = jax.tree.map(lambda leaf: leaf[:, 0], messages)
    else:
        carry, (rows, messages) = body(carry, chunk)
    accumulator, totals = carry
    if message_shapes is not None:
        accumulator = add(accumulator, messages, mask, ids)
    return rows, accumulator, totals


def map_clients(
    function: Callable[[PyTree, jax.Array], PyTree],
    store: PyTree,
    ids: jax.Array,
    plan: Plan,
    rows: Rows,
    *,
    sort: bool = True,
) -> PyTree:
    """Map `(personal, client_id) -> outputs` over clients; outputs are (s, ...).

    `store` has their personal states, leaves (s, ...), and `ids` are (s,) int32. `function` reads
    `rows`. All clients of a batch wait for its longest, so batches are of clients with similar
    numbers of rows. Reverse mode wants them in their own order, not to `sort`, as it would add to
    the whole store in every batch.
    """
    if plan.asks_memory:
        row = row_of(store)
        client_bytes = bytes_of_work(jax.make_jaxpr(function)(row, INTEGER).jaxpr, row)
        plan = plan.in_memory(ids.shape[0], bytes_of((rows, store)), client_bytes)
    size = None if plan.scans else plan.chunk_size
    # Nobody waits if no rows are read, as for the models that clients predict with.
    if plan.scans or not (sort and rows.fields):
        return jax.lax.map(lambda args: function(*args), (store, ids), batch_size=size)
    if not plan.on_cpu and plan.chunk_size >= ids.shape[0]:
        # All clients are one batch in any order; a gather would copy the store.
        return jax.vmap(function)(store, ids)
    order = _order_of(-rows.counts(ids) // PASS_SIZE)  # batches, the most first

    def of_slot(slot):
        personal = jax.tree.map(lambda leaf: leaf[slot], store)
        return function(personal, ids[slot])

    # Batches of one size: with another a client's values could be rounded otherwise.
    count = order.shape[0]
    size = count if size is None else min(size, count)
    outputs = jax.lax.map(of_slot, jnp.pad(order, (0, -count % size), mode="edge"), batch_size=size)
    places = jnp.arange(count, dtype=order.dtype)
    places = jnp.zeros_like(order).at[order].set(places, unique_indices=True)
    return jax.tree.map(lambda leaf: leaf[places], outputs)
