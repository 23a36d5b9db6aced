"""The third part of a round: the release, the server's step, and what the ledger is charged."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjaxsim.algorithm import Algorithm, Metrics
from fedjaxsim.engine.draw import Draw
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.engine.work import CohortResult
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.events import SamplingScheme
from fedjaxsim.privacy.ledger import Charges
from fedjaxsim.privacy.mechanisms import Mechanism

PyTree = Any


def server_update(
    algorithm: Algorithm,
    mechanism: Mechanism,
    scheme: SamplingScheme,
    charge: Callable[..., Charges],
    state: SimulationState,
    hparams: Hyperparameters,
    drawn: Draw,
    worked: CohortResult,
) -> tuple[SimulationState, Metrics]:
    """Release, take the server's step and charge the ledger; return state and metrics.

    Args:
      algorithm: whose `server` steps.
      mechanism: whose `release` is all that the server sees.
      scheme: how cohorts are drawn.
      charge: `(charges, noise multiplier, sampling rate, round) -> charges`.
      state: before the round.
      hparams: hyperparameters.
      drawn: who took part.
      worked: what they did, added up over all of them.
    """
    accumulator = worked.accumulator
    release = mechanism.release(
        accumulator,
        drawn.rate * scheme.clients,
        drawn.noise,
        state.mechanism,
        hparams,
        state.round,
    )
    # From here on the server sees the release alone.
    privacy = state.privacy
    if mechanism.event.kind != "no_release":
        privacy = ledger.update(
            privacy,
            scheme,
            mechanism.event,
            lambda charges: charge(charges, release.noise_multiplier, drawn.rate, state.round),
        )
        privacy = ledger.drew(privacy, state.key, state.round)
    shared = algorithm.server(state.shared, release.value, hparams, state.round)
    after = dataclasses.replace(
        state,
        round=state.round + 1,
        shared=_with_types_of(state.shared, shared),
        personal=worked.store.personal,
        mechanism=release.state,
        privacy=privacy,
        consumed=worked.store.consumed,
    )
    participants = jnp.sum(drawn.cohort.mask, dtype=jnp.int32)
    means = jax.tree.map(lambda total: total / participants, worked.metrics)
    return after, means | {
        "participants": participants,
        "overflow": drawn.cohort.overflow,
        "clipped": accumulator.clipped,
        "nonfinite": accumulator.nonfinite,
        "noise_multiplier": release.noise_multiplier,
    }


def _with_types_of(old: PyTree, new: PyTree) -> PyTree:
    """Cast the new server state to the old floating types; releases are float32 at least."""

    def one(before, after):
        both = all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in (before, after))
        return after.astype(before.dtype) if both else after

    return jax.tree.map(one, old, new)
