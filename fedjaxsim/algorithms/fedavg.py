"""FedAvg (McMahan et al. 2017), and with the Gaussian mechanism DP-FedAvg (McMahan et al. 2018).

Then what differs from it in the server's step, the local loss or the weight of a message.
"""

import dataclasses

import jax
import jax.numpy as jnp

from fedjaxsim.algorithm import Algorithm, WarmStart
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.local_steps import PULL, Pull, local_update, mean_over_rows
from fedjaxsim.algorithms.shared_model import (
    from_one_model,
    predict_with_shared,
    publish,
    published,
    server_step,
)
from fedjaxsim.hyperparameters import Hyperparameter, reads
from fedjaxsim.kernels import products
from fedjaxsim.tasks.task import Task

MU = dataclasses.replace(PULL, name="mu", help="μ, the weight of FedProx's proximal term.")
FAIRNESS = Hyperparameter(
    "fairness",
    default=0.1,  # a loss of hundreds, as of raw scores, makes the steps of q = 1 diverge
    scale="log",
    help="q of q-FFL: clients of loss F weigh F^q in the server's step; 0 is FedAvg.",
)
_ADAPTIVE_RATE = dataclasses.replace(optimizers.SERVER_LEARNING_RATE, default=0.01)


@reads(optimizers.local_records, optimizers.server_records)
def fedavg(
    task: Task,
    *,
    local_optimizer: optimizers.LocalChoice = "sgd",
    server_optimizer: optimizers.ServerChoice = "sgd",
) -> Algorithm:
    """FedAvg: local SGD from the global w; clients send v − w; one model for all.

    Example:
      >>> algorithm = fjs.fedavg(task)  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'server_learning_rate']
    """
    server_optimizer = optimizers.as_server(server_optimizer)

    def start(key, hparams, shared_model, own_model):
        return publish(shared_model, server_optimizer, hparams), ()

    def client(shared, personal, data, hparams, context):
        w = shared.params
        update = local_update(w, data, task, local_optimizer, hparams, context.round)
        return personal, update, {}

    return Algorithm(
        from_one_model(task, start),
        client,
        server_step(server_optimizer, statistics=task.track is not None),
        predict_with_shared,
        task,
        warm_start=WarmStart(start, published),
        curvature=optimizers.curvature(local_optimizer),
        typical_message=optimizers.small_update,
        sends_from_shared=True,
        averages_statistics=True,
    )


@reads(optimizers.local_records, optimizers.SERVER_LEARNING_RATE, optimizers.SERVER_MOMENTUM)
def fedavgm(task: Task, *, local_optimizer: optimizers.LocalChoice = "sgd") -> Algorithm:
    """FedAvgM (Hsu, Qi, Brown 2019): FedAvg whose server steps with momentum, as Flower's.

    β is `hparams.server_momentum`.

    Example:
      >>> algorithm = fjs.fedavgm(task)  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'server_learning_rate', 'server_momentum']
    """
    return fedavg(task, local_optimizer=local_optimizer, server_optimizer="momentum")


@reads(optimizers.local_records, _ADAPTIVE_RATE)
def fedadam(task: Task, *, local_optimizer: optimizers.LocalChoice = "sgd") -> Algorithm:
    """FedAdam (Reddi et al. 2021): FedAvg whose server steps by `optimizers.adaptive`.

    β₁ = 0.9, β₂ = 0.99 and τ = 10⁻³ are the paper's.

    Example:
      >>> algorithm = fjs.fedadam(task)  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'server_learning_rate']
    """
    adam = optimizers.server(optimizers.fedadam)
    return fedavg(task, local_optimizer=local_optimizer, server_optimizer=adam)


@reads(optimizers.local_records, _ADAPTIVE_RATE)
def fedyogi(task: Task, *, local_optimizer: optimizers.LocalChoice = "sgd") -> Algorithm:
    """FedYogi (Reddi et al. 2021): FedAvg whose server steps with Yogi; constants as `fedadam`.

    Example:
      >>> algorithm = fjs.fedyogi(task)  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'server_learning_rate']
    """
    return fedavg(task, local_optimizer=local_optimizer, server_optimizer="yogi")


@reads(optimizers.local_records, optimizers.server_records, MU)
def fedprox(
    task: Task,
    *,
    local_optimizer: optimizers.LocalChoice = "sgd",
    server_optimizer: optimizers.ServerChoice = "sgd",
) -> Algorithm:
    """FedProx (Li et al. 2020): local SGD on ℓ_k(v) + (μ/2)‖v − w‖²; one model for all.

    Steps start from the global w. Everything else is FedAvg.

    Example:
      >>> algorithm = fjs.fedprox(task)  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'server_learning_rate', 'mu']
    """

    def client(shared, personal, data, hparams, context):
        w = shared.params
        pull = Pull(hparams.mu, w)
        update = local_update(w, data, task, local_optimizer, hparams, context.round, pull)
        return personal, update, {}

    curvature = optimizers.curvature(local_optimizer, MU.name)
    plain = fedavg(task, server_optimizer=server_optimizer)
    return plain._replace(client=client, curvature=curvature)


@reads(optimizers.local_records, optimizers.server_records, FAIRNESS)
def qffl(
    task: Task,
    *,
    local_optimizer: optimizers.LocalChoice = "sgd",
    server_optimizer: optimizers.ServerChoice = "sgd",
) -> Algorithm:
    """q-FFL: clients with larger losses count more; one model for all (q-FedAvg, Algorithm 2).

    The objective is Σ_k F_k(w)^(q+1)/(q+1) (Li, Sanjabi, Beirami, Smith 2020). Client k of the
    cohort takes FedAvg's local steps from w and sends F_k(w)^q (v − w), F_k(w) being the mean loss
    of all its rows at w. The paper divides the sum by numbers that depend on data, too; here the
    divisor is the expected cohort, and `hparams.server_learning_rate` the step.

    Example:
      >>> algorithm = fjs.qffl(task)  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'server_learning_rate', 'fairness']
    """
    plain = fedavg(task, local_optimizer=local_optimizer, server_optimizer=server_optimizer)

    def client(shared, personal, data, hparams, context):
        personal, update, metrics = plain.client(shared, personal, data, hparams, context)
        loss = mean_over_rows(lambda batch: task.loss(shared.params, batch), data)
        weight = jnp.power(loss, hparams.fairness)
        update = products.dense(products.unsealed(update))
        return personal, jax.tree.map(lambda u: weight.astype(u.dtype) * u, update), metrics

    return plain._replace(client=client, averages_statistics=False)  # its weights do not add to 1
