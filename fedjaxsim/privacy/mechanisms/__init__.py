"""Mechanisms: their protocol, the record of choices they are made of, and the usual ones."""

import jax
import jax.numpy as jnp
from numpy.typing import ArrayLike

from fedjaxsim.hyperparameters import Hyperparameters, reads
from fedjaxsim.privacy.events import NoRelease
from fedjaxsim.privacy.mechanisms.protocol import CLIP_NORM as CLIP_NORM
from fedjaxsim.privacy.mechanisms.protocol import LARGEST_CLIP_NORM as LARGEST_CLIP_NORM
from fedjaxsim.privacy.mechanisms.protocol import NOISE_MULTIPLIER as NOISE_MULTIPLIER
from fedjaxsim.privacy.mechanisms.protocol import SMALLEST_CLIP_NORM as SMALLEST_CLIP_NORM
from fedjaxsim.privacy.mechanisms.protocol import Accumulator as Accumulator
from fedjaxsim.privacy.mechanisms.protocol import Mechanism as Mechanism
from fedjaxsim.privacy.mechanisms.protocol import Release as Release
from fedjaxsim.privacy.mechanisms.protocol import accumulate as accumulate
from fedjaxsim.privacy.mechanisms.protocol import check_noise as check_noise
from fedjaxsim.privacy.mechanisms.protocol import check_statistics as check_statistics
from fedjaxsim.privacy.mechanisms.protocol import noise_like as noise_like
from fedjaxsim.privacy.mechanisms.protocol import noise_scale as noise_scale
from fedjaxsim.privacy.mechanisms.protocol import noised_mean as noised_mean
from fedjaxsim.privacy.mechanisms.protocol import round_value as round_value
from fedjaxsim.privacy.mechanisms.protocol import stamped as _stamped
from fedjaxsim.privacy.mechanisms.protocol import with_total as with_total
from fedjaxsim.privacy.mechanisms.protocol import zeros as zeros
from fedjaxsim.privacy.mechanisms.record import (
    CLIP,
    EXACT_SUM,
    GAUSSIAN_NOISE,
    SUM,
    mechanism_of,
)
from fedjaxsim.privacy.messages import Messages


@reads(CLIP_NORM, NOISE_MULTIPLIER)
def gaussian(
    weights: ArrayLike | None = None,
    max_weight: float | None = None,
    *,
    exact_sums: bool = False,
) -> Mechanism:
    """Add Gaussian noise to the sum of clipped messages (McMahan et al. 2018).

    release = (Σ_k clip(v_k, C) + N(0, (zC)² I)) / denominator, the noise drawn once a round. The
    denominator is the *expected* cohort size p·m, which is public; the realised size never enters.

    With weights w_k the clipped messages are scaled by s_k = min(w_k, w_max)/w_max ≤ 1. By default
    w_max is the largest weight and the denominator p Σ_k s_k: the release estimates the weighted
    mean Σ w_k v_k / Σ w_k. With `max_weight` the denominator is p·m: no other number of the release
    depends on a client's weight than its own message.

    Formal guarantees:
      * Adding or removing one client, or setting its message to zero, moves the sum by at most C in
        L2 norm; replacing its data by at most 2C. Non-finite messages count as zero.
      * The noise on the sum has standard deviation zC in every coordinate, so in units of z the
        sensitivity is 1 (zero-out) and 2 (replace).
      * Weights without `max_weight` are *public*, fixed before the run, and named among the
        assumptions: their largest and their sum are in every release. With `max_weight`, which must
        not follow from them, they may be private, as numbers of examples are.
      * A float32 sum meets this up to rounding, which in the worst case over all other clients may
        reach many C; an exact sum meets it to a relative 2⁻²⁴ of the noise and, of 2²⁹ clients,
        to 10⁻⁵ C.
      * With z = 0 there is no guarantee.

    Args:
      weights: w_k > 0, (m,); equal by default.
      max_weight: Public bound w_max on weights, which may then be private; by default the largest.
      exact_sums: Sum messages as integers: exact, and the same on any number of devices. Needs a
        finite clip norm, and has no derivative.

    Example:
      >>> [record.name for record in fjs.gaussian().hyperparameters]
      ['clip', 'noise_multiplier']
    """
    statistic = EXACT_SUM if exact_sums else SUM
    return mechanism_of(statistic, CLIP, GAUSSIAN_NOISE, weights=weights, max_weight=max_weight)


def release_once(
    messages: jax.Array,
    present: jax.Array,
    key: jax.Array,
    *,
    clip: float | jax.Array,
    noise_multiplier: float | jax.Array,
) -> jax.Array:
    """Return the noised mean over all m clients of their messages (m, ...), outside of rounds.

    Those not `present`, (m,), send zero. Whoever calls it charges one release of `gaussian` with
    all clients.
    """
    mechanism, m = gaussian(), len(messages)
    hparams = Hyperparameters(clip=clip, noise_multiplier=noise_multiplier).as_arrays()
    zero = mechanism.zero(jax.ShapeDtypeStruct(messages.shape[1:], messages.dtype), m)
    ids = jnp.arange(m, dtype=jnp.int32)
    total = mechanism.add(zero, Messages(messages), present, ids, (), hparams)
    return mechanism.release(total, m, key, (), hparams, 0).value


def no_release() -> Mechanism:
    """Release nothing, at ε = 0.

    Formal guarantees:
      * The release is empty whatever the clients hold.

    Example:
      >>> fjs.no_release().event.releases
      False
    """

    def add(accumulator, messages, mask, ids, state, hparams):
        return accumulator

    def release(accumulator, denominator, key, state, hparams, round_):
        return Release(accumulator.total, state, jnp.zeros(()))

    return _stamped(Mechanism(NoRelease(), lambda _: (), lambda _, m: zeros(()), add, release))
