"""The server state of algorithms that publish one set of parameters, and functions in common."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from fedjaxsim import keys
from fedjaxsim.algorithm import Algorithm, Client, Predict, Server, ServerOptimizer, WarmStart
from fedjaxsim.algorithms.optimizers import evaluated, step_with
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.keys import Stream
from fedjaxsim.models.model import STATISTICS
from fedjaxsim.tasks.task import Task

PyTree = Any


class SharedModel(NamedTuple):
    """The public server state: parameters, and the server optimizer's state, made of releases."""

    params: PyTree
    optimizer: PyTree


def publish(
    params: PyTree, server_optimizer: ServerOptimizer, hparams: Hyperparameters
) -> SharedModel:
    """Return the first server state."""
    return SharedModel(params, server_optimizer(hparams).init(params))


def published(shared: SharedModel) -> PyTree:
    """Return the published parameters, for `WarmStart.published`; see `optimizers.evaluated`."""
    return evaluated(shared.params, shared.optimizer)


def from_one_model(
    task: Task, start: Callable[[jax.Array, Hyperparameters, PyTree, PyTree], tuple[PyTree, PyTree]]
) -> Callable[[jax.Array, Hyperparameters], tuple[PyTree, PyTree]]:
    """Return the `init` function that starts server and clients from one random model."""

    def init(key, hparams):
        w = task.init(key)
        return start(keys.stream(key, Stream.WARM_START), hparams, w, w)

    return init


def with_personal(
    shared_model: Algorithm,
    client: Client,
    state: Callable[[Hyperparameters, PyTree], PyTree] = lambda hparams, model: model,
    predict: Predict | None = None,
) -> Algorithm:
    """Return an algorithm of one shared model, as `fedavg`, whose clients keep a state besides.

    `state`, `(hparams, model) -> personal`, makes a client's first one of the model that it
    predicted with in the stage before, at first the shared one. `client` and `predict` are as in
    `Algorithm`; by default clients predict with their state.
    """

    def start(key, hparams, published, own_model):
        assert shared_model.warm_start.start is not None
        shared, _ = shared_model.warm_start.start(key, hparams, published, own_model)
        return shared, state(hparams, own_model)

    return shared_model._replace(
        init=from_one_model(shared_model.task, start),
        client=client,
        predict=predict_with_personal if predict is None else predict,
        warm_start=WarmStart(start, shared_model.warm_start.published),
        sends_from_shared=False,  # unless the caller knows
    )


def server_step(server_optimizer: ServerOptimizer, *, statistics: bool = False) -> Server:
    """Return the `server` function that steps along the mean update (Reddi et al. 2021, Alg. 1).

    If the model keeps running `statistics`, they become the mean of the clients'; no optimizer
    moves them.
    """

    def server(shared, release, hparams, round_):
        pseudo_gradient = jax.tree.map(jnp.negative, release)
        optimizer = server_optimizer(hparams)
        updates, state = step_with(optimizer, pseudo_gradient, shared.optimizer, shared.params)
        params: Any = optax.apply_updates(shared.params, updates)
        if statistics:
            of_clients = moved(shared.params[STATISTICS], 1, release[STATISTICS])
            params = params | {STATISTICS: of_clients}
        return SharedModel(params, state)

    return server


def sum_outgrows_mean(p: float, hparams: Hyperparameters) -> float:
    """Return the rounds after which p times a sum of noise outgrows its running mean of rate p.

    The first has the variance p²T, the second p²/(1 − (1 − p)²), in units of one release.
    """
    return 1 / (1 - (1 - p) ** 2) if p > 0 else math.inf


def moved(tree: PyTree, rate: ArrayLike, direction: PyTree) -> PyTree:
    """Return tree + rate · direction, in the types of the tree.

    Example:
      >>> w, step = {"w": jnp.ones(2)}, {"w": jnp.array([2.0, 4.0])}
      >>> fjs.shared_model.moved(w, 0.5, step)["w"].tolist()
      [2.0, 3.0]
    """
    return jax.tree.map(lambda t, d: (t + rate * d).astype(t.dtype), tree, direction)


def keep_shared(
    shared: PyTree, release: PyTree, hparams: Hyperparameters, round_: jax.Array
) -> PyTree:
    """Keep the server state: the `server` function of algorithms that send nothing."""
    return shared


def predict_with_shared(
    shared: SharedModel, personal: PyTree, hparams: Hyperparameters, client_id: jax.Array
) -> PyTree:
    """Return the published parameters: the `predict` function of one model for all clients."""
    return published(shared)


def predict_with_personal(
    shared: PyTree, personal: PyTree, hparams: Hyperparameters, client_id: jax.Array
) -> PyTree:
    """Return the client's state: the `predict` function of clients that keep whole models."""
    return personal
