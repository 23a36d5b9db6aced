"""FedAvg (McMahan et al. 2017), and with the Gaussian mechanism DP-FedAvg (McMahan et al. 2018)."""

import jax
import jax.numpy as jnp

from fedjaxsim.algorithm import Algorithm, LocalOptimizer, ServerOptimizer
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.billboard import (
    from_one_model,
    predict_with_shared,
    publish,
    published,
    server_step,
)
from fedjaxsim.algorithms.linear_steps import linear_update, pays
from fedjaxsim.algorithms.local_steps import descend
from fedjaxsim.models.task import Task


def fedavg(
    task: Task,
    local_optimizer: LocalOptimizer | None = None,
    server_optimizer: ServerOptimizer | None = None,
) -> Algorithm:
    """FedAvg: local SGD from the global w; clients send v − w; one model for all.

    A client of a linear task sends v − w as a product of thin matrices where that saves work (see
    `linear_steps`): the same update, up to rounding.

    With `optimizers.server(optax.adam)` it is FedAdam, and so on (Reddi et al. 2021).

    Args:
      task: model and loss.
      local_optimizer: of the local steps; by default SGD with `hparams.learning_rate`.
      server_optimizer: applies the release to w; by default adds it.
    """
    linear = task.linear if local_optimizer is None else None
    local_optimizer = local_optimizer or optimizers.local()
    server_optimizer = server_optimizer or optimizers.server()

    def start(hparams, shared_model, own_model):
        del own_model
        return publish(shared_model, server_optimizer, hparams), ()

    def client(shared, personal, data, hparams, context):
        w = shared.params
        if linear is not None and pays(w, data.minibatches):
            update, loss = linear_update(w, data, linear, hparams.learning_rate)
            return personal, update, {"loss": loss}
        v, loss = descend(w, data, local_optimizer(hparams, context.round), task.loss)
        return personal, jax.tree.map(jnp.subtract, v, w), {"loss": loss}

    return Algorithm(
        from_one_model(task, start),
        client,
        server_step(server_optimizer),
        predict_with_shared,
        published=published,
        start=start,
    )
