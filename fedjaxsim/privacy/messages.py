"""Messages of a chunk of clients, their clipping, and the operations that a mechanism may use."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim import checks
from fedjaxsim.kernels import products
from fedjaxsim.kernels.products import Opaque, Product

PyTree = Any

_LONG = 1024
"""Length of a message from which on a CPU sums many faster as a product with ones."""


class Bounded(NamedTuple):
    """`Messages` of global norm at most the clip norm, with flags (k,) bool, or one, ().

    One was `clipped` if its norm was above the bound; one that was not `finite` became zero.
    """

    messages: Any
    clipped: jax.Array
    finite: jax.Array


class Messages(Opaque):
    """The messages of k clients, in any memory layout.

    Updates of linear models may be kept as factors (see `kernels.products`), so this is not a
    pytree of arrays: `jax.tree.map` takes it for a leaf, and arithmetic on it raises TypeError. The
    methods give the same numbers for either layout, up to rounding.

    Example:
      >>> messages = fjs.Messages({"w": jnp.array([[3.0, 4.0], [0.0, 1.0]])})
      >>> messages.dense()["w"].shape
      (2, 2)
    """

    instead = "a mechanism may bound, scale and sum messages, or call dense() for their numbers"

    def __init__(self, tree: PyTree):
        """Take a pytree of arrays, leaves (k, …), or of `Product`s of k clients."""
        self._tree = tree

    def bound(self, clip_norm: jax.Array, mask: jax.Array, ord: int = 2) -> Bounded:
        """Clip each message to a global norm; absent ones, mask (k,) False, become zero.

        `ord` is 2 for the L2 norm, which suits Gaussian noise, or 1 for L1, which suits Laplace.

        Example:
          >>> sent = fjs.Messages({"w": jnp.array([[8.0, 0.0], [0.0, 0.5], [9.0, 9.0]])})
          >>> bounded = sent.bound(jnp.asarray(2.0), jnp.array([True, True, False]))
          >>> bounded.messages.total()["w"].round(4).tolist(), bounded.clipped.tolist()
          ([2.0, 0.5], [True, False, False])
        """
        checks.one_of((1, 2), ord=ord)
        tree = self._tree if ord == 2 else self.dense()
        clip = functools.partial(clip_by_global_norm, ord=ord)
        clipped = jax.vmap(clip, in_axes=(0, None))(tree, clip_norm)
        present = products.rescale(
            lambda leaf: jnp.where(along_clients(mask, leaf), leaf, 0), clipped.messages
        )
        return Bounded(Messages(present), clipped.clipped & mask, clipped.finite | ~mask)

    def paths(self) -> list[str]:
        """Return the path of each leaf, as `paths_of`."""
        return paths_of(self._tree)

    def bound_parts(
        self, parts: Sequence[str], clip_norms: Mapping[str, jax.Array], mask: jax.Array
    ) -> Bounded:
        """Clip each part of a message to its own L2 norm, by its name in `clip_norms`.

        `parts` has the part of each leaf, in the order of `paths`. A message is clipped if one of
        its parts is, and becomes zero if one is not finite.
        """
        leaves, structure = jax.tree.flatten(self._tree, is_leaf=products.is_product)
        places = {name: [k for k, part in enumerate(parts) if part == name] for name in clip_norms}
        clipped, finite = jnp.zeros_like(mask), jnp.ones_like(mask)
        for name, clip_norm in clip_norms.items():
            part = Messages([leaves[k] for k in places[name]]).bound(clip_norm, mask)
            for k, leaf in zip(places[name], part.messages._tree, strict=True):
                leaves[k] = leaf
            clipped, finite = clipped | part.clipped, finite & part.finite

        def present(leaf):
            return jnp.where(along_clients(finite, leaf), leaf, 0)

        zeroed = products.rescale(present, jax.tree.unflatten(structure, leaves))
        return Bounded(Messages(zeroed), clipped & finite, finite)

    def map(self, function: Callable[[PyTree], PyTree]) -> "Messages":
        """Apply a function of one client's message to each, as a pytree of arrays."""
        return Messages(jax.vmap(function)(self.dense()))

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


