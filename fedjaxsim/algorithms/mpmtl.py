"""MP-MTL: model-protected multi-task learning (Liang et al. 2020), Algorithms 1 to 5."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.algorithms.billboard import from_one_model
from fedjaxsim.algorithms.server_maps import ServerMap, group_sparse, low_rank
from fedjaxsim.algorithms.spectral import shrinkage
from fedjaxsim.data.minibatches import ClientData
from fedjaxsim.fast import threefry
from fedjaxsim.hparams import Hyperparameters, on_host
from fedjaxsim.models.task import Task
from fedjaxsim.privacy.accounting import kov
from fedjaxsim.privacy.clipping import clip_by_global_norm
from fedjaxsim.privacy.events import Entry
from fedjaxsim.privacy.guarantee import Guarantee
from fedjaxsim.privacy.noise import normal, radius

PyTree = Any
Penalty = Literal["low-rank", "group-sparse", "decomposed", "decomposed-group-sparse"]
Outliers = Literal["entries", "columns", "frobenius"]
Acceleration = Literal["none", "convex", "strongly-convex"]

_NOISED_EXAMPLES = (
    "Clients add noise of their own, for the sake of single examples: that guarantee is no part of "
    "this ε, which is of whole clients; `example_guarantee` states it."
)


class Published(NamedTuple):
    """What everybody may read.

    Attributes:
      matrix: M of the last release; the identity before there is one.
      memory: what the server map remembers of earlier releases.
    """

    matrix: PyTree
    memory: PyTree


class Part(NamedTuple):
    """A client's model, or one of the two parts of a decomposed one.

    Attributes:
      w: (d, c), as the last step left it; clipped, as the mechanism clips it, if it is sent.
      previous: (d, c), what the proximal map made of it a round earlier, for the acceleration.
    """

    w: jax.Array
    previous: jax.Array


class Personal(NamedTuple):
    """What a client keeps.

    Attributes:
      sent: w̃_i, or p̃_i of a decomposed model.
      kept: q_i of a decomposed model, which never leaves the client; None where there is none.
    """

    sent: Part
    kept: Part | None


def mpmtl(
    task: Task,
    penalty: Penalty = "low-rank",
    outliers: Outliers = "entries",
    acceleration: Acceleration = "none",
    protect_examples: bool = False,
    *,
    server_map: ServerMap | None = None,
) -> Algorithm:
    """MP-MTL: clients learn which subspace, or which features, their models have in common.

    It is proximal gradient descent on

        Σ_i L_i(w_i) + (μ/2) Σ_i ‖w_i‖² + λ ‖W‖_*       (low-rank; λ ‖W‖_{2,1} for group-sparse)

    over the matrix W of all clients' linear models; L_i is the mean loss of client i over all its
    own rows. The proximal map is a product M·W whose M follows from WWᵀ, and that is all that is
    released. In a round, with the M of the last release (I in the first round), client i does

        ŵ_i = M w̃_i                                          (Algorithm 2, step 9)
        z_i = ŵ_i + β_t (ŵ_i − ŵ_i of the round before)       (step 10)
        w_i = z_i − η (∇L_i(z_i) + μ z_i)                     (step 11)
        w̃_i = clip(w_i, K)                                    (step 3)

    and sends w_i. The mechanism clips it to w̃_i too and releases Σ_i w̃_i w̃_iᵀ + E, of which the
    server makes the next M. Clients predict with M w̃_i. That is the paper's loop, turned by half a
    round: its W⁰ is what the first round's step makes of each client's start, without the others.

    The mechanism must release a Gram matrix: `gaussian_gram()`, or of its diagonal alone, which is
    all that group sparsity needs, `gaussian_gram(diagonal=True)`; or `pure_gram`, or `wishart`,
    which guarantees nothing. Its clip norm is K. Everyone should take part, as in the paper: Σ is a
    sum, against which λ is weighed.

    A decomposed model is W = P + Q (Algorithm 4 and Remark 4). P is as W above, low-rank or
    group-sparse; Q stays with the clients, under one more penalty: λ₂ Σ_i ‖q_i‖₁ on its entries,
    λ₂ Σ_i ‖q_i‖₂ on its columns, or λ₂ ‖Q‖²_F. Both take the same gradient, which for the pair has
    the Lipschitz constant 2L: η ≤ 1/(2L). P starts where the client starts, and Q at 0; the paper
    starts both from W⁰, which predicts with 2 W⁰.

    With an intercept, that is one more coordinate of w_i. With c outputs, a client has c columns of
    W, and a message is a matrix (d, c), clipped in Frobenius norm.

    Args:
      task: a linear model with its loss.
      penalty: on W, or on P.
      outliers: which penalty is on Q; for decomposed models.
      acceleration: β_t is 0, or (t − 1)/(t + 2) ("convex"), or (1 − √(μη))/(1 + √(μη))
        ("strongly-convex"), which is the paper's where η = 1/L; then μ = `hparams.ridge` > 0.
      protect_examples: whether a client adds noise b of density ∝ exp(−(ε/(2K)) ‖b‖) to w̃_i, clips
        again, and sends and goes on from the result (Algorithm 5, which prints the inverse of the
        factor); ε = `hparams.example_epsilon` is that of one round. See `example_guarantee`.
      server_map: what the server makes of the releases; by default the proximal map of the penalty.

    Raises:
      ValueError: if the task is not linear, or there is no such penalty or acceleration; when a run
        starts, if the mechanism releases something else.
    """
    _require(penalty, Penalty, "penalty")
    _require(outliers, Outliers, "outliers")
    _require(acceleration, Acceleration, "acceleration")
    to_matrix, to_params = _matrices(task)
    common = group_sparse if penalty.endswith("group-sparse") else low_rank
    server_map = server_map or common()
    decomposed, shrink = penalty.startswith("decomposed"), _SHRINK[outliers]

    def start(hparams, published, own):
        del hparams, published
        w = to_matrix(own)
        q = jnp.zeros_like(w)
        shared = Published(*server_map.init(w.shape[0]))
        return shared, Personal(Part(w, w), Part(q, q) if decomposed else None)

    def proximal(shared, personal, hparams, client_id):
        """ŵ_i and None, or p̂_i and q̂_i."""
        hat = server_map.apply(shared.matrix, personal.sent.w, client_id)
        if personal.kept is None:
            return hat, None
        return hat, shrink(personal.kept.w, hparams.learning_rate * hparams.lam2)

    def client(shared, personal, data, hparams, context):
        hat, hat_q = proximal(shared, personal, hparams, context.client_id)
        beta = _beta(acceleration, context.round, hparams)
        z = hat + beta * (hat - personal.sent.previous)
        z_q = None if hat_q is None else hat_q + beta * (hat_q - personal.kept.previous)
        whole = z if z_q is None else z + z_q
        loss, gradient = _loss_and_gradient(task, to_params, whole, data)
        step = hparams.learning_rate * (gradient + hparams.ridge * whole)

        def after(w, hat):
            # ŵ⁰ is w̃⁰: in the first round there was no release to make it of.
            return Part(w, jnp.where(context.round == 0, w, hat))

        message = z - step
        clipped = clip_by_global_norm(message, hparams.clip_norm).message
        if protect_examples:
            message = clipped = _noised(clipped, hparams, context.key)
        kept = None if z_q is None else after(z_q - step, hat_q)
        return Personal(after(clipped, hat), kept), message, {"loss": loss}

    def server(shared, release, hparams, round_):
        matrix, memory = server_map.step(release, shared.memory, hparams, round_)
        return Published(matrix, memory)

    def predict(shared, personal, hparams, client_id):
        hat, hat_q = proximal(shared, personal, hparams, client_id)
        return to_params(hat if hat_q is None else hat + hat_q)

    def check(hparams):
        _check_hyperparameters(acceleration, protect_examples, hparams)

    return Algorithm(
        from_one_model(task, start),
        client,
        server,
        predict,
        check,
        public=(_NOISED_EXAMPLES,) if protect_examples else (),
        start=start,
    )


def example_guarantee(example_epsilon: float, rounds: int, delta: float = 0.0) -> Guarantee:
    """What `protect_examples` guarantees: (ε, δ)-differential privacy of every single example.

    The clip bounds by 2K how far one example can move what a client sends, so each round's noise
    makes it ε-differentially private by itself (Algorithm 5, Proposition 4), whatever else the
    client keeps. Over rounds that composes (MP-MTL, equation 6).

    Args:
      example_epsilon: ε of one round.
      rounds: T.
      delta: δ in [0, 1); with 0, ε is the sum.

    Raises:
      ValueError: if one of them is out of range.
    """
    if not example_epsilon > 0 or rounds < 0:
        raise ValueError(
            "example_epsilon must be positive and rounds at least 0, got "
            f"{example_epsilon} and {rounds}"
        )
    epsilon = kov.compose([Entry(example_epsilon, 1.0, rounds)], delta)
    protected = np.isfinite(epsilon)
    return Guarantee(
        epsilon=float(epsilon) if protected else None,
        delta=delta,
        adjacency="replace",
        view="released_sequence",
        sampling="everyone",
        accountant="kov",
        status="upper_bound" if protected else "none",
        assumptions=(
            "One example of one client is replaced; its number of examples is public.",
            "It holds against whoever sees what the client sends, the server included, and not "
            "against the client itself.",
        ),
        reason="" if protected else "no noise was added",
        unit="example",
    )


def _require(value: str, kind: Any, name: str) -> None:
    if value not in get_args(kind):
        raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}")


def _matrices(
    task: Task,
) -> tuple[Callable[[PyTree], jax.Array], Callable[[jax.Array], PyTree]]:
    """A linear task's parameters as a matrix (d, c), the intercept being its last row, and back."""
    if task.linear is None:
        raise ValueError(
            "mpmtl is for linear models, whose parameters are a column of W each: give a task of "
            "models.linear()"
        )

    def to_matrix(params):
        rows = [params["kernel"], *([params["bias"][None]] if "bias" in params else [])]
        w = jnp.concatenate(rows)
        return w.astype(jnp.promote_types(w.dtype, jnp.float32))

    def to_params(matrix):
        like = jax.eval_shape(task.init, jax.random.key(0))
        w = matrix.astype(like["kernel"].dtype)
        return {"kernel": w[:-1], "bias": w[-1]} if "bias" in like else {"kernel": w}

    return to_matrix, to_params


