"""FedALA (Zhang et al.; AAAI 2023): adaptive local aggregation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.local_steps import local_steps
from fedjaxsim.algorithms.shared_model import with_personal
from fedjaxsim.hyperparameters import Hyperparameter, reads
from fedjaxsim.tasks.task import Task

PyTree = Any
AGGREGATION_RATE = Hyperparameter(
    "aggregation_rate",
    default=1.0,
    scale="log",
    help="η of FedALA's aggregation weights, 1 in the paper.",
    per_client=True,
)


class Personal(NamedTuple):
    """One client's state: θ_i, its model, and W_i, its weights in [0, 1], like the params."""

    params: PyTree
    weights: PyTree


@reads(optimizers.local_records, optimizers.server_records, AGGREGATION_RATE)
def fedala(
    task: Task,
    *,
    local_optimizer: optimizers.LocalChoice = "sgd",
    server_optimizer: optimizers.ServerChoice = "sgd",
) -> Algorithm:
    """FedALA: clients move to w by learned amounts, one for each parameter (Algorithm 1).

    Client i of the cohort goes over the round's minibatches twice: once to learn its weights W_i,
    which start at 1 (equation 5), and then to take local steps from the aggregated model θ̂:

        θ̂ = θ_i + (w − θ_i) ⊙ W_i,    W_i ← clip(W_i − η_W ∇ℓ_i(θ̂) ⊙ (w − θ_i), 0, 1)

    with η_W = `hparams.aggregation_rate`. It keeps the result as θ_i, predicts with it, and sends
    its difference to w.

    Example:
      >>> algorithm = fjs.fedala(task)  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'server_learning_rate', 'aggregation_rate']
    """

    def state(hparams, theta):
        return Personal(theta, jax.tree.map(jnp.ones_like, theta))

    def predict(shared, personal, hparams, client_id):
        return personal.params

    def client(shared, personal, data, hparams, context):
        w, theta = shared.params, personal.params
        towards = jax.tree.map(jnp.subtract, w, theta)

        def aggregated(weights):
            return jax.tree.map(lambda t, d, a: t + d * a, theta, towards, weights)

        def learn(weights, batch):
            gradient = task.gradient(aggregated(weights), batch)

            def descend(a, g, d):
                return jnp.clip(a - hparams.aggregation_rate * g * d, 0, 1).astype(a.dtype)

            return jax.tree.map(descend, weights, gradient, towards)

        weights = data.fold(learn, personal.weights)
        v = local_steps(aggregated(weights), data, task, local_optimizer, hparams, context.round)
        return Personal(v, weights), jax.tree.map(jnp.subtract, v, w), {}

    plain = fedavg(task, local_optimizer=local_optimizer, server_optimizer=server_optimizer)
    return with_personal(plain, client, state, predict)
