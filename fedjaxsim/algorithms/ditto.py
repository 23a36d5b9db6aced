"""Ditto (Li, Hu, Beirami, Smith; ICML 2021): personal models pulled towards a global one."""

from fedjaxsim.algorithm import Algorithm, LocalOptimizer, ServerOptimizer
from fedjaxsim.algorithms.billboard import from_one_model
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.local_steps import Pull, local_steps
from fedjaxsim.models.task import Task


def ditto(
    task: Task,
    local_optimizer: LocalOptimizer | None = None,
    server_optimizer: ServerOptimizer | None = None,
) -> Algorithm:
    """Ditto: FedAvg's global w, and beside it a personal model v_k of every client (Algorithm 1).

    Client k of the cohort takes FedAvg's local steps from w and sends their sum. From its own v_k
    it takes as many steps, on the same minibatches,

        v_k ← v_k − η (∇ℓ_k(v_k) + λ (v_k − w))

    with the w of the round's start. Clients predict with v_k, which starts as w. All that is sent
    is FedAvg's, so the releases, and ε, are those of FedAvg.

    Args:
      task: model and loss.
      local_optimizer: of both kinds of local steps; by default SGD with `hparams.learning_rate`.
      server_optimizer: applies the release to w; by default adds it.
    """
    of_w = fedavg(task, local_optimizer, server_optimizer)

    def start(hparams, w, v_k):
        assert of_w.start is not None
        shared, _ = of_w.start(hparams, w, v_k)
        return shared, v_k

    def client(shared, personal, data, hparams, context):
        _, update, _ = of_w.client(shared, (), data, hparams, context)
        pull = Pull(hparams.lam, shared.params)
        v_k, loss = local_steps(personal, data, task, local_optimizer, hparams, context.round, pull)
        return v_k, update, {"loss": loss}

    def predict(shared, personal, hparams, client_id):
        del shared, hparams, client_id
        return personal

    return Algorithm(
        from_one_model(task, start),
        client,
        of_w.server,
        predict,
        published=of_w.published,
        start=start,
    )
