"""Reads and writes of rows of a store with a transpose that works in place.

Reverse mode reads the cotangents of a cohort's rows and writes others in their place. The
transposes of `at[].get` and `at[].set` would also zero the written rows and add to the read ones,
at the price of two copies of the whole store in every chunk.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any


def take(
    store: PyTree,
    slots: jax.Array,
    *,
    reverse: bool,
    piece: bool = False,
    stand_in: jax.Array | None = None,
) -> tuple[PyTree, PyTree]:
    """Take the rows, leaves (c, ...), of distinct `slots` (c,) of a store, leaves (s, ...).

    A slot outside the store reads the row of the slot `stand_in`, (), by default the last; the
    returned store is only for `put`. If `reverse`, reverse mode works in place and forward mode is
    unavailable; a `piece` has slots that are consecutive and inside the store. Both are static.
    """
    leaves, structure = jax.tree.flatten(store)
    last = leaves[0].shape[0] - 1 if leaves else 0
    other = jnp.asarray(last if stand_in is None else stand_in, slots.dtype)
    pairs = [
        (_take if reverse and _has_derivative(leaf) else _read)(leaf, slots, other, piece)
        for leaf in leaves
    ]
    rows, remaining = zip(*pairs, strict=True) if pairs else ((), ())
    return structure.unflatten(rows), structure.unflatten(remaining)


def put(
    store: PyTree, slots: jax.Array, rows: PyTree, *, reverse: bool, piece: bool = False
) -> PyTree:
    """Replace the rows that `take` returned; rows of slots outside the store are dropped."""

    def put_leaf(leaf, row):
        return (_put if reverse and _has_derivative(leaf) else _write)(leaf, slots, row, piece)

    return jax.tree.map(put_leaf, store, rows)


def _write(leaf, slots, rows, piece):
    if piece:
        return jax.lax.dynamic_update_slice_in_dim(leaf, rows, slots[0], axis=0)
    # Distinct slots let XLA write in place and keep reverse mode from saving masks.
    return leaf.at[slots].set(rows, mode="drop", unique_indices=True)


def _read(leaf, slots, other, piece):
    if piece:
        return jax.lax.dynamic_slice_in_dim(leaf, slots[0], slots.shape[0]), leaf
    return leaf.at[jnp.where(slots < leaf.shape[0], slots, other)].get(mode="clip"), leaf


def _has_derivative(leaf):
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _take_backward(piece, slots, cotangents):
    of_rows, of_store = cotangents
    return _write(of_store, slots, of_rows, piece), _none(slots), _none(slots[0])


def _put_backward(piece, slots, cotangent):
    # The store keeps the cotangents of replaced rows: `_take` overwrites them.
    if piece:
        rows, _ = _read(cotangent, slots, slots[0], piece)
    else:
        rows = cotangent.at[slots].get(mode="fill", fill_value=0, unique_indices=True)
    return cotangent, _none(slots), rows


def _none(slots):
    """Return the cotangent of integers."""
    return np.zeros(slots.shape, jax.dtypes.float0)


_take = jax.custom_vjp(_read, nondiff_argnums=(3,))
_put = jax.custom_vjp(_write, nondiff_argnums=(3,))
_take.defvjp(lambda leaf, slots, *other: (_read(leaf, slots, *other), slots), _take_backward)
_put.defvjp(lambda leaf, slots, *rows: (_write(leaf, slots, *rows), slots), _put_backward)
