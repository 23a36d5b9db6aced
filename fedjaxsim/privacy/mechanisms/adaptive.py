"""Gaussian noise with a clip norm that follows a quantile of the messages' norms."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.hyperparameters import Hyperparameter, on_host, reads
from fedjaxsim.privacy import mechanisms as base
from fedjaxsim.privacy.events import GAUSSIAN

LARGEST_CLIP_NORM = 1e18  # squares of larger norms overflow in float32
_OPEN = (math.nextafter(0, 1), math.nextafter(1, 0))
TARGET_QUANTILE = Hyperparameter(
    "target_quantile",
    default=0.5,
    range=_OPEN,
    allowed="lie in (0, 1)",
    symbol="γ",
    label="target quantile",
    help="γ of adaptive clipping, the share of messages that should not be clipped.",
)
CLIP_LEARNING_RATE = Hyperparameter(
    "clip_learning_rate",
    default=0.2,
    symbol="η_C",
    label="step of log C",
    help="η_C of adaptive clipping, the step of log C.",
)
COUNT_NOISE = Hyperparameter(
    "count_noise",
    default=0.0,
    symbol="σ_b",
    label="noise on the count",
    help="σ_b of adaptive clipping, the noise on the number of clipped messages, above z/2 where "
    "there is noise. (A run sets a twentieth of the expected cohort where it is not given.)",
)


@reads(base.CLIP_NORM, base.NOISE_MULTIPLIER, TARGET_QUANTILE, CLIP_LEARNING_RATE, COUNT_NOISE)
def adaptive_clipping() -> base.Mechanism:
    """Adapt the clip norm to a quantile (Andrew, Thakkar, McMahan, Ramaswamy 2021, Algorithm 1).

    The state is the clip norm C, public, at first `hparams.clip`. A client adds its message
    clipped at C to a sum, and b_k to a count: +1/2 if the norm was at most C and −1/2 otherwise. A
    round releases both with noise and steps C towards the quantile γ:

        sum:    (Σ clip(v_k, C) + N(0, (z_Δ C)² I)) / (p·m),   z_Δ = (z⁻² − (2σ_b)⁻²)^(−1/2)
        count:  b̃ = 1/2 + (Σ b_k + N(0, σ_b²)) / (p·m)
        C ← C exp(−η_C (b̃ − γ))

    γ, η_C and σ_b are `hparams.target_quantile`, `clip_learning_rate` and `count_noise`; the paper
    takes 0.5, 0.2 and a twentieth of the expected cohort. The charged z covers the sum and the
    count together (their Theorem 1), so σ_b must exceed z/2; from σ_b = 3.6 z on, z_Δ is below 1.01
    z.

    Formal guarantees:
      * A client with a zero (or non-finite) message adds zero to the count, like an absent one. So
        zero-out moves the sum by at most C and the count by 1/2. Replacing moves each by twice as
        much, reached by v of norm above C against −v scaled to norm C.
      * In units of the noise of each part the squared distance is z_Δ⁻² + (2σ_b)⁻² = z⁻² for
        zero-out and 4 z⁻² for replace. One release is a Gaussian one of sensitivity 1 and 2 at z.
      * C is a function of earlier releases, kept within [1e-12, 1e18].
      * Where z > 0 and σ_b ≤ z/2 the charged z is NaN, and no ε is reported.
    """

    def clip_norm(value):
        return jnp.clip(value, base.SMALLEST_CLIP_NORM, LARGEST_CLIP_NORM)

    def init(hparams):
        return clip_norm(hparams.clip)

    def zero(message, num_clients) -> base.Accumulator:
        del num_clients
        return base.zeros((message, jax.ShapeDtypeStruct((), jnp.result_type(float))))

    def add(accumulator, messages, mask, ids, state, hparams):
        del ids, hparams
        bounded = messages.bound(state, mask)
        sends = bounded.messages.nonzero()
        count = jnp.sum(jnp.where(sends, jnp.where(bounded.clipped, -0.5, 0.5), 0.0))
        return base.accumulate(accumulator, bounded, (bounded.messages.total(), count))

    def release(accumulator, denominator, key, state, hparams, round_):
        z = base.round_value(hparams.noise_multiplier, round_)
        sigma = hparams.count_noise
        private = z > 0
        share = jnp.where(private, z / jnp.where(private, 2 * sigma, 1.0), 0.0)
        valid = share < 1
        z_sum = jnp.where(valid, z / jnp.sqrt(jnp.where(valid, 1 - share**2, 1.0)), jnp.nan)
        sum_key, count_key = jax.random.split(key)
        total, count = accumulator.total
        noise = base.noise_like(sum_key, total, z_sum * state)
        count = count + base.noise_like(count_key, count, sigma)
        unclipped = 0.5 + count / denominator
        step = hparams.clip_learning_rate * (unclipped - hparams.target_quantile)
        new_state = clip_norm(state * jnp.exp(-step))
        value = base.noised_mean(total, noise, denominator)
        return base.Release(value, new_state, jnp.where(valid, z, jnp.nan))

    def check(hparams):
        first, z, sigma = map(
            on_host, (hparams.clip, hparams.noise_multiplier, hparams.count_noise)
        )
        if first is not None and not np.all(first <= LARGEST_CLIP_NORM):
            raise ValueError(
                f"clip of adaptive clipping must be at most {LARGEST_CLIP_NORM}, got {first}"
            )
        if z is not None and sigma is not None and np.any((z > 0) & (2 * sigma <= z)):
            raise ValueError(
                f"count_noise must be above noise_multiplier/2 = {np.max(z) / 2}, got {sigma}; a "
                "twentieth of the expected cohort is usual"
            )

    return base.Mechanism(GAUSSIAN, init, zero, add, release, check=check)
