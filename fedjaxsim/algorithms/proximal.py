"""Proximal gradient descent of linear models, for one client."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.algorithms.local_steps import mean_over_rows
from fedjaxsim.algorithms.spectral import shrinkage
from fedjaxsim.data.minibatches import ClientData
from fedjaxsim.hyperparameters import Hyperparameter, Hyperparameters, on_host
from fedjaxsim.tasks.task import Task

PyTree = Any
Acceleration = Literal["none", "convex", "strongly-convex"]
RIDGE = Hyperparameter(
    "ridge", default=0.0, symbol="ridge", help="μ, the weight of ½‖w‖² in every client's objective."
)


def matrices(
    task: Task, name: str
) -> tuple[Callable[[PyTree], jax.Array], Callable[[jax.Array], PyTree]]:
    """Return functions from a linear task's parameters to a matrix (d, c), and back.

    The intercept is the last row.

    Args:
      task: a task with a linear model.
      name: the algorithm, for the message.
    """
    if task.linear is None:
        raise ValueError(
            f"{name} is for linear models, with one row of W per output: give a task of "
            "models.linear()"
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


def momentum(
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


def loss_and_gradient(
    task: Task, to_params: Callable[[jax.Array], PyTree], w: jax.Array, data: ClientData
) -> tuple[jax.Array, jax.Array]:
    """Compute L_i and ∇L_i at w (d, c) over all rows of a client; 0 if it has none."""
    return mean_over_rows(
        lambda batch: jax.value_and_grad(lambda w: task.loss(to_params(w), batch))(w), data
    )


def check_acceleration(acceleration: Acceleration, hparams: Hyperparameters) -> None:
    """Raise ValueError if a known ridge and η do not suit the acceleration."""
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


def soften(q: jax.Array, threshold: jax.Array) -> jax.Array:
    """Return sign(q) max(0, |q| − τ), for λ₂ ‖q‖₁."""
    return jnp.sign(q) * jnp.maximum(jnp.abs(q) - threshold, 0)


def shorten(q: jax.Array, threshold: jax.Array) -> jax.Array:
    """Return max(0, 1 − τ/‖q‖₂) q of every column, for λ₂ ‖q‖₂."""
    return q * shrinkage(jnp.sum(jnp.square(q), axis=0), threshold)


def scale(q: jax.Array, threshold: jax.Array) -> jax.Array:
    """Return q/(1 + 2τ), for λ₂ ‖q‖²_F."""
    return q / (1 + 2 * threshold)


SHRINK = {"entries": soften, "columns": shorten, "frobenius": scale}
"""The proximal maps of the penalties on Q, (q (d, c), τ = ηλ₂) -> q̂ (d, c)."""
