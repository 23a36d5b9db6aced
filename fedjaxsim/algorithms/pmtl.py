"""PMTL: private mean-regularized multi-task learning (Hu, Wu, Smith; TMLR 2023), Algorithm 1.

Beside it the naive way to privacy of Figure 1.
"""

import dataclasses
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from fedjaxsim import checks
from fedjaxsim.algorithm import Algorithm, WarmStart
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.local_steps import PULL, Pull, local_steps
from fedjaxsim.algorithms.shared_model import from_one_model, with_personal
from fedjaxsim.hyperparameters import RATE, Records, reads
from fedjaxsim.tasks.task import Task

PyTree = Any
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
) -> Algorithm:
    """PMTL: every client keeps its own w_k, pulled towards w̃, the noised mean of all of them.

    Client k of the cohort takes E steps from its own w_k (line 13)

        w ← w − η (∇ℓ_k(w) + λ (w − w̃))

    and sends w − w̃, as the authors' code does, or by name w − w_k, the paper's message (line 6);
    the server adds the clipped, noised mean of the messages to w̃ (line 8). All clients and w̃ start
    from one data-independent w⁰. Clients predict with w_k.

    Args:
      task: model and loss.
      local_optimizer: Optimizer of the clients, a name or from `optimizers.local`.
      server_optimizer: Optimizer of the server, applied to the released mean message; "sgd" adds
        it, as in the paper.
      message: Message of a client: "offset", w − w̃, or the paper's "update", w − w_k, in which
        noise adds up.
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
    return algorithm


class Matrix(NamedTuple):
    """The public server state: W, every client's released model, (m, ...), and their mean w̄."""

    rows: PyTree
    mean: PyTree


@reads(optimizers.local_records, PULL)
def naive_dp(
    task: Task, *, num_clients: int, local_optimizer: optimizers.LocalChoice = "sgd"
) -> Algorithm:
    """PMTL's objective with differential privacy of all models instead of joint DP.

    The server publishes the matrix W of all models. Client k of the cohort takes E steps

        w ← w − η (∇ℓ_k(w) + λ (w − w̄))

    from its released row w_k, w̄ being the mean of all rows, and sends w − w_k. The mechanism
    `every_row()` clips that and noises every row; the server adds the release to W. Clients predict
    with their released row, so (ε, δ) covers a client's own model too.

    Args:
      task: model and loss.
      num_clients: m.
      local_optimizer: Optimizer of the clients, a name or from `optimizers.local`.

    Raises:
      ValueError: when first traced, if the run or the release has not m clients.
    """

    def start(hparams, published, own):
        rows = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (num_clients, *leaf.shape)), published
        )
        return Matrix(rows, published), ()

    def client(shared, personal, data, hparams, context):
        if context.num_clients != num_clients:
            raise ValueError(
                f"num_clients must be {context.num_clients}, the clients of the run, "
                f"got {num_clients}"
            )
        w_k = predict(shared, personal, hparams, context.client_id)
        pull = Pull(hparams.lam, shared.mean)
        w = local_steps(w_k, data, task, local_optimizer, hparams, context.round, pull)
        return personal, jax.tree.map(jnp.subtract, w, w_k), {}

    def server(shared, release, hparams, round_):
        # A release of one row would silently broadcast to all rows.
        if jax.tree.map(jnp.shape, release) != jax.tree.map(jnp.shape, shared.rows):
            raise ValueError(
                f"naive_dp needs a release of {num_clients} rows: its mechanism must be every_row()"
            )
        rows = jax.tree.map(jnp.add, shared.rows, release)
        return Matrix(rows, jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), rows))

    def predict(shared, personal, hparams, client_id):
        return jax.tree.map(lambda leaf: leaf[client_id], shared.rows)

    return Algorithm(
        from_one_model(task, start),
        client,
        server,
        predict,
        task,
        warm_start=WarmStart(start, lambda shared: shared.mean),
        curvature=optimizers.curvature(local_optimizer, PULL.name),
    )
