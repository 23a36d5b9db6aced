"""The privacy ledger: the cost of every round, counted in exact integers inside the loop.

A sum of floats over rounds drifts, and in float32 it drifts to the unsound side. The ledger only
counts rounds of equal noise and sampling rate; the host composes the counts in float64.

A charge names its sampling scheme and event, so a state may pass through simulations with other
samplers and mechanisms, and no reader makes it cheaper.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass
from jax.typing import ArrayLike

from fedjaxsim import checks, keys
from fedjaxsim.data.columns import Preparation
from fedjaxsim.keys import Stream
from fedjaxsim.privacy.entries import MOST_ROUNDS, UNITS, Drawn, Entry, SamplingScheme
from fedjaxsim.privacy.events import (
    Account,
    ChecksSkipped,
    Prepared,
    PrivacyEvent,
    PrivacyLimit,
    PrivacySpend,
    in_order,
)
from fedjaxsim.privacy.filter import Room


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Charges:
    """Rounds of one sampler and mechanism, grouped by noise z and exact sampling rate p, (L,).

    Places with `rounds` > 0 come first; z and p of others mean nothing. If a round could not be
    entered, the account is `overflowed`, and no ε is reported. `next_round` is the first round that
    may be charged next; None unless the cost depends on the order of rounds: fixed groups and
    correlated noise take each once, without a gap.
    """

    scheme: SamplingScheme = dataclasses.field(metadata={"static": True})
    event: PrivacyEvent = dataclasses.field(metadata={"static": True})
    noise_multiplier: jax.Array
    sampling_rate: jax.Array
    rounds: jax.Array
    overflowed: jax.Array
    next_round: jax.Array | None = None


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Draws:
    """The rounds with a release that drew random numbers from a key of this digest, (4,) uint32.

    All rounds below `next_round` count as drawn, even those without a release. `repeated` tells
    whether a release drew from another key, or from a round already drawn.
    """

    digest: jax.Array
    next_round: jax.Array
    repeated: jax.Array


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Ledger:
    """All charges of a state, for each sampler and mechanism, and the keys of its random numbers.

    The current key is the last of `draws`; a stage has its own. `public` are sentences on what no
    charge covers (private numbers taken as public, choices made by reading private rows, shared
    noise), which every report of the state names. `limit` is the budget of the state and of all
    stages that start from it, if it has one. In a compiled loop, a ledger has neither: it is the
    `current` part of another one, and `room` is what the budget leaves to it, as arrays.
    """

    charges: tuple[Charges, ...]
    draws: tuple[Draws, ...] = ()
    public: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    limit: PrivacyLimit | None = dataclasses.field(default=None, metadata={"static": True})
    room: Room | None = None


def no_charges(scheme: SamplingScheme, event: PrivacyEvent, places: int) -> Charges:
    """Return the account of a sampler and a mechanism before the first round.

    `places` is L, the number of distinct (z, p): 1 for constant noise, up to T for a schedule.
    """
    checks.count(places=places)
    return Charges(
        scheme,
        event,
        noise_multiplier=jnp.zeros(places),
        sampling_rate=jnp.zeros(places),
        rounds=jnp.zeros(places, jnp.int32),
        overflowed=jnp.full((), isinstance(event, ChecksSkipped)),  # no ε from the start
        next_round=jnp.zeros((), jnp.int32) if in_order(scheme, event) else None,
    )


def key_digest(key: jax.Array) -> jax.Array:
    """Compute a one-way digest of a threefry key, (4,) uint32: two blocks of its cipher.

    It hides a key that cannot be guessed. A seed among few can be found by trying all.
    """
    return jnp.concatenate(keys.words(key, Stream.DIGEST, jnp.arange(2)))


def with_key(ledger: Ledger, key: jax.Array) -> Ledger:
    """Return the ledger of a state that draws from `key` from now on."""
    digest = key_digest(key)
    repeated = jnp.zeros((), bool)
    for draws in ledger.draws:
        repeated |= jnp.all(draws.digest == digest)
    added = Draws(digest, jnp.zeros((), jnp.int32), repeated)
    return dataclasses.replace(ledger, draws=(*ledger.draws, added))


def stream_of(ledger: Ledger, key: jax.Array) -> int | None:
    """Return the place of a key's record in a ledger, on the host; None if it has none."""
    digest = np.asarray(key_digest(key))
    places = [np.array_equal(digest, np.asarray(draws.digest)) for draws in ledger.draws]
    return places.index(True) if True in places else None


