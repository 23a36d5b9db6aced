"""APFL (Deng, Kamani, Mahdavi; 2020): personal models mixed with a global one."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.shared_model import moved, with_personal
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


@reads(optimizers.LEARNING_RATE, optimizers.server_records, MIXTURE)
def apfl(
    task: Task, *, adaptive: bool = False, server_optimizer: optimizers.ServerChoice = "sgd"
) -> Algorithm:
    """APFL: clients predict with αv + (1 − α)w, w global and v their own (Algorithm 1).

    Client i of the cohort copies w and takes local steps of both models, on the same minibatches,

        v ← v − η ∇_v ℓ_i(αv + (1 − α)w),    w_i ← w_i − η ∇ℓ_i(w_i)

    with the local w_i in place of w. It keeps v and sends w_i − w, the message of FedAvg. With
    `adaptive` each α_i starts at α = `hparams.mixture` and moves once a round, on the first
    minibatch (equation 10): α_i ← α_i − η ⟨v − w_i, ∇ℓ_i(α_i v + (1 − α_i) w_i)⟩, kept in [0, 1].

    Args:
      adaptive: Whether clients adapt their α.
    """

    def state(hparams, v):
        return Personal(v, jnp.asarray(hparams.mixture, jnp.result_type(float)))

    def mixed(personal, w):
        difference = jax.tree.map(jnp.subtract, personal.params, w)
        return moved(w, personal.mixture, difference), difference

    def client(shared, personal, data, hparams, context):
        w, eta = shared.params, hparams.learning_rate

        def step(carry, batch):
            (v, alpha), w_i, first = carry
            both, difference = mixed(Personal(v, alpha), w_i)
            gradient = task.gradient(both, batch)
            v = task.tracked(v, moved(v, -eta * alpha, gradient), batch)
            if adaptive:
                slope = jax.tree.map(lambda d, g: jnp.sum(d * g), difference, gradient)
                slope = jax.tree.reduce(jnp.add, slope).astype(alpha.dtype)
                alpha = jnp.clip(alpha - first * eta * slope, 0, 1)
            w_i = task.tracked(w_i, moved(w_i, -eta, task.gradient(w_i, batch)), batch)
            return Personal(v, alpha), w_i, 0 * first

        personal, w_i, _ = data.fold(step, (personal, w, jnp.ones(())))
        update = jax.tree.map(jnp.subtract, w_i, w)
        return personal, update, {}

    def predict(shared, personal, hparams, client_id):
        return mixed(personal, shared.params)[0]

    return with_personal(fedavg(task, server_optimizer=server_optimizer), client, state, predict)
