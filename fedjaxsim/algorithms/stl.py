"""Single-task learning by proximal gradient descent: every client learns its linear model alone."""

from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp

from fedjaxsim import checks
from fedjaxsim.algorithm import Algorithm, WarmStart
from fedjaxsim.algorithms.optimizers import LEARNING_RATE, curvature
from fedjaxsim.algorithms.proximal import (
    RIDGE,
    Acceleration,
    check_acceleration,
    loss_and_gradient,
    matrices,
    momentum,
    soften,
)
from fedjaxsim.algorithms.shared_model import from_one_model, keep_shared
from fedjaxsim.hyperparameters import Hyperparameter, reads
from fedjaxsim.tasks.task import Task

LAM = Hyperparameter(
    "lam",
    default=0.1,
    scale="log",
    symbol="λ",
    help="λ, the weight of ‖w‖₁ in STL's objective.",
    per_client=True,
)


class Personal(NamedTuple):
    """The state of a client.

    Attributes:
      w: (d, c), its model.
      previous: (d, c), its model of the round before.
    """

    w: jax.Array
    previous: jax.Array


@reads(LEARNING_RATE, LAM, RIDGE)
def stl(task: Task, *, acceleration: Acceleration = "convex") -> Algorithm:
    """STL with ℓ1 and ℓ2 penalties: client i minimizes L_i(w) + (μ/2) ‖w‖² + λ ‖w‖₁.

    L_i is the mean loss over all its own rows, μ = `hparams.ridge` and λ = `hparams.lam`. A round
    is one step of proximal gradient descent, equal to `mpmtl` for λ = 0. Nothing is sent, ε = 0.

    Args:
      task: a linear model with its loss.
      acceleration: Momentum, see `mpmtl`.

    Raises:
      ValueError: if the task is not linear, or the acceleration is unknown.
    """
    checks.one_of(get_args(Acceleration), acceleration=acceleration)
    to_matrix, to_params = matrices(task, "stl")

    def start(hparams, published, own):
        w = to_matrix(own)
        return (), Personal(w, w)

    def client(shared, personal, data, hparams, context):
        w, previous = personal
        z = w + momentum(acceleration, context.round, hparams) * (w - previous)
        loss, gradient = loss_and_gradient(task, to_params, z, data)
        step = z - hparams.learning_rate * (gradient + hparams.ridge * z)
        new = soften(step, hparams.learning_rate * hparams.lam)
        # As in `mpmtl`, the first step only makes the paper's first model.
        previous = jnp.where(context.round == 0, new, w)
        return Personal(new, previous), (), {"loss": loss}

    def predict(shared, personal, hparams, client_id):
        return to_params(personal.w)

    def check(hparams):
        check_acceleration(acceleration, hparams)

    init = from_one_model(task, start)
    return Algorithm(
        init, client, keep_shared, predict, task, check=check, warm_start=WarmStart(start),
        curvature=curvature("sgd", RIDGE.name),
    )  # fmt: skip
