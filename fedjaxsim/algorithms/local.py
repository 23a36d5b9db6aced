"""Local: every client learns alone by local steps."""

from fedjaxsim.algorithm import Algorithm, WarmStart
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.local_steps import local_steps
from fedjaxsim.algorithms.shared_model import from_one_model, keep_shared, predict_with_personal
from fedjaxsim.hyperparameters import reads
from fedjaxsim.tasks.task import Task


@reads(optimizers.local_records)
def local(task: Task, *, local_optimizer: optimizers.LocalChoice = "sgd") -> Algorithm:
    """Local: client k takes its steps on ℓ_k from its own w_k; nothing is sent, ε = 0.

    A client works in the rounds in which it is drawn, with the same local steps, data and
    evaluation as in other systems.

    Args:
      task: model and loss.
      local_optimizer: Optimizer of the clients, a name or from `optimizers.local`.
    """

    def start(hparams, published, own):
        return (), own

    def client(shared, personal, data, hparams, context):
        w_k = local_steps(personal, data, task, local_optimizer, hparams, context.round)
        return w_k, (), {}

    init = from_one_model(task, start)
    return Algorithm(
        init,
        client,
        keep_shared,
        predict_with_personal,
        task,
        warm_start=WarmStart(start),
        curvature=optimizers.curvature(local_optimizer),
    )
