"""Gram matrices of clipped messages, Σ_k W_k W_kᵀ, with Gaussian, pure or Wishart noise."""

import math
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import scipy.special

from fedjaxsim import checks
from fedjaxsim.hyperparameters import reads
from fedjaxsim.own_code import stamp
from fedjaxsim.privacy import mechanisms as base
from fedjaxsim.privacy.mechanisms.record import (
    CLIP,
    GAUSSIAN_NOISE,
    PURE_NOISE,
    Noise,
    Statistic,
    mechanism_of,
)
from fedjaxsim.privacy.noise import normal

PyTree = Any
Diagonal = Annotated[
    bool, "Whether only the diagonal is released, (d,): enough for the group-sparse MP-MTL."
]
Deviations = Annotated[float | None, "t ≥ 0 of the shift; None for no shift."]


def _symmetric(matrix: jax.Array) -> jax.Array:
    """Return (A + Aᵀ)/2 of a matrix; a diagonal (d,) unchanged."""
    return matrix if matrix.ndim == 1 else (matrix + matrix.T) / 2


def _symmetric_normal(key: jax.Array, total: jax.Array) -> jax.Array:
    """Draw a standard normal symmetric matrix (or diagonal), isotropic in the Frobenius norm."""
    return _symmetric(normal(key, total.shape, total.dtype))  # N(0, 1/2) off the diagonal


def spectral_bound(shape: tuple[int, ...], deviations: float) -> float:
    """Return b with P(λ_min(E) < −b) ≤ e^(−t²/2), E symmetric normal noise of a shape.

    The largest eigenvalue has mean at most √(2d), on a diagonal √(2 ln d), and is a 1-Lipschitz
    function of standard normals.
    """
    d = shape[0]
    return math.sqrt(2 * d if len(shape) == 2 else 2 * math.log(d)) + deviations


def _gram(
    noise: Noise,
    diagonal: bool,
    psd_deviations: float | None = None,
    bound: Callable[[tuple[int, ...], float], float] = spectral_bound,
) -> base.Mechanism:
    """Release Σ + E + c·I: E is noise of scale zK², and c is zK² `bound(shape, deviations)`."""
    if psd_deviations is not None:
        checks.non_negative(psd_deviations=psd_deviations)

    def zero(message, num_clients):
        leaves = jax.tree.leaves(message)
        if len(leaves) != 1 or leaves[0].ndim not in (1, 2):
            raise ValueError(
                "a Gram matrix is made of one vector (d,) or matrix (d, c) per client, got shapes "
                f"{[leaf.shape for leaf in leaves]}"
            )
        d, dtype = leaves[0].shape[0], leaves[0].dtype
        return jnp.zeros((d,) if diagonal else (d, d), dtype)

    def shift(scale, like):
        assert psd_deviations is not None
        by = scale.astype(like.dtype) * bound(like.shape, psd_deviations)
        return by if diagonal else by * jnp.eye(len(like), dtype=like.dtype)

    statistic = Statistic(
        "Gram matrix",
        zero,
        lambda total, terms, ids, norm: (
            total + (terms.gram_diagonal() if diagonal else terms.gram())
        ),
        lambda total, drawn, norm: _symmetric(total) + drawn,
        lambda total: total,
        lambda key, like, scale: scale.astype(like.dtype) * _symmetric_normal(key, like),
        lambda like: _coordinates(like.shape),
        degree=2,
        replace=math.sqrt(2),
        adds_chunks=True,
    )
    moved = None if psd_deviations is None else shift
    return mechanism_of(stamp(statistic), CLIP, noise, "one", shift=moved)


