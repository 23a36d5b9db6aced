"""A random permutation, element by element, that allocates nothing of its size."""

import jax
import jax.numpy as jnp

from fedjaxsim.kernels import threefry

_ROUNDS = 24
"""Rounds of the swap-or-not shuffle in `permuted`."""


def permuted(key: jax.Array, position: jax.Array, count: jax.Array) -> jax.Array:
    """Return the elements at `position` of a random permutation of 0 … count−1.

    The swap-or-not shuffle (Hoang, Morris, Rogaway 2012) allocates nothing of size `count`: in each
    round a coin decides whether to swap the pair x ↔ (K − x) mod count. Its distance from uniform
    falls geometrically in the number of rounds.

    Args:
      key: a random key.
      position: integers in [0, count), any shape.
      count: () int32 ≥ 1.

    Returns:
      int32 of the shape of `position`, distinct for distinct positions.
    """
    offset_key, coin_key = threefry.split(key)
    offsets = threefry.randint(offset_key, (_ROUNDS,), count)
    coins = threefry.bits(coin_key, (_ROUNDS,))

    def pairing(x, round_):
        offset, coin = round_
        partner = offset - x
        partner = jnp.where(partner < 0, partner + count, partner)
        # Both members of a pair see the same coin, a hash of the larger one and the round.
        h = jnp.maximum(x, partner).astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + coin
        h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
        h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
        return jnp.where((h >> 31) == 1, partner, x), None

    # A loop: unrolled, newer compilers duplicate values used three times a round exponentially.
    return jax.lax.scan(pairing, position.astype(jnp.int32), (offsets, coins))[0]
