"""Which noise a state draws, and what its ledger says of that."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.engine.devices import placed
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.privacy import ledger, streams


def drawing_from(fingerprint: np.ndarray, state: SimulationState) -> SimulationState:
    """A state whose next rounds take their noise from a stream of its key, as its ledger says then.

    Args:
      fingerprint: (2,) uint32, see `privacy/streams.py`.
      state: of a run, or of many; not traced.
    """
    noise = streams.opened(
        state.privacy.noise,
        state.key,
        fingerprint,
        int(state.round),
        ledger.rounds_charged(state.privacy),
    )
    return dataclasses.replace(
        state,
        fingerprint=_like(state.fingerprint, fingerprint),
        privacy=dataclasses.replace(state.privacy, noise=_like(state.privacy.noise, noise)),
    )


def draws_common_noise(state: SimulationState) -> bool:
    """Whether a state draws the noise that all settings share under its key."""
    return bool(np.array_equal(state.fingerprint, streams.COMMON))


def _like(old: jax.Array, new: jax.typing.ArrayLike) -> jax.Array:
    """Other numbers where the old ones lie, so that nothing is compiled anew for them."""
    if np.array_equal(old, new):
        return old
    return placed(np.array(new), old.sharding) if old.committed else jnp.array(new)
