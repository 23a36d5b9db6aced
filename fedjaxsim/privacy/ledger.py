"""The privacy ledger: what every round released, counted in exact integers inside the loop.

Adding up floats over rounds drifts, and in float32 it drifts to the unsound side. The ledger only
counts rounds that had the same noise and the same sampling rate; the host composes the counts in
float64.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass
from jax.typing import ArrayLike

_MOST_ROUNDS = np.iinfo(np.int32).max


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Ledger:
    """Rounds, grouped by their noise and sampling rate. L places, of which the used come first.

    Attributes:
      noise_multiplier: (L,) float, z of each group; meaningless where `rounds` is 0.
      sampling_rate: (L,) float, the probability p that the cohorts were really drawn with.
      rounds: (L,) int32, how many rounds had exactly this z and p.
      overflowed: () bool, whether some round could not be entered. No ε is reported then.
    """

    noise_multiplier: jax.Array
    sampling_rate: jax.Array
    rounds: jax.Array
    overflowed: jax.Array


class Entry(NamedTuple):
    """One group of rounds on the host: float64 z and p, and an exact count."""

    noise_multiplier: float
    sampling_rate: float
    rounds: int


def empty(capacity: int) -> Ledger:
    """A ledger without rounds.

    Args:
      capacity: L, the number of different (z, p) it can hold: 1 for constant noise, up to T for
        a schedule.
    """
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, got {capacity}")
    return Ledger(
        noise_multiplier=jnp.zeros(capacity),
        sampling_rate=jnp.zeros(capacity),
        rounds=jnp.zeros(capacity, jnp.int32),
        overflowed=jnp.zeros((), bool),
    )


def charge(ledger: Ledger, noise_multiplier: ArrayLike, sampling_rate: ArrayLike) -> Ledger:
    """Enters one round: counts it with its equals, or opens the first free place.

    Pure, with static shapes: safe under jit, vmap, scan and differentiation. When no place is left
    (or a count would exceed int32), the ledger is marked as overflowed and otherwise unchanged.

    Args:
      ledger: the rounds so far.
      noise_multiplier: () z of the noise that was really drawn.
      sampling_rate: () p that the cohort was really drawn with.
    """
    z = jnp.asarray(noise_multiplier, ledger.noise_multiplier.dtype)
    p = jnp.asarray(sampling_rate, ledger.sampling_rate.dtype)
    used = ledger.rounds > 0
    usable = ~used | ((ledger.noise_multiplier == z) & (ledger.sampling_rate == p))
    # The used places come first, so the first usable place is the equal one where there is one.
    place = jnp.argmax(usable)
    hit = (jnp.arange(usable.shape[0]) == place) & usable & (ledger.rounds < _MOST_ROUNDS)
    # The step towards z is zero for an equal entry, but its derivative is not: it makes the entry's
    # derivative the mean of its rounds', so that ε has the right gradient in each round's z.
    step = (z - ledger.noise_multiplier) / (ledger.rounds + 1).astype(z.dtype)
    return Ledger(
        noise_multiplier=jnp.where(hit, ledger.noise_multiplier + step, ledger.noise_multiplier),
        sampling_rate=jnp.where(hit, p, ledger.sampling_rate),
        rounds=ledger.rounds + hit.astype(jnp.int32),
        overflowed=ledger.overflowed | ~jnp.any(hit),
    )


def entries(ledger: Ledger) -> list[Entry]:
    """The groups of rounds, on the host. Whether the ledger overflowed is for the caller to check.

    Raises:
      ValueError: if the ledger has a batch axis (take one run out of a sweep first).
    """
    counts = np.asarray(ledger.rounds)
    if counts.ndim != 1:
        raise ValueError(
            f"the ledger of one run is needed, with arrays of shape (L,), got {counts.shape}; "
            "index the runs of a sweep one by one"
        )
    z = np.asarray(ledger.noise_multiplier, np.float64)
    p = np.asarray(ledger.sampling_rate, np.float64)
    return [Entry(float(z[i]), float(p[i]), int(counts[i])) for i in np.flatnonzero(counts)]
