"""q-FFL (Li, Sanjabi, Beirami, Smith; ICLR 2020): fair resource allocation."""

import jax
import jax.numpy as jnp

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.local_steps import mean_over_rows
from fedjaxsim.hyperparameters import Hyperparameter, reads
from fedjaxsim.kernels import products
from fedjaxsim.tasks.task import Task

FAIRNESS = Hyperparameter(
    "fairness",
    default=0.1,  # a loss of hundreds, as of raw scores, makes the steps of q = 1 diverge
    scale="log",
    symbol="q",
    label="fairness",
    help="q of q-FFL: clients of loss F weigh F^q in the server's step; 0 is FedAvg.",
)


@reads(optimizers.local_records, optimizers.server_records, FAIRNESS)
def qffl(
    task: Task,
    *,
    local_optimizer: optimizers.LocalChoice = "sgd",
    server_optimizer: optimizers.ServerChoice = "sgd",
) -> Algorithm:
    """q-FFL: clients with larger losses count more; one model for all (q-FedAvg, Algorithm 2).

    The objective is Σ_k F_k(w)^(q+1)/(q+1). Client k of the cohort takes FedAvg's local steps from
    w and sends F_k(w)^q (v − w), F_k(w) being the mean loss of all its rows at w. The weight F_k^q
    depends on its data, so it is part of the message and bounded with it.

    The paper divides the sum by Σ_k h_k with h_k = q F_k^(q−1) ‖Δw_k‖² + F_k^q/η, which depends on
    data, too. Here the divisor is fixed, the expected cohort: `hparams.server_learning_rate` is the
    step instead. For q = 0 both are FedAvg; with their divisor as the step, w is the authors'.

    Args:
      task: model and loss.
      local_optimizer: Optimizer of the clients, a name or from `optimizers.local`.
      server_optimizer: Optimizer of the server, applied to the released mean update.

    Raises:
      ValueError: when first traced, if minibatches are made afresh, so that clients have no rows.
    """
    plain = fedavg(task, local_optimizer=local_optimizer, server_optimizer=server_optimizer)

    def client(shared, personal, data, hparams, context):
        personal, update, metrics = plain.client(shared, personal, data, hparams, context)
        loss = mean_over_rows(lambda batch: task.loss(shared.params, batch), data)
        weight = jnp.power(loss, hparams.fairness)
        update = products.dense(products.unsealed(update))
        return personal, jax.tree.map(lambda u: weight.astype(u.dtype) * u, update), metrics

    return plain._replace(client=client, averages_statistics=False)  # its weights do not add to 1
