"""MP-MTL: model-protected multi-task learning (Liang et al. 2020), Algorithms 1 to 5.

Beside it the two that it is compared with: DP-MTRL, which publishes all models, and STL, which
publishes nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim import checks, keys
from fedjaxsim.algorithm import Algorithm, WarmStart
from fedjaxsim.algorithms.local_steps import PULL, mean_over_rows
from fedjaxsim.algorithms.optimizers import COMMON_LEARNING_RATE, LEARNING_RATE, curvature
from fedjaxsim.algorithms.server_maps import MAPS, ServerMap, relationship_of_rows, shrinkage
from fedjaxsim.algorithms.shared_model import from_one_model, keep_shared
from fedjaxsim.checks import Name, SettingError
from fedjaxsim.data.minibatches import ClientData
from fedjaxsim.hyperparameters import (
    LARGEST_FLOAT32,
    Hyperparameter,
    Hyperparameters,
    keeps_ranges,
    on_host,
    reads,
)
from fedjaxsim.kernels import threefry
from fedjaxsim.keys import Stream
from fedjaxsim.own_code import stamp
from fedjaxsim.privacy.mechanisms import CLIP_NORM
from fedjaxsim.privacy.messages import clip_by_global_norm
from fedjaxsim.privacy.noise import normal, radius
from fedjaxsim.tasks.task import Task

PyTree = Any
Penalty = Literal[
    "low-rank", "group-sparse", "relationship", "decomposed", "decomposed-group-sparse"
]
Outliers = Literal["entries", "columns", "frobenius"]
_Acceleration = Literal["none", "convex", "strongly-convex"]
Acceleration = Annotated[
    _Acceleration,
    'Momentum β_t: 0, or (t − 1)/(t + 2) ("convex"), or (1 − √(μη))/(1 + √(μη)) '
    '("strongly-convex"), the paper\'s for η = 1/L; then μ = `hparams.ridge` > 0.',
]
RIDGE = Hyperparameter(
    "ridge", default=0.0, help="μ, the weight of ½‖w‖² in every client's objective."
)
LAM = dataclasses.replace(
    PULL, per_client=False, help="λ, the weight of the penalty on the matrix of all models."
)
LAM2 = dataclasses.replace(
    LAM,
    name="lam2",
    help="λ₂, the weight of the penalty on the part of a model that its client keeps.",
)
MESSAGE_EPSILON = Hyperparameter(
    "message_epsilon",
    default=float("inf"),
    range=(1e-12, LARGEST_FLOAT32),
    also=(float("inf"),),
    allowed="be positive (inf: examples are not protected by themselves)",
    help="ε of one round for every single example, in addition to clients' guarantee.",
)
_STL_LAM = dataclasses.replace(PULL, help="λ, the weight of ‖w‖₁ in STL's objective.")


class Iterates(NamedTuple):
    """A client's model, or one of the two parts of a decomposed one, (d, c).

    `w` is after the last step, clipped like messages if it is sent; `previous` is its proximal map
    of the round before, for the acceleration.
    """

    w: jax.Array
    previous: jax.Array


class Personal(NamedTuple):
    """A client's state: w̃_i; or p̃_i and, kept, q_i of a decomposed model, which it never sends."""

    sent: Iterates
    kept: Iterates | None


