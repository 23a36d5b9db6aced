"""FedAvg (McMahan et al. 2017), and with the Gaussian mechanism DP-FedAvg (McMahan et al. 2018)."""

from fedjaxsim.algorithm import Algorithm, WarmStart
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.local_steps import local_update
from fedjaxsim.algorithms.shared_model import (
    from_one_model,
    predict_with_shared,
    publish,
    published,
    server_step,
)
from fedjaxsim.hyperparameters import reads
from fedjaxsim.tasks.task import Task


@reads(optimizers.LEARNING_RATE, optimizers.SERVER_LEARNING_RATE)
def fedavg(
    task: Task,
    *,
    local_optimizer: optimizers.LocalChoice = "sgd",
    server_optimizer: optimizers.ServerChoice = "sgd",
) -> Algorithm:
    """FedAvg: local SGD from the global w; clients send v − w; one model for all.

    With "adam" it is FedAdam (Reddi et al. 2021), with "momentum" (β = 0.9) FedAvgM (Hsu et al.
    2019).

    Args:
      task: model and loss.
      local_optimizer: Optimizer of the clients, a name or from `optimizers.local`.
      server_optimizer: Optimizer of the server, a name (momentum for FedAvgM, adam for FedAdam) or
        from `optimizers.server`.
    """
    server_optimizer = optimizers.as_server(server_optimizer)

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
        task,
        warm_start=WarmStart(start, published),
    )
