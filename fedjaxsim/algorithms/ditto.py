"""Ditto (Li, Hu, Beirami, Smith; ICML 2021): personal models pulled towards a global one."""

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.local_steps import PULL, Pull, local_steps
from fedjaxsim.algorithms.shared_model import with_personal
from fedjaxsim.hyperparameters import reads
from fedjaxsim.tasks.task import Task


@reads(optimizers.LEARNING_RATE, optimizers.SERVER_LEARNING_RATE, PULL)
def ditto(
    task: Task,
    *,
    local_optimizer: optimizers.LocalChoice = "sgd",
    server_optimizer: optimizers.ServerChoice = "sgd",
) -> Algorithm:
    """Ditto: FedAvg's global w, and beside it a personal model v_k of every client (Algorithm 1).

    Client k of the cohort takes FedAvg's local steps from w and sends their sum. From its own v_k
    it takes equally many steps, on the same minibatches,

        v_k ← v_k − η (∇ℓ_k(v_k) + λ (v_k − w))

    with the w of the round's start. Clients predict with v_k, which starts as w. Messages,
    releases and ε equal FedAvg's.

    Args:
      task: model and loss.
      local_optimizer: Optimizer of the clients, of both kinds of local steps; a name or from
        `optimizers.local`.
      server_optimizer: Optimizer of the server, applied to the released mean update.
    """
    of_w = fedavg(task, local_optimizer=local_optimizer, server_optimizer=server_optimizer)

    def client(shared, personal, data, hparams, context):
        _, update, _ = of_w.client(shared, (), data, hparams, context)
        pull = Pull(hparams.lam, shared.params)
        v_k = local_steps(personal, data, task, local_optimizer, hparams, context.round, pull)
        return v_k, update, {}

    return with_personal(of_w, client)
