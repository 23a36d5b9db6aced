"""Ditto (Li, Hu, Beirami, Smith; ICML 2021): personal models pulled towards a global one."""

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.local_steps import (
    PULL,
    PullBy,
    check_pull,
    local_steps,
    pull_of,
    pull_records,
    pull_to_shared,
)
from fedjaxsim.algorithms.shared_model import with_personal
from fedjaxsim.hyperparameters import reads
from fedjaxsim.tasks.task import Task

OwnChoice = optimizers.LocalChoice | None


def _personal(
    *,
    personal_optimizer: OwnChoice = None,
    local_optimizer: optimizers.LocalChoice = "sgd",
    **_: object,
) -> optimizers.LocalChoice:
    if personal_optimizer is None:
        return local_optimizer
    if callable(personal_optimizer):
        return personal_optimizer
    return optimizers.local(personal_optimizer, rate=optimizers.PERSONAL_LEARNING_RATE)


@reads(
    optimizers.local_records,
    optimizers.server_records,
    pull_records,
    lambda **choices: optimizers.local_records(local_optimizer=_personal(**choices)),
)
def ditto(
    task: Task,
    *,
    personal_optimizer: OwnChoice = None,
    personal_epochs: int | None = None,
    local_optimizer: optimizers.LocalChoice = "sgd",
    server_optimizer: optimizers.ServerChoice = "sgd",
    pull: PullBy = "equal",
) -> Algorithm:
    """Ditto: FedAvg's global w, and a personal model v_k of every client (Algorithm 1).

    Client k of the cohort takes FedAvg's local steps from w and sends their sum. From its own v_k
    it takes equally many steps, on the same minibatches,

        v_k ← v_k − η (∇ℓ_k(v_k) + λ (v_k − w))

    with the w of the round's start. Clients predict with v_k, which starts as w. Releases and ε
    equal FedAvg's bit for bit; λ = 0 is Local. PMTL differs in the message: it sends the update of
    the personal model.

    Args:
      personal_optimizer: Optimizer of the personal models, with `hparams.personal_learning_rate`
        if it is a name; by default the clients' optimizer.
      personal_epochs: Epochs of the personal models; by default as many local steps as for w.
      pull: "rows" divides λ by the client's training rows, and gives intercepts their own λ,
        as a mixed model shrinks; see `data.variance_ratios`.

    Example:
      >>> algorithm = fjs.ditto(task)  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'server_learning_rate', 'lam']
    """
    check_pull(pull, local_optimizer, personal_optimizer)
    v_optimizer = _personal(personal_optimizer=personal_optimizer, local_optimizer=local_optimizer)
    of_w = fedavg(task, local_optimizer=local_optimizer, server_optimizer=server_optimizer)

    def client(shared, personal, data, hparams, context):
        _, update, _ = of_w.client(shared, (), data, hparams, context)
        to_w = pull_of(pull, hparams, shared.params, data)
        v_k = local_steps(
            personal, data, task, v_optimizer, hparams, context.round, to_w, epochs=personal_epochs
        )
        return v_k, update, {}

    penalties = (PULL.name,) if pull == "equal" else ()
    curvature = optimizers.curvature(local_optimizer, *penalties)
    algorithm = with_personal(of_w, client)._replace(curvature=curvature, sends_from_shared=True)
    return algorithm._replace(personal_pull=pull_to_shared(pull))
