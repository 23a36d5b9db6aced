"""APFL (Deng, Kamani, Mahdavi; 2020): personal models mixed with a global one."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.shared_model import moved, published, with_personal
from fedjaxsim.hyperparameters import Hyperparameter, reads
from fedjaxsim.tasks.task import Task

PyTree = Any
MIXTURE = Hyperparameter(
    "mixture",
    default=0.5,
    range=(0.0, 1.0),
    allowed="lie in [0, 1]",
    help="α of APFL, the weight of the client's own model in its predictions.",
    per_client=True,
)


class Personal(NamedTuple):
    """One client's state: v, its own model, and α, the weight of v, ()."""

    params: PyTree
    mixture: jax.Array


@reads(optimizers.local_records, optimizers.server_records, MIXTURE)
def apfl(
    task: Task,
    *,
    adaptive: bool = False,
    local_optimizer: optimizers.LocalChoice = "sgd",
    server_optimizer: optimizers.ServerChoice = "sgd",
) -> Algorithm:
    """APFL: clients predict with αv + (1 − α)w, w global and v their own (Algorithm 1).

    Client i of the cohort copies w and takes local steps of both models, on the same minibatches,

        v ← v − η ∇_v ℓ_i(αv + (1 − α)w),    w_i ← w_i − η ∇ℓ_i(w_i)

    with the local w_i in place of w. It keeps v and sends w_i − w, the message of FedAvg. With
    `adaptive` each α_i starts at α = `hparams.mixture` and moves once a round, on the first
    minibatch (equation 10): α_i ← α_i − η ⟨v − w_i, ∇ℓ_i(α_i v + (1 − α_i) w_i)⟩, kept in [0, 1].
    Other local optimizers and schedules take the steps of v and w_i alone.

    Args:
      adaptive: Whether clients adapt their α.

    Example:
      >>> algorithm = fjs.apfl(task)  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'server_learning_rate', 'mixture']
    """

    def state(hparams, v):
        return Personal(v, jnp.asarray(hparams.mixture, jnp.result_type(float)))

    def mixed(personal, w):
        difference = jax.tree.map(jnp.subtract, personal.params, w)
        return moved(w, personal.mixture, difference), difference

    def client(shared, personal, data, hparams, context):
        w, eta = shared.params, hparams.learning_rate
        optimizer = optimizers.as_local(local_optimizer)(hparams, context.round)

        def stepped(params, gradient, state, batch):
            updates, state = optimizer.update(gradient, state, params)
            return task.tracked(params, optax.apply_updates(params, updates), batch), state

        def step(carry, batch):
            (v, alpha), w_i, (of_v, of_w), first = carry
            both, difference = mixed(Personal(v, alpha), w_i)
            gradient = task.gradient(both, batch)
            weighted = jax.tree.map(lambda g: (alpha * g).astype(g.dtype), gradient)
            v, of_v = stepped(v, weighted, of_v, batch)
            if adaptive:
                slope = jax.tree.map(lambda d, g: jnp.sum(d * g), difference, gradient)
                slope = jax.tree.reduce(jnp.add, slope).astype(alpha.dtype)
                alpha = jnp.clip(alpha - first * eta * slope, 0, 1)
            w_i, of_w = stepped(w_i, task.gradient(w_i, batch), of_w, batch)
            return Personal(v, alpha), w_i, (of_v, of_w), 0 * first

        states = optimizer.init(personal.params), optimizer.init(w)
        personal, w_i, (of_v, of_w), _ = data.fold(step, (personal, w, states, jnp.ones(())))
        personal = personal._replace(params=optimizers.evaluated(personal.params, of_v))
        w_i = optimizers.evaluated(w_i, of_w)
        update = jax.tree.map(jnp.subtract, w_i, w)
        return personal, update, {}

    def predict(shared, personal, hparams, client_id):
        return mixed(personal, published(shared))[0]

    plain = fedavg(task, local_optimizer=local_optimizer, server_optimizer=server_optimizer)
    return with_personal(plain, client, state, predict)