def drew(ledger: Ledger, key: jax.Array, round_: ArrayLike, place: int = -1) -> Ledger:
    """Enter that the release of a round drew from a key, by default the state's.

    Pure, with static shapes: safe under jit, vmap, scan and differentiation.
    """
    draws = list(ledger.draws)
    last = draws[place]
    again = jnp.any(key_digest(key) != last.digest) | (round_ < last.next_round)
    draws[place] = dataclasses.replace(
        last,
        next_round=jnp.maximum(last.next_round, round_ + 1),
        repeated=last.repeated | again,
    )
    return dataclasses.replace(ledger, draws=tuple(draws))


def announce(
    ledger: Ledger,
    releases: Iterable[PrivacySpend] = (),
    sentences: Iterable[str] = (),
    *,
    places: int = 1,
    stage: jax.Array | None = None,
    stream: jax.Array | None = None,
) -> Ledger:
    """Return the ledger with all that releases to come need; what it has stays.

    Args:
      ledger: what was released so far.
      releases: kinds of releases; each gets an account if it has none, with places for the
        (z, p) of its entries. Those before round 1 are charged, unless they are.
      sentences: for every report of the state.
      places: the number of places of a new account.
      stage: the key of a stage that begins. Accounts whose rounds come in order are closed, so that
        a later charge marks them as overflowed, and the stage has its own.
      stream: a key besides the state's that releases draw from.
    """
    accounts, draws = [*ledger.charges], ledger.draws
    if stage is not None:
        accounts, draws = [*map(_closed, accounts)], with_key(ledger, stage).draws
    if stream is not None and stream_of(ledger, stream) is None:
        others = dataclasses.replace(ledger, draws=draws[:-1])
        draws = *with_key(others, stream).draws, draws[-1]
    charged_events = {account.event for account in accounts}
    for spend in releases:
        scheme, event, planned, *_ = spend
        if isinstance(event, Prepared):
            accounts += [] if event in charged_events else [charges_of(spend)]
            continue
        place = _place(accounts, scheme, event)
        if place is None or (stage is not None and in_order(scheme, event)):
            place = len(accounts)
            accounts.append(no_charges(scheme, event, places))
        accounts[place] = _with_places(accounts[place], planned)
    public = tuple(dict.fromkeys((*ledger.public, *sentences)))
    return dataclasses.replace(ledger, charges=tuple(accounts), draws=draws, public=public)


def _closed(charges: Charges) -> Charges:
    """Return an account that takes no more rounds, if they come in order."""
    if charges.next_round is None:
        return charges
    return dataclasses.replace(charges, next_round=jnp.full((), MOST_ROUNDS, jnp.int32))


def _with_places(charges: Charges, planned: Iterable[Entry]) -> Charges:
    """Return an account with places for the (z, p) of planned rounds; on the host, if any."""
    dtype = charges.noise_multiplier.dtype.type
    pairs = {(dtype(e.noise_multiplier), dtype(e.sampling_rate)) for e in planned}
    if not pairs:
        return charges
    z, p = np.asarray(charges.noise_multiplier), np.asarray(charges.sampling_rate)
    used = np.asarray(charges.rounds) > 0
    missing = len(pairs - {*zip(z[used], p[used], strict=True)}) - int(np.sum(~used))
    if missing <= 0:
        return charges
    wide = {
        name: jnp.pad(getattr(charges, name), (0, missing))
        for name in ("noise_multiplier", "sampling_rate", "rounds")
    }
    return dataclasses.replace(charges, **wide)


def charges_of(spend: PrivacySpend) -> Charges:
    """Return the account of a release before round 1."""
    scheme, event, (entry,), *_ = spend
    return charge(no_charges(scheme, event, 1), entry.noise_multiplier, entry.sampling_rate, 0)


def spend_of(preparation: Preparation) -> PrivacySpend:
    """Return the charge of a release before round 1."""
    digest, m, z = preparation
    entry = Entry(float(np.float32(z)), 1.0, 1)
    return PrivacySpend(SamplingScheme("full", m, m), Prepared(digest=digest), (entry,))


def update(
    ledger: Ledger,
    scheme: SamplingScheme,
    event: PrivacyEvent,
    change: Callable[[Charges], Charges],
) -> Ledger:
    """Return the ledger with one account changed; raise ValueError if it has no such account."""
    place = _place(ledger.charges, scheme, event)
    if place is None:
        raise ValueError(
            f"the ledger has no account for {event.kind!r} releases under {scheme.kind!r} "
            "sampling: it belongs to another simulation. Pass the state to `run` or `round`"
        )
    charges = list(ledger.charges)
    charges[place] = change(charges[place])
    return dataclasses.replace(ledger, charges=tuple(charges))