def paths_of(message: PyTree) -> list[str]:
    """Return the path of each leaf, such as "layer_0/kernel"; "" for a single leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(message, is_leaf=products.is_product)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]


def along_clients(values: jax.Array, leaf: jax.Array) -> jax.Array:
    """Reshape one value per client, (k,), to broadcast against a leaf (k, …)."""
    return values.reshape(values.shape + (1,) * (leaf.ndim - 1))


def wide_type(leaf: Any) -> Any:
    """Return the type in which sums of such numbers are kept: float32 at least, or integers."""
    narrow = jnp.issubdtype(leaf.dtype, jnp.floating)
    return jnp.promote_types(leaf.dtype, jnp.float32) if narrow else leaf.dtype


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

        return jax.tree.map(lambda part: part.astype(wide_type(part)), leaf)

    message = products.unsealed(message)
    return jax.tree_util.tree_map_with_path(one, message, is_leaf=products.is_product)


def clip_by_global_norm(message: PyTree, clip_norm: jax.Array, ord: int = 2) -> Bounded:
    """Scale one client's message to a global L2 or L1 norm of at most `clip_norm`.

    clip(v, C) = v · min(1, C/‖v‖), the norm taken over the whole pytree; C = ∞ leaves finite
    messages unchanged. A message with a NaN or an infinity (or with an overflowing norm) becomes
    zero, so the sensitivity of the sum is C for any message. The derivative is the formula's,
    with 0 for the factor at v = 0 and for C = ∞; at ‖v‖ = C it is the derivative from inside (the
    unclipped side).
    """
    if ord == 2:
        squared = squared_norm(message)
    else:
        absolute = [jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(message)]
        squared = jnp.square(sum(absolute, jnp.zeros(())))
    finite = jnp.isfinite(squared)
    factor, clipped = _factor(squared, clip_norm)
    scaled = products.rescale(
        lambda leaf: jnp.where(finite, leaf, 0) * factor.astype(leaf.dtype), message
    )
    return Bounded(scaled, clipped, finite)


def clip_factor(squared: jax.Array, clip_norm: jax.Array) -> jax.Array:
    """Return min(1, C/‖v‖) of squared norms of any shape; 0 for one that is not finite."""
    return jnp.where(jnp.isfinite(squared), _factor(squared, clip_norm)[0], 0)


def _factor(squared: jax.Array, clip_norm: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the factor of finite vectors, and whether it is below 1."""
    # A norm is not differentiable at 0 and ∞/‖v‖ has no usable derivative: without scaling, the
    # unused factor is computed from harmless numbers.
    bound = clip_norm * _margin(jnp.result_type(squared))
    clipped = jnp.isfinite(squared) & (squared > jnp.square(bound))
    norm = jnp.sqrt(jnp.where(clipped, squared, 1.0))
    return jnp.where(clipped, jnp.where(clipped, bound, 1.0) / norm, 1.0), clipped


def _margin(dtype: Any) -> float:
    """Return the relative room left below the bound for the rounding of the norm itself.

    The norm of p numbers is summed in blocks, with a relative error of a few ulp times √log p:
    below 128 ulp for any p that fits in memory, so the true norm never exceeds the bound. The norm
    of a product comes from Gram matrices with their own room; see `products.squared_norm`.
    """
    return 1.0 - 128 * float(np.finfo(dtype).eps)


def squared_norm(message: PyTree) -> jax.Array:
    """Compute ‖v‖₂² over the whole pytree, (); never far below it through rounding."""

    def one(leaf):
        if isinstance(leaf, Product):
            return products.squared_norm(leaf)
        # XLA turns a sum of `jnp.square` into a batch of 1 × 1 products on a CPU.
        return jnp.sum(leaf * leaf)

    return sum(map(one, products.leaves(message)), jnp.zeros(()))
