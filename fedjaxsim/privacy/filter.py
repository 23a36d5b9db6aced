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

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fedjaxsim.privacy.entries import MOST_ROUNDS
from fedjaxsim.privacy.events import PrivacyLimit, PrivacySpend, in_order


def exceeds(limit: PrivacyLimit, accounts: Iterable[tuple[Any, ...]], xp: Any = np) -> Any:
    """Return whether releases have no place in a budget, (), by numpy or jax.numpy.

    Accounts are scheme, event, and z, p and numbers of releases, (L,) each.
    """
    kinds: dict[Any, list[Sequence[Any]]] = {}
    for scheme, event, *groups in accounts:
        kind = scheme, event
        # A stage that begins such rounds anew makes them costlier than one after the other.
        again = kind in kinds and in_order(scheme, event)
        kinds.setdefault(None if again else kind, []).append(groups)
    over = (
        _exceeds(limit, kind, *(xp.concatenate(arrays) for arrays in zip(*groups, strict=True)))
        for kind, groups in kinds.items()
    )
    return functools.reduce(operator.or_, over, xp.asarray(False))


def _exceeds(limit: PrivacyLimit, kind: Any, z: Any, p: Any, rounds: Any) -> Any:
    """Return whether releases of one kind have no places, z, p and rounds (L,).

    Quieter releases fit into more places. So all have one if, for each planned z, the releases with
    less noise fit into the places below it (Hall's theorem), in whatever order they came.
    """
    planned = [entry for spend in limit.planned if spend[:2] == kind for entry in spend.entries]
    if not planned:
        return (rounds > 0).any()
    noise, rates, room = map(np.array, zip(*sorted(planned), strict=True))
    room = np.minimum(np.cumsum([0, *room]), MOST_ROUNDS)
    louder = (rounds * ~(z >= noise[:, None])).sum(axis=1)
    often = (rounds > 0) & ~(p <= min(rates))
    return (louder > room[:-1]).any() | (rounds.sum() > room[-1]) | often.any()


def exceeded(limit: PrivacyLimit, charges: Sequence[PrivacySpend]) -> str:
    """Return why a budget bounds nothing: it lacks places for the charges; "" if it has them."""
    accounts = [
        (scheme, event, *map(np.array, zip(*entries, strict=True)))
        for scheme, event, entries, *_ in charges
        if entries and event.releases and event.unit == "client"
    ]
    if not exceeds(limit, accounts):
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