@reads(
    COMMON_LEARNING_RATE,
    LAM,
    RIDGE,
    CLIP_NORM,
    lambda penalty, **_: (LAM2,) if penalty.startswith("decomposed") else (),
    lambda protect_examples, **_: (MESSAGE_EPSILON,) if protect_examples else (),
)
def mpmtl(
    task: Task,
    *,
    penalty: Penalty = "low-rank",
    outliers: Outliers = "entries",
    acceleration: Acceleration = "convex",
    protect_examples: bool = False,
    server_map: ServerMap | None = None,
) -> Algorithm:
    """MP-MTL: clients learn the subspace, or the features, that their models have in common.

    It is proximal gradient descent on

        Σ_i L_i(w_i) + (μ/2) Σ_i ‖w_i‖² + λ ‖W‖_*

    over the matrix W of all clients' linear models, with λ ‖W‖_{2,1} for group-sparse and
    (λ/2) ‖W‖_*² for relationship; L_i is the mean loss over all rows of client i. In a round, with
    the M of the last release (I in the first round), client i computes

        ŵ_i = M w̃_i                                          (Algorithm 2, step 9)
        z_i = ŵ_i + β_t (ŵ_i − ŵ_i of the round before)       (step 10)
        w_i = z_i − η (∇L_i(z_i) + μ z_i)                     (step 11)
        w̃_i = clip(w_i, K)                                    (step 3)

    and sends w_i. A mechanism such as `gaussian_gram()`, whose clip norm is K, releases
    Σ_i w̃_i w̃_iᵀ + E or its diagonal, from which the server computes the next M. Clients predict
    with M w̃_i. Nobody sees W: the proximal map of each penalty is a product M·W, and M follows
    from WWᵀ. The loop is the paper's, rotated by half a round. Participation is full, since λ is
    weighed against all of Σ.

    A decomposed model is W = P + Q (Algorithm 4): P as above, and Q kept by its clients, under
    λ₂ Σ_i ‖q_i‖₁ on its entries, λ₂ Σ_i ‖q_i‖₂ on its columns, or λ₂ ‖Q‖²_F. Both take the same
    gradient: η ≤ 1/(2L).

    An intercept is one more coordinate of w_i. With c outputs a message is a matrix V (d, c),
    clipped in Frobenius norm; ‖VVᵀ‖_F ≤ ‖V‖²_F keeps all sensitivities.

    Differences from the paper:

    * Noise: the paper's Wishart noise (Theorem 1), `wishart`, has no ε. Here it is symmetric
      Gaussian noise with a positive shift (`gaussian_gram`), or pure ε (`pure_gram`).
    * Directions: the paper's i ≤ min(d, m) would zero d − m of them with few clients; all d are
      kept, since otherwise noise would not lead to M = I (Proposition 1).
    * Negative eigenvalues count as 0; the shift makes them improbable. λ = 0 gives M = I, exactly
      single-task learning.
    * Group sparsity releases the diagonal of Σ alone: the same cost, and a smaller shift.
    * Decomposed: Q starts at 0, since the paper's P = Q = W⁰ predicts with 2W⁰.
    * Protected examples: the paper's density ∝ exp(−(2K/ε)‖b‖) would cost 4K²/ε.

    Baselines of the paper: `stl`, and STL for Proposition 1 with λ = 0; non-private trace-norm and
    ℓ2,1 MTL without noise and clipping; MTRL (Zhang and Yeung 2010) as "relationship", since the
    best Ω turns λ₂ tr(WΩ⁻¹Wᵀ) into λ₂‖W‖_*²; `dp_mtrl`; DP-AGGR (Pathak et al. 2010) as `fedprox`
    for one round behind `pure`, whose pull from w = 0 is the ridge.

    Derivatives are finite at repeated eigenvalues; at an eigenvalue of exactly (ηλ)² the
    derivative is 0.

    Args:
      penalty: Penalty on the matrix W of all models, or on its shared part P.
      outliers: Penalty on Q, the part of a decomposed model that its client keeps.
      protect_examples: Whether a client adds noise b of density ∝ exp(−(ε/(2K)) ‖b‖) to w̃_i, clips
        again, sends the result and continues from it (Algorithm 5, which prints the inverse of the
        factor). One example moves w̃_i by at most 2K, so each round is ε-differentially private for
        it (Proposition 4), ε = `hparams.message_epsilon`; the report composes the rounds.
      server_map: the map from releases to M, any `ServerMap` (f: Σ^(1:t) → M); by default the
        proximal map of the penalty. It cannot mix clients' models (W ← WM).

    Raises:
      ValueError: if the task is not linear; when a run starts, if the mechanism does not suit.

    Example:
      >>> algorithm = fjs.mpmtl(task)  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'lam', 'ridge', 'clip']
    """
    checks.one_of(get_args(Penalty), penalty=penalty)
    checks.one_of(get_args(Outliers), outliers=outliers)
    checks.one_of(get_args(_Acceleration), acceleration=acceleration)
    to_matrix, to_params = _matrices(task, "mpmtl")
    server_map = server_map or MAPS[penalty.removeprefix("decomposed-")]
    decomposed, shrink = penalty.startswith("decomposed"), _SHRINK[outliers]

    def start(key, hparams, published, own_model):
        w = to_matrix(own_model)
        q = jnp.zeros_like(w)
        personal = Personal(Iterates(w, w), Iterates(q, q) if decomposed else None)
        return server_map.init(*w.shape), personal

    def proximal(shared, personal, hparams, client_id):
        """Return ŵ_i and None, or p̂_i and q̂_i."""
        hat = server_map.apply(shared, personal.sent.w, client_id)
        if personal.kept is None:
            return hat, None
        return hat, shrink(personal.kept.w, hparams.learning_rate * hparams.lam2)

    def client(shared, personal, data, hparams, context):
        hat, hat_q = proximal(shared, personal, hparams, context.client_id)
        beta = _momentum(acceleration, context.round, hparams)
        z = hat + beta * (hat - personal.sent.previous)
        z_q = None if hat_q is None else hat_q + beta * (hat_q - personal.kept.previous)
        z_sum = z if z_q is None else z + z_q
        loss, gradient = _loss_and_gradient(task, to_params, z_sum, data)
        step = hparams.learning_rate * (gradient + hparams.ridge * z_sum)

        def after(w, hat):
            # ŵ⁰ is w̃⁰, since there is no release before the first round.
            return Iterates(w, jnp.where(context.round == 0, w, hat))

        message = z - step
        clipped = clip_by_global_norm(message, hparams.clip).messages
        if protect_examples:
            key = keys.stream(context.key, Stream.EXAMPLE_NOISE)
            message = clipped = _noised(clipped, hparams, key)
        kept_iterates = None if z_q is None else after(z_q - step, hat_q)
        return Personal(after(clipped, hat), kept_iterates), message, {"loss": loss}

    def predict(shared, personal, hparams, client_id):
        hat, hat_q = proximal(shared, personal, hparams, client_id)
        return to_params(hat if hat_q is None else hat + hat_q)

    def check(hparams):
        _check_acceleration(acceleration, hparams)
        clip_norm = on_host(hparams.clip)
        if protect_examples and clip_norm is not None and not np.all(np.isfinite(clip_norm)):
            raise ValueError(
                f"clip must be finite where examples are protected, got clip {clip_norm}"
            )

    made = Algorithm(
        from_one_model(task, start),
        client,
        server_map.step,
        predict,
        task,
        check=check,
        warm_start=WarmStart(start),
        example_epsilon=(lambda hparams: hparams.message_epsilon) if protect_examples else None,
        curvature=lambda bound, hparams: (1 + decomposed) * (bound + hparams.ridge),
    )
    return stamp(made, _same_noise)


