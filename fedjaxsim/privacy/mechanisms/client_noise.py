"""Means over the realised cohort, as DPFedMTL publishes its aggregation. No ε."""

import jax
import jax.numpy as jnp

from fedjaxsim.hyperparameters import reads
from fedjaxsim.privacy import mechanisms as base
from fedjaxsim.privacy.events import Unprotected


def _mean(noised: bool) -> base.Mechanism:
    """Return a mean over the realised cohort; without noise no hyperparameter is read."""

    def zero(message, num_clients):
        del num_clients
        return base.zeros((message, jax.ShapeDtypeStruct((), jnp.result_type(float))))

    def add(accumulator, messages, mask, ids, state, hparams):
        del ids, state
        bounded = messages.bound(hparams.clip if noised else jnp.asarray(jnp.inf), mask)
        present = jnp.sum(mask, dtype=jnp.result_type(float))
        return base.accumulate(accumulator, bounded, (bounded.messages.total(), present))

    def release(accumulator, denominator, key, state, hparams, round_):
        del denominator
        total, present = accumulator.total
        noise, z = jax.tree.map(jnp.zeros_like, total), jnp.zeros(())
        if noised:
            z = base.round_value(hparams.noise_multiplier, round_)
            scale = base.noise_scale(z, hparams.clip) * jnp.sqrt(present)
            noise = base.noise_like(key, total, scale)
        return base.Release(base.noised_mean(total, noise, jnp.maximum(present, 1)), state, z)

    return base.Mechanism(Unprotected(), lambda _: (), zero, add, release)


@reads(base.CLIP_NORM, base.NOISE_MULTIPLIER)
def client_noise() -> base.Mechanism:
    """Average messages noised at every client over the realised cohort, as DPFedMTL publishes it.

    release = (1/q) Σ_{k∈S} (clip(v_k, C) + N(0, (zC)² I)), 0 for an empty cohort; q is the size of
    the cohort S (DPFedMTL, equations 3 and 6, for one local step). The paper's noise of standard
    deviation σ · 2CK/M, for K of M clients, is z = 2σK/M. Nothing reads a single noised message, so
    one draw of N(0, q (zC)² I) replaces their sum, with the same distribution.

    Formal guarantees:
      * None, and no ε is reported. The mean is divided by a private number, the realised cohort
        size. The paper's Lemma 4.1 takes 2CK/M for the sensitivity of the average, which is 2C/K:
        it divides by the sampling rate and amplifies by it again. Local noise protects, but at this
        scale far less than the paper computes.
    """
    return _mean(noised=True)


def plain_mean() -> base.Mechanism:
    """Average the messages of the realised cohort, neither clipped nor noised.

    release = (1/q) Σ_{k∈S} v_k, 0 for an empty cohort; q is the size of the cohort S. For
    algorithms whose clients add noise in each local step, such as DPFedMTL. Non-finite messages
    count as zero.

    Formal guarantees:
      * None, and no ε is reported.
    """
    return _mean(noised=False)
