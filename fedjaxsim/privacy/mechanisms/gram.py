"""Gram matrices of clipped messages, Σ_k W_k W_kᵀ, with symmetric Gaussian noise."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjaxsim import checks
from fedjaxsim.hyperparameters import reads
from fedjaxsim.privacy import mechanisms as base
from fedjaxsim.privacy.events import Gaussian, PrivacyEvent
from fedjaxsim.privacy.noise import normal

PyTree = Any


def symmetric(matrix: jax.Array) -> jax.Array:
    """Return (A + Aᵀ)/2 of a matrix; a diagonal (d,) unchanged."""
    return matrix if matrix.ndim == 1 else (matrix + matrix.T) / 2


def symmetric_normal(key: jax.Array, total: jax.Array) -> jax.Array:
    """Draw a standard normal symmetric matrix (or diagonal) of the shape of `total`.

    (G + Gᵀ)/2 has N(0, 1) on the diagonal and N(0, 1/2) off it: isotropic in the Frobenius norm.
    """
    return symmetric(normal(key, total.shape, total.dtype))


def spectral_bound(shape: tuple[int, ...], deviations: float) -> float:
    """Return b with P(λ_min(E) < −b) ≤ e^(−t²/2) for `symmetric_normal` noise E of a shape.

    The largest eigenvalue has mean at most √(2d), on a diagonal √(2 ln d), and is a 1-Lipschitz
    function of standard normals.
    """
    d = shape[0]
    return math.sqrt(2 * d if len(shape) == 2 else 2 * math.log(d)) + deviations


def gram_mechanism(
    event: PrivacyEvent,
    diagonal: bool,
    noise: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    psd_deviations: float | None = None,
    bound: Callable[[tuple[int, ...], float], float] = spectral_bound,
) -> base.Mechanism:
    """Return the mechanism that releases Σ + E + c·I, with Σ = Σ_k W̃_k W̃_kᵀ.

    Args:
      event: the cost of one release.
      diagonal: whether only the diagonal is released, (d,).
      noise: `(key, Σ, s) -> E` at the scale s = zK².
      psd_deviations: t ≥ 0 of the shift; None for no shift.
      bound: `(shape, t) -> c/s`.
    """
    if psd_deviations is not None:
        checks.non_negative(psd_deviations=psd_deviations)

    def zero(message, num_clients):
        del num_clients
        leaves = jax.tree.leaves(message)
        if len(leaves) != 1 or leaves[0].ndim not in (1, 2):
            raise ValueError(
                "a Gram matrix is made of one vector (d,) or matrix (d, c) per client, got shapes "
                f"{[leaf.shape for leaf in leaves]}"
            )
        d, dtype = leaves[0].shape[0], leaves[0].dtype
        return base.zeros(jax.ShapeDtypeStruct((d,) if diagonal else (d, d), dtype))

    def add(accumulator, messages, mask, ids, state, hparams):
        del ids, state
        bounded = messages.bound(hparams.clip, mask)
        terms = bounded.messages
        total = terms.gram_diagonal() if diagonal else terms.gram()
        return base.accumulate(accumulator, bounded, total)

    def release(accumulator, denominator, key, state, hparams, round_):
        del denominator
        z = base.round_value(hparams.noise_multiplier, round_)
        total = symmetric(accumulator.total)
        s = base.noise_scale(z, hparams.clip, degree=2).astype(total.dtype)
        value = total + noise(key, total, s)
        if psd_deviations is not None:
            shift = s * bound(total.shape, psd_deviations)
            value += shift if diagonal else shift * jnp.eye(len(total), dtype=total.dtype)
        return base.Release(value, state, z)

    return base.Mechanism(event, lambda _: (), zero, add, release, adds_chunks=True)


@reads(base.CLIP_NORM, base.NOISE_MULTIPLIER)
def gaussian_gram(diagonal: bool = False, psd_deviations: float | None = 4.0) -> base.Mechanism:
    """Add symmetric Gaussian noise to the Gram matrix of clipped messages: MP-MTL with a guarantee.

    release = Σ_k W̃_k W̃_kᵀ + E + c·I, W̃_k = clip(W_k, K), K = `hparams.clip`. A message is
    one vector (d,), as in the paper, or one matrix (d, c) of equally weighted columns. E is
    symmetric with N(0, s²) on the diagonal and N(0, s²/2) off it, s = zK². The release is a sum, as
    in MP-MTL (Algorithm 1, steps 3 to 5), not divided by the cohort size. The shift c does not
    depend on data: s(√(2d) + t), for the diagonal s(√(2 ln d) + t). It keeps the matrix positive
    definite, and lets all coupling vanish, M → I, as noise grows.

    Formal guarantees:
      * ‖W̃W̃ᵀ‖_F ≤ ‖W̃‖²_F ≤ K² and ‖W̃W̃ᵀ − ṼṼᵀ‖_F ≤ √2 K², as ⟨W̃W̃ᵀ, ṼṼᵀ⟩ = ‖W̃ᵀṼ‖²_F ≥ 0; also
        for diagonals. E is isotropic in that norm with standard deviation zK², so in units of z the
        sensitivity is 1 (zero-out) and √2 (replace).
      * Σ + E + c·I is positive definite with probability at least 1 − e^(−t²/2), whatever Σ is.
      * With z = 0 there is no guarantee.

    Args:
      diagonal: whether only the diagonal is released, (d,): enough for the group-sparse MP-MTL.
      psd_deviations: t ≥ 0 of the shift; None for no shift.

    Raises:
      ValueError: if t is negative. `zero` raises it if a message is not one vector or matrix.
    """

    def noise(key, total, s):
        return s * symmetric_normal(key, total)

    event = Gaussian(replace=math.sqrt(2))
    return gram_mechanism(event, diagonal, noise, psd_deviations)
