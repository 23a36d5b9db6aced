"""FedAvg (McMahan et al. 2017), and with the Gaussian mechanism DP-FedAvg (McMahan et al. 2018)."""

from fedjaxsim.algorithm import Algorithm, LocalOptimizer, ServerOptimizer
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.billboard import (
    from_one_model,
    predict_with_shared,
    publish,
    published,
    server_step,
)
from fedjaxsim.algorithms.local_steps import local_update
from fedjaxsim.models.task import Task


def fedavg(
    task: Task,
    local_optimizer: LocalOptimizer | None = None,
    server_optimizer: ServerOptimizer | None = None,
) -> Algorithm:
    """FedAvg: local SGD from the global w; clients send v − w; one model for all.

    With `optimizers.server(optax.adam)` it is FedAdam, and so on (Reddi et al. 2021).

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
        update, loss = local_update(w, data, task, local_optimizer, hparams, context.round)
        return personal, update, {"loss": loss}

    return Algorithm(
        from_one_model(task, start),
        client,
        server_step(server_optimizer),
        predict_with_shared,
        published=published,
        start=start,
    )