def _same_noise(before: Algorithm, after: Algorithm) -> bool:
    """Return whether a change leaves the noise for examples as it was."""
    same = before.client is after.client and before.example_epsilon is after.example_epsilon
    return same and keeps_ranges(before.hyperparameters, after.hyperparameters)


def _noised(w: jax.Array, hparams: Hyperparameters, key: jax.Array) -> jax.Array:
    """Add noise for single examples to a clipped model and clip it again."""
    radius_key, normal_key = threefry.split(key)
    direction = normal(normal_key, w.shape, w.dtype)
    size = radius(radius_key, w.size).astype(w.dtype)
    clip_norm = jnp.asarray(hparams.clip)
    scale = 2 * clip_norm / hparams.message_epsilon
    return clip_by_global_norm(w + scale * size * direction, clip_norm).messages


@reads(COMMON_LEARNING_RATE, LAM, RIDGE, CLIP_NORM)
def dp_mtrl(task: Task, *, num_clients: int, acceleration: Acceleration = "none") -> Algorithm:
    """DP-MTRL (Gupta, Rana, Phung, Venkatesh 2016), as MP-MTL compares itself with it.

    Objective and descent equal `mpmtl(task, penalty="relationship")`. But `every_row` releases
    every client's model, clipped and noised; the relationship of the tasks is computed from the
    noised models, and clients continue from them and predict with them.

    The paper's DP-MTRL and DP-AGGR protect one example with noise of density ∝ exp(−‖b‖ε'/Δ),
    Δ = 2G/(n_i μ), G a bound on gradients and μ the ridge, and a client of n examples by group
    privacy, at (ε/n, δ/(n e^ε)). That is the noise for messages that a client moves by
    2Gn/(n_min μ), which clipping to C = Gn/(n_min μ) gives for replacement; z = 2/ε behind `pure`
    is their DP-AGGR exactly. Clipping holds however well a client minimizes, and without G, which
    the paper takes from the data, so that it has no ε. A smaller C is allowed and far better.

    Args:
      num_clients: m.

    Example:
      >>> algorithm = fjs.dp_mtrl(task, num_clients=2)  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'lam', 'ridge', 'clip']
    """
    server_map = relationship_of_rows(num_clients)
    return mpmtl(task, penalty="relationship", acceleration=acceleration, server_map=server_map)


