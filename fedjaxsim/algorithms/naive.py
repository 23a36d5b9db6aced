"""Client-level DP of all models, the naive way (PMTL, Figure 1): a baseline that must fail."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjaxsim.algorithm import Algorithm, WarmStart
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.local_steps import PULL, Pull, local_steps
from fedjaxsim.algorithms.shared_model import from_one_model
from fedjaxsim.hyperparameters import reads
from fedjaxsim.tasks.task import Task

PyTree = Any


class Matrix(NamedTuple):
    """The public server state: all models.

    Attributes:
      rows: W, the released model of every client, leaves (m, ...).
      mean: w̄, the mean of the rows, leaves (...).
    """

    rows: PyTree
    mean: PyTree


@reads(optimizers.local_records, PULL)
def naive_dp(
    task: Task, *, num_clients: int, local_optimizer: optimizers.LocalChoice = "sgd"
) -> Algorithm:
    """PMTL's objective with differential privacy of all models instead of joint DP.

    The server publishes the matrix W of all models. Client k of the cohort takes E steps

        w ← w − η (∇ℓ_k(w) + λ (w − w̄))

    from its released row w_k, w̄ being the mean of all rows, and sends w − w_k. The mechanism,
    `privacy.mechanisms.every_row()`, clips that and noises every row; the server adds the
    release to W. Clients predict with their released row, so (ε, δ) covers a client's own model
    too. At the ε of PMTL the noise is equally large, but meets the update of one client instead of
    a cohort's sum.

    W takes the memory of m models, on every device.

    Args:
      task: model and loss.
      num_clients: m.
      local_optimizer: Optimizer of the clients, a name or from `optimizers.local`.

    Raises:
      ValueError: when the algorithm is first traced, if the run has not `num_clients` clients, or
        the release has not one row for each.
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
