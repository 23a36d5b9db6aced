"""Local, or single-task learning (STL): every client learns alone."""

from fedjaxsim.algorithm import Algorithm, LocalOptimizer
from fedjaxsim.algorithms.billboard import from_one_model
from fedjaxsim.algorithms.local_steps import local_steps
from fedjaxsim.models.task import Task


def local(task: Task, local_optimizer: LocalOptimizer | None = None) -> Algorithm:
    """Local: client k takes its steps on ℓ_k from its own w_k; nothing is sent, ε = 0.

    A baseline on the same footing as the others: a client works in the rounds in which it is
    drawn, with the same local steps, data and evaluation.

    Args:
      task: model and loss.
      local_optimizer: of the local steps; by default SGD with `hparams.learning_rate`.
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

    return Algorithm(from_one_model(task, start), client, server, predict, start=start)