def _beta(
    acceleration: Acceleration, round_: jax.Array, hparams: Hyperparameters
) -> jax.Array | float:
    """β_t, with t = 0 in the first round."""
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
    """L_i and ∇L_i at w (d, c), over all rows of a client; 0 where it has none."""

    def of_batch(batch):
        value, gradient = jax.value_and_grad(lambda w: task.loss(to_params(w), batch))(w)
        count = jnp.sum(batch.weight)
        return value * count, gradient * count.astype(gradient.dtype)

    def add(total, batch):
        return jax.tree.map(jnp.add, total, of_batch(batch))

    shapes = jax.eval_shape(of_batch, data.batch_shapes())
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    total = data.full_pass(add, zero)
    count = jnp.maximum(data.count, 1)
    return jax.tree.map(lambda leaf: leaf / count.astype(leaf.dtype), total)


def _noised(w: jax.Array, hparams: Hyperparameters, key: jax.Array) -> jax.Array:
    """A clipped model with noise for the sake of single examples, clipped again."""
    radius_key, normal_key = threefry.split(key)
    direction = normal(normal_key, w.shape, w.dtype)
    size = radius(radius_key, w.size).astype(w.dtype)
    clip_norm = jnp.asarray(hparams.clip_norm)
    scale = 2 * clip_norm / hparams.example_epsilon
    return clip_by_global_norm(w + scale * size * direction, clip_norm).message


