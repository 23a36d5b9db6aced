"""MP-MTL's maps Σ^(1:t) → M from noised Gram matrices to the matrix that clients apply.

With Σ = WWᵀ, MW is the proximal point of W for the trace norm (Ji and Ye 2009); with diagonals, for
the ℓ2,1 norm (Liu, Ji, Ye 2009). The maps have derivatives wherever they are smooth.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjaxsim.checks import Name, SettingError
from fedjaxsim.hyperparameters import Hyperparameters

PyTree = Any
_HIGHEST = jax.lax.Precision.HIGHEST


def _apply_matrix(matrix: jax.Array, w: jax.Array, client_id: jax.Array) -> jax.Array:
    """Return M·w for a matrix M (d, d) or a diagonal (d,)."""
    matrix = matrix.astype(w.dtype)
    if matrix.ndim == 1:
        return matrix[:, None] * w
    # With the identity of the first round, w stays bit-identical.
    return jnp.matmul(matrix, w, precision=_HIGHEST)


class ServerMap(NamedTuple):
    """A map f: Σ^(1:t) → M^(t) (MP-MTL, Algorithm 1, step 6), and its use by a client.

    The server reads only releases and each client applies M to its own model, so any f is as
    private as the releases.

    Attributes:
      init: `(d, c) -> M⁰`, a pytree.
      step: `(M, gram, hparams, round) -> M`: the next M, from the last M and the release Σ.
      apply: `(M, w (d, c), client_id) -> ŵ (d, c)` of one client; the identity for M⁰.
    """

    init: Callable[[int, int], PyTree]
    step: Callable[[PyTree, jax.Array, Hyperparameters, jax.Array], PyTree]
    apply: Callable[[PyTree, jax.Array, jax.Array], jax.Array] = _apply_matrix


def _of_last_gram(
    matrix: Callable[[jax.Array, Hyperparameters], jax.Array], diagonal: bool = False
) -> ServerMap:
    """Return the map that computes M from the last Σ alone."""
    dimensions = (1, 2) if diagonal else (2,)

    def step(last, gram, hparams, round_):
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(gram)]
        if [len(shape) in dimensions and len(set(shape)) == 1 for shape in shapes] != [True]:
            raise SettingError(
                "MP-MTL's mechanism must release a Gram matrix (d, d), or for group sparsity its "
                "diagonal (d,), as ",
                Name("gaussian_gram()"),
                f" does; the release has the shapes {shapes}",
            )
        return matrix(gram, hparams)

    return ServerMap(lambda d, c: jnp.ones(d) if diagonal else jnp.eye(d), step)


def _low_rank(gram: jax.Array, hparams: Hyperparameters) -> jax.Array:
    """Map Σ = UΛUᵀ to M = U max(0, 1 − ηλ/√Λ) Uᵀ: the trace norm (Algorithm 2, steps 6 to 8)."""
    return shrinkage(gram, hparams.learning_rate * hparams.lam)


def _group_sparse(gram: jax.Array, hparams: Hyperparameters) -> jax.Array:
    """Map Σ to M = diag(max(0, 1 − ηλ/√Σ_jj)): the ℓ2,1 norm (Algorithm 3, steps 6 and 7).

    The diagonal of a whole Σ has more noise than a diagonal released alone.
    """
    diagonal = jnp.diagonal(gram) if gram.ndim == 2 else gram
    return shrinkage(diagonal, hparams.learning_rate * hparams.lam)


def _relationship(gram: jax.Array, hparams: Hyperparameters) -> jax.Array:
    """Map Σ to M = U max(0, 1 − θ/√Λ) Uᵀ: λ/2 times the squared trace norm, MTRL (see `mpmtl`).

    The threshold grows with the remainder: θ = ηλ Σ_j max(0, √Λ_j − θ).
    """
    return shrinkage(gram, _common_threshold(gram, hparams.learning_rate * hparams.lam))


MAPS = {
    "low-rank": _of_last_gram(_low_rank),
    "decomposed": _of_last_gram(_low_rank),
    "group-sparse": _of_last_gram(_group_sparse, diagonal=True),
    "relationship": _of_last_gram(_relationship),
}


class Rows(NamedTuple):
    """M times every client's released model, (m, d, c), and whether there was a release, ()."""

    rows: jax.Array
    released: jax.Array


def relationship_of_rows(num_clients: int) -> ServerMap:
    """Return the map of DP-MTRL: "relationship" of the `num_clients` released, noised models.

    The mechanism is `every_row()`; a client's noised row replaces its model.
    """

    def init(d, c):
        return Rows(jnp.zeros((num_clients, d, c)), jnp.zeros((), bool))

    def step(last, release, hparams, round_):
        if jnp.ndim(release) != 3 or len(release) != num_clients:
            raise SettingError(
                f"DP-MTRL needs a release of {num_clients} models; its mechanism must be ",
                Name("every_row()"),
            )
        flat = jnp.moveaxis(release, 1, 0).reshape(release.shape[1], -1)
        matrix = _relationship(jnp.matmul(flat, flat.T, precision=_HIGHEST), hparams)
        rows = jnp.einsum("de,mec->mdc", matrix, release, precision=_HIGHEST)
        return Rows(rows, jnp.ones((), bool))

    def apply(published, w, client_id):
        return jnp.where(published.released, published.rows[client_id].astype(w.dtype), w)

    return ServerMap(init, step, apply)


def shrinkage(gram: ArrayLike, threshold: ArrayLike) -> jax.Array:
    """Compute M = U max(0, 1 − τ/√Λ) Uᵀ of Σ = UΛUᵀ, or max(0, 1 − τ/√Σ_jj) of a diagonal.

    MP-MTL, Algorithm 2 (steps 6 to 8) and Algorithm 3 (steps 6 and 7), with all d directions: the
    paper's i ≤ min(d, m) would drop d − m of them. Nonpositive eigenvalues, which noise can cause,
    count as 0. For τ = 0, M is the identity, whatever Σ is.

    The derivative of the spectral function (Daleckii and Krein) is first order, in both modes. It
    is finite at repeated eigenvalues, where the derivative of `eigh` is not. At the kink Λ = τ² it
    is the one from below, 0.
    """
    gram = jnp.asarray(gram)
    threshold = jnp.asarray(threshold, gram.dtype)
    return _kept(gram, threshold) if gram.ndim == 1 else _spectral(gram, threshold)


def _common_threshold(gram: ArrayLike, weight: ArrayLike) -> jax.Array:
    """Compute the threshold θ with which `shrinkage` is the proximal map of (κ/2) ‖·‖_*².

    It solves θ = κ Σ_j max(0, √Λ_j − θ), κ = ηλ. Over the k largest roots, with sum S_k, that is
    θ = κ S_k/(1 + kκ), which rises while the next root exceeds it: the maximum over k is θ.
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
    shrunk = _kept(values, threshold)
    apart = jnp.abs(values[:, None] - values[None, :])
    across = jnp.abs(shrunk[:, None] - shrunk[None, :]) / jnp.where(apart > 0, apart, 1.0)
    steepest = 0.5 / jnp.where(threshold > 0, threshold, 1.0) ** 2
    across = jnp.where(threshold > 0, jnp.minimum(across, steepest), 0.0)
    exactly_one = active[:, None] ^ active[None, :]
    return jnp.where(both, above, jnp.where(exactly_one, across, 0.0))
