"""Clipping of a message to a bounded global norm, safe at 0, at ∞ and for non-finite messages."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.kernels import products
from fedjaxsim.kernels.products import Product

PyTree = Any


class Clipped(NamedTuple):
    """A clipped message with its flags.

    Attributes:
      message: the message, of global L2 norm at most the clip norm.
      clipped: () bool, whether the norm was above the bound.
      finite: () bool; False where a non-finite message became zero.
    """

    message: PyTree
    clipped: jax.Array
    finite: jax.Array


def _margin(dtype: Any) -> float:
    """Return the relative room left below the bound for the rounding of the norm itself.

    The norm of p numbers is summed in blocks, with a relative error of a few ulp times √log p:
    below 128 ulp for any p that fits in memory, so the true norm never exceeds the bound. The norm
    of a product comes from Gram matrices with room of their own; see `products.squared_norm`.
    """
    return 1.0 - 128 * float(np.finfo(dtype).eps)


def clip_by_global_norm(message: PyTree, clip_norm: jax.Array, ord: int = 2) -> Clipped:
    """Scale one client's message to a global L2 or L1 norm of at most `clip_norm`.

    clip(v, C) = v · min(1, C/‖v‖), the norm taken over the whole pytree; C = ∞ leaves finite
    messages unchanged. A message with a NaN or an infinity (or with an overflowing norm) becomes
    zero, so the sensitivity of the sum is C for any message. The derivative is that of the formula,
    with 0 for the factor at v = 0 and for C = ∞; at ‖v‖ = C it is the derivative from inside (the
    unclipped side).
    """
    squared = squared_norm(message) if ord == 2 else jnp.square(_absolute_sum(message))
    finite = jnp.isfinite(squared)
    factor, clipped = _factor(squared, clip_norm)
    scaled = products.rescale(
        lambda leaf: jnp.where(finite, leaf, 0) * factor.astype(leaf.dtype), message
    )
    return Clipped(scaled, clipped, finite)


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


def squared_norm(message: PyTree) -> jax.Array:
    """Compute ‖v‖₂² over the whole pytree, (); never far below it through rounding."""

    def one(leaf):
        if isinstance(leaf, Product):
            return products.squared_norm(leaf)
        # XLA turns a sum of `jnp.square` into a batch of 1 × 1 products on a CPU.
        return jnp.sum(leaf * leaf)

    return sum(map(one, products.leaves(message)), jnp.zeros(()))


def _absolute_sum(message: PyTree) -> jax.Array:
    """Compute ‖v‖₁ over the whole pytree of arrays, ()."""
    return sum((jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(message)), jnp.zeros(()))
