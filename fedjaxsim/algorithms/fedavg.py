"""FedAvg (McMahan et al. 2017), and with the Gaussian mechanism DP-FedAvg (McMahan et al. 2018)."""

import dataclasses
import functools

import optax

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

_ADAPTIVE_RATE = dataclasses.replace(optimizers.SERVER_LEARNING_RATE, default=0.01)
_OF_PAPER = {"b1": 0.9, "b2": 0.99, "eps": 1e-3}
"""β₁, β₂ and τ of Reddi et al. (2021)."""


@reads(optimizers.local_records, optimizers.server_records)
def fedavg(
    task: Task,
    *,
    local_optimizer: optimizers.LocalChoice = "sgd",
    server_optimizer: optimizers.ServerChoice = "sgd",
) -> Algorithm:
    """FedAvg: local SGD from the global w; clients send v − w; one model for all.

    Args:
      task: model and loss.
      local_optimizer: Optimizer of the clients, a name or from `optimizers.local`.
      server_optimizer: Optimizer of the server, a name or from `optimizers.server`.
    """
    server_optimizer = optimizers.as_server(server_optimizer)

    def start(hparams, shared_model, own_model):
        return publish(shared_model, server_optimizer, hparams), ()

    def client(shared, personal, data, hparams, context):
        w = shared.params
        update = local_update(w, data, task, local_optimizer, hparams, context.round)
        return personal, update, {}

    return Algorithm(
        from_one_model(task, start),
        client,
        server_step(server_optimizer),
        predict_with_shared,
        task,
        warm_start=WarmStart(start, published),
        curvature=optimizers.curvature(local_optimizer),
        averages_statistics=True,
    )


@reads(optimizers.local_records, optimizers.SERVER_LEARNING_RATE, optimizers.SERVER_MOMENTUM)
def fedavgm(task: Task, *, local_optimizer: optimizers.LocalChoice = "sgd") -> Algorithm:
    """FedAvgM (Hsu, Qi, Brown 2019): FedAvg whose server steps with momentum, as Flower's.

    β is `hparams.server_momentum`.

    Args:
      task: model and loss.
      local_optimizer: Optimizer of the clients, a name or from `optimizers.local`.
    """
    return fedavg(task, local_optimizer=local_optimizer, server_optimizer="momentum")


@reads(optimizers.local_records, _ADAPTIVE_RATE)
def fedadam(task: Task, *, local_optimizer: optimizers.LocalChoice = "sgd") -> Algorithm:
    """FedAdam (Reddi et al. 2021): FedAvg whose server steps with Adam.

    β₁ = 0.9, β₂ = 0.99 and τ = 10⁻³ are the paper's; optax corrects the bias of the first steps,
    the paper does not. Flower's `FedAdam` corrects it, too, but not at τ, and its `FedYogi` does
    not; but for that both are the same step by step.

    Args:
      task: model and loss.
      local_optimizer: Optimizer of the clients, a name or from `optimizers.local`.
    """
    adam = optimizers.server(functools.partial(optax.adam, **_OF_PAPER))
    return fedavg(task, local_optimizer=local_optimizer, server_optimizer=adam)


@reads(optimizers.local_records, _ADAPTIVE_RATE)
def fedyogi(task: Task, *, local_optimizer: optimizers.LocalChoice = "sgd") -> Algorithm:
    """FedYogi (Reddi et al. 2021): FedAvg whose server steps with Yogi; constants as `fedadam`.

    Args:
      task: model and loss.
      local_optimizer: Optimizer of the clients, a name or from `optimizers.local`.
    """
    yogi = optimizers.server(functools.partial(optax.yogi, **_OF_PAPER))
    return fedavg(task, local_optimizer=local_optimizer, server_optimizer=yogi)
