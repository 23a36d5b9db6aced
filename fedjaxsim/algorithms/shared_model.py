"""The server state of algorithms that publish one set of parameters, and functions in common."""

from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from fedjaxsim.algorithm import ServerOptimizer
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.tasks.task import Task

PyTree = Any


class SharedModel(NamedTuple):
    """The public server state.

    Attributes:
      params: the published parameters: w̃ of PMTL, w of FedAvg and FedProx.
      optimizer: the server optimizer's state, a function of the releases.
    """

    params: PyTree
    optimizer: PyTree


def publish(
    params: PyTree, server_optimizer: ServerOptimizer, hparams: Hyperparameters
) -> SharedModel:
    """Return the first server state."""
    return SharedModel(params, server_optimizer(hparams).init(params))


def published(shared: SharedModel) -> PyTree:
    """Return the published parameters, for `WarmStart.published`."""
    return shared.params


def from_one_model(
    task: Task, start: Callable[[Hyperparameters, PyTree, PyTree], tuple[PyTree, PyTree]]
) -> Callable[[jax.Array, Hyperparameters], tuple[PyTree, PyTree]]:
    """Return the `init` function that starts server and clients from one random model."""

    def init(key, hparams):
        w = task.init(key)
        return start(hparams, w, w)

    return init


def server_step(
    server_optimizer: ServerOptimizer,
) -> Callable[[SharedModel, PyTree, Hyperparameters, jax.Array], SharedModel]:
    """Return the `server` function that steps along the mean update (Reddi et al. 2021, Alg. 1)."""

    def server(shared, release, hparams, round_):
        del round_
        pseudo_gradient = jax.tree.map(jnp.negative, release)
        updates, state = server_optimizer(hparams).update(
            pseudo_gradient, shared.optimizer, shared.params
        )
        return SharedModel(optax.apply_updates(shared.params, updates), state)

    return server


def keep_shared(
    shared: PyTree, release: PyTree, hparams: Hyperparameters, round_: jax.Array
) -> PyTree:
    """Keep the server state: the `server` function of algorithms that send nothing."""
    del release, hparams, round_
    return shared


def predict_with_shared(
    shared: SharedModel, personal: PyTree, hparams: Hyperparameters, client_id: jax.Array
) -> PyTree:
    """Return the published parameters: the `predict` function of one model for all clients."""
    del personal, hparams, client_id
    return shared.params


def predict_with_personal(
    shared: PyTree, personal: PyTree, hparams: Hyperparameters, client_id: jax.Array
) -> PyTree:
    """Return the client's state: the `predict` function of clients that keep whole models."""
    del shared, hparams, client_id
    return personal


def require_choice(value: str, kind: Any, name: str) -> None:
    """Raise ValueError unless `value` is one of a `Literal`."""
    if value not in get_args(kind):
        raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}")