@reads(LEARNING_RATE, _STL_LAM, RIDGE)
def stl(task: Task, *, acceleration: Acceleration = "convex") -> Algorithm:
    """STL with ℓ1 and ℓ2 penalties: client i minimizes L_i(w) + (μ/2) ‖w‖² + λ ‖w‖₁.

    L_i is the mean loss over all its own rows, μ = `hparams.ridge` and λ = `hparams.lam`. A round
    is one step of proximal gradient descent, equal to `mpmtl` for λ = 0. Nothing is sent, ε = 0.

    Example:
      >>> algorithm = fjs.stl(task)  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'lam', 'ridge']
    """
    checks.one_of(get_args(_Acceleration), acceleration=acceleration)
    to_matrix, to_params = _matrices(task, "stl")

    def start(key, hparams, published, own_model):
        w = to_matrix(own_model)
        return (), Iterates(w, w)

    def client(shared, personal, data, hparams, context):
        w, previous = personal
        z = w + _momentum(acceleration, context.round, hparams) * (w - previous)
        loss, gradient = _loss_and_gradient(task, to_params, z, data)
        step = z - hparams.learning_rate * (gradient + hparams.ridge * z)
        w_new = _soften(step, hparams.learning_rate * hparams.lam)
        # As in `mpmtl`, the first step only makes the paper's first model.
        return Iterates(w_new, jnp.where(context.round == 0, w_new, w)), (), {"loss": loss}

    return Algorithm(
        from_one_model(task, start),
        client,
        keep_shared,
        lambda shared, personal, hparams, client_id: to_params(personal.w),
        task,
        check=lambda hparams: _check_acceleration(acceleration, hparams),
        warm_start=WarmStart(start),
        curvature=curvature("sgd", RIDGE.name),
    )


def _matrices(
    task: Task, name: str
) -> tuple[Callable[[PyTree], jax.Array], Callable[[jax.Array], PyTree]]:
    """Return functions from parameters to a matrix (d, c), its last row the intercept, and back."""
    if task.linear is None:
        raise ValueError(
            f"{name} is for linear models, with one row of W per output, and losses of single "
            "rows: give a task of models.linear() whose loss compares no rows of a client with "
            "each other, as cox does"
        )

    def to_matrix(params):
        rows = [params["kernel"].T, *([params["bias"][None]] if "bias" in params else [])]
        w = jnp.concatenate(rows)
        return w.astype(jnp.promote_types(w.dtype, jnp.float32))

    def to_params(matrix):
        like = jax.eval_shape(task.init, jax.random.key(0))
        w = matrix.astype(like["kernel"].dtype)
        return {"kernel": w[:-1].T, "bias": w[-1]} if "bias" in like else {"kernel": w.T}

    return to_matrix, to_params


def _momentum(
    acceleration: Acceleration, round_: jax.Array, hparams: Hyperparameters
) -> jax.Array | float:
    """Return β_t, with t = 0 in the first round."""
    if acceleration == "none":
        return 0.0
    if acceleration == "convex":
        t = round_.astype(float)
        return jnp.maximum(t - 1, 0) / (t + 2)
    root = jnp.sqrt(jnp.asarray(hparams.ridge) * hparams.learning_rate)
    return (1 - root) / (1 + root)


def _loss_and_gradient(
    task: Task, to_params: Callable[[jax.Array], PyTree], w: jax.Array, data: ClientData
) -> tuple[jax.Array, jax.Array]:
    """Compute L_i and ∇L_i at w (d, c) over all rows of a client; 0 if it has none."""
    return mean_over_rows(
        lambda batch: jax.value_and_grad(lambda w: task.loss(to_params(w), batch))(w), data
    )


def _check_acceleration(acceleration: Acceleration, hparams: Hyperparameters) -> None:
    """Raise ValueError if a known ridge and η do not suit the acceleration."""
    ridge, eta = on_host(hparams.ridge), on_host(hparams.learning_rate)
    if acceleration == "strongly-convex" and ridge is not None:
        if np.any(ridge <= 0):
            raise ValueError(
                f"ridge must be positive for the acceleration 'strongly-convex', got {ridge}"
            )
        if eta is not None and np.any(ridge * eta > 1):
            raise SettingError(
                Name("learning_rate"),
                " must be at most 1/ridge for the acceleration 'strongly-convex', "
                f"got {eta} with ridge {ridge}",
            )


def _soften(q: jax.Array, threshold: jax.Array) -> jax.Array:
    """Return sign(q) max(0, |q| − τ), the proximal map of τ ‖q‖₁."""
    return jnp.sign(q) * jnp.maximum(jnp.abs(q) - threshold, 0)


# The proximal maps of the penalties on Q, of q (d, c) and τ = ηλ₂; that of "columns" is
# max(0, 1 − τ/‖q‖₂) q of every column.
_SHRINK = {
    "entries": _soften,
    "columns": lambda q, threshold: q * shrinkage(jnp.sum(jnp.square(q), axis=0), threshold),
    "frobenius": lambda q, threshold: q / (1 + 2 * threshold),
}
