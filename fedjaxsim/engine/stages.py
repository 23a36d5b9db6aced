"""The start of a stage from the state of another run."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.engine.purity import check_captured, check_pure
from fedjaxsim.engine.setup import Setup
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.engine.traced_checks import require_same_shapes
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.assumptions import NEW_CLIENTS
from fedjaxsim.privacy.events import Examples

PyTree = Any
_STAGE = 2**32 - 2
"""Folded into a run's key for its next stage, distinct from all other folded numbers."""
_NEW = 2**32 - 3
"""Folded into the key of a stage of new clients."""


def stage_key(key: jax.Array, round_: jax.Array) -> jax.Array:
    """Return the key of the stage after `round_` rounds, distinct from every key the run uses."""
    return jax.random.fold_in(jax.random.fold_in(key, _STAGE), round_)


def start_new_clients(
    setup: Setup, state: SimulationState, hparams: Hyperparameters, earlier: Algorithm
) -> SimulationState:
    """Return the first state of a stage of new clients; see `Simulation.start_new_clients`.

    Raises:
      ValueError: as `Simulation.start_new_clients`.
    """
    if setup.mechanism.event.releases:
        raise ValueError(
            "new clients send nothing: give their simulation an algorithm such as finetune, and "
            "no_release()"
        )
    if setup.examples is not None or any(
        isinstance(each.event, Examples) for each in state.privacy.charges
    ):
        raise ValueError(
            "an ε of examples is about the silos of one run: new clients may follow no rounds that "
            "protect examples, and protect none"
        )
    start, published = setup.algorithm.warm_start.start, earlier.warm_start.published(state.shared)
    if start is None or published is None:
        raise ValueError(
            "new clients start from the model that the stage before published, as FedAvg's w or "
            "PMTL's w̃, with an algorithm that has a `warm_start`"
        )
    # Their minibatches differ from those of the clients who have the same numbers.
    key = jax.random.fold_in(stage_key(state.key, state.round), _NEW)
    key, hparams = setup.check_start(key, hparams)
    new = setup.compiled.init(key, hparams)
    shared, own = jax.tree.map(jnp.copy, start(hparams, published, published))
    personal = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (setup.num_clients, *jnp.shape(leaf))), own
    )
    require_same_shapes("server state", new.shared, shared)
    require_same_shapes("personal states", new.personal, personal)
    privacy = ledger.next_stage(jax.tree.map(jnp.copy, state.privacy), new.key)
    privacy = ledger.with_public(privacy, (NEW_CLIENTS.format(setup.num_clients),))
    new = dataclasses.replace(new, shared=shared, personal=personal, privacy=privacy)
    return setup.with_account(new, begins=True)


def start_stage(
    setup: Setup,
    state: SimulationState,
    hparams: Hyperparameters,
    earlier: Algorithm | None,
    earlier_hparams: Hyperparameters | None,
) -> SimulationState:
    """Return the first state of a stage; see `Simulation.start_from`.

    Raises:
      ValueError: as `Simulation.start_from`.
    """
    key, hparams = setup.check_start(stage_key(state.key, state.round), hparams)
    others = {charges.scheme.clients for charges in state.privacy.charges} - {setup.num_clients}
    if others:
        raise ValueError(
            f"the state must be of {setup.num_clients} clients, as those here, got {others.pop()}"
        )
    if earlier is None:
        shared, personal = jax.tree.map(jnp.copy, (state.shared, state.personal))
    else:
        if setup.algorithm.warm_start.start is None:
            raise ValueError("the algorithm has no `warm_start`: it cannot start from models")
        earlier_hparams = hparams if earlier_hparams is None else earlier_hparams.as_arrays()
        begin = functools.partial(_first_states, setup, earlier)
        shared, personal = jax.jit(begin)(key, hparams, state, earlier_hparams)
    fresh = setup.compiled.init(key, hparams)
    require_same_shapes("server state", fresh.shared, shared)
    require_same_shapes("personal states", fresh.personal, personal)
    new = dataclasses.replace(
        fresh,
        shared=shared,
        personal=personal,
        privacy=ledger.next_stage(jax.tree.map(jnp.copy, state.privacy), fresh.key),
    )
    if state.consumed is not None and new.consumed is not None:
        new = dataclasses.replace(new, consumed=jnp.copy(state.consumed))
    return setup.with_account(new, begins=True)


def _first_states(
    setup: Setup,
    earlier: Algorithm,
    key: jax.Array,
    hparams: Hyperparameters,
    state: SimulationState,
    earlier_hparams: Hyperparameters,
) -> tuple[PyTree, PyTree]:
    """Return the server state and personal states (m, ...) made from another algorithm's models.

    The server state is made of zeros in place of a client's model, so it holds none of it.
    """
    algorithm = setup.algorithm
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

    def of_client(personal, client_id):
        return start(hparams, published, model_of(personal, client_id))

    ids = jnp.arange(setup.num_clients, dtype=jnp.int32)
    first = jax.tree.map(lambda leaf: leaf[0], (state.personal, ids))
    check_captured(check_pure(jax.make_jaxpr(of_client)(*first)), setup.population.fields)
    model = jax.tree.map(jnp.zeros_like, model_of(*first))
    shared, _ = start(hparams, published, model)
    # `out_axes` raises where the server state depends on a client's model.
    _, personal = jax.vmap(of_client, out_axes=(None, 0))(state.personal, ids)
    return shared, personal
