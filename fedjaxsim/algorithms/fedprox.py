"""FedProx (Li et al. 2020): FedAvg with a proximal term in the local objective."""

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.local_steps import Pull, local_update
from fedjaxsim.hyperparameters import Hyperparameter, reads
from fedjaxsim.tasks.task import Task

MU = Hyperparameter(
    "mu",
    default=0.1,
    scale="log",
    symbol="μ",
    help="μ, the weight of FedProx's proximal term.",
    per_client=True,
)


@reads(optimizers.local_records, optimizers.server_records, MU)
def fedprox(
    task: Task,
    *,
    local_optimizer: optimizers.LocalChoice = "sgd",
    server_optimizer: optimizers.ServerChoice = "sgd",
) -> Algorithm:
    """FedProx: local SGD on ℓ_k(v) + (μ/2)‖v − w‖² from the global w; one model for all.

    Everything else is FedAvg.

    Args:
      task: model and loss.
      local_optimizer: Optimizer of the clients, a name or from `optimizers.local`.
      server_optimizer: Optimizer of the server, applied to the released mean update.
    """

    def client(shared, personal, data, hparams, context):
        w = shared.params
        pull = Pull(hparams.mu, w)
        update = local_update(w, data, task, local_optimizer, hparams, context.round, pull)
        return personal, update, {}

    curvature = optimizers.curvature(local_optimizer, MU.name)
    plain = fedavg(task, server_optimizer=server_optimizer)
    return plain._replace(client=client, curvature=curvature)
