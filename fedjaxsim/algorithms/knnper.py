"""kNN-Per (Marfoq, Neglia, Kameni, Vidal; ICML 2022): a shared model and own nearest neighbours."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjaxsim import checks
from fedjaxsim.algorithm import Algorithm
from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.hyperparameters import Hyperparameter, reads
from fedjaxsim.tasks.task import Task

PyTree = Any
NEIGHBOUR_WEIGHT = Hyperparameter(
    "neighbour_weight",
    default=0.5,
    range=(0.0, 1.0),
    allowed="lie in [0, 1]",
    help="λ of kNN-Per, the weight of a client's nearest neighbours in its predictions.",
    per_client=True,
)
NEIGHBOUR_SCALE = Hyperparameter(
    "neighbour_scale",
    default=1.0,
    scale="log",
    help="Distance at which a neighbour of kNN-Per weighs 1/e.",
)
_TINY = 1e-30


class Neighbours(NamedTuple):
    """Parameters that one client predicts with: its model w, its datastore, and λ and s, ().

    `keys` are representations of its training rows, (n, r); `labels`, (n,), are −1 without a row.
    """

    params: PyTree
    keys: jax.Array
    labels: jax.Array
    weight: jax.Array
    scale: jax.Array


@reads(optimizers.local_records, optimizers.server_records, NEIGHBOUR_WEIGHT, NEIGHBOUR_SCALE)
def knnper(
    task: Task,
    *,
    neighbours: int = 10,
    datastore: int = 256,
    local_optimizer: optimizers.LocalChoice = "sgd",
    server_optimizer: optimizers.ServerChoice = "sgd",
) -> Algorithm:
    """kNN-Per: FedAvg, and at prediction each client's own k nearest neighbours.

    A client predicts by `with_neighbours`, with one λ = `hparams.neighbour_weight` for all clients.

    Args:
      neighbours: k, the rows that a prediction reads.
      datastore: Most rows that a client keeps.

    Example:
      >>> classes = fjs.tasks.softmax(fjs.models.mlp((4,), 3, (5,)), 3)
      >>> [record.name for record in fjs.knnper(classes).hyperparameters]
      ['learning_rate', 'server_learning_rate', 'neighbour_weight', 'neighbour_scale']
    """
    plain = fedavg(task, local_optimizer=local_optimizer, server_optimizer=server_optimizer)
    return with_neighbours(plain, neighbours=neighbours, datastore=datastore)


def with_neighbours(
    algorithm: Algorithm, *, neighbours: int = 10, datastore: int = 256
) -> Algorithm:
    """Return an algorithm whose clients mix the votes of own rows into their predictions.

    A client predicts with the probabilities (equation 4)

        λ p_kNN(y | x) + (1 − λ) p_w(y | x),    p_kNN(y | x) ∝ Σ_i [y_i = y] exp(−‖φ(x) − φ(x_i)‖/s)

    of its model w, over the k training rows of its datastore whose representations φ, the inputs of
    the output layer of w, are nearest. The datastore never leaves its client and holds its first
    `datastore` training rows.

    Raises:
      ValueError: if the task is no softmax classification, its model names no output layer, clients
        predict with their rows already, or the datastore has fewer rows than neighbours.

    Example:
      >>> classes = fjs.tasks.softmax(fjs.models.mlp((4,), 3, (5,)), 3)
      >>> algorithm = fjs.with_neighbours(fjs.fedprox(classes))
      >>> [record.name for record in algorithm.hyperparameters]
      ['learning_rate', 'server_learning_rate', 'mu', 'neighbour_weight', 'neighbour_scale']
    """
    model = algorithm.task.model
    if algorithm.predict_with_data is not None:
        raise ValueError("clients of this algorithm predict with their training rows already")
    if model is None or model.representation is None:
        raise ValueError(
            "knn-per needs a softmax classification with a linear model or one that names its "
            "output layer"
        )
    checks.count(1, datastore, neighbours=neighbours)
    represent = model.representation

    def apply(params, x):
        logits, features = model.apply(params.params, x), represent(params.params, x)
        squares = jnp.sum(jnp.square(features[:, None] - params.keys[None]), axis=-1)
        squares = jnp.where(params.labels >= 0, squares, jnp.inf)
        nearest, index = jax.lax.top_k(-squares, neighbours)
        present = jnp.isfinite(nearest)
        # The root has no derivative at 0, where a row meets itself.
        apart = present & (nearest < 0)
        distance = jnp.where(apart, jnp.sqrt(jnp.where(apart, -nearest, 1)), 0)
        kernel = jnp.where(present, jnp.exp(-distance / params.scale), 0)
        votes = jax.nn.one_hot(params.labels[index], logits.shape[-1]) * kernel[..., None]
        total = jnp.sum(kernel, axis=-1, keepdims=True)
        of_neighbours = jnp.sum(votes, axis=1) / jnp.maximum(total, _TINY)
        weight = jnp.where(total > _TINY, params.weight, 0)
        mixed = weight * of_neighbours + (1 - weight) * jax.nn.softmax(logits)
        return jnp.log(jnp.maximum(mixed, _TINY)).astype(logits.dtype)

    def predict_with_data(shared, personal, data, hparams, client_id):
        w = algorithm.predict(shared, personal, hparams, client_id)

        def add(carry, batch):
            keys, labels, count = carry
            row = batch.weight > 0
            place = jnp.where(row, count + jnp.cumsum(row) - 1, datastore)
            keys = keys.at[place].set(represent(w, batch.fields["x"]), mode="drop")
            labels = labels.at[place].set(batch.fields["y"].astype(jnp.int32), mode="drop")
            return keys, labels, count + jnp.sum(row, dtype=jnp.int32)

        shape = jax.eval_shape(represent, w, data.batch_shapes().fields["x"])
        keys = jnp.zeros((datastore, shape.shape[1]), shape.dtype)
        start = keys, jnp.full(datastore, -1, jnp.int32), jnp.zeros((), jnp.int32)
        keys, labels, _ = data.full_pass(add, start)
        return Neighbours(w, keys, labels, hparams.neighbour_weight, hparams.neighbour_scale)

    return algorithm._replace(
        task=algorithm.task.with_outputs(apply),
        predict_with_data=predict_with_data,
        hyperparameters=(*algorithm.hyperparameters, NEIGHBOUR_WEIGHT, NEIGHBOUR_SCALE),
    )
