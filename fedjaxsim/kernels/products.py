"""Matrices that are products of two thin ones, and are never formed.

The update of a linear model by r examples is RᵀX, of rank at most r: the derivatives R (r, c) with
respect to the outputs and the features X (r, d) say all of it. Its norm, its multiples and the sum
of many of them need only the factors. What a function of one's own would do to the factors,
`jax.tree.map` included, would be wrong of the matrix: so a client sends them `Sealed`, and a
mechanism gets all messages as one `Opaque` object.
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
    """What `jax.tree.map` passes on as it is, and no function or operator takes for an array.

    JAX's own functions refuse it with a TypeError as well.
    """

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
    """leftᵀ·right in place of an array (c, d); `jax.tree.map` acts on the factors.

    Row i of `left` and row i of `right` are one term of a sum of r outer products.

    Attributes:
      left: (..., r, c).
      right: (..., r, d).
    """

    left: jax.Array
    right: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., c, d), of the matrix that the product stands for."""
        return (*self.left.shape[:-2], self.left.shape[-1], self.right.shape[-1])

    @property
    def dtype(self) -> Any:
        """The element type of that matrix."""
        return jnp.result_type(self.left.dtype, self.right.dtype)


class Sealed(Opaque):
    """A product as a leaf of what a client sends: its factors are the engine's alone.

    Attributes:
      product: of one client.
    """

    instead = "an update of a linear model may be kept as two factors; dense() multiplies them"

    def __init__(self, product: Product):
        self.product = product

    @property
    def shape(self) -> tuple[int, ...]:
        """(c, d), of the matrix that the product stands for."""
        return self.product.shape

    @property
    def dtype(self) -> Any:
        """The element type of that matrix."""
        return self.product.dtype

    def dense(self) -> jax.Array:
        """The matrix (c, d)."""
        return dense(self.product)


def unsealed(message: PyTree) -> PyTree:
    """What a client sends, with `Product`s in place of sealed ones."""
    return jax.tree.map(lambda leaf: leaf.product if isinstance(leaf, Sealed) else leaf, message)


def shapes(message: PyTree) -> PyTree:
    """The message as shapes, (c, d) for a product."""
    return tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), message)


def leaves(message: PyTree) -> list[Any]:
    """The leaves of a message: arrays and products."""
    return jax.tree.leaves(message, is_leaf=is_product)


def any_of(message: PyTree) -> bool:
    """Whether a message has a product among its leaves."""
    return any(isinstance(leaf, Product) for leaf in leaves(message))


def tree_map(function: Callable[[Any], Any], message: PyTree) -> PyTree:
    """Maps over the leaves of a message: arrays and products."""
    return jax.tree.map(function, message, is_leaf=is_product)


def rescale(function: Callable[[jax.Array], jax.Array], message: PyTree) -> PyTree:
    """Multiplies a message by numbers, or clears it, through one of the factors of each product.

    Args:
      function: multiplies an array by numbers that do not depend on the last two axes, or sets all
        that lies along them to zero.
      message: pytree of arrays and products.
    """

    def one(leaf):
        if isinstance(leaf, Product):
            return Product(function(leaf.left), leaf.right)
        return function(leaf)

    return tree_map(one, message)


def dense(message: PyTree) -> PyTree:
    """The message with every product multiplied out, leaves (..., c, d)."""

    def one(leaf):
        if not isinstance(leaf, Product):
            return leaf
        return jnp.einsum("...rc,...rd->...cd", leaf.left, leaf.right, precision=_EXACT)

    return tree_map(one, message)


def total(product: Product) -> jax.Array:
    """Σ_k left_kᵀ·right_k, (c, d), as one matrix product.

    A row of zeros in `left` adds nothing, whatever the row of `right` holds, NaN included: so a
    message that `rescale` has cleared is absent.

    Args:
      product: of k clients, left (k, r, c) and right (k, r, d).
    """
    c, d = product.shape[-2:]

    def multiply(right):
        left = product.left.reshape(-1, c)
        return jnp.matmul(left.T, right.reshape(-1, d), precision=_EXACT)

    # Whether there is a NaN to be cleared shows in the sum, at less cost than in the factors.
    sums = multiply(product.right)
    usable = jnp.all(jnp.isfinite(sums))
    return jax.lax.cond(usable, lambda: sums, lambda: multiply(_cleared(product)))


def nonzero(messages: PyTree) -> jax.Array:
    """Which messages of a chunk have a number, or a term of a product, that is not 0, (k,) bool."""

    def one(leaf):
        if isinstance(leaf, Product):
            leaf = jnp.any(leaf.left != 0, axis=-1) & jnp.any(leaf.right != 0, axis=-1)
        return jnp.any(leaf.reshape(leaf.shape[0], -1) != 0, axis=1)

    return functools.reduce(jnp.logical_or, map(one, leaves(messages)))


def squared_norm(product: Product) -> jax.Array:
    """A bound on ‖leftᵀ·right‖²_F, (), above it by no more than rounding could have taken away.

    ‖RᵀX‖² = Σ_ij G_ij H_ij with the Gram matrices G = XXᵀ and H = RRᵀ. Terms of either sign may
    cancel, so the error is relative not to the result, but to the sum of their sizes, at most
    B = (Σ_i ‖x_i‖‖r_i‖)²: G is summed from d products, H from c, and the result from r², so that
    in whatever order this is done the error is below (d + c + r²)·(ulp/2)·B, to first order. The
    rounding of a clipped R adds 3·(ulp/2)·B. Twice these bounds is added here, without a
    derivative. Numbers that underflow have a share of their own: up to 2d·tiny in an element of G
    and 2c·tiny in one of H, where tiny is the smallest normal number.

    The result is ∞ where a Gram matrix is not finite, which may happen before the product's own
    norm overflows.

    Args:
      product: left (r, c), the derivatives R, and right (r, d), the features X.
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
"""Accelerators round factors to fewer bits by default, and norms could exceed their bounds."""


def is_product(node: Any) -> bool:
    """Whether a node of a message is a product, for `is_leaf`."""
    return isinstance(node, Product)


def _cleared(product: Product) -> jax.Array:
    """Return `right`, with zeros for rows that are not finite where the term is zero anyway."""
    counts = jnp.any(product.left != 0, axis=-1) | jnp.all(jnp.isfinite(product.right), axis=-1)
    return jnp.where(counts[..., None], product.right, 0)
