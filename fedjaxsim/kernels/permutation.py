"""Random orders of a client's rows, without a sort and without an array of rows.

A position in an order is mapped to a row by itself, so a minibatch costs what its own rows do. The
numbers come from a hash of the client's key, as good as a shuffle needs. No ε depends on an order:
samplers that permute clients get no amplification from it.
"""

import jax
import jax.numpy as jnp

from fedjaxsim.kernels import threefry

FEW_ROWS = 256
"""Most rows of a client for which ranks are cheaper than a shuffle in rounds."""
_ROUNDS = 24
"""Rounds of the swap-or-not shuffle."""


def permuted(key: jax.Array, position: jax.Array, count: jax.Array, most: int = 0) -> jax.Array:
    """Return the elements at `position` of a random permutation of 0 … count−1.

    Args:
      key: a random key.
      position: (b,) integers in [0, count).
      count: () int32 ≥ 1.
      most: a static bound on `count`; 0 if there is none.

    Returns:
      (b,) int32, distinct for distinct positions.
    """
    position = position.astype(jnp.int32)
    if 0 < most <= FEW_ROWS:
        return by_ranks(key, position, count, most)
    return by_swaps(key, position, count)


def by_ranks(key: jax.Array, position: jax.Array, count: jax.Array, most: int) -> jax.Array:
    """Return the ranks of independent random numbers, which are a uniformly random permutation.

    It takes `most` hashes and b · `most` comparisons. Equal numbers, of probability below
    count²/2³³, keep their order.
    """
    words = jax.random.key_data(key)

    def number(element):
        h = _mixed(element.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) ^ words[0])
        return _mixed(h + words[1])

    other = jnp.arange(most, dtype=jnp.int32)[None]
    mine, others = number(position)[:, None], number(other)
    before = (others < mine) | ((others == mine) & (other < position[:, None]))
    return jnp.sum(before & (other < count), axis=1, dtype=jnp.int32)


def by_swaps(key: jax.Array, position: jax.Array, count: jax.Array) -> jax.Array:
    """Return elements of a swap-or-not shuffle (Hoang, Morris, Rogaway 2012).

    In each round a coin decides whether to swap the pair x ↔ (K − x) mod count. The distance from
    uniform falls geometrically in the number of rounds.
    """
    offset_key, coin_key = threefry.split(key)
    offsets = threefry.randint(offset_key, (_ROUNDS,), count)
    coins = threefry.bits(coin_key, (_ROUNDS,))

    def pairing(x, round_):
        offset, coin = round_
        partner = offset - x
        partner = jnp.where(partner < 0, partner + count, partner)
        # Both members of a pair see the same coin, a hash of the larger one and the round.
        larger = jnp.maximum(x, partner).astype(jnp.uint32)
        h = _mixed(larger * jnp.uint32(0x9E3779B1) + coin)
        return jnp.where((h >> 31) == 1, partner, x), None

    # A loop: unrolled, newer compilers duplicate values used three times a round exponentially.
    return jax.lax.scan(pairing, position, (offsets, coins))[0]


def _mixed(h: jax.Array) -> jax.Array:
    """Mix the bits of uint32 (the finalizer of MurmurHash3)."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
