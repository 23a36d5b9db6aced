"""Mechanisms with ε-differential privacy at δ = 0: noise of density ∝ exp(−‖E‖/b)."""

import math

import jax
import scipy.special

from fedjaxsim.hyperparameters import reads
from fedjaxsim.privacy import mechanisms as base
from fedjaxsim.privacy.events import Pure
from fedjaxsim.privacy.mechanisms import gram
from fedjaxsim.privacy.noise import radius


def _coordinates(shape: tuple[int, ...]) -> int:
    """Return n, the number of coordinates of a symmetric matrix (d, d) or a diagonal (d,)."""
    return shape[0] if len(shape) == 1 else shape[0] * (shape[0] + 1) // 2


def _spectral_bound(shape: tuple[int, ...], deviations: float) -> float:
    """Return b with P(λ_min(E) < −b) ≤ 2 e^(−t²/2) for the noise E of `pure_gram` at zK² = 1."""
    # Norm and normals each leave their quantiles with probability e^(−t²/2).
    tail = math.exp(-(deviations**2) / 2)
    largest = math.sqrt(scipy.special.chdtri(_coordinates(shape) + 1, tail))
    return largest * gram.spectral_bound(shape, deviations)


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


@reads(base.CLIP_NORM, base.NOISE_MULTIPLIER)
def pure_gram(diagonal: bool = False, psd_deviations: float | None = 4.0) -> base.Mechanism:
    """Add noise of density ∝ exp(−‖E‖_F/(zK²)) to the Gram matrix of clipped messages: pure ε-DP.

    release = Σ_k W̃_k W̃_kᵀ + E + c·I, as `gaussian_gram` except for the noise, in the Frobenius
    geometry of the n = d(d + 1)/2 coordinates of a symmetric matrix (n = d for a diagonal). A
    release at ε takes `noise_multiplier` = √2/ε.

    Formal guarantees:
      * (ε, 0)-DP with ε = 1/z for zero-out and √2/z for replace, by the sensitivities of
        `gaussian_gram`.
      * Σ + E + c·I is positive definite with probability at least 1 − 2 e^(−t²/2), whatever Σ is.
      * With z = 0, ε is ∞.

    Args:
      diagonal: whether only the diagonal is released, (d,).
      psd_deviations: t ≥ 0 of the shift; None for no shift.

    Raises:
      ValueError: if t is negative. `zero` raises it if a message is not one vector or matrix.
    """

    def noise(key, total, s):
        radius_key, normal_key = jax.random.split(key)
        size = radius(radius_key, _coordinates(total.shape)).astype(total.dtype)
        return s * size * gram.symmetric_normal(normal_key, total)

    return gram.gram_mechanism(
        Pure(replace=math.sqrt(2)),
        diagonal,
        noise,
        psd_deviations,
        bound=_spectral_bound,
    )
