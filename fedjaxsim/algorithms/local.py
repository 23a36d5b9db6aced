"""Local, or single-task learning (STL): every client learns alone."""

from fedjaxsim.algorithm import Algorithm, LocalOptimizer, WarmStart
from fedjaxsim.algorithms.billboard import from_one_model
from fedjaxsim.algorithms.local_steps import local_steps
from fedjaxsim.algorithms.optimizers import LEARNING_RATE, LocalName
from fedjaxsim.hyperparameters import reads
from fedjaxsim.tasks.task import Task


@reads(LEARNING_RATE)
def local(task: Task, *, local_optimizer: LocalOptimizer | LocalName = "sgd") -> Algorithm:
    """Local: client k takes its steps on ℓ_k from its own w_k; nothing is sent, ε = 0.

    A baseline on the same footing as the others: a client works in the rounds in which it is
    drawn, with the same local steps, data and evaluation.

    Args:
      task: model and loss.
      local_optimizer: Optimizer of the clients, a name or as from `optimizers.local`.
    """

    def start(hparams, published, own):
        del hparams, published
        return (), own

    def client(shared, personal, data, hparams, context):
        del shared
        w_k, loss = local_steps(personal, data, task, local_optimizer, hparams, context.round)
        return w_k, (), {"loss": loss}

    def server(shared, release, hparams, round_):
        del release, hparams, round_
        return shared

    def predict(shared, personal, hparams, client_id):
        del shared, hparams, client_id
        return personal

    init = from_one_model(task, start)
    return Algorithm(init, client, server, predict, task, warm_start=WarmStart(start))
