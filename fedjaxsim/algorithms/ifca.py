"""IFCA (Ghosh, Chung, Yin, Ramchandran; NeurIPS 2020): iterative federated clustering."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjaxsim import checks
from fedjaxsim.algorithm import Algorithm, WarmStart
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.local_steps import local_steps, mean_over_rows
from fedjaxsim.algorithms.shared_model import publish, published, server_step
from fedjaxsim.hyperparameters import Hyperparameter, reads
from fedjaxsim.tasks.task import Task

PyTree = Any
SEPARATION = Hyperparameter(
    "separation",
    default=0.1,
    scale="log",
    help="Standard deviation of the random numbers that set the first models of clusters apart.",
)


@reads(optimizers.local_records, optimizers.server_records, SEPARATION)
def ifca(
    task: Task,
    *,
    clusters: int = 2,
    local_optimizer: optimizers.LocalChoice = "sgd",
    server_optimizer: optimizers.ServerChoice = "sgd",
) -> Algorithm:
    """IFCA: k models; a client trains and predicts with the one that suits it best (Algorithm 1).

    Client i of the cohort finds the cluster j of the smallest mean loss of all its rows (line 6)
    and takes local steps from w_j. Its message has k slots, v − w_j in slot j and 0 in the others:
    which one is taken depends on its data, so one clip bounds the whole message and all slots get
    noise. The server adds each slot of the release to its model (option I): the divisor is pm, so a
    cluster of a share s of the clients moves by s times its mean update. (Option II divides by the
    cluster's number of clients, which is private.)

    Clients predict with the best model on their training rows; `predict`, which has no rows, takes
    the choice of the last round.

    Args:
      clusters: k, the number of models.

    Example:
      >>> algorithm = fjs.ifca(task, clusters=3)  # `task` as in `Simulation`
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'server_learning_rate', 'separation']
    """
    checks.count(clusters=clusters)
    server_optimizer = optimizers.as_server(server_optimizer)
    step = jax.vmap(
        server_step(server_optimizer, statistics=task.track is not None), (0, 0, None, None)
    )

    def apart(models, key, hparams):
        """Move all models but the first one at random, leaves (k, ...)."""
        leaves, structure = jax.tree.flatten(models)
        is_noisy = jnp.arange(clusters) > 0
        for place, leaf in enumerate(leaves):
            noise = jax.random.normal(jax.random.fold_in(key, place), leaf.shape, leaf.dtype)
            noise = jnp.where(is_noisy.reshape(-1, *(1,) * (leaf.ndim - 1)), noise, 0)
            leaves[place] = (leaf + hparams.separation * noise).astype(leaf.dtype)
        return jax.tree.unflatten(structure, leaves)

    def first_states(models, hparams):
        shared = jax.vmap(lambda model: publish(model, server_optimizer, hparams))(models)
        return shared, jnp.zeros((), jnp.int32)

    def init(key, hparams):
        key, *keys = jax.random.split(key, clusters + 1)
        models = jax.vmap(task.init)(jnp.stack(keys))
        return first_states(apart(models, key, hparams), hparams)

    def start(key, hparams, first, own_model):
        models = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (clusters, *leaf.shape)), first)
        return first_states(apart(models, key, hparams), hparams)

    published_models = jax.vmap(published)

    def model(models, cluster):
        return jax.tree.map(lambda leaf: leaf[cluster], models)

    def best(models, data):
        of_all = jax.vmap(task.loss, (0, None))
        return jnp.argmin(mean_over_rows(lambda batch: of_all(models, batch), data))

    def client(shared, personal, data, hparams, context):
        j = best(shared.params, data)
        w_j = model(shared.params, j)
        v = local_steps(w_j, data, task, local_optimizer, hparams, context.round)
        message = jax.tree.map(
            lambda after, before: (
                jnp.zeros((clusters, *before.shape), before.dtype).at[j].set(after - before)
            ),
            v,
            w_j,
        )
        return j.astype(jnp.int32), message, {}

    def predict(shared, personal, hparams, client_id):
        return model(published_models(shared), personal)

    def predict_with_data(shared, personal, data, hparams, client_id):
        models = published_models(shared)
        return model(models, best(models, data))

    return Algorithm(
        init,
        client,
        step,
        predict,
        task,
        predict_with_data=predict_with_data,
        warm_start=WarmStart(start, lambda shared: model(published_models(shared), 0)),
        curvature=optimizers.curvature(local_optimizer),
        typical_message=optimizers.small_update,
    )
