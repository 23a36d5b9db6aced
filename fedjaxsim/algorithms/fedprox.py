"""FedProx (Li et al. 2020): FedAvg with a proximal term in the local objective."""

from fedjaxsim.algorithm import Algorithm, LocalOptimizer, ServerOptimizer, WarmStart
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.billboard import (
    from_one_model,
    predict_with_shared,
    publish,
    published,
    server_step,
)
from fedjaxsim.algorithms.local_steps import Pull, local_update
from fedjaxsim.algorithms.optimizers import (
    LEARNING_RATE,
    SERVER_LEARNING_RATE,
    LocalName,
    ServerName,
)
from fedjaxsim.hyperparameters import Hyperparameter, reads
from fedjaxsim.tasks.task import Task

MU = Hyperparameter(
    "mu", default=0.1, scale="log", symbol="μ", help="μ, the weight of FedProx's proximal term."
)


@reads(LEARNING_RATE, SERVER_LEARNING_RATE, MU)
def fedprox(
    task: Task,
    *,
    local_optimizer: LocalOptimizer | LocalName = "sgd",
    server_optimizer: ServerOptimizer | ServerName = "sgd",
) -> Algorithm:
    """FedProx: local SGD on ℓ_k(v) + (μ/2)‖v − w‖² from the global w; one model for all.

    A client sends its update v − w; the server adds the clipped, noised mean of the updates to w.

    Args:
      task: model and loss.
      local_optimizer: Optimizer of the clients, a name or as from `optimizers.local`.
      server_optimizer: Optimizer of the server, applied to the released mean update.
    """
    server_optimizer = optimizers.as_server(server_optimizer)

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
        task,
        warm_start=WarmStart(start, published),
    )
