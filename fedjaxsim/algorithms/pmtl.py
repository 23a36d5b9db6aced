"""PMTL: private mean-regularized multi-task learning (Hu, Wu, Smith; TMLR 2023), Algorithm 1.

Beside it its generality, models of public clusters, and the naive way to privacy of Figure 1.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from fedjaxsim import checks
from fedjaxsim.algorithm import Algorithm, NoiseAddsUp, WarmStart
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.local_steps import (
    PULL,
    Pull,
    PullBy,
    check_pull,
    local_steps,
    pull_of,
    pull_records,
    pull_to_shared,
)
from fedjaxsim.algorithms.shared_model import from_one_model, with_personal
from fedjaxsim.checks import Name, SettingError
from fedjaxsim.hyperparameters import Declarations, Default, Hyperparameters, reads
from fedjaxsim.kernels import products
from fedjaxsim.tasks.task import Task

PyTree = Any
Message = Literal["update", "offset"]
_MEAN_RATE = dataclasses.replace(
    optimizers.SERVER_LEARNING_RATE,
    default=Default.RATE,
    help="Server's step along the released mean update: p keeps w̃ the mean of the models, 1 is "
    "the paper's, and unstable for p < 1.",
)
_PUBLIC = (
    "The clusters of the clients, whose sizes divide the releases, are taken as public; if they "
    "are made of data, the guarantee does not cover what they reveal."
)


def _server_records(message: Message, **arguments: Any) -> Declarations:
    rate, *more = optimizers.server_records(**arguments)
    return (_MEAN_RATE if message == "update" else rate, *more)


@reads(optimizers.local_records, _server_records, pull_records)
def pmtl(
    task: Task,
    *,
    local_optimizer: optimizers.LocalChoice = "sgd",
    server_optimizer: optimizers.ServerChoice = "sgd",
    message: Message = "offset",
    clusters: ArrayLike | None = None,
    pull: PullBy = "equal",
) -> Algorithm:
    """PMTL: every client keeps its own w_k, pulled towards w̃, the noised mean of all of them.

    Client k of the cohort takes E steps from its own w_k (line 13)

        w ← w − η (∇ℓ_k(w) + λ (w − w̃))

    keeps w, and sends a message (line 6). The server adds the clipped, noised mean of the messages
    (line 8):

        w̃ ← w̃ + (Σ clip(message, C) + N(0, (zC)² I)) / pm

    The paper's σ is the noise on that mean, zC/(pm). All clients and w̃ start from one w⁰, which
    depends on no data: the paper's mean of w_k⁰ is private only then. Clients predict with w_k.

    The message is one of two. Both are bounded, noised and charged alike:

    * "offset", w − w̃, as in the authors' code. With full participation and no clip binding, w̃ is
      the mean of the models plus the noise of the *last* round. For p < 1 the last w̃ keeps a weight
      of 1 − n/(pm) for a cohort of n: 0 on average, with standard deviation √((1 − p)/(pm)). An
      offset is as long as the distance of a client's model from w̃, however far training has
      converged. A small C turns the mean of the models into a point at which *clipped* offsets
      cancel. So tune C, λ and η for each message.
    * "update", w − w_k, as in the paper. Its noise adds up: it does not depend on where w̃ has
      drifted, so with full participation and no clip binding, w̃ − (mean of all w_k) is *exactly*
      the sum of all noise so far, a random walk with steps of zC/m. (In FedAvg clients start from
      the noisy w, and their gradients pull the error back.) Choose a small λ under strong noise.

    With the update and p < 1 the paper's rule moves w̃ 1/p times as far as the mean of the models.
    It is unstable: a direction in which the loss curves less than λ(1/p − 1) grows without bound.
    (Digits, λ = 0.1, p = 0.2, no noise: the training loss is 0.08 after 300 rounds and 3,460 after
    1,000, the accuracy still 0.91.) So the server's step is p unless given; 1 is the paper's.

    Left out of the authors' code: weights by numbers of rows, a pull in the first local batch
    only, and one model object that clients share.

    Args:
      message: Message of a client: "offset", w − w̃, or the paper's "update", w − w_k, in which
        noise adds up.
      clusters: the cluster of each client, (m,) integers from 0 to g − 1, none of them empty, for
        a w̃ per cluster at the same price (remark on the generality of Corollary 2). Public and
        fixed before the run, and named among the assumptions of a guarantee.
      pull: "rows" divides λ by the client's training rows, and gives intercepts their own λ, as
        a mixed model shrinks; see `data.variance_ratios`.

    Raises:
      ValueError: if the message is unknown, or clusters are not such integers; when the algorithm
        is first traced, if there is not one for each client.

    Example:
      >>> algorithm = fjs.pmtl(task)  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'server_learning_rate', 'lam']
    """
    checks.one_of(get_args(Message), message=message)
    check_pull(pull, local_optimizer)

    def client(shared, personal, data, hparams, context):
        w_k, w_tilde = personal, shared.params
        to_mean = pull_of(pull, hparams, w_tilde, data)
        w = local_steps(w_k, data, task, local_optimizer, hparams, context.round, to_mean)
        origin = w_k if message == "update" else w_tilde
        return w, jax.tree.map(jnp.subtract, w, origin), {}

    algorithm = with_personal(fedavg(task, server_optimizer=server_optimizer), client)
    penalties = (PULL.name,) if pull == "equal" else ()
    algorithm = algorithm._replace(curvature=optimizers.curvature(local_optimizer, *penalties))
    algorithm = algorithm._replace(personal_pull=pull_to_shared(pull))
    if message == "update":
        algorithm = algorithm._replace(
            noise_adds_up=NoiseAddsUp("PMTL", 'message="offset"', _outgrown)
        )
    return algorithm if clusters is None else _in_clusters(algorithm, clusters)


def _outgrown(p: float, hparams: Hyperparameters) -> float:
    """Return the rounds after which noise in w̃ exceeds one release's noise: η_s²T > 1."""
    step = float(hparams.server_learning_rate)
    return step**-2 if step > 0 else math.inf


