"""Noise on the matrix of all clients' messages: client-level DP of every published model."""

import jax
import jax.numpy as jnp

from fedjaxsim.hyperparameters import reads
from fedjaxsim.privacy import mechanisms as base
from fedjaxsim.privacy.events import GAUSSIAN


@reads(base.CLIP_NORM, base.NOISE_MULTIPLIER)
def every_row() -> base.Mechanism:
    """Add Gaussian noise to the matrix of all clients' messages (PMTL, Figure 1).

    release = V + N(0, (zC)² I), leaves (m, …) for messages (…). Row k of V is clip(v_k, C) if
    client k is in the cohort, and 0 if not. Nothing is divided, and every row is noised in every
    round: a model that sums its row's releases gets one client's signal and the noise of all
    rounds. Client-level DP asks for this in multi-task learning where all models are published.

    Accumulator and release take the memory of m messages, on every device.

    Formal guarantees:
      * Setting one client's message to zero moves V by at most C, in one row alone; replacing its
        data by at most 2C. The noise has standard deviation zC in every coordinate. So in units of
        z the sensitivity is 1 (zero-out) and 2 (replace), and a release costs as much as one of
        `gaussian`, sampled or not.
      * Participation does not show in the noise, which is the same for all rows.
      * With z = 0 there is no guarantee.
    """

    def zero(message, num_clients):
        return base.zeros(
            jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((num_clients, *leaf.shape), leaf.dtype), message
            )
        )

    def add(accumulator, messages, mask, ids, state, hparams):
        del state
        bounded = messages.bound(hparams.clip, mask)
        return base.counted(accumulator, bounded, bounded.messages.add_rows(accumulator.total, ids))

    def release(accumulator, denominator, key, state, hparams, round_):
        del denominator
        z = base.round_value(hparams.noise_multiplier, round_)
        noise = base.noise_like(key, accumulator.total, base.noise_scale(z, hparams.clip))
        return base.Release(jax.tree.map(jnp.add, accumulator.total, noise), state, z)

    return base.Mechanism(GAUSSIAN, lambda _: (), zero, add, release)
