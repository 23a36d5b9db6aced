"""How a run goes on where another one ended."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.hyperparameters import Hyperparameters

PyTree = Any
_STAGE = 2**32 - 2
"""Folded into a run's key for its next stage; no other number so large is."""


def stage_key(key: jax.Array, round_: jax.Array) -> jax.Array:
    """The key of the stage after so many rounds: another one than any that the run draws from."""
    return jax.random.fold_in(jax.random.fold_in(key, _STAGE), round_)


def first_states(
    algorithm: Algorithm,
    earlier: Algorithm,
    key: jax.Array,
    hparams: Hyperparameters,
    state: SimulationState,
    earlier_hparams: Hyperparameters,
    num_clients: int,
) -> tuple[PyTree, PyTree]:
    """The billboard and all personal states of an algorithm that starts from another one's models.

    That the billboard does not depend on any client's own model holds by construction: it is an
    output that is not mapped over clients.

    Args:
      algorithm: which starts; it has a `start`.
      earlier: the other one.
      key: of the new stage.
      hparams: of the new stage.
      state: of the other one, of m clients.
      earlier_hparams: likewise.
      num_clients: m.

    Returns:
      The billboard, and personal states (m, ...).

    Raises:
      ValueError: if it needs a published model, and there is none.
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

    def of_client(personal, client_id):
        own = earlier.predict(state.shared, personal, earlier_hparams, client_id)
        return start(hparams, published, own)

    ids = jnp.arange(num_clients, dtype=jnp.int32)
    return jax.vmap(of_client, out_axes=(None, 0))(state.personal, ids)