@reads(base.CLIP_NORM, base.NOISE_MULTIPLIER)
def gaussian_gram(diagonal: Diagonal = False, psd_deviations: Deviations = 4.0) -> base.Mechanism:
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

    Raises:
      ValueError: if t is negative. `zero` raises it if a message is not one vector or matrix.
    """
    return _gram(GAUSSIAN_NOISE, diagonal, psd_deviations)


@reads(base.CLIP_NORM, base.NOISE_MULTIPLIER)
def pure_gram(diagonal: Diagonal = False, psd_deviations: Deviations = 4.0) -> base.Mechanism:
    """Add noise of density ∝ exp(−‖E‖_F/(zK²)) to the Gram matrix of clipped messages: pure ε-DP.

    release = Σ_k W̃_k W̃_kᵀ + E + c·I, as `gaussian_gram` except for the noise, in the Frobenius
    geometry of the n = d(d + 1)/2 coordinates of a symmetric matrix (n = d for a diagonal). A
    release at ε takes `noise_multiplier` = √2/ε.

    Formal guarantees:
      * (ε, 0)-DP with ε = 1/z for zero-out and √2/z for replace, by the sensitivities of
        `gaussian_gram`.
      * Σ + E + c·I is positive definite with probability at least 1 − 2 e^(−t²/2), whatever Σ is.
      * With z = 0, ε is ∞.

    Raises:
      ValueError: if t is negative. `zero` raises it if a message is not one vector or matrix.
    """
    return _gram(PURE_NOISE, diagonal, psd_deviations, _pure_bound)


def _coordinates(shape: tuple[int, ...]) -> int:
    """Return n, the number of coordinates of a symmetric matrix (d, d) or a diagonal (d,)."""
    return shape[0] if len(shape) == 1 else shape[0] * (shape[0] + 1) // 2


def _pure_bound(shape: tuple[int, ...], deviations: float) -> float:
    """Return b with P(λ_min(E) < −b) ≤ 2 e^(−t²/2), E the noise of `pure_gram` at zK² = 1."""
    # Norm and normals each leave their quantiles with probability e^(−t²/2).
    tail = math.exp(-(deviations**2) / 2)
    largest = math.sqrt(scipy.special.chdtri(_coordinates(shape) + 1, tail))
    return largest * spectral_bound(shape, deviations)


@reads(base.CLIP_NORM, base.NOISE_MULTIPLIER)
def wishart(diagonal: Diagonal = False) -> base.Mechanism:
    """Add Wishart noise to the Gram matrix of clipped messages (MP-MTL, Algorithm 1, step 5).

    release = Σ_k W̃_k W̃_kᵀ + E, W̃_k = clip(W_k, K), E ~ W_d(d + 1, (K²/(2ε)) I), with the paper's
    ε = 1/z: `noise_multiplier` = 1/ε.

    Formal guarantees:
      * None, and no ε is reported. The paper's Theorem 1 bounds a ratio of densities but ignores
        that their supports differ: E is positive definite, so the output exceeds the true matrix.
        If one client's vector is 0 in one data set and w, ‖w‖ = K, in its neighbour, a release at
        which E − wwᵀ is not positive definite comes from the first alone. The probability of that
        is P(wᵀE⁻¹w > 1) = P(χ²₂ < 2ε) = 1 − e^(−ε) exactly, so δ can be no smaller: 0.10 at ε =
        0.1, 0.63 at ε = 1. `gaussian_gram` and `pure_gram` are sound.
      * The release is positive definite.

    A diagonal has the same flaw, with χ² of d + 1 degrees of freedom.

    Raises:
      ValueError: `zero` raises it if a message is not one vector or matrix.
    """

    def draw(statistic, key, like, scale, round_):
        g, s = normal(key, (len(like), len(like) + 1), like.dtype), scale.astype(like.dtype)
        if diagonal:
            return s / 2 * jnp.sum(jnp.square(g), axis=1)
        return s / 2 * jnp.matmul(g, g.T, precision=jax.lax.Precision.HIGHEST)

    noise = Noise("wishart", draw, hyperparameters=(base.NOISE_MULTIPLIER,))
    return _gram(stamp(noise), diagonal)
