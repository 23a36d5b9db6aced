"""PMTL: private mean-regularized multi-task learning (Hu, Wu, Smith; TMLR 2023), Algorithm 1."""

import jax
import jax.numpy as jnp

from fedjaxsim.algorithm import Algorithm, LocalOptimizer, ServerOptimizer
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.billboard import from_one_model, publish, published, server_step
from fedjaxsim.algorithms.local_steps import descend
from fedjaxsim.models.task import Task


def pmtl(
    task: Task,
    local_optimizer: LocalOptimizer | None = None,
    server_optimizer: ServerOptimizer | None = None,
) -> Algorithm:
    """PMTL: every client keeps its own w_k, pulled towards w̃, the noised mean of all of them.

    Client k of the cohort takes E steps from its own w_k (line 13)

        w ← w − η (∇ℓ_k(w) + λ (w − w̃))

    and sends w − w_k (line 6); the server adds the clipped, noised mean of the updates to w̃
    (line 8). All clients and w̃ start from one data-independent w⁰: a w̃⁰ that is the mean of w_k
    fitted to data would publish data without noise. Clients predict with w_k.

    Args:
      task: model and loss.
      local_optimizer: of the local steps; by default SGD with `hparams.learning_rate`.
      server_optimizer: applies the release to w̃; by default adds it, as in the paper.
    """
    local_optimizer = local_optimizer or optimizers.local()
    server_optimizer = server_optimizer or optimizers.server()

    def start(hparams, w_tilde, w_k):
        return publish(w_tilde, server_optimizer, hparams), w_k

    def client(shared, personal, data, hparams, context):
        w_k, w_tilde = personal, shared.params

        def pull(w):  # the gradient of (λ/2)‖w − w̃‖²
            return jax.tree.map(lambda a, b: hparams.lam * (a - b), w, w_tilde)

        w, loss = descend(w_k, data, local_optimizer(hparams, context.round), task.loss, pull)
        return w, jax.tree.map(jnp.subtract, w, w_k), {"loss": loss}

    def predict(shared, personal, hparams, client_id):
        del shared, hparams, client_id
        return personal

    return Algorithm(
        from_one_model(task, start),
        client,
        server_step(server_optimizer),
        predict,
        published=published,
        start=start,
    )
