"""pFedMe (Dinh, Tran, Nguyen; NeurIPS 2020): personal models from Moreau envelopes."""

import jax
import jax.numpy as jnp
import optax

from fedjaxsim import checks
from fedjaxsim.algorithm import Algorithm
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.local_steps import PULL
from fedjaxsim.algorithms.shared_model import moved, with_personal
from fedjaxsim.hyperparameters import Hyperparameter, reads
from fedjaxsim.tasks.task import Task

ENVELOPE_RATE = Hyperparameter(
    "envelope_rate",
    default=1.0,
    scale="log",
    help="η of pFedMe, the step of a client's copy of w along the gradient of its envelope.",
    per_client=True,
)


@reads(optimizers.local_records, optimizers.server_records, PULL, ENVELOPE_RATE)
def pfedme(
    task: Task,
    *,
    inner_steps: int = 5,
    local_optimizer: optimizers.LocalChoice = "sgd",
    server_optimizer: optimizers.ServerChoice = "sgd",
) -> Algorithm:
    """PFedMe: w minimizes the clients' Moreau envelopes, θ_i is personal (Algorithm 1).

    Client i of the cohort copies w to w_i and θ. On each minibatch it approximates the minimum of
    ℓ_i(θ) + (λ/2) ‖θ − w_i‖² by `inner_steps` steps (line 7), and then steps along the envelope's
    gradient (line 8), with η = `hparams.envelope_rate`:

        θ ← θ − η_θ (∇ℓ_i(θ) + λ (θ − w_i)),    w_i ← w_i − ηλ (w_i − θ)

    η_θ is `hparams.learning_rate`. The paper lets any method approximate the minimum: other local
    optimizers and schedules are of θ, and start anew each round; θ goes on from minibatch to
    minibatch, as in the authors' code, without its weight decay. The client sends w_i − w, the
    server adds β times the released mean (line 11; β is the server's learning rate), and clients
    predict with their last θ_i.

    Args:
      inner_steps: K, the steps of θ on each minibatch.

    Example:
      >>> algorithm = fjs.pfedme(task)  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'server_learning_rate', 'lam', 'envelope_rate']
    """
    checks.count(inner_steps=inner_steps)

    def client(shared, personal, data, hparams, context):
        w, lam = shared.params, hparams.lam
        optimizer = optimizers.as_local(local_optimizer)(hparams, context.round)

        def step(carry, batch):
            theta, w_i, state = carry
            for _ in range(inner_steps):
                pull = jax.tree.map(jnp.subtract, theta, w_i)
                gradient = moved(task.gradient(theta, batch), lam, pull)
                updates, state = optimizer.update(gradient, state, theta)
                theta = optax.apply_updates(theta, updates)
            offset = jax.tree.map(jnp.subtract, w_i, theta)
            return theta, moved(w_i, -hparams.envelope_rate * lam, offset), state

        theta, w_i, state = data.fold(step, (w, w, optimizer.init(w)))
        theta = optimizers.evaluated(theta, state)
        steps = data.num_steps()
        # A client whose minibatches are consumed keeps θ_i.
        theta = jax.tree.map(
            lambda after, before: jnp.where(steps > 0, after, before), theta, personal
        )
        update = jax.tree.map(jnp.subtract, w_i, w)
        return theta, update, {}

    algorithm = with_personal(fedavg(task, server_optimizer=server_optimizer), client)
    # w_i is no result of steps on batches, so it has no statistics of its own.
    return algorithm._replace(
        curvature=optimizers.curvature(local_optimizer, PULL.name), averages_statistics=False
    )
