"""Matrices that are kept turned, (c, d) in place of (d, c), while a CPU works on them.

A linear model has few columns, c, one for each output: rows of c numbers are too short for a core's
vector units. With rows of d numbers the products of a step and every pass over a model take about
half the time. So where each client has a linear model of its own, the engine keeps their states
turned from the first round of a segment to the last one, and the messages and their sum, too. What
algorithms, mechanisms and servers see is (d, c): the compiler does away with a turn and the turn
back.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any
Turned = tuple[bool, ...]
"""Which leaves of a pytree are turned; () for none of them."""

_FEW = 20
"""Columns up to which a CPU gains by turning (measured: 10 and 20; with 32 and 62 it loses)."""


def which(tree: PyTree) -> Turned:
    """Which leaves are worth turning: matrices (d, c) with few columns, but more than one, c < d.

    Args:
      tree: of arrays, or their shapes, of one client.
    """
    return tuple(
        len(leaf.shape) == 2
        and 1 < leaf.shape[1] < leaf.shape[0]
        and leaf.shape[1] <= _FEW
        and jnp.issubdtype(leaf.dtype, jnp.floating)
        for leaf in jax.tree.leaves(tree)
    )


def turn(tree: PyTree, turned: Turned) -> PyTree:
    """The leaves with their last two axes exchanged, where they are to be; its own inverse."""
    return _where(tree, turned, lambda leaf: leaf.swapaxes(-1, -2))


def made_turned(tree: PyTree, turned: Turned) -> PyTree:
    """The same, and the compiler makes what is turned so, instead of turning what is made."""
    return jax.lax.optimization_barrier(turn(tree, turned)) if any(turned) else tree


def turn_in_place(tree: PyTree, turned: Turned) -> PyTree:
    """The same for the states of many clients, leaves (s, ...), in the memory where they lie."""
    return _where(tree, turned, _in_place)


def _where(tree: PyTree, turned: Turned, function: Callable[[jax.Array], jax.Array]) -> PyTree:
    if not any(turned):
        return tree
    leaves, structure = jax.tree.flatten(tree)
    pairs = zip(leaves, turned, strict=True)
    return structure.unflatten([function(leaf) if yes else leaf for leaf, yes in pairs])


def _in_place(leaf: jax.Array) -> jax.Array:
    """(s, d, c) to (s, c, d)."""
    clients, rows, columns = leaf.shape

    def one(flat, client):
        matrix = jax.lax.dynamic_index_in_dim(flat, client, keepdims=False)
        # Kept apart from where it is read, or the compiler would copy all of them first.
        matrix = jax.lax.optimization_barrier(matrix.reshape(rows, columns).T.reshape(-1))
        return jax.lax.dynamic_update_index_in_dim(flat, matrix, client, 0), None

    flat = leaf.reshape(clients, rows * columns)
    flat, _ = jax.lax.scan(one, flat, jnp.arange(clients, dtype=jnp.int32))
    return flat.reshape(clients, columns, rows)
