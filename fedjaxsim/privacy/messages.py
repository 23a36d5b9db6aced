"""Messages of a chunk of clients, with the operations that a mechanism may use."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjaxsim import checks
from fedjaxsim.kernels import products
from fedjaxsim.kernels.products import Opaque, Product
from fedjaxsim.privacy.clipping import clip_by_global_norm

PyTree = Any

_LONG = 1024
"""Length of a message from which on a CPU sums many faster as a product with ones."""


class Bounded(NamedTuple):
    """Clipped messages of a chunk, with their flags.

    Attributes:
      messages: each of global norm at most the clip norm.
      clipped: (k,) bool, whether the norm was above the bound.
      finite: (k,) bool; False where a non-finite message became zero.
    """

    messages: "Messages"
    clipped: jax.Array
    finite: jax.Array


class Messages(Opaque):
    """The messages of k clients, in any memory layout.

    Updates of linear models may be kept as factors (see `kernels.products`), so this is not a
    pytree of arrays: `jax.tree.map` takes it for a leaf, and arithmetic on it raises TypeError. The
    methods give the same numbers for either layout, up to rounding.
    """

    instead = "a mechanism may bound, scale and sum messages, or call dense() for their numbers"

    def __init__(self, tree: PyTree):
        """Take a pytree of arrays, leaves (k, …), or of `Product`s of k clients."""
        self._tree = tree

    def bound(self, clip_norm: jax.Array, mask: jax.Array, ord: int = 2) -> Bounded:
        """Clip each message to a global norm; absent ones, mask (k,) False, become zero.

        Args:
          clip_norm: () the bound.
          mask: (k,) bool.
          ord: 2 for the L2 norm, which suits Gaussian noise, or 1 for the L1 norm, which suits
            Laplace noise.

        Raises:
          ValueError: for any other norm.
        """
        checks.one_of((1, 2), ord=ord)
        tree = self._tree if ord == 2 else self.dense()
        clip = functools.partial(clip_by_global_norm, ord=ord)
        clipped = jax.vmap(clip, in_axes=(0, None))(tree, clip_norm)
        present = products.rescale(
            lambda leaf: jnp.where(along_clients(mask, leaf), leaf, 0), clipped.message
        )
        return Bounded(Messages(present), clipped.clipped & mask, clipped.finite | ~mask)

    def scale(self, factors: jax.Array) -> "Messages":
        """Multiply each client's message by its factor, (k,)."""
        return Messages(
            products.rescale(
                lambda leaf: leaf * along_clients(factors, leaf).astype(leaf.dtype), self._tree
            )
        )

    def total(self) -> PyTree:
        """Compute Σ_k v_k, a pytree of arrays."""

        def one(leaf):
            if isinstance(leaf, Product):
                return products.total(leaf)
            if leaf.shape[0] == 1 or leaf.size < _LONG * leaf.shape[0]:
                return jnp.sum(leaf, axis=0)
            ones = jnp.ones(leaf.shape[0], leaf.dtype)
            return jnp.tensordot(ones, leaf, 1, precision=jax.lax.Precision.HIGHEST)

        return products.tree_map(one, self._tree)

    def add_rows(self, rows: PyTree, ids: jax.Array) -> PyTree:
        """Add each client's message to its row, `ids` (k,), of `rows`, leaves (m, …)."""
        return jax.tree.map(lambda leaf, v: leaf.at[ids].add(v), rows, self.dense())

    def gram(self) -> jax.Array:
        """Compute Σ_k V_k V_kᵀ, (d, d), of messages that are one vector (d,) or matrix (d, c)."""
        (v,) = jax.tree.leaves(self.dense())
        summed = (0, *range(2, v.ndim))
        # Accelerators round factors to fewer bits by default, and V Vᵀ could exceed its bound.
        return jnp.tensordot(v, v, (summed, summed), precision=jax.lax.Precision.HIGHEST)

    def gram_diagonal(self) -> jax.Array:
        """Compute the diagonal of `gram`, (d,)."""
        (v,) = jax.tree.leaves(self.dense())
        return jnp.sum(jnp.square(v), axis=(0, *range(2, v.ndim)))

    def nonzero(self) -> jax.Array:
        """Return whether each message has a nonzero number, or term of a product, (k,) bool."""
        return products.nonzero(self._tree)

    def dense(self) -> PyTree:
        """Compute the numbers themselves, leaves (k, …), without the memory saved by factors."""

        def one(leaf):
            return products.rows(leaf) if isinstance(leaf, Product) else leaf

        return products.tree_map(one, self._tree)


def along_clients(values: jax.Array, leaf: jax.Array) -> jax.Array:
    """Reshape one value per client, (k,), to broadcast against a leaf (k, …)."""
    return values.reshape(values.shape + (1,) * (leaf.ndim - 1))


def widened(message: PyTree) -> PyTree:
    """Cast every leaf of a client's message narrower than float32 up to it, before clipping.

    A norm summed in bfloat16 may miss its bound by a hundredth, and noise of 16 bits has a thousand
    values. The engine widens the messages of every algorithm; a release has their types.
    """

    def one(path, leaf):
        # The type of a product may hide the type of one factor.
        for part in jax.tree.leaves(leaf):
            if not jnp.issubdtype(part.dtype, jnp.floating):
                where = jax.tree_util.keystr(path) or "its only leaf"
                raise ValueError(
                    "a message must hold real floating numbers, which can be clipped and noised, "
                    f"got {part.dtype}{list(leaf.shape)} at {where}"
                )

        def wide(part):
            return part.astype(jnp.promote_types(part.dtype, jnp.float32))

        return jax.tree.map(wide, leaf)

    message = products.unsealed(message)
    return jax.tree_util.tree_map_with_path(one, message, is_leaf=products.is_product)
