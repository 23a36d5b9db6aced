"""R-DPCFL (Malekmohammadi, Taik, Farnadi; TMLR 2025): DP-SGD clients, clustered by their updates.

fedjaxsim run --algorithm experiments/gallery/dpcfl.py:dpcfl --mechanism every-row --sampling full
  --example-epsilon 8 --noise-multiplier 0 --clip inf --data digits --clusters 4

The server sees each client's update, which protects the client's examples by noise in its own
gradients. Clustering updates and averaging clusters are post-processing: ε of examples is that of
FedAvg with the same minibatches, and only gradients are charged. With `--noise-multiplier` and
`--clip` each row is noised for the whole client, too, but then nothing averages that noise before
clusters are found.

Not here is the paper's last part, in which clients choose a cluster by their loss with the
exponential mechanism (3 % of its ε): here clusters stay those of round 1.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

import fedjaxsim as fjs

_STEPS = 50
"""Steps of EM; they end as soon as no client changes its cluster, in practice."""


class Clusters(NamedTuple):
    """The models of all clusters, leaves (k, …), and each client's cluster, (m,)."""

    models: Any
    of_client: jax.Array


def clusters_of(rows: jax.Array, count: int) -> jax.Array:
    """Return the cluster of each row (m, p), by a mixture of `count` spherical Gaussians, by EM.

    Its means start at row 0 and, one by one, at the row that is farthest from them.
    """
    m, p = rows.shape
    far, means = jnp.full(m, jnp.inf), [rows[0]]
    for _ in range(count - 1):
        far = jnp.minimum(far, jnp.sum(jnp.square(rows - means[-1]), axis=1))
        means.append(rows[jnp.argmax(far)])
    means = jnp.stack(means)
    least = 1e-6 * jnp.mean(jnp.square(rows - jnp.mean(rows, axis=0))) + 1e-30

    def squares(means):
        return jnp.sum(jnp.square(rows[:, None] - means), axis=-1)

    def logits(mixture):
        means, variances, shares = mixture
        fit = squares(means) / variances + p * jnp.log(variances)
        return jnp.log(jnp.maximum(shares, 1e-30)) - fit / 2

    def step(_, mixture):
        weights = jax.nn.softmax(logits(mixture), axis=1)
        sums = jnp.maximum(jnp.sum(weights, axis=0), 1e-9)
        means = weights.T @ rows / sums[:, None]
        variances = jnp.maximum(jnp.sum(weights * squares(means), axis=0) / (p * sums), least)
        return means, variances, sums / m

    variance = jnp.mean(jnp.min(squares(means), axis=1)) / p + least
    first = means, jnp.full(count, variance), jnp.full(count, 1 / count)
    return jnp.argmax(logits(jax.lax.fori_loop(0, _STEPS, step, first)), axis=1)


@fjs.reads(fjs.optimizers.LEARNING_RATE)
def dpcfl(task: fjs.Task, *, num_clients: int, clusters: int = 2) -> fjs.Algorithm:
    """Cluster the clients by their first updates, and train a model for each cluster.

    In round 1 a client sends −η Σ g, its gradients g of all minibatches at the first model: for one
    epoch a full batch, whose sum has less noise beside its signal. Later it takes local steps from
    its cluster's model, which moves by the mean of its clients' updates.

    Args:
      task: model and loss; `private_examples(task)` protects examples.
      num_clients: m.
      clusters: k, the number of models.
    """

    def model(shared, client_id):
        cluster = shared.of_client[client_id]
        return jax.tree.map(lambda leaf: leaf[cluster], shared.models)

    def client(shared, personal, data, hparams, context):
        w = model(shared, context.client_id)
        clustering = context.round == 0

        def step(update, batch):
            at = jax.tree.map(lambda a, u: a + jnp.where(clustering, 0, u), w, update)
            slope = task.gradient(at, batch)
            return jax.tree.map(lambda u, g: u - hparams.learning_rate * g, update, slope)

        return personal, data.fold(step, jax.tree.map(jnp.zeros_like, w)), {}

    def server(shared, release, hparams, round_):
        rows = jax.vmap(lambda row: ravel_pytree(row)[0])(release)
        of_client = jax.lax.cond(
            round_ == 0, lambda: clusters_of(rows, clusters), lambda: shared.of_client
        )
        belongs = jax.nn.one_hot(of_client, clusters, axis=0, dtype=rows.dtype)  # (k, m)
        weights = belongs / jnp.maximum(belongs.sum(axis=1, keepdims=True), 1)
        moved = jax.tree.map(lambda w, u: w + jnp.tensordot(weights, u, 1), shared.models, release)
        return Clusters(moved, of_client)

    def init(key, hparams):
        w = task.init(key)
        models = jax.tree.map(lambda leaf: jnp.repeat(leaf[None], clusters, axis=0), w)
        return Clusters(models, jnp.zeros(num_clients, jnp.int32)), ()

    return fjs.Algorithm(
        init,
        client,
        server,
        lambda shared, personal, hparams, client_id: model(shared, client_id),
        task,
    )
