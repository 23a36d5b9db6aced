"""Sums and means with other noise than `gaussian`, or with none."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.hyperparameters import Hyperparameter, on_host, reads
from fedjaxsim.kernels import threefry
from fedjaxsim.privacy import mechanisms as base
from fedjaxsim.privacy.accounting.gaussian import coefficients
from fedjaxsim.privacy.events import GAUSSIAN, Correlated, Pure, Unprotected
from fedjaxsim.privacy.noise import radius

_OPEN = (math.nextafter(0, 1), math.nextafter(1, 0))
TARGET_QUANTILE = Hyperparameter(
    "target_quantile",
    default=0.5,
    range=_OPEN,
    allowed="lie in (0, 1)",
    help="γ of adaptive clipping, the share of messages that should not be clipped.",
)
CLIP_LEARNING_RATE = Hyperparameter(
    "clip_learning_rate",
    default=0.2,
    help="η_C of adaptive clipping, the step of log C.",
)
COUNT_NOISE = Hyperparameter(
    "count_noise",
    default=0.0,
    help="σ_b of adaptive clipping, the noise on the number of clipped messages, above z/2 where "
    "there is noise. (A run sets a twentieth of the expected cohort where it is not given.)",
)
_CONSTANT_NOISE = dataclasses.replace(
    base.NOISE_MULTIPLIER,
    schedule=False,
    help="z, the standard deviation of the independent noise that is correlated, divided by C; one "
    "number for all rounds.",
)


def _and_a_number(message, num_clients) -> base.Accumulator:
    return base.zeros((message, jax.ShapeDtypeStruct((), jnp.result_type(float))))


@reads(base.CLIP_NORM, base.NOISE_MULTIPLIER)
def pure() -> base.Mechanism:
    """Add noise of density ∝ exp(−‖E‖₂/(zC)) to the sum of clipped messages: pure ε-DP.

    release = (Σ_k clip(v_k, C) + E)/(p·m), the norms over the whole pytree. z scales the noise as
    in the other mechanisms, so a release at ε takes `noise_multiplier` = 2/ε (1/ε if only zero-out
    counts). ‖E‖ is zC times a Gamma(n) variable, n the number of parameters: about n zC, where
    Gaussian noise has √n zC.

    Formal guarantees:
      * The densities of neighbours differ by a factor of at most e^(Δ/(zC)) everywhere, Δ = C for
        zero-out and 2C for replace: (ε, 0)-DP with ε = 1/z and 2/z.
      * With z = 0, ε is ∞.
      * Poisson sampling amplifies: see `accounting/randomized_response.py`.
    """

    def release(accumulator, denominator, key, state, hparams, round_):
        z = base.round_value(hparams.noise_multiplier, round_)
        radius_key, normal_key = jax.random.split(key)
        n = sum(leaf.size for leaf in jax.tree.leaves(accumulator.total))
        scale = base.noise_scale(z, hparams.clip) * radius(radius_key, n)
        noise = base.noise_like(normal_key, accumulator.total, scale)
        value = base.noised_mean(accumulator.total, noise, denominator)
        return base.Release(value, state, z)

    return base.gaussian()._replace(event=Pure(), release=release)


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
      * C is a function of earlier releases, kept within [1e-12, 1e15].
      * Where z > 0 and σ_b ≤ z/2 the charged z is NaN, and no ε is reported.
    """

    def clip_norm(value):
        return jnp.clip(value, base.SMALLEST_CLIP_NORM, base.LARGEST_CLIP_NORM)

    def init(hparams):
        return clip_norm(hparams.clip)

    def add(accumulator, messages, mask, ids, state, hparams):
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
        if first is not None and not np.all(np.isfinite(first)):
            raise ValueError(f"clip of adaptive clipping must be finite, got {first}")
        if z is not None and sigma is not None and np.any((z > 0) & (2 * sigma <= z)):
            raise ValueError(
                f"count_noise must be above noise_multiplier/2 = {np.max(z) / 2}, got {sigma}; a "
                "twentieth of the expected cohort is usual"
            )

    return base.Mechanism(GAUSSIAN, init, _and_a_number, add, release, check=check)


