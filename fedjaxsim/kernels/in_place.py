"""Rows of a store that are read, worked on and written back, whose transpose works in place.

Reverse mode walks back through a store of all clients' rows as a cohort was walked through forward:
it reads the cotangents of some rows, and writes others in their place. From `at[].get` and
`at[].set` XLA is told more: cotangents of rows that are written are set to zero, and those of rows
that are read are added. That costs two copies of the whole store in every chunk.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any


def take(
    store: PyTree, slots: jax.Array, *, reverse: bool, piece: bool = False
) -> tuple[PyTree, PyTree]:
    """Some rows of a store, and the store, to be given to `put` with new rows and to nothing else.

    Args:
      store: leaves (s, ...).
      slots: (c,) int32, distinct; where one lies outside the store, what is read has no meaning.
      reverse: static; whether it is for reverse mode, which is then in place. Forward mode does not
        apply to that.
      piece: static; whether the slots are consecutive and inside the store, so that the rows are
        one piece of memory.

    Returns:
      The rows, leaves (c, ...), and the store.
    """
    leaves, structure = jax.tree.flatten(store)
    pairs = [
        (_take if reverse and _has_derivative(leaf) else _read)(leaf, slots, piece)
        for leaf in leaves
    ]
    rows, rest = zip(*pairs, strict=True) if pairs else ((), ())
    return structure.unflatten(rows), structure.unflatten(rest)


def put(
    store: PyTree, slots: jax.Array, rows: PyTree, *, reverse: bool, piece: bool = False
) -> PyTree:
    """The store with the rows that were taken replaced.

    Args:
      store: as `take` returned it.
      slots: those of `take`; what lies outside the store is dropped.
      rows: leaves (c, ...).
      reverse: as of `take`.
      piece: likewise.
    """

    def put_leaf(leaf, row):
        return (_put if reverse and _has_derivative(leaf) else _write)(leaf, slots, row, piece)

    return jax.tree.map(put_leaf, store, rows)


def _write(leaf, slots, rows, piece):
    if piece:
        return jax.lax.dynamic_update_slice_in_dim(leaf, rows, slots[0], axis=0)
    # Distinct slots let XLA write in place and keep reverse mode from saving masks.
    return leaf.at[slots].set(rows, mode="drop", unique_indices=True)


def _read(leaf, slots, piece):
    if piece:
        return jax.lax.dynamic_slice_in_dim(leaf, slots[0], slots.shape[0]), leaf
    return leaf.at[slots].get(mode="clip"), leaf


def _has_derivative(leaf):
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


_take = jax.custom_vjp(_read, nondiff_argnums=(2,))


def _take_forward(leaf, slots, piece):
    return _read(leaf, slots, piece), slots


def _take_backward(piece, slots, cotangents):
    of_rows, of_store = cotangents
    return _write(of_store, slots, of_rows, piece), _none(slots)


_put = jax.custom_vjp(_write, nondiff_argnums=(3,))


def _put_forward(leaf, slots, rows, piece):
    return _write(leaf, slots, rows, piece), slots


def _put_backward(piece, slots, cotangent):
    # Those of the rows that were replaced are left in the store's: `_take` writes over them.
    if piece:
        rows, _ = _read(cotangent, slots, piece)
    else:
        rows = cotangent.at[slots].get(mode="fill", fill_value=0, unique_indices=True)
    return cotangent, _none(slots), rows


def _none(slots):
    """The cotangent of integers."""
    return np.zeros(slots.shape, jax.dtypes.float0)


_take.defvjp(_take_forward, _take_backward)
_put.defvjp(_put_forward, _put_backward)
