"""The maps Σ → M of MP-MTL, with derivatives that exist wherever the maps are smooth.

With Σ = WWᵀ, MW is the proximal point of W for the trace norm (Ji and Ye 2009); with diagonals, for
the ℓ2,1 norm (Liu, Ji, Ye 2009).
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

_HIGHEST = jax.lax.Precision.HIGHEST


def shrinkage(gram: ArrayLike, threshold: ArrayLike) -> jax.Array:
    """Compute M = U max(0, 1 − τ/√Λ) Uᵀ of Σ = UΛUᵀ, or max(0, 1 − τ/√Σ_jj) of a diagonal.

    MP-MTL, Algorithm 2 (steps 6 to 8) and Algorithm 3 (steps 6 and 7), with all d directions: the
    paper's i ≤ min(d, m) would drop d − m of them. Nonpositive eigenvalues, which noise can cause,
    count as 0. For τ = 0, M is the identity, whatever Σ is.

    The derivative of the spectral function (Daleckii and Krein) is first order, in both modes. It
    is finite at repeated eigenvalues, where the derivative of `eigh` is not. At the kink Λ = τ² it
    is the one from below, 0.

    Args:
      gram: Σ, (d, d) symmetric, or its diagonal (d,).
      threshold: τ = ηλ, () ≥ 0.

    Returns:
      M, of the shape of Σ.
    """
    gram = jnp.asarray(gram)
    threshold = jnp.asarray(threshold, gram.dtype)
    return _kept(gram, threshold) if gram.ndim == 1 else _spectral(gram, threshold)


def common_threshold(gram: ArrayLike, weight: ArrayLike) -> jax.Array:
    """Compute the threshold θ with which `shrinkage` is the proximal map of (κ/2) ‖·‖_*².

    It solves θ = κ Σ_j max(0, √Λ_j − θ). Over the k largest roots, with sum S_k, that is
    θ = κ S_k/(1 + kκ), which rises while the next root exceeds it: the maximum over k is θ.

    Args:
      gram: Σ, (d, d) symmetric; nonpositive eigenvalues count as 0.
      weight: κ = ηλ, () ≥ 0.

    Returns:
      θ, ().
    """
    values = jnp.linalg.eigvalsh(jnp.asarray(gram))[::-1]
    positive = values > 0
    roots = jnp.where(positive, jnp.sqrt(jnp.where(positive, values, 1.0)), 0.0)
    weight = jnp.asarray(weight, roots.dtype)
    count = jnp.arange(1, len(values) + 1, dtype=roots.dtype)
    return jnp.max(weight * jnp.cumsum(roots) / (1 + weight * count))


def _kept(values: jax.Array, threshold: jax.Array) -> jax.Array:
    """Return max(0, 1 − τ/√λ), and 1 for τ = 0."""
    root, active = _roots(values, threshold)
    return jnp.where(active, 1 - threshold / root, jnp.where(threshold > 0, 0.0, 1.0))


def _roots(values: jax.Array, threshold: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return √λ, or 1 for λ ≤ 0, and whether it exceeds τ."""
    positive = values > 0
    root = jnp.sqrt(jnp.where(positive, values, 1.0))
    return root, positive & (root > threshold)


@jax.custom_jvp
def _spectral(gram: jax.Array, threshold: jax.Array) -> jax.Array:
    values, vectors = jnp.linalg.eigh(gram)
    return _matrix(vectors, _kept(values, threshold))


def _matrix(vectors: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.matmul(vectors * values[None], vectors.T, precision=_HIGHEST)


@_spectral.defjvp
def _spectral_jvp(primals, tangents):
    """Compute dM = U (F ∘ UᵀdΣU + diag(∂f/∂τ) dτ) Uᵀ, F_ij = (f(λ_i) − f(λ_j))/(λ_i − λ_j)."""
    gram, threshold = primals
    change, threshold_change = tangents
    values, vectors = jnp.linalg.eigh(gram)
    root, active = _roots(values, threshold)
    inner = jnp.matmul(vectors.T, (change + change.T) / 2, precision=_HIGHEST)
    inner = jnp.matmul(inner, vectors, precision=_HIGHEST)
    moved = _divided_differences(values, threshold) * inner
    moved += jnp.diag(jnp.where(active, -1 / root, 0.0) * threshold_change)
    change = jnp.matmul(
        jnp.matmul(vectors, moved, precision=_HIGHEST), vectors.T, precision=_HIGHEST
    )
    return _matrix(vectors, _kept(values, threshold)), change


def _divided_differences(values: jax.Array, threshold: jax.Array) -> jax.Array:
    """Compute F, (d, d), of max(0, 1 − τ/√λ), with its derivative on the diagonal.

    Between two eigenvalues above τ² it is τ/(√a √b (√a + √b)), without cancellation. Across the
    kink it is at most the largest slope, 1/(2τ²), which bounds the rounding.
    """
    root, active = _roots(values, threshold)
    a, b = root[:, None], root[None, :]
    both = active[:, None] & active[None, :]
    above = threshold / (a * b * (a + b))
    kept = _kept(values, threshold)
    apart = jnp.abs(values[:, None] - values[None, :])
    across = jnp.abs(kept[:, None] - kept[None, :]) / jnp.where(apart > 0, apart, 1.0)
    steepest = 0.5 / jnp.where(threshold > 0, threshold, 1.0) ** 2
    across = jnp.where(threshold > 0, jnp.minimum(across, steepest), 0.0)
    one = active[:, None] ^ active[None, :]
    return jnp.where(both, above, jnp.where(one, across, 0.0))