@reads(base.CLIP_NORM, _CONSTANT_NOISE)
def correlated(*, bands: int = 8, power: float = 0.5) -> base.Mechanism:
    """Add Gaussian noise that later rounds take back in part (Kalinin et al. 2025).

    release_t = (Σ_k clip(v_k, C) + zC Σ_{j<b} d_j ξ_{t−j}) / denominator, with ξ_s a vector of
    independent standard normals for each round s, and d_j the coefficients of (1 − x)^power: 1,
    −power, …, all but the first negative. Noise of past rounds is drawn again from its keys, so
    there is no state, and a round draws b times the noise of `gaussian`.

    Formal guarantees:
      * All releases of a run are one Gaussian release of D⁻¹ applied to the sums
        (`accounting/gaussian.py`). The event is of the whole run: ε is of the rounds done, and
        no round has a cost of its own.
      * The samplers are those whose clients take part at known rounds: fixed groups in turn, and
        full participation. Every other one is refused.
      * The clip norm may follow earlier releases, as all noise of a round is scaled by its C. The
        noise multiplier may not change: no ε is reported then.
      * Each stage has noise of its own, and an account of its own.
      * With z = 0 there is no guarantee.

    Args:
      bands: Number b of rounds whose noise a release adds; 1 is independent noise.
      power: Power of the coefficients in (0, 1]: near 1, more noise cancels and less is left for
        each participation.
    """
    event = Correlated(bands=bands, power=power)
    weights = coefficients(bands, power)

    def release(accumulator, denominator, key, state, hparams, round_):
        z = hparams.noise_multiplier
        scale = base.noise_scale(z, hparams.clip)

        def add_band(noise, band):
            rounds_ago, weight = band
            # There is no noise before the first round.
            weight = jnp.where(rounds_ago <= round_, weight, 0.0)
            past = threefry.fold_in(key, round_ - rounds_ago)
            more = base.noise_like(past, noise, scale * weight)
            return jax.tree.map(jnp.add, noise, more), None

        none = jax.tree.map(jnp.zeros_like, accumulator.total)
        by_band = jnp.arange(bands), jnp.asarray(weights, dtype=float)
        noise, _ = jax.lax.scan(add_band, none, by_band)
        return base.Release(base.noised_mean(accumulator.total, noise, denominator), state, z)

    return base.gaussian()._replace(event=event, release=release)


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
        bounded = messages.bound(hparams.clip, mask)
        return base.counted(accumulator, bounded, bounded.messages.add_rows(accumulator.total, ids))

    def release(accumulator, denominator, key, state, hparams, round_):
        z = base.round_value(hparams.noise_multiplier, round_)
        noise = base.noise_like(key, accumulator.total, base.noise_scale(z, hparams.clip))
        return base.Release(jax.tree.map(jnp.add, accumulator.total, noise), state, z)

    return base.Mechanism(GAUSSIAN, lambda _: (), zero, add, release)


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


def _mean(noised: bool) -> base.Mechanism:
    """Return a mean over the realised cohort; without noise no hyperparameter is read."""

    def add(accumulator, messages, mask, ids, state, hparams):
        bounded = messages.bound(hparams.clip if noised else jnp.asarray(jnp.inf), mask)
        present = jnp.sum(mask, dtype=jnp.result_type(float))
        return base.accumulate(accumulator, bounded, (bounded.messages.total(), present))

    def release(accumulator, denominator, key, state, hparams, round_):
        total, present = accumulator.total
        noise, z = jax.tree.map(jnp.zeros_like, total), jnp.zeros(())
        if noised:
            z = base.round_value(hparams.noise_multiplier, round_)
            scale = base.noise_scale(z, hparams.clip) * jnp.sqrt(present)
            noise = base.noise_like(key, total, scale)
        return base.Release(base.noised_mean(total, noise, jnp.maximum(present, 1)), state, z)

    return base.Mechanism(Unprotected(), lambda _: (), _and_a_number, add, release)
