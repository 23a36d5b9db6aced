"""Sums of bounded vectors in integers: exact, and the same in every order.

A float32 sum of many clipped messages is not 1-sensitive: rounding may depend on one client in all
later additions (Casacuberta, Shoemate, Vadhan, Wagaman 2022). Here each number is truncated to a
multiple of C·2⁻ᵏ, which lengthens no vector, and the multiples are added as int32.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from fedjaxsim.checks import Name, SettingError

PyTree = Any
_BITS = 22
"""k where it fits: a float32 of magnitude at most 2²² times the unit is truncated without error."""
_ONE_WORD = 18
"""Smallest k for which one word is enough."""
_LOW = 8
"""Bits that `plus` splits off a word of 31, as a float32 holds 24."""


@register_dataclass
@dataclasses.dataclass(frozen=True)
class IntegerSum:
    """A sum of vectors of norm at most C as multiples of C·2⁻ᵏ.

    Attributes:
      words: one pytree of int32, or two: the multiples are words[0]·2^shift + words[1].
      bits: static, k.
      shift: static, the bits of the second word; 0 with one word.
      dtypes: static, the floating type of each leaf.
    """

    words: tuple[PyTree, ...]
    bits: int = dataclasses.field(metadata={"static": True})
    shift: int = dataclasses.field(metadata={"static": True})
    dtypes: tuple[Any, ...] = dataclasses.field(metadata={"static": True})

    @property
    def shapes(self) -> PyTree:
        """One vector as a pytree of shapes."""
        leaves, structure = jax.tree.flatten(self.words[0])
        pairs = zip(leaves, self.dtypes, strict=True)
        return jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(v.shape, d) for v, d in pairs])


def zero(shapes: PyTree, most: int, fine: bool = False) -> IntegerSum:
    """Return the sum of no vectors, `shapes` being one, with room for `most`.

    Up to 4,096 vectors take one word, and k is 18 to 22. Beyond, or if `fine`, they take two: k is
    up to 44, for 4,097 vectors 34, and each doubling costs it two bits.
    """
    free = min(30 - math.ceil(math.log2(max(most, 1))), _BITS)
    bits, shift = (free, 0) if free >= _ONE_WORD and not fine else (2 * free, free)
    if bits < 1:
        raise ValueError(f"exact sums take at most 2²⁹ clients, got {most}")

    def word():
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.int32), shapes)

    dtypes = tuple(leaf.dtype for leaf in jax.tree.leaves(shapes))
    return IntegerSum((word(), word()) if shift else (word(),), bits, shift, dtypes)


def add(total: IntegerSum, vectors: PyTree, bound: PyTree) -> IntegerSum:
    """Add vectors, leaves (c, ...), each of global L2 norm at most `bound`, which is finite.

    The bound is () or one for each leaf, a pytree of (); the leaf's unit is a share of it.
    """

    def scaled(leaf, bound):
        wide = jnp.promote_types(leaf.dtype, jnp.float32)
        return leaf.astype(wide) * (2.0 ** (total.bits - total.shift) / bound).astype(wide)

    def added(word, terms):
        return jax.tree.map(
            lambda partial, term: partial + jnp.sum(_truncated(term), axis=0, dtype=jnp.int32),
            word,
            terms,
        )

    terms = jax.tree.map(scaled, vectors, _for_leaves(bound, vectors))
    words = [added(total.words[0], terms)]
    if total.shift:  # what truncation leaves is exact in floats
        fractions = jax.tree.map(lambda leaf: (leaf - jnp.trunc(leaf)) * 2.0**total.shift, terms)
        words.append(added(total.words[1], fractions))
    return dataclasses.replace(total, words=tuple(words))


def plus(total: IntegerSum, noise: PyTree, bound: PyTree) -> PyTree:
    """Return the sum plus noise as floats, rounded by as much as the noise is and once after it.

    Rounded before the noise, a large sum would move by more than its vectors do. So the noise is
    added to the lowest bits of the sum, which floats hold exactly, and then the others are.
    """

    def number(noise, bound, high, *low):
        unit = bound * 2.0**-total.bits
        wide = jnp.promote_types(noise.dtype, jnp.float32)
        scale, value = 2.0**total.shift, noise.astype(wide) / unit.astype(wide)
        if low:  # The carry first: the words of a small sum may be large, and of opposite sign.
            high, low_bits = high + (low[0] >> total.shift), low[0] & (2**total.shift - 1)
            value = value + low_bits.astype(wide)
        middle = high & (2**_LOW - 1)
        value = value + middle.astype(wide) * scale
        value = value + (high - middle).astype(wide) * scale
        return (value * unit.astype(wide)).astype(noise.dtype)

    return jax.tree.map(number, noise, _for_leaves(bound, noise), *total.words)


def _for_leaves(bound: PyTree, tree: PyTree) -> PyTree:
    """Return the bound of each leaf, in the structure of the tree."""
    leaves, structure = jax.tree.flatten(tree)
    bounds = jax.tree.leaves(bound)
    return jax.tree.unflatten(structure, bounds * len(leaves) if len(bounds) == 1 else bounds)


@jax.custom_jvp
def _truncated(x: jax.Array) -> jax.Array:
    return x.astype(jnp.int32)


@_truncated.defjvp
def _refuse(primals, tangents):
    raise SettingError(
        "exact sums have no derivative: leave ", Name("exact_sums"), " out where one is asked for"
    )
