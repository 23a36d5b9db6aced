"""Random orders of a client's rows, without a sort and without an array of rows.

A position in an order is mapped to a row by itself, so a minibatch costs what its own rows do. The
numbers come from a hash of the client's key, as good as a shuffle needs. No ε depends on an order:
samplers that permute clients get no amplification from it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

FEW_ROWS = 256
"""Most rows of a client for which ranks are cheaper than a shuffle in rounds."""
_ROUNDS = 24
"""Rounds of the swap-or-not shuffle."""


Order = Callable[[jax.Array], jax.Array]
"""(b,) distinct integers in [0, count) -> (b,) int32, their elements in a random order."""


def random_order(key: jax.Array, count: jax.Array, most: int = 0) -> Order:
    """Draw a random permutation of 0 … count−1.

    Whatever does not depend on a position is computed here: outside a loop over minibatches.
    `most` is a static bound on `count`, () int32 ≥ 1; 0 if there is none.
    """
    return by_ranks(key, count, most) if 0 < most <= FEW_ROWS else by_swaps(key, count)


def by_ranks(key: jax.Array, count: jax.Array, most: int) -> Order:
    """Return the order by ranks of independent random numbers, a uniformly random permutation.

    It takes `most` hashes, and `most` comparisons for each position. Equal numbers, of probability
    below count²/2³³, keep their order.
    """
    other = jnp.arange(most, dtype=jnp.int32)[None]
    numbers = _numbers(key, other)

    def at(position):
        position = position.astype(jnp.int32)[:, None]
        mine = _numbers(key, position)
        before = (numbers < mine) | ((numbers == mine) & (other < position))
        return jnp.sum(before & (other < count), axis=1, dtype=jnp.int32)

    return at


def by_swaps(key: jax.Array, count: jax.Array) -> Order:
    """Return the order of a swap-or-not shuffle (Hoang, Morris, Rogaway 2012).

    In each round a coin decides whether to swap the pair x ↔ (K − x) mod count. The distance from
    uniform falls geometrically in the number of rounds.
    """
    offsets, coins = _numbers(key, jnp.arange(2 * _ROUNDS).reshape(2, _ROUNDS))
    size = jnp.maximum(count, 1).astype(jnp.uint32)
    rounds = (offsets % size).astype(jnp.int32), coins

    def pairing(x, round_):
        offset, coin = round_
        partner = offset - x
        partner = jnp.where(partner < 0, partner + count, partner)
        # Both members of a pair see the same coin, a hash of the larger one and the round.
        larger = jnp.maximum(x, partner).astype(jnp.uint32)
        h = _mixed(larger * jnp.uint32(0x9E3779B1) + coin)
        return jnp.where((h >> 31) == 1, partner, x), None

    def at(position):
        # A CPU computes whole vectors of eight, and single numbers up to five times slower.
        padded = jnp.pad(position.astype(jnp.int32), (0, -len(position) % 8))
        # A loop: unrolled, newer compilers duplicate values used three times a round exponentially.
        return jax.lax.scan(pairing, padded, rounds)[0][: len(position)]

    return at


def _numbers(key: jax.Array, element: jax.Array) -> jax.Array:
    """Hash integers with a key; return a random uint32 for each."""
    words = jax.random.key_data(key)
    h = _mixed(element.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) ^ words[0])
    return _mixed(h + words[1])


def _mixed(h: jax.Array) -> jax.Array:
    """Mix the bits of uint32 (the finalizer of MurmurHash3)."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
