"""Compression of one client's message, before the mechanism bounds it.

A compressed message is one more function of a client's own data, and the mechanism clips the
result: no ε changes, whatever a compression does to norms.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedjaxsim import checks, keys
from fedjaxsim.algorithm import Algorithm
from fedjaxsim.kernels import products, threefry
from fedjaxsim.kernels.permutation import permuted
from fedjaxsim.privacy.messages import widened

PyTree = Any


class Compression(NamedTuple):
    """A function of one client's message, and the size of its result.

    Attributes:
      apply: `(key, message) -> message`, pytrees of arrays of the same shapes; `key` belongs to
        this client and this round.
      size: `(message) -> bytes` of a compressed message, from its shapes.
    """

    apply: Callable[[jax.Array, PyTree], PyTree]
    size: Callable[[PyTree], int]


def compressed(algorithm: Algorithm, compression: Compression) -> Algorithm:
    """Return the algorithm with compressed messages.

    Args:
      algorithm: any one; an update that it keeps as factors is multiplied out.
      compression: such as `quantize(bits=4)`.

    Raises:
      ValueError: if its messages are compressed already, or this is no compression.
    """
    if not isinstance(compression, Compression):
        raise ValueError(f"compression must be such as quantize(), got {compression!r}")
    if algorithm.message_bytes is not None:
        raise ValueError("the algorithm's messages are compressed already: give one compression")

    @functools.wraps(algorithm.client)
    def client(shared, personal, data, hparams, context):
        personal, message, metrics = algorithm.client(shared, personal, data, hparams, context)
        if not jax.tree.leaves(message):
            raise ValueError("the algorithm sends nothing, so there is nothing to compress")
        message = products.dense(widened(message))
        key = threefry.fold_in(context.key, keys.COMPRESSION)
        return personal, compression.apply(key, message), metrics

    return algorithm._replace(
        client=client, message_bytes=compression.size, averages_statistics=False
    )


def quantize(*, bits: int = 8) -> Compression:
    """Round each number at random to one of 2^bits − 1 levels (Alistarh et al. 2017).

    Levels are evenly spaced between −s and s, with s the largest magnitude of a leaf. A number is
    rounded up with the probability that makes its mean exact, so the compression is unbiased and
    adds at most s²/(2^bits − 2)² to a number's variance. Derivatives are those of the mean.

    Args:
      bits: Bits of each number that a client sends, with one float for each array.

    Raises:
      ValueError: if bits lie outside [2, 16].
    """
    checks.count(2, 16, bits=bits)
    levels = 2 ** (bits - 1) - 1

    def rounded(key, v):
        largest = jnp.max(jnp.abs(v), initial=0)
        step = jnp.where(largest > 0, largest, 1) / levels
        low = jnp.floor(v / step)
        up = threefry.bits(key, v.shape) * 2.0**-32 < v / step - low
        q = jnp.clip(low + up, -levels, levels) * step
        return v + jax.lax.stop_gradient(q - v)

    def apply(key, message):
        leaves, structure = jax.tree.flatten(message)
        leaves = [rounded(threefry.fold_in(key, i), v) for i, v in enumerate(leaves)]
        return jax.tree.unflatten(structure, leaves)

    def size(message):
        return sum(math.ceil(leaf.size * bits / 8) + 4 for leaf in jax.tree.leaves(message))

    return Compression(apply, size)


def top_k(*, kept: float = 0.1) -> Compression:
    """Keep the numbers of largest magnitude, and send zeros for the others (Aji, Heafield 2017).

    A client sends each kept number as a float with its position. What is left out is forgotten.

    Args:
      kept: Part of a message's numbers that a client sends.

    Raises:
      ValueError: if the part lies outside (0, 1].
    """

    def choose(key, v, k):
        return jax.lax.top_k(jnp.abs(v), k)[1], 1.0

    return _sparse(kept, choose, lambda d, k: math.ceil(k * math.ceil(math.log2(max(d, 2))) / 8))


def random_k(*, kept: float = 0.1) -> Compression:
    """Keep numbers drawn at random, multiplied by d/k (Konečný et al. 2016).

    A client sends k of d numbers as floats, and the seed of their positions; unbiased.

    Args:
      kept: Part of a message's numbers that a client sends.

    Raises:
      ValueError: if the part lies outside (0, 1].
    """

    def choose(key, v, k):
        return permuted(key, jnp.arange(k), jnp.int32(v.size)), v.size / k

    return _sparse(kept, choose, lambda d, k: 8)


def _sparse(
    kept: float, choose: Callable[..., Any], position_bytes: Callable[[int, int], int]
) -> Compression:
    """Return the compression that sends the numbers at the positions that `choose` returns."""
    checks.in_range("(0, 1]", kept=kept)

    def apply(key, message):
        flat, restore = ravel_pytree(message)
        positions, factor = choose(key, flat, math.ceil(kept * flat.size))
        return restore(jnp.zeros_like(flat).at[positions].set(flat[positions] * factor))

    def size(message):
        leaves = jax.tree.leaves(message)
        d = sum(leaf.size for leaf in leaves)
        k = math.ceil(kept * d)
        return k * max(leaf.dtype.itemsize for leaf in leaves) + position_bytes(d, k)

    return Compression(apply, size)
