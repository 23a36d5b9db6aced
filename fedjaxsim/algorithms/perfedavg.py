"""Per-FedAvg (Fallah, Mokhtari, Ozdaglar; NeurIPS 2020): a model one step from every client's."""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from fedjaxsim import checks
from fedjaxsim.algorithm import Algorithm
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.local_steps import local_steps, mean_over_rows
from fedjaxsim.algorithms.shared_model import moved, published
from fedjaxsim.hyperparameters import reads
from fedjaxsim.tasks.task import Task

ADAPTATION_RATE = dataclasses.replace(
    optimizers.LEARNING_RATE,
    name="adaptation_rate",
    help="α of Per-FedAvg, the step from the shared model to a client's own.",
)
Derivative = Literal["first-order", "hessian"]


@reads(optimizers.local_records, optimizers.server_records, ADAPTATION_RATE)
def perfedavg(
    task: Task,
    *,
    derivative: Derivative = "first-order",
    local_optimizer: optimizers.LocalChoice = "sgd",
    server_optimizer: optimizers.ServerChoice = "sgd",
) -> Algorithm:
    """Per-FedAvg: w minimizes the mean of ℓ_k(w − α∇ℓ_k(w)), as in MAML (Algorithm 1).

    The first half of a minibatch is D, the other one D′. Client k of the cohort takes local steps
    from w, with η for the paper's β (lines 7 and 8),

        ṽ = v − α ∇ℓ(v; D),    v ← v − η (I − α ∇²ℓ(v; D)) ∇ℓ(ṽ; D′)

    or without the Hessian, Per-FedAvg (FO). D″ is D, so the Hessian gives the exact gradient of the
    adapted loss. A batch of one row has no D′ and takes no step. The
    client sends v − w and predicts with w − α∇ℓ_k(w), of all its training rows.

    Args:
      derivative: Derivative of the adapted model: "first-order" or "hessian".

    Example:
      >>> algorithm = fjs.perfedavg(task)  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'server_learning_rate', 'adaptation_rate']
    """
    checks.one_of(get_args(Derivative), derivative=derivative)
    plain = fedavg(task, local_optimizer=local_optimizer, server_optimizer=server_optimizer)

    def client(shared, personal, data, hparams, context):
        def adapted(v, batch):
            return moved(v, -hparams.adaptation_rate, jax.grad(task.loss)(v, batch))

        def loss(v, batch):
            first, second = _halves(batch)
            return task.loss(adapted(v, first), second)

        def gradient(v, batch):
            if derivative == "hessian":
                return task._replace(loss=loss).gradient(v, batch)
            first, second = _halves(batch)
            return task.gradient(adapted(v, first), second)

        w = shared.params
        v = local_steps(w, data, task, local_optimizer, hparams, context.round, gradient=gradient)
        return personal, jax.tree.map(jnp.subtract, v, w), {}

    def predict_with_data(shared, personal, data, hparams, client_id):
        w = published(shared)
        gradient = mean_over_rows(lambda batch: jax.grad(task.loss)(w, batch), data)
        return moved(w, -hparams.adaptation_rate, gradient)

    return plain._replace(client=client, predict_with_data=predict_with_data)


def _halves(batch):
    """Split the examples of a minibatch in two by their weights; the first half is the larger."""
    present = batch.weight > 0
    first = jnp.cumsum(present) <= (jnp.sum(present) + 1) // 2
    weight = batch.weight
    return (
        batch._replace(weight=jnp.where(first, weight, 0)),
        batch._replace(weight=jnp.where(first, 0, weight)),
    )
