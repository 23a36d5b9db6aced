"""Gaussian noise that is correlated over rounds, so that most of it cancels in sums of releases."""

import dataclasses

import jax
import jax.numpy as jnp

from fedjaxsim.hyperparameters import reads
from fedjaxsim.kernels import threefry
from fedjaxsim.privacy import mechanisms as base
from fedjaxsim.privacy.accounting.correlated import coefficients
from fedjaxsim.privacy.events import Correlated

_CONSTANT_NOISE = dataclasses.replace(
    base.NOISE_MULTIPLIER,
    schedule=False,
    help="z, the standard deviation of the independent noise that is correlated, divided by C; one "
    "number for all rounds.",
)


@reads(base.CLIP_NORM, _CONSTANT_NOISE)
def correlated(*, bands: int = 8, power: float = 0.5) -> base.Mechanism:
    """Add Gaussian noise that later rounds take back in part (Kalinin et al. 2025).

    release_t = (Σ_k clip(v_k, C) + zC Σ_{j<b} d_j ξ_{t−j}) / denominator, with ξ_s a vector of
    independent standard normals for each round s, and d_j the coefficients of (1 − x)^power: 1,
    −power, …, all but the first negative. Noise of past rounds is drawn again from its keys, so
    there is no state, and a round draws b times the noise of `gaussian`.

    Formal guarantees:
      * All releases of a run are one Gaussian release of D⁻¹ applied to the sums
        (`accounting/correlated.py`). The event is of the whole run: ε is of the rounds done, and
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

    Raises:
      ValueError: if `bands` is below 1, or `power` outside (0, 1].
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