def _in_clusters(algorithm: Algorithm, clusters: ArrayLike) -> Algorithm:
    """Run the algorithm in each of g clusters: a client reads and moves its cluster's state alone.

    A message goes into its cluster's slot of g, which keeps its norm: one message, one clip and one
    release, with noise in every slot, at the price of the algorithm. A release is a sum divided by
    p·m; the server multiplies slot c by m/m_c, since p·m_c is the divisor of a cluster of m_c
    clients. The noise of that cluster is m/m_c times as large. A message takes g times the memory.
    """
    ids = np.asarray(clusters)
    are_integers = ids.ndim == 1 and ids.size > 0 and ids.dtype.kind in "iu"
    if not are_integers or not np.array_equal(np.unique(ids), np.arange(ids.max() + 1)):
        raise ValueError(
            "clusters must be whole numbers (m,), from 0 to g − 1 and each of them taken, "
            f"got {clusters!r}"
        )
    sizes = np.bincount(ids)
    g, m, ids = len(sizes), len(ids), ids.astype(np.int32)

    def for_all(shared: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (g, *jnp.shape(leaf))), shared)

    def of_client(shared: PyTree, client_id: jax.Array) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[jnp.asarray(ids)[client_id]], shared)

    def scaled(tree: PyTree, factors: np.ndarray) -> PyTree:
        def scale(leaf):
            return leaf * jnp.asarray(factors.reshape(g, *(1,) * (leaf.ndim - 1)), leaf.dtype)

        return jax.tree.map(scale, tree)

    def start(key, hparams, published, own_model):
        assert algorithm.warm_start.start is not None
        shared, personal = algorithm.warm_start.start(key, hparams, published, own_model)
        return for_all(shared), personal

    def client(shared, personal, data, hparams, context):
        if context.num_clients != m:
            raise ValueError(
                f"clusters must have a number for each of the {context.num_clients} clients, "
                f"got {m}"
            )
        cluster_state = of_client(shared, context.client_id)
        personal, message, metrics = algorithm.client(
            cluster_state, personal, data, hparams, context
        )

        def place(leaf):
            slots = jnp.zeros((g, *leaf.shape), leaf.dtype)
            return slots.at[jnp.asarray(ids)[context.client_id]].set(leaf)

        message = products.dense(products.unsealed(message))
        return personal, jax.tree.map(place, message), metrics

    def server(shared, release, hparams, round_):
        step = jax.vmap(algorithm.server, in_axes=(0, 0, None, None))
        return step(shared, scaled(release, m / sizes), hparams, round_)

    def predict(shared, personal, hparams, client_id):
        return algorithm.predict(of_client(shared, client_id), personal, hparams, client_id)

    def pull(shared, personal, data, hparams, client_id):
        assert algorithm.personal_pull is not None
        cluster_state = of_client(shared, client_id)
        return algorithm.personal_pull(cluster_state, personal, data, hparams, client_id)

    def published(shared):
        params = jax.vmap(algorithm.warm_start.published)(shared)
        return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), scaled(params, sizes / m))

    return algorithm._replace(
        averages_statistics=False,
        init=from_one_model(algorithm.task, start),
        client=client,
        server=server,
        predict=predict,
        public=(*algorithm.public, _PUBLIC),
        warm_start=WarmStart(start, published),
        personal_pull=pull,
    )


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

    from its released row w_k, w̄ being the mean of all rows, and sends w − w_k. The mechanism,
    `privacy.mechanisms.every_row()`, clips that and noises *every* row with N(0, (zC)²); the server
    adds the release to W without division. Clients predict with their released row, so (ε, δ)
    covers a client's own model too, and the ε of the view `released_sequence` covers everything.

    A round costs as much as PMTL's at the same z. But its noise meets the update of one client
    instead of a cohort's sum, and T rounds leave zC√T in every coordinate. The baseline shows such
    useless models (PMTL, Figure 1). W takes the memory of m models, on every device.

    Args:
      num_clients: m.

    Raises:
      ValueError: when the algorithm is first traced, if the run has not `num_clients` clients, or
        the release has not one row for each.

    Example:
      >>> algorithm = fjs.naive_dp(task, num_clients=2)  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'lam']
    """

    def start(key, hparams, published, own_model):
        rows = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (num_clients, *leaf.shape)), published
        )
        return Matrix(rows, published), ()

    def client(shared, personal, data, hparams, context):
        if context.num_clients != num_clients:
            raise SettingError(
                Name("num_clients"),
                f" must be {context.num_clients}, the clients of the run, got {num_clients}",
            )
        w_k = predict(shared, personal, hparams, context.client_id)
        pull = Pull(hparams.lam, shared.mean)
        w = local_steps(w_k, data, task, local_optimizer, hparams, context.round, pull)
        return personal, jax.tree.map(jnp.subtract, w, w_k), {}

    def server(shared, release, hparams, round_):
        # A release of one row would silently broadcast to all rows.
        if jax.tree.map(jnp.shape, release) != jax.tree.map(jnp.shape, shared.rows):
            raise SettingError(
                Name("naive_dp"),
                f" needs a release of {num_clients} rows: its mechanism must be ",
                Name("every_row()"),
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
        typical_message=optimizers.small_update,
    )
