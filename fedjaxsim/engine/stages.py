"""The start of a stage from the state of another run."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjaxsim import keys
from fedjaxsim.algorithm import Algorithm
from fedjaxsim.data.population import Population
from fedjaxsim.engine.purity import check_captured, check_pure
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.hyperparameters import Hyperparameters, client_values

PyTree = Any


def stage_key(key: jax.Array, round_: jax.Array) -> jax.Array:
    """Return the key of the stage after `round_` rounds, distinct from every key the run uses."""
    return jax.random.fold_in(jax.random.fold_in(key, keys.STAGE), round_)


def first_states(
    algorithm: Algorithm,
    population: Population,
    earlier: Algorithm,
    key: jax.Array,
    hparams: Hyperparameters,
    state: SimulationState,
    earlier_hparams: Hyperparameters,
    *,
    unchecked: bool,
) -> tuple[PyTree, PyTree]:
    """Return the server state and personal states (m, ...) made from another algorithm's models.

    The server state is made of zeros in place of a client's model, so it holds none of it.
    """
    start, published = algorithm.warm_start.start, earlier.warm_start.published(state.shared)
    assert start is not None
    if published is None and algorithm.warm_start.required:
        raise ValueError(
            "the algorithm needs the model that the stage before published, as FedAvg's w or "
            "PMTL's w̃, but that stage published none"
        )
    if published is None:
        published = algorithm.task.init(jax.random.split(key)[0])

    def model_of(personal, client_id):
        return earlier.predict(state.shared, personal, earlier_hparams, client_id)

    def of_one(personal, client_id):
        own = client_values(algorithm.hyperparameters, hparams, client_id)
        return start(own, published, model_of(personal, client_id))

    ids = jnp.arange(population.num_clients, dtype=jnp.int32)
    first = jax.tree.map(lambda leaf: leaf[0], (state.personal, ids))
    if not unchecked:
        check_captured(check_pure(jax.make_jaxpr(of_one)(*first)), population.fields)
    model = jax.tree.map(jnp.zeros_like, model_of(*first))
    shared, _ = start(client_values(algorithm.hyperparameters, hparams, 0), published, model)
    # `out_axes` raises where the server state depends on a client's model.
    _, personal = jax.vmap(of_one, out_axes=(None, 0))(state.personal, ids)
    return shared, personal


def states_from(
    algorithm: Algorithm, num_clients: int, hparams: Hyperparameters, published: PyTree
) -> tuple[PyTree, PyTree]:
    """Return server state and personal states (m, ...) of clients that start from one model."""
    start = algorithm.warm_start.start
    assert start is not None

    def of_one(client_id):
        own = client_values(algorithm.hyperparameters, hparams, client_id)
        return start(own, published, published)

    return jax.vmap(of_one, out_axes=(None, 0))(jnp.arange(num_clients))