def current(ledger: Ledger, accounts: Iterable[Account]) -> Ledger:
    """Return the part of a ledger that rounds charged to these accounts read and change.

    Earlier stages, sentences and the budget are no part of it: programs do not follow from them.
    """
    places = [_place(ledger.charges, scheme, event) for scheme, event in accounts]
    charges = tuple(ledger.charges[place] for place in places if place is not None)
    return Ledger(charges, ledger.draws[-1:])


def rejoined(ledger: Ledger, part: Ledger) -> Ledger:
    """Return the ledger with its `current` part as rounds have changed it."""
    charges = list(ledger.charges)
    for changed in part.charges:
        place = _place(charges, changed.scheme, changed.event)
        assert place is not None
        charges[place] = changed
    draws = *ledger.draws[:-1], *part.draws
    return dataclasses.replace(ledger, charges=tuple(charges), draws=draws)


def _place(accounts: Sequence[Charges], scheme: SamplingScheme, event: PrivacyEvent) -> int | None:
    """Return the place of the last account of a kind."""
    kinds = [(charges.scheme, charges.event) for charges in accounts]
    places = [place for place, kind in enumerate(kinds) if kind == (scheme, event)]
    return places[-1] if places else None


def charge(
    charges: Charges, noise_multiplier: ArrayLike, sampling_rate: ArrayLike, round_: ArrayLike
) -> Charges:
    """Enter one round, with the z and p actually drawn: count it with its equals, or open a place.

    Pure, with static shapes: safe under jit, vmap, scan and differentiation. Without a free place
    (or with a count beyond int32), the account is marked as overflowed and otherwise unchanged.
    """
    z = jnp.asarray(noise_multiplier, charges.noise_multiplier.dtype)
    p = jnp.asarray(sampling_rate, charges.sampling_rate.dtype)
    used = charges.rounds > 0
    # Rounds without a known z are alike, too: they fill no more than one place.
    unknown = jnp.isnan(z) & jnp.isnan(charges.noise_multiplier)
    same = (charges.noise_multiplier == z) | unknown
    usable = ~used | (same & (charges.sampling_rate == p))
    # Used places come first, so the first usable place is the equal one, if any.
    place = jnp.argmax(usable)
    countable = charges.rounds < np.iinfo(np.int32).max
    hit = (jnp.arange(usable.shape[0]) == place) & usable & countable
    # The step towards z is zero for an equal entry, but its derivative is not: the entry's
    # derivative becomes the mean over its rounds, so ε has the right gradient in each round's z.
    equal = ~jnp.isfinite(z) & same
    gap = jnp.where(equal, 0.0, z - charges.noise_multiplier)
    step = gap / (charges.rounds + 1).astype(z.dtype)
    missing = ~jnp.any(hit)
    next_round = charges.next_round
    if next_round is not None:
        number = jnp.asarray(round_, jnp.int32)
        missing |= number != next_round
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
    """Return the groups of rounds of one run, on the host. The caller checks for overflow."""
    counts = np.asarray(charges.rounds)
    if counts.ndim != 1:
        raise ValueError(
            f"the ledger must be of one run, with arrays of shape (L,), got {counts.shape}; "
            "index the runs of a sweep one by one"
        )
    z = np.asarray(charges.noise_multiplier, np.float64)
    p = np.asarray(charges.sampling_rate, np.float64)
    return [Entry(float(z[i]), float(p[i]), int(counts[i])) for i in np.flatnonzero(counts)]


def charged(ledger: Ledger) -> list[PrivacySpend]:
    """Return all charges of one run's state, on the host."""
    by_account = [tuple(entries(charges)) for charges in ledger.charges]
    spent = dict.fromkeys(UNITS, 0)
    for charges, spent_entries in zip(ledger.charges, by_account, strict=True):
        if isinstance(charges.event, Prepared):  # its digest stands for its random numbers
            continue
        spent[charges.event.unit] += sum(entry.rounds for entry in spent_entries)
    redrawn = max(spent.values()) > sum(draws.rounds for draws in drawn(ledger))
    redrawn |= any(bool(np.asarray(draws.repeated)) for draws in ledger.draws)
    return [
        PrivacySpend(
            charges.scheme,
            charges.event,
            spent_entries,
            bool(np.asarray(charges.overflowed)),
            redrawn,
        )
        for charges, spent_entries in zip(ledger.charges, by_account, strict=True)
    ]


def drawn(ledger: Ledger) -> tuple[Drawn, ...]:
    """Return the rounds drawn from each key, on the host."""
    records = []
    for draws in ledger.draws:
        if rounds := int(draws.next_round):
            records.append(Drawn(hex_digest(draws.digest), rounds))
    return tuple(records)


def hex_digest(words: jax.typing.ArrayLike) -> str:
    """Return a digest, (4,) uint32, as text."""
    return np.asarray(words).astype(">u4").tobytes().hex()
