"""Products of two thin matrices, kept as factors.

The update of a linear model by r examples is RᵀX, with the derivatives R (r, c) in the outputs and
the features X (r, d). Norms, multiples and sums of such updates need only the factors. A user's
function on the factors, `jax.tree.map` included, would compute something else than on the matrix:
so a client sends them `Sealed`, and a mechanism gets all messages as one `Opaque` object.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

PyTree = Any


class Opaque:
    """An object that `jax.tree.map` keeps as a leaf and every array operation refuses."""

    instead: str

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"a {type(self).__name__} object is no array: {self.instead}")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __pow__ = __rpow__ = _refuse
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __neg__ = __abs__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = __iter__ = __len__ = __float__ = _refuse
    __array__ = _refuse


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Product:
    """leftᵀ·right in place of an array (..., c, d), of (..., r, c) and (..., r, d).

    `jax.tree.map` acts on the factors, whose rows i are one term of a sum of r outer products.
    """

    left: jax.Array
    right: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, (..., c, d)."""
        return (*self.left.shape[:-2], self.left.shape[-1], self.right.shape[-1])

    @property
    def dtype(self) -> Any:
        """Element type of the matrix."""
        return jnp.result_type(self.left.dtype, self.right.dtype)


class Sealed(Opaque):
    """A product as a leaf of a client's message; only the engine reads its factors."""

    instead = "an update of a linear model may be kept as two factors; dense() multiplies them"

    def __init__(self, product: Product):
        self.product = product

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, (c, d)."""
        return self.product.shape

    @property
    def dtype(self) -> Any:
        """Element type of the matrix."""
        return self.product.dtype

    def dense(self) -> jax.Array:
        """Return the matrix (c, d)."""
        return dense(self.product)


def unsealed(message: PyTree) -> PyTree:
    """Replace the sealed products of a message by `Product`s."""
    return jax.tree.map(lambda leaf: leaf.product if isinstance(leaf, Sealed) else leaf, message)


def shapes(message: PyTree) -> PyTree:
    """Return the shapes of a message, (c, d) for a product."""
    return tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), message)


def leaves(message: PyTree) -> list[Any]:
    """Return the leaves of a message: arrays and products."""
    return jax.tree.leaves(message, is_leaf=is_product)


def any_of(message: PyTree) -> bool:
    """Return whether a message has a product among its leaves."""
    return any(isinstance(leaf, Product) for leaf in leaves(message))


def tree_map(function: Callable[[Any], Any], message: PyTree) -> PyTree:
    """Map over the leaves of a message: arrays and products."""
    return jax.tree.map(function, message, is_leaf=is_product)


def rescale(function: Callable[[jax.Array], jax.Array], message: PyTree) -> PyTree:
    """Apply a scaling to a message, through one of the factors of each product.

    `function` multiplies an array by numbers that do not depend on the last two axes, or sets
    everything along them to zero.
    """

    def one(leaf):
        if isinstance(leaf, Product):
            return Product(function(leaf.left), leaf.right)
        return function(leaf)

    return tree_map(one, message)


def dense(message: PyTree) -> PyTree:
    """Multiply out every product of a message, leaves (..., c, d)."""

    def one(leaf):
        if not isinstance(leaf, Product):
            return leaf
        return jnp.einsum("...rc,...rd->...cd", leaf.left, leaf.right, precision=_EXACT)

    return tree_map(one, message)


def rows(product: Product) -> jax.Array:
    """Compute left_kᵀ·right_k of each client, (k, c, d), zero where cleared, as in `total`."""
    return _without_cleared(lambda right: dense(Product(product.left, right)), product)


def total(product: Product) -> jax.Array:
    """Compute Σ_k left_kᵀ·right_k, (c, d), as one matrix product.

    A row of zeros in `left` adds nothing even if `right` holds NaN, so messages that `rescale` has
    cleared do not count.
    """
    c, d = product.shape[-2:]

    def multiply(right):
        left = product.left.reshape(-1, c)
        return jnp.matmul(left.T, right.reshape(-1, d), precision=_EXACT)

    return _without_cleared(multiply, product)


def _without_cleared(multiply: Callable[[jax.Array], jax.Array], product: Product) -> jax.Array:
    """Return `multiply(right)`, without rows of `right` that meet zeros if it is not finite."""
    # Looking for NaN in the result is cheaper than in the factors.
    result = multiply(product.right)
    usable = jnp.all(jnp.isfinite(result))
    return jax.lax.cond(usable, lambda: result, lambda: multiply(_cleared(product)))


def nonzero(messages: PyTree) -> jax.Array:
    """Return which messages of a chunk have a nonzero number or product term, (k,) bool."""

    def one(leaf):
        if isinstance(leaf, Product):
            leaf = jnp.any(leaf.left != 0, axis=-1) & jnp.any(leaf.right != 0, axis=-1)
        return jnp.any(leaf.reshape(leaf.shape[0], -1) != 0, axis=1)

    return functools.reduce(jnp.logical_or, map(one, leaves(messages)))


def squared_norm(product: Product) -> jax.Array:
    """Compute an upper bound on ‖leftᵀ·right‖²_F, (), that exceeds it by the possible rounding.

    ‖RᵀX‖² = Σ_ij G_ij H_ij with the Gram matrices G = XXᵀ and H = RRᵀ. Terms may cancel, so the
    error is relative to the sum of their sizes, at most B = (Σ_i ‖x_i‖‖r_i‖)². With d products in
    an element of G, c in one of H and r² in the result, the error is below (d + c + r²)·(ulp/2)·B
    in any order of summation, to first order; the rounding of a clipped R adds 3·(ulp/2)·B. The
    bound adds twice these, without a derivative, and for underflow up to 2d·tiny per element of G
    and 2c·tiny per element of H, where tiny is the smallest normal number.

    The result is ∞ if a Gram matrix is not finite, possibly before the product's norm overflows.
    """
    left, right = product.left, product.right
    (r, c), d = left.shape, right.shape[-1]
    left_gram = jnp.matmul(left, left.T, precision=_EXACT)
    right_gram = jnp.matmul(right, right.T, precision=_EXACT)
    # Reverse mode would multiply an infinite number by a derivative of 0.
    usable = jnp.isfinite(jnp.sum(left_gram * right_gram))
    left_gram, right_gram = (jnp.where(usable, gram, 0) for gram in (left_gram, right_gram))
    left_norms = jnp.sqrt(jnp.diagonal(jax.lax.stop_gradient(left_gram)))
    right_norms = jnp.sqrt(jnp.diagonal(jax.lax.stop_gradient(right_gram)))
    info = jnp.finfo(product.dtype)
    rounding = (c + d + r * r + 16) * info.eps * jnp.sum(left_norms * right_norms) ** 2
    underflow = 4 * info.tiny * (d * jnp.sum(left_norms) ** 2 + c * jnp.sum(right_norms) ** 2)
    squared = jnp.sum(left_gram * right_gram) + (rounding + underflow).astype(product.dtype)
    return jnp.where(usable, squared, jnp.inf)


_EXACT = jax.lax.Precision.HIGHEST
"""Accelerators round factors to fewer bits by default, so norms could exceed their bounds."""


def is_product(node: Any) -> bool:
    """Return whether a node of a message is a product, for `is_leaf`."""
    return isinstance(node, Product)


def _cleared(product: Product) -> jax.Array:
    """Return `right` with zeros for rows that are not finite and meet zeros in `left`."""
    counts = jnp.any(product.left != 0, axis=-1) | jnp.all(jnp.isfinite(product.right), axis=-1)
    return jnp.where(counts[..., None], product.right, 0)