def _check_hyperparameters(
    acceleration: Acceleration, protect_examples: bool, hparams: Hyperparameters
) -> None:
    ridge, eta = on_host(hparams.ridge), on_host(hparams.learning_rate)
    if acceleration == "strongly-convex" and ridge is not None:
        if np.any(ridge <= 0):
            raise ValueError(
                f"ridge must be positive for the acceleration 'strongly-convex', got {ridge}"
            )
        if eta is not None and np.any(ridge * eta > 1):
            raise ValueError(
                "learning_rate must be at most 1/ridge for the acceleration 'strongly-convex', "
                f"got {eta} with ridge {ridge}"
            )
    clip_norm = on_host(hparams.clip_norm)
    if protect_examples and clip_norm is not None and not np.all(np.isfinite(clip_norm)):
        raise ValueError(
            f"clip_norm must be finite where examples are protected, got clip_norm {clip_norm}"
        )


def _soften(q: jax.Array, threshold: jax.Array) -> jax.Array:
    """sign(q) max(0, |q| − τ), for λ₂ ‖q‖₁."""
    return jnp.sign(q) * jnp.maximum(jnp.abs(q) - threshold, 0)


def _shorten(q: jax.Array, threshold: jax.Array) -> jax.Array:
    """max(0, 1 − τ/‖q‖₂) q of every column, for λ₂ ‖q‖₂."""
    return q * shrinkage(jnp.sum(jnp.square(q), axis=0), threshold)


def _scale(q: jax.Array, threshold: jax.Array) -> jax.Array:
    """q/(1 + 2τ), for λ₂ ‖q‖²_F."""
    return q / (1 + 2 * threshold)


_SHRINK = {"entries": _soften, "columns": _shorten, "frobenius": _scale}
"""The proximal maps of the penalties on Q, (q (d, c), τ = ηλ₂) -> q̂ (d, c)."""
