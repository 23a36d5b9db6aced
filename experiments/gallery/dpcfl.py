"""R-DPCFL (Malekmohammadi, Taik, Farnadi; TMLR 2025): DP-SGD clients, clustered by their updates.

fedjaxsim run --algorithm experiments/gallery/dpcfl.py:dpcfl --mechanism every-row --sampling full
  --example-epsilon 8 --noise-multiplier 0 --clip inf --data digits --clusters 4 --rounds 100

The server sees each client's update, which protects the client's examples by noise in its own
gradients. A mixture of Gaussians on the updates of round 1 gives each client a probability of each
cluster, by which its cluster is drawn in the first (1 − overlap) T/2 rounds; the overlap is that
of the two closest clusters. From then on clients choose the cluster with the smallest loss.

Clustering updates and averaging clusters are post-processing. In the paper a choice is one by the
exponential mechanism, in a tenth of the rounds, for 3 % of ε each. Here every tenth round is
spent on it: its noised gradients are those of a loss whose derivatives are the losses of all
models. So ε of examples is that of FedAvg with the same minibatches, and only gradients are
charged. The authors' code clusters two principal components, here all coordinates count.

With `--noise-multiplier` and `--clip` each row is noised for the whole client, too, but then
nothing averages that noise before clusters are found.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

import fedjaxsim as fjs

_STEPS = 50
"""Steps of EM; they end as soon as no client changes its cluster, in practice."""
_PERIOD = 10
"""From one round in which clients choose to the next."""


class Clusters(NamedTuple):
    """The models of all clusters, leaves (k, …), and what decides who trains which.

    Attributes:
      models: leaves (k, …).
      of_client: each client's cluster in the next round, (m,).
      probabilities: of each cluster for each client, (m, k).
      switch: the first round in which clients choose, ().
      seed: a random number for the clusters that are drawn, ().
    """

    models: Any
    of_client: jax.Array
    probabilities: jax.Array
    switch: jax.Array
    seed: jax.Array

    def chooses(self, round_: jax.Array) -> jax.Array:
        """Return whether clients choose their clusters in a round, instead of training."""
        since = round_ - self.switch
        return (round_ > 0) & (since >= 0) & (since % _PERIOD == 0)


def clusters_of(rows: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Fit a mixture of `count` spherical Gaussians to rows (m, p), by EM.

    Its means start at row 0 and, one by one, at the row that is farthest from them. Returns the
    probabilities of the clusters for each row, (m, k), and the largest overlap of two clusters, (),
    1 − erf(s/√2) for means 2s of the larger standard deviation apart.
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
    mixture = jax.lax.fori_loop(0, _STEPS, step, first)
    means, variances, _ = mixture
    apart = jnp.linalg.norm(means[:, None] - means, axis=-1)
    larger = jnp.sqrt(jnp.maximum(variances[:, None], variances))
    distances = jnp.where(jnp.eye(count, dtype=bool), jnp.inf, apart / (2 * larger))
    overlap = jax.scipy.special.erfc(jnp.min(distances) / jnp.sqrt(2))
    return jax.nn.softmax(logits(mixture), axis=1), overlap


@fjs.reads(fjs.optimizers.LEARNING_RATE)
def dpcfl(
    task: fjs.Task, *, num_clients: int, clusters: int = 2, drawn_rounds: int = 50
) -> fjs.Algorithm:
    """Cluster the clients by their first updates, and later by their losses; train k models.

    In round 1 a client sends −η Σ g, its gradients g of all minibatches at the first model: for one
    epoch a full batch, whose sum has less noise beside its signal. Later it takes local steps from
    its cluster's model, which moves by the mean of its clients' updates, or, in a round of choices,
    sends the mean of what the models' losses are above their mean.

    Args:
      task: model and loss; `private_examples(task)` protects examples.
      num_clients: m.
      clusters: k, the number of models.
      drawn_rounds: rounds before clients choose if no clusters overlap; T/2 in the paper.
    """

    def model(shared, client_id):
        cluster = shared.of_client[client_id]
        return jax.tree.map(lambda leaf: leaf[cluster], shared.models)

    def client(shared, personal, data, hparams, context):
        w = model(shared, context.client_id)
        clustering, choosing = context.round == 0, shared.chooses(context.round)

        def loss(point, batch):
            def training(point):
                return task.loss(point["w"], batch)

            def choice(point):
                losses = jax.vmap(lambda model: task.loss(model, batch))(shared.models)
                mean = jnp.mean(losses)
                return mean + point["losses"] @ (losses - mean)

            return jax.lax.cond(choosing, choice, training, point)

        either = task._replace(loss=loss, layers=None, linear=None)

        def step(sent, batch):
            at = jax.tree.map(lambda a, u: a + jnp.where(clustering, 0, u), w, sent["w"])
            slope = either.gradient({"w": at, "losses": sent["losses"]}, batch)
            update = jax.tree.map(lambda u, g: u - hparams.learning_rate * g, sent["w"], slope["w"])
            return {"w": update, "losses": sent["losses"] + slope["losses"]}

        nothing = {"w": jax.tree.map(jnp.zeros_like, w), "losses": jnp.zeros(clusters)}
        return personal, data.fold(step, nothing), {}

    def server(shared, release, hparams, round_):
        def first():
            rows = jax.vmap(lambda row: ravel_pytree(row)[0])(release["w"])
            probabilities, overlap = clusters_of(rows, clusters)
            switch = jnp.maximum(1, (1 - overlap) * drawn_rounds).astype(jnp.int32)
            return jnp.argmax(probabilities, axis=1), probabilities, switch

        of_client, probabilities, switch = jax.lax.cond(
            round_ == 0, first, lambda: (shared.of_client, shared.probabilities, shared.switch)
        )
        dtype = release["losses"].dtype
        belongs = jax.nn.one_hot(of_client, clusters, axis=0, dtype=dtype)  # (k, m)
        weights = belongs / jnp.maximum(belongs.sum(axis=1, keepdims=True), 1)
        models = jax.tree.map(
            lambda w, u: w + jnp.tensordot(weights, u, 1), shared.models, release["w"]
        )
        key = jax.random.fold_in(jax.random.key(shared.seed), round_)
        drawn = jax.random.categorical(key, jnp.log(probabilities))
        of_next = jnp.where(round_ + 1 <= switch, drawn, of_client)
        best = jnp.argmin(release["losses"], axis=1)
        of_next = jnp.where(shared.chooses(round_), best, of_next).astype(jnp.int32)
        return Clusters(models, of_next, probabilities, switch, shared.seed)

    def init(key, hparams):
        first_key, seed_key = jax.random.split(key)
        w = task.init(first_key)
        models = jax.tree.map(lambda leaf: jnp.repeat(leaf[None], clusters, axis=0), w)
        nobody, seed = jnp.zeros(num_clients, jnp.int32), jax.random.bits(seed_key)
        even = jnp.full((num_clients, clusters), 1 / clusters)
        return Clusters(models, nobody, even, jnp.int32(0), seed), ()

    return fjs.Algorithm(
        init,
        client,
        server,
        lambda shared, personal, hparams, client_id: model(shared, client_id),
        task,
    )
