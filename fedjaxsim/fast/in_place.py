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


def take(store: PyTree, slots: jax.Array, *, reverse: bool) -> tuple[PyTree, PyTree]:
    """Some rows of a store, and the store, to be given to `put` with new rows and to nothing else.

    Args:
      store: leaves (s, ...).
      slots: (c,) int32, distinct; where one lies outside the store, what is read has no meaning.
      reverse: static; whether it is for reverse mode, which is then in place. Forward mode does not
        apply to that.

    Returns:
      The rows, leaves (c, ...), and the store.
    """
    leaves, structure = jax.tree.flatten(store)
    pairs = [
        (_take if reverse and _has_derivative(leaf) else _read)(leaf, slots) for leaf in leaves
    ]
    rows, rest = zip(*pairs, strict=True) if pairs else ((), ())
    return structure.unflatten(rows), structure.unflatten(rest)


def put(store: PyTree, slots: jax.Array, rows: PyTree, *, reverse: bool) -> PyTree:
    """The store with the rows that were taken replaced.

    Args:
      store: as `take` returned it.
      slots: those of `take`; what lies outside the store is dropped.
      rows: leaves (c, ...).
      reverse: as of `take`.
    """

    def put_leaf(leaf, row):
        return (_put if reverse and _has_derivative(leaf) else _write)(leaf, slots, row)

    return jax.tree.map(put_leaf, store, rows)


def _write(leaf, slots, rows):
    # Distinct slots let XLA write in place and keep reverse mode from saving masks.
    return leaf.at[slots].set(rows, mode="drop", unique_indices=True)


def _read(leaf, slots):
    return leaf.at[slots].get(mode="clip"), leaf


def _has_derivative(leaf):
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


_take = jax.custom_vjp(_read)


def _take_forward(leaf, slots):
    return _read(leaf, slots), slots


def _take_backward(slots, cotangents):
    of_rows, of_store = cotangents
    return _write(of_store, slots, of_rows), _none(slots)


_put = jax.custom_vjp(_write)


def _put_forward(leaf, slots, rows):
    return _write(leaf, slots, rows), slots


def _put_backward(slots, cotangent):
    # Those of the rows that were replaced are left in the store's: `_take` writes over them.
    rows = cotangent.at[slots].get(mode="fill", fill_value=0, unique_indices=True)
    return cotangent, _none(slots), rows


def _none(slots):
    """The cotangent of integers."""
    return np.zeros(slots.shape, jax.dtypes.float0)


_take.defvjp(_take_forward, _take_backward)
_put.defvjp(_put_forward, _put_backward)
