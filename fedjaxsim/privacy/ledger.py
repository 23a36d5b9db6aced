"""The privacy ledger: what every round released, counted in exact integers inside the loop.

Adding up floats over rounds drifts, and in float32 it drifts to the unsound side. The ledger only
counts rounds that had the same noise and the same sampling rate; the host composes the counts in
float64.

A charge knows how its cohorts were drawn and what was released, whoever reads it later. So a state
may pass through several simulations, with other samplers and mechanisms, and no reader makes it
cheaper.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass
from jax.typing import ArrayLike

from fedjaxsim.privacy import streams
from fedjaxsim.privacy.events import Charged, Entry, Event, Scheme

_MOST_ROUNDS = np.iinfo(np.int32).max


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Charges:
    """Rounds of one sampler and mechanism, grouped by noise and sampling rate.

    L places, of which the used come first.

    Attributes:
      scheme: static; how their cohorts were drawn.
      event: static; what each of them released.
      noise_multiplier: (L,) float, z of each group; meaningless where `rounds` is 0.
      sampling_rate: (L,) float, the probability p that the cohorts were really drawn with.
      rounds: (L,) int32, how many rounds had exactly this z and p.
      overflowed: () bool, whether some round could not be entered. No ε is reported then.
      next_round: () int32, the first round that may be charged next. Only where participations are
        capped (None otherwise): the cap holds for rounds in their order, each once.
    """

    scheme: Scheme = dataclasses.field(metadata={"static": True})
    event: Event = dataclasses.field(metadata={"static": True})
    noise_multiplier: jax.Array
    sampling_rate: jax.Array
    rounds: jax.Array
    overflowed: jax.Array
    next_round: jax.Array | None = None


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Ledger:
    """Everything that a state was charged for, and which noise it was charged for.

    Attributes:
      charges: one for each sampler and mechanism that the state has met.
      noise: the streams of noise that it drew from, see `streams.py`.
    """

    charges: tuple[Charges, ...]
    noise: jax.Array


def no_charges(scheme: Scheme, event: Event, places: int) -> Charges:
    """The account of a sampler and a mechanism before the first round.

    Args:
      scheme: how cohorts are drawn.
      event: what a round releases.
      places: L, the number of different (z, p) it can hold: 1 for constant noise, up to T for a
        schedule.
    """
    if places < 1:
        raise ValueError(f"places must be at least 1, got {places}")
    return Charges(
        scheme,
        event,
        noise_multiplier=jnp.zeros(places),
        sampling_rate=jnp.zeros(places),
        rounds=jnp.zeros(places, jnp.int32),
        overflowed=jnp.zeros((), bool),
        next_round=jnp.zeros((), jnp.int32) if scheme.max_participations is not None else None,
    )


def empty(charges: Charges) -> Ledger:
    """The ledger of a state that has met one sampler and mechanism, and no round."""
    return Ledger((charges,), streams.none())


def with_account(ledger: Ledger, scheme: Scheme, event: Event, places: int) -> Ledger:
    """The ledger with an account for a sampler and a mechanism: that which it has, or a new one."""
    if _place(ledger, scheme, event) is not None:
        return ledger
    new = no_charges(scheme, event, places)
    return dataclasses.replace(ledger, charges=(*ledger.charges, new))


def with_room(
    ledger: Ledger, scheme: Scheme, event: Event, noise: np.ndarray, sampling_rate: ArrayLike
) -> Ledger:
    """The ledger with places in one of its accounts for rounds that are to come, on the host.

    Args:
      ledger: which has the account.
      scheme: of the account.
      event: likewise.
      noise: the z of those rounds, (T,) or ().
      sampling_rate: their p.
    """

    def widened(charges: Charges) -> Charges:
        z, p = np.asarray(charges.noise_multiplier), np.asarray(charges.sampling_rate)
        used = np.asarray(charges.rounds) > 0
        rate = np.asarray(sampling_rate, p.dtype)
        new = np.setdiff1d(np.asarray(noise, z.dtype), z[used & (p == rate)])
        missing = max(0, len(new) - int(np.sum(~used)))
        wide = {
            name: jnp.pad(getattr(charges, name), (0, missing))
            for name in ("noise_multiplier", "sampling_rate", "rounds")
        }
        return dataclasses.replace(charges, **wide) if missing else charges

    return update(ledger, scheme, event, widened)


def update(
    ledger: Ledger, scheme: Scheme, event: Event, change: Callable[[Charges], Charges]
) -> Ledger:
    """The ledger with one account changed.

    Raises:
      ValueError: if it has no account for the sampler and the mechanism.
    """
    place = _place(ledger, scheme, event)
    if place is None:
        raise ValueError(
            f"the ledger has no account for {event.kind!r} releases under {scheme.kind!r} "
            "sampling: it belongs to another simulation; pass the state to `run` or `round`"
        )
    charges = list(ledger.charges)
    charges[place] = change(charges[place])
    return dataclasses.replace(ledger, charges=tuple(charges))


def _place(ledger: Ledger, scheme: Scheme, event: Event) -> int | None:
    kinds = [(charges.scheme, charges.event) for charges in ledger.charges]
    return kinds.index((scheme, event)) if (scheme, event) in kinds else None


def charge(
    charges: Charges, noise_multiplier: ArrayLike, sampling_rate: ArrayLike, round_: ArrayLike
) -> Charges:
    """Enters one round: counts it with its equals, or opens the first free place.

    Pure, with static shapes: safe under jit, vmap, scan and differentiation. When no place is left
    (or a count would exceed int32), the account is marked as overflowed and otherwise unchanged.

    Args:
      charges: the rounds so far.
      noise_multiplier: () z of the noise that was really drawn.
      sampling_rate: () p that the cohort was really drawn with.
      round_: () int32, the number of the round.
    """
    z = jnp.asarray(noise_multiplier, charges.noise_multiplier.dtype)
    p = jnp.asarray(sampling_rate, charges.sampling_rate.dtype)
    used = charges.rounds > 0
    usable = ~used | ((charges.noise_multiplier == z) & (charges.sampling_rate == p))
    # The used places come first, so the first usable place is the equal one where there is one.
    place = jnp.argmax(usable)
    hit = (jnp.arange(usable.shape[0]) == place) & usable & (charges.rounds < _MOST_ROUNDS)
    # The step towards z is zero for an equal entry, but its derivative is not: it makes the entry's
    # derivative the mean of its rounds', so that ε has the right gradient in each round's z.
    step = (z - charges.noise_multiplier) / (charges.rounds + 1).astype(z.dtype)
    missing = ~jnp.any(hit)
    next_round = charges.next_round
    if next_round is not None:
        number = jnp.asarray(round_, jnp.int32)
        missing |= number < next_round  # A round that comes again may break the cap.
        next_round = jnp.maximum(next_round, number + 1)
    return dataclasses.replace(
        charges,
        noise_multiplier=jnp.where(hit, charges.noise_multiplier + step, charges.noise_multiplier),
        sampling_rate=jnp.where(hit, p, charges.sampling_rate),
        rounds=charges.rounds + hit.astype(jnp.int32),
        overflowed=charges.overflowed | missing,
        next_round=next_round,
    )


def entries(charges: Charges) -> list[Entry]:
    """The groups of rounds, on the host. Whether the account overflowed is for the caller to check.

    Raises:
      ValueError: if the account has a batch axis (take one run out of a sweep first).
    """
    counts = np.asarray(charges.rounds)
    if counts.ndim != 1:
        raise ValueError(
            f"the ledger of one run is needed, with arrays of shape (L,), got {counts.shape}; "
            "index the runs of a sweep one by one"
        )
    z = np.asarray(charges.noise_multiplier, np.float64)
    p = np.asarray(charges.sampling_rate, np.float64)
    return [Entry(float(z[i]), float(p[i]), int(counts[i])) for i in np.flatnonzero(counts)]


def charged(ledger: Ledger) -> list[Charged]:
    """Everything that a state was charged for, on the host.

    Raises:
      ValueError: as `entries`.
    """
    return [
        Charged(
            charges.scheme,
            charges.event,
            tuple(entries(charges)),
            bool(np.asarray(charges.overflowed)),
        )
        for charges in ledger.charges
    ]


def rounds_charged(ledger: Ledger) -> int:
    """How many rounds the ledger holds, of all kinds; of the first of several runs in a sweep."""
    total = 0
    for charges in ledger.charges:
        counts = np.asarray(charges.rounds, np.int64)
        total += int(counts.reshape(counts.shape[0], -1)[:, 0].sum())
    return total
