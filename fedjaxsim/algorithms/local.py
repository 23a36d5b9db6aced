"""Clients that learn alone: Local, and fine-tuning after another stage (PMTL, section 5.3)."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from fedjaxsim import checks
from fedjaxsim.algorithm import Algorithm, WarmStart
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.local_steps import PULL, Pull, local_steps, mean_over_rows, no_pull
from fedjaxsim.algorithms.shared_model import (
    from_one_model,
    keep_shared,
    predict_with_personal,
)
from fedjaxsim.data.minibatches import Batch, ClientData
from fedjaxsim.hyperparameters import reads
from fedjaxsim.tasks.task import Task

PyTree = Any
Penalty = Literal["vanilla", "mean", "kl", "ewc"]
Origin = Literal["personal", "global"]


@reads(optimizers.local_records)
def local(task: Task, *, local_optimizer: optimizers.LocalChoice = "sgd") -> Algorithm:
    """Local: client k takes its steps on ℓ_k from its own w_k; nothing is sent, ε = 0.

    A client works in the rounds in which it is drawn, with the same local steps, data and
    evaluation as in other systems.

    Example:
      >>> algorithm = fjs.local(task)  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate']
    """
    return finetune(task, penalty="vanilla", local_optimizer=local_optimizer)


@reads(optimizers.local_records, lambda penalty, **_: () if penalty == "vanilla" else (PULL,))
def finetune(
    task: Task,
    *,
    penalty: Penalty = "mean",
    origin: Origin = "personal",
    local_optimizer: optimizers.LocalChoice = "sgd",
) -> Algorithm:
    """Fine-tuning: client k takes its steps on ℓ_k plus a penalty towards w̃; nothing is sent.

    w̃ is the published model of the earlier stage (`Simulation.start_from`) and does not change. The
    penalties, with λ = `hparams.lam`:

        vanilla: none
        mean:    (λ/2) ‖w − w̃‖²
        kl:      (λ/2) [KL(p_w‖p_w̃) + KL(p_w̃‖p_w)], averaged over the minibatch
        ewc:     (λ/2) Σ_j F_j (w_j − w̃_j)², F of `fisher` at w̃ on the client's own rows

    (EWC: Kirkpatrick et al. 2017; all four: Yu, Bagdasaryan, Shmatikov 2020.) PMTL gives no
    formulas; these are ours. Clients read only their own data and w̃: this is post-processing, and
    the report has the ε of the first stage. It protects a client from everybody else; a personal
    model that is published reveals something about its owner.

    * KL: p_w is the distribution that the loss makes of the outputs: categorical for softmax, a
      Bernoulli variable per output for logistic and one-versus-all losses, normal with variance 1
      for squared losses.
    * EWC: F takes one exact pass over the client's rows in every round. If w̃ fits a client badly, F
      is large, and steps are stable only for η below 2/(L + λ max_j F_j).
    * One round with full participation is a whole stage. Further rounds continue, and the local
      optimizer starts anew in each.
    * After Local there is no w̃, so all penalties but "vanilla" are refused. In a simulation that
      starts from nothing, w̃ is the initial model.

    Args:
      task: model and loss; for "kl" with a `divergence`.
      penalty: Penalty towards the published model; "vanilla" is none.
      origin: Start of the clients: the "personal" model that they predicted with, or the "global"
        one, w̃.

    Example:
      >>> algorithm = fjs.finetune(task)  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'lam']
    """
    checks.one_of(get_args(Penalty), penalty=penalty)
    checks.one_of(get_args(Origin), origin=origin)
    if penalty == "kl" and task.divergence is None:
        raise ValueError(
            "penalty 'kl' needs a task with a `divergence`, the symmetrized KL divergence of its "
            "predictions; this one has none"
        )
    if penalty == "ewc" and task.track is not None:
        raise ValueError("penalty 'ewc' takes gradients of single rows: BatchNorm has none")
    of_loss = optimizers.curvature(local_optimizer)
    curvature = {
        "vanilla": of_loss,
        "mean": optimizers.curvature(local_optimizer, PULL.name),
        "kl": of_loss and (lambda bound, hparams: bound * (1 + hparams.lam)),
        "ewc": None,  # it depends on data
    }
    pulls = {
        "vanilla": no_pull,
        "mean": lambda w_tilde, w_k, data, hparams, client_id: Pull(hparams.lam, w_tilde),
        "kl": None,  # they curve, and depend on rows
        "ewc": None,
    }
    reads_published = penalty != "vanilla" or origin == "global"

    def start(key, hparams, w_tilde, w_k):
        return w_tilde if reads_published else (), w_tilde if origin == "global" else w_k

    def client(shared, personal, data, hparams, context):
        lam = None if penalty == "vanilla" else hparams.lam
        towards = _towards(penalty, task, shared, data, lam)
        w_k = local_steps(
            personal, data, task, local_optimizer, hparams, context.round, penalty=towards
        )
        return w_k, (), {}

    return Algorithm(
        from_one_model(task, start),
        client,
        keep_shared,
        predict_with_personal,
        task,
        warm_start=WarmStart(
            start, lambda shared: shared if reads_published else None, required=reads_published
        ),
        curvature=curvature[penalty],
        personal_pull=pulls[penalty],
    )


def _towards(
    penalty: Penalty, task: Task, w_tilde: PyTree, data: ClientData, lam: Any
) -> Callable[[PyTree, Batch], jax.Array] | None:
    """Return the penalty as a function of parameters and a minibatch, ()."""

    def mean(w, batch):
        return lam / 2 * _sum(jax.tree.map(lambda a, b: jnp.square(a - b), w, w_tilde))

    def kl(w, batch):
        assert task.divergence is not None
        return lam / 2 * batch.mean(task.divergence(w, w_tilde, batch))

    def ewc(w, batch):
        terms = jax.tree.map(lambda f, a, b: f * jnp.square(a - b), information, w, w_tilde)
        return lam / 2 * _sum(terms)

    if penalty == "ewc":
        information = fisher(task, w_tilde, data)
    return {"vanilla": None, "mean": mean, "kl": kl, "ewc": ewc}[penalty]


def fisher(task: Task, params: PyTree, data: ClientData) -> PyTree:
    """Compute the diagonal of the empirical Fisher information, F_j = (1/n) Σ_i (∂ℓ_i/∂w_j)².

    An exact pass over the client's n rows, with their own labels; the loss ℓ_i stands for the
    negative log-likelihood of row i.
    """

    def squares(fields):
        row = Batch(jax.tree.map(lambda value: value[None], fields), jnp.ones(1))
        return jax.tree.map(jnp.square, jax.grad(task.loss)(params, row))

    def of_batch(batch):
        weight = batch.weight / jnp.maximum(jnp.sum(batch.weight), 1)
        squared_gradients = jax.vmap(squares)(batch.fields)
        return jax.tree.map(
            lambda s: jnp.tensordot(weight.astype(s.dtype), s, 1), squared_gradients
        )

    return mean_over_rows(of_batch, data)


def _sum(tree: PyTree) -> jax.Array:
    return jax.tree.reduce(jnp.add, jax.tree.map(jnp.sum, tree))
