"""FedProx (Li et al. 2020): FedAvg with a proximal term in the local objective."""

from fedjaxsim.algorithm import Algorithm, LocalOptimizer, ServerOptimizer
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.billboard import (
    from_one_model,
    predict_with_shared,
    publish,
    published,
    server_step,
)
from fedjaxsim.algorithms.local_steps import Pull, local_update
from fedjaxsim.models.task import Task


def fedprox(
    task: Task,
    local_optimizer: LocalOptimizer | None = None,
    server_optimizer: ServerOptimizer | None = None,
) -> Algorithm:
    """FedProx: local SGD on ℓ_k(v) + (μ/2)‖v − w‖² from the global w; one model for all.

    A client sends its update v − w; the server adds the clipped, noised mean of the updates to w.

    Args:
      task: model and loss.
      local_optimizer: of the local steps; by default SGD with `hparams.learning_rate`.
      server_optimizer: applies the release to w; by default adds it.
    """
    server_optimizer = server_optimizer or optimizers.server()

    def start(hparams, shared_model, own_model):
        del own_model
        return publish(shared_model, server_optimizer, hparams), ()

    def client(shared, personal, data, hparams, context):
        w = shared.params
        pull = Pull(hparams.mu, w)
        update, loss = local_update(w, data, task, local_optimizer, hparams, context.round, pull)
        return personal, update, {"loss": loss}

    return Algorithm(
        from_one_model(task, start),
        client,
        server_step(server_optimizer),
        predict_with_shared,
        published=published,
        start=start,
    )
