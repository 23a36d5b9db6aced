"""The billboard of algorithms that publish one set of parameters, and how a release moves it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjaxsim.algorithm import ServerOptimizer
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.tasks.task import Task

PyTree = Any


class Billboard(NamedTuple):
    """What everybody may read.

    Attributes:
      params: the published parameters: w̃ of PMTL, w of FedAvg and FedProx.
      optimizer: the server optimizer's state, a function of the releases.
    """

    params: PyTree
    optimizer: PyTree


def publish(
    params: PyTree, server_optimizer: ServerOptimizer, hparams: Hyperparameters
) -> Billboard:
    """The first billboard."""
    return Billboard(params, server_optimizer(hparams).init(params))


def published(shared: Billboard) -> PyTree:
    """The `published` function of an `Algorithm`."""
    return shared.params


def from_one_model(
    task: Task, start: Callable[[Hyperparameters, PyTree, PyTree], tuple[PyTree, PyTree]]
) -> Callable[[jax.Array, Hyperparameters], tuple[PyTree, PyTree]]:
    """The `init` function of algorithms that start everybody from one random model."""

    def init(key, hparams):
        w = task.init(key)
        return start(hparams, w, w)

    return init


def server_step(
    server_optimizer: ServerOptimizer,
) -> Callable[[Billboard, PyTree, Hyperparameters, jax.Array], Billboard]:
    """The `server` function that steps along a released mean update (Reddi et al. 2021, Alg. 1)."""

    def server(shared, release, hparams, round_):
        del round_
        pseudo_gradient = jax.tree.map(jnp.negative, release)
        updates, state = server_optimizer(hparams).update(
            pseudo_gradient, shared.optimizer, shared.params
        )
        return Billboard(optax.apply_updates(shared.params, updates), state)

    return server


def predict_with_shared(
    shared: Billboard, personal: PyTree, hparams: Hyperparameters, client_id: jax.Array
) -> PyTree:
    """The `predict` function of algorithms with one model for all clients."""
    del personal, hparams, client_id
    return shared.params
