"""Robust aggregation: a median, a trimmed mean or Krum of all messages, in place of their sum.

fedjaxsim run --algorithm fedavg --mechanism experiments/gallery/robust.py:median --data digits

They resist clients that send anything, and have no ε. Noise on a mean of clipped messages hides a
client because that client moves the mean by C/m at most. No such bound holds for these centers: for
some messages of the others, one client moves a median from one end of their range to the other, and
Krum from one client's whole message to another's. Clipping (`fjs.gaussian()`) also bounds what one
client can do, and has an ε.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import fedjaxsim as fjs


def median() -> fjs.Mechanism:
    """Release the median of the messages, coordinate by coordinate."""
    return robust(lambda messages: jnp.nanmedian(messages, axis=0))


def trimmed_mean(*, share: float = 0.2) -> fjs.Mechanism:
    """Release the mean without the largest and smallest values of each coordinate.

    Args:
      share: Share of the messages to leave out at each end.
    """

    def center(messages):
        low, high = jnp.nanquantile(messages, jnp.array([share, 1 - share]), axis=0)
        inside = (messages >= low) & (messages <= high)
        return jnp.nanmean(jnp.where(inside, messages, jnp.nan), axis=0)

    return robust(center)


def krum(*, broken: int = 1) -> fjs.Mechanism:
    """Release the message nearest to its n − broken − 2 nearest ones (Blanchard et al. 2017).

    Args:
      broken: Number of clients that may send anything.
    """

    def center(messages):
        apart = jnp.sum((messages[:, None] - messages[None]) ** 2, axis=-1)
        n = jnp.sum(~jnp.isnan(messages[:, 0]))
        near = jnp.sort(apart, axis=1)[:, 1:]  # NaN comes last; the first distance is to itself
        counted = jnp.arange(near.shape[1]) < jnp.maximum(n - broken - 2, 1)
        return messages[jnp.nanargmin(jnp.sum(jnp.where(counted, near, 0), axis=1))]

    return robust(center)


def robust(center: Callable[[jax.Array], jax.Array]) -> fjs.Mechanism:
    """Keep all messages, one row per client, and release a center of them.

    `center` takes (m, p) with NaN in the rows of absent clients, and returns (p,).
    """

    def zero(message, num_clients):
        def rows(leaf):
            return jax.ShapeDtypeStruct((num_clients, *leaf.shape), leaf.dtype)

        present = jax.ShapeDtypeStruct((num_clients,), jnp.int32)
        return fjs.privacy.zeros((jax.tree.map(rows, message), present))

    def add(accumulator, messages, mask, ids, state, hparams):
        bounded = messages.bound(jnp.asarray(jnp.inf), mask)  # what is not finite becomes zero
        rows, present = accumulator.total
        total = bounded.messages.add_rows(rows, ids), present.at[ids].add(mask)
        return fjs.privacy.with_total(accumulator, bounded, total)

    def release(accumulator, denominator, key, state, hparams, round_):
        rows, present = accumulator.total
        leaves, structure = jax.tree.flatten(rows)
        matrix = jnp.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)
        middle = jnp.nan_to_num(center(jnp.where(present[:, None] > 0, matrix, jnp.nan)))
        parts = jnp.split(middle, np.cumsum([leaf[0].size for leaf in leaves])[:-1])
        shaped = [part.reshape(leaf.shape[1:]) for part, leaf in zip(parts, leaves, strict=True)]
        return fjs.privacy.Release(structure.unflatten(shaped), state, jnp.asarray(jnp.nan))

    event = fjs.privacy.NoKnownCost()
    return fjs.privacy.Mechanism(event, lambda hparams: (), zero, add, release)
