"""MP-MTL's maps Σ^(1:t) → M from noised Gram matrices to the matrix that clients apply."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjaxsim.algorithms.spectral import common_threshold, shrinkage
from fedjaxsim.hyperparameters import Hyperparameters

PyTree = Any


def apply_matrix(matrix: jax.Array, w: jax.Array, client_id: jax.Array) -> jax.Array:
    """Return M·w of one client's w (d, c), for a matrix M (d, d) or a diagonal (d,)."""
    matrix = matrix.astype(w.dtype)
    if matrix.ndim == 1:
        return matrix[:, None] * w
    # With the identity of the first round, w stays bit-identical.
    return jnp.matmul(matrix, w, precision=jax.lax.Precision.HIGHEST)


class ServerMap(NamedTuple):
    """A map f: Σ^(1:t) → M^(t) (MP-MTL, Algorithm 1, step 6), and its use by a client.

    The server reads only releases and each client applies M to its own model, so any f is as
    private as the releases.

    Attributes:
      init: `(d) -> (M, memory)`: M⁰, and the server's memory of earlier releases, a pytree.
      step: `(gram, memory, hparams, round) -> (M, memory)`: the next M, from the release Σ.
      apply: `(M, w (d, c), client_id) -> ŵ (d, c)` of one client; the identity for M⁰.
    """

    init: Callable[[int], tuple[PyTree, PyTree]]
    step: Callable[[jax.Array, PyTree, Hyperparameters, jax.Array], tuple[PyTree, PyTree]]
    apply: Callable[[PyTree, jax.Array, jax.Array], jax.Array] = apply_matrix


def _of_last_gram(
    matrix: Callable[[jax.Array, Hyperparameters], jax.Array], diagonal: bool = False
) -> ServerMap:
    """Return the map that computes M from the last Σ alone."""
    dimensions = (1, 2) if diagonal else (2,)

    def step(gram, memory, hparams, round_):
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(gram)]
        if [len(shape) in dimensions and len(set(shape)) == 1 for shape in shapes] != [True]:
            raise ValueError(
                "MP-MTL's mechanism must release a Gram matrix (d, d), or for group sparsity its "
                "diagonal (d,), as gaussian_gram() does; the release has the shapes "
                f"{shapes}"
            )
        return matrix(gram, hparams), memory

    return ServerMap(lambda d: (jnp.ones(d) if diagonal else jnp.eye(d), ()), step)


def low_rank() -> ServerMap:
    """Map Σ = UΛUᵀ to M = U max(0, 1 − ηλ/√Λ) Uᵀ: the trace norm (Algorithm 2, steps 6 to 8)."""
    return _of_last_gram(lambda gram, h: shrinkage(gram, h.learning_rate * h.lam))


def group_sparse() -> ServerMap:
    """Map Σ to M = diag(max(0, 1 − ηλ/√Σ_jj)): the ℓ2,1 norm (Algorithm 3, steps 6 and 7).

    The diagonal of a whole Σ has more noise than a diagonal released alone.
    """

    def matrix(gram, hparams):
        diagonal = jnp.diagonal(gram) if gram.ndim == 2 else gram
        return shrinkage(diagonal, hparams.learning_rate * hparams.lam)

    return _of_last_gram(matrix, diagonal=True)


def relationship() -> ServerMap:
    """Map Σ to M = U max(0, 1 − θ/√Λ) Uᵀ: λ/2 times the squared trace norm, MTRL (see `mpmtl`).

    The threshold grows with the remainder: θ = ηλ Σ_j max(0, √Λ_j − θ).
    """
    return _of_last_gram(_relate)


def _relate(gram: jax.Array, hparams: Hyperparameters) -> jax.Array:
    return shrinkage(gram, common_threshold(gram, hparams.learning_rate * hparams.lam))


class Rows(NamedTuple):
    """The published state of `relationship_of_rows`.

    Attributes:
      matrix: M.
      rows: M times every client's released model, (m, d, c).
      released: whether there was a release, ().
    """

    matrix: jax.Array
    rows: jax.Array
    released: jax.Array


def relationship_of_rows(num_clients: int, num_outputs: int = 1) -> ServerMap:
    """Return the map of DP-MTRL: `relationship` of all clients' released models.

    The mechanism is `every_row()`; Σ is computed from the noised rows, and a client's noised row
    replaces its model.

    Args:
      num_clients: m.
      num_outputs: c.
    """

    def init(d):
        rows = jnp.zeros((num_clients, d, num_outputs))
        return Rows(jnp.eye(d), rows, jnp.zeros((), bool)), ()

    def step(release, memory, hparams, round_):
        if jnp.ndim(release) != 3 or len(release) != num_clients:
            raise ValueError(
                f"DP-MTRL needs a release of {num_clients} models; its mechanism must be "
                "every_row()"
            )
        flat = jnp.moveaxis(release, 1, 0).reshape(release.shape[1], -1)
        gram = jnp.matmul(flat, flat.T, precision=jax.lax.Precision.HIGHEST)
        matrix = _relate(gram, hparams)
        rows = jnp.einsum("de,mec->mdc", matrix, release, precision=jax.lax.Precision.HIGHEST)
        return Rows(matrix, rows, jnp.ones((), bool)), memory

    def apply(published, w, client_id):
        return jnp.where(published.released, published.rows[client_id].astype(w.dtype), w)

    return ServerMap(init, step, apply)
