"""A privacy filter: a budget (ε, δ) that no run exceeds, however it chooses its rounds.

A report of rounds whose noise and number were fixed beforehand is no bound for a run that stops, or
sets its noise, by what it has published. A budget is one: it is made of planned releases that
together cost at most (ε, δ), and each release of the run uses up a planned one that costs at least
as much: of the same sampling and mechanism, with no more noise and no smaller p.

1. A round with z ≥ z₀ and p ≤ p₀ is a function of the planned round: to the worst pair of outputs
   under z₀ and p₀ add noise of variance z² − z₀² and, with probability 1 − p/p₀, draw the output
   without the client instead. This gives the worst pair under z and p, for zero-out in both
   directions and for replace, and any pure release in the same way. (In a cohort that may be full,
   what others know varies with p; there the losses grow with p in the increasing convex order.)
2. So take one independent draw from the worst pair of every planned round. The whole run, whose
   rounds come in any order and whose releases may follow from earlier ones, is a function of these
   draws, each used at most once.
3. A function of draws is no easier to tell from its neighbour than the draws, whose ε is the
   plan's.

Periods of random allocation are charged the least noise of all planned rounds, so each of them has
such a pair, whatever noise its rounds get.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjaxsim.privacy.entries import MOST_ROUNDS, Entry
from fedjaxsim.privacy.events import Account, PrivacyLimit, PrivacySpend, in_order

_LEAST_PLACES = 8
"""Budgets with up to this many noise multipliers share a program."""


class Places(NamedTuple):
    """The planned releases of one kind: the P noise multipliers `noise`, (P,), in rising order.

    `less`, (P + 1,) int32, has the number of releases planned with less noise than each, and of all
    of them; `rate`, (), is their smallest p. Multipliers of 0, with no release, fill up the arrays.
    """

    noise: np.ndarray
    less: np.ndarray
    rate: np.ndarray


class Room(NamedTuple):
    """A budget as arrays: its `places` for each account of clients' releases, in one order.

    `open`, (), is whether all other releases have theirs.
    """

    places: tuple[Places, ...]
    open: Any


def room_in(
    limit: PrivacyLimit,
    kinds: Sequence[Account],
    earlier: Sequence[Account] = (),
    is_open: Any = np.True_,
) -> Room:
    """Return a budget's places for accounts of these kinds, which follow `earlier` ones.

    A kind has one account, unless a stage begins rounds anew whose cost depends on their order.
    That makes them costlier than one after the other, so a second account has no place.
    """
    all_kinds = [*earlier, *kinds]
    places = []
    for number, kind in enumerate(all_kinds[len(earlier) :], len(earlier)):
        again = kind in all_kinds[:number]
        places.append(_places(limit, None if again else kind))
    return Room(tuple(places), is_open)


def _places(limit: PrivacyLimit, kind: Account | None) -> Places:
    """Return the planned releases of a kind; without one there are none."""
    planned = [entry for spend in limit.planned if spend[:2] == kind for entry in spend.entries]
    size = 1 << (max(_LEAST_PLACES, len(planned)) - 1).bit_length()
    rate = min((entry.sampling_rate for entry in planned), default=0.0)
    filling = [Entry(0.0, rate, 0)] * (size - len(planned))
    noise, _, rounds = map(np.array, zip(*sorted([*filling, *planned]), strict=True))
    less = np.minimum(np.cumsum([0, *rounds]), MOST_ROUNDS).astype(np.int32)
    return Places(noise, less, np.asarray(rate))


def lacks_places(places: Places, z: Any, p: Any, rounds: Any) -> Any:
    """Return whether releases of one kind have no places, (); z, p and rounds are (L,).

    Quieter releases fit into more places. So all have one if, for each planned z, the releases with
    less noise fit into the places below it (Hall's theorem), in whatever order they came.
    """
    louder = (rounds * ~(z >= places.noise[:, None])).sum(axis=1)
    often = (rounds > 0) & ~(p <= places.rate)
    return (louder > places.less[:-1]).any() | (rounds.sum() > places.less[-1]) | often.any()


def exceeded(limit: PrivacyLimit, charges: Sequence[PrivacySpend]) -> str:
    """Return why a budget bounds nothing: it lacks places for the charges; "" if it has them."""
    groups: dict[Account | None, list[Entry]] = {}
    for scheme, event, entries, *_ in charges:
        if entries and event.releases and event.unit == "client":
            kind = scheme, event
            again = kind in groups and in_order(*kind)
            groups.setdefault(None if again else kind, []).extend(entries)
    if not any(
        lacks_places(_places(limit, kind), *map(np.array, zip(*entries, strict=True)))
        for kind, entries in groups.items()
    ):
        return ""
    return (
        f"the state released more than its budget of {described(limit.planned)}: its ledger was "
        "changed by hand, or its noise did not follow from published state"
    )


def described(planned: Sequence[PrivacySpend]) -> str:
    """Return words, as in `12 gaussian releases (poisson sampling, z ≥ 4, p ≤ 0.1)`."""
    words = []
    for scheme, event, entries, *_ in planned:
        least = min(entry.noise_multiplier for entry in entries)
        most = max(entry.sampling_rate for entry in entries)
        words.append(
            f"{sum(entry.rounds for entry in entries):,} {event.kind} releases ({scheme.kind} "
            f"sampling, z ≥ {least:.4g}, p ≤ {most:.4g})"
        )
    return " and ".join(words)
