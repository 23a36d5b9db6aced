"""PMTL: private mean-regularized multi-task learning (Hu, Wu, Smith; TMLR 2023), Algorithm 1."""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from numpy.typing import ArrayLike

from fedjaxsim import checks
from fedjaxsim.algorithm import Algorithm
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.clusters import in_clusters
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.local_steps import PULL, Pull, local_steps
from fedjaxsim.algorithms.shared_model import with_personal
from fedjaxsim.hyperparameters import RATE, Records, reads
from fedjaxsim.tasks.task import Task

Message = Literal["update", "offset"]
_MEAN_RATE = dataclasses.replace(
    optimizers.SERVER_LEARNING_RATE,
    default=RATE,
    help="Server's step along the released mean update: p keeps w̃ the mean of the models, 1 is "
    "the paper's, and unstable for p < 1.",
)


def _server_records(message: Message, **arguments: Any) -> Records:
    rate, *more = optimizers.server_records(**arguments)
    return (_MEAN_RATE if message == "update" else rate, *more)


@reads(optimizers.local_records, _server_records, PULL)
def pmtl(
    task: Task,
    *,
    local_optimizer: optimizers.LocalChoice = "sgd",
    server_optimizer: optimizers.ServerChoice = "sgd",
    message: Message = "offset",
    clusters: ArrayLike | None = None,
) -> Algorithm:
    """PMTL: every client keeps its own w_k, pulled towards w̃, the noised mean of all of them.

    Client k of the cohort takes E steps from its own w_k (line 13)

        w ← w − η (∇ℓ_k(w) + λ (w − w̃))

    and sends w − w̃, or by name w − w_k, the paper's message (line 6); the server adds the clipped,
    noised mean of the messages to w̃ (line 8). All clients and w̃ start from one data-independent w⁰:
    the mean of w_k fitted to data would publish data without noise. Clients predict with w_k.

    The message is one of two, both bounded, noised and charged alike:

    * "offset": w − w̃, the authors' code: it pulls w̃ back to the models, so that little or no
      earlier noise remains.
    * "update": w − w_k, the paper's: w̃ is w⁰ plus the sum of all releases and their noise, which
      in the end outweighs the models. The server's step is p unless given, so that w̃ is the mean
      of the models; the paper's 1 puts it 1/p times as far out, and diverges in directions of
      little curvature.

    Args:
      task: model and loss.
      local_optimizer: Optimizer of the clients, a name or from `optimizers.local`.
      server_optimizer: Optimizer of the server, applied to the released mean message; "sgd" adds
        it, as in the paper.
      message: Message of a client: "offset", w − w̃, or the paper's "update", w − w_k, in which
        noise adds up.
      clusters: the cluster of each client, (m,), for a w̃ per cluster at the same price; public,
        see `in_clusters`.

    Raises:
      ValueError: if the message is unknown, or `in_clusters` refuses the clusters.
    """
    checks.one_of(get_args(Message), message=message)

    def client(shared, personal, data, hparams, context):
        w_k, w_tilde = personal, shared.params
        pull = Pull(hparams.lam, w_tilde)
        w = local_steps(w_k, data, task, local_optimizer, hparams, context.round, pull)
        origin = w_k if message == "update" else w_tilde
        return w, jax.tree.map(jnp.subtract, w, origin), {}

    algorithm = with_personal(fedavg(task, server_optimizer=server_optimizer), client)
    algorithm = algorithm._replace(curvature=optimizers.curvature(local_optimizer, PULL.name))
    if message == "update":
        algorithm = algorithm._replace(noise_adds_up='message="offset"')
    return algorithm if clusters is None else in_clusters(algorithm, clusters)
