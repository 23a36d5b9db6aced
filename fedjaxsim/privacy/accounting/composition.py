"""Selection of the accountants that describe a run, and their privacy profiles."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from fedjaxsim.privacy import binomial
from fedjaxsim.privacy.accounting import clt, correlated, gaussian, randomized_response, rdp
from fedjaxsim.privacy.accounting.groups import merge, merge_pure
from fedjaxsim.privacy.accounting.profile import NOTHING, Profile, smaller, with_failure
from fedjaxsim.privacy.events import (
    ADJACENCIES,
    SCHEMES,
    VIEWS,
    Adjacency,
    Entry,
    PrivacyEvent,
    PrivacySpend,
    SamplingScheme,
    Status,
    View,
)

_MOST_PURE = 512
"""Number of different pure rounds that are composed."""


class _Scope(NamedTuple):
    """The runs that an accountant describes."""

    schemes: tuple[str, ...]
    events: tuple[str, ...]
    status: Status
    adjacencies: tuple[str, ...] = ADJACENCIES
    views: tuple[str, ...] = VIEWS
    never_better: bool = False

    def describes(self, scheme: SamplingScheme, event: PrivacyEvent) -> bool:
        return scheme.kind in self.schemes and event.kind in self.events


_SCOPES = {
    "gaussian": _Scope(("full", "capped", "groups"), ("gaussian",), "exact"),
    "correlated": _Scope(("full", "groups"), ("correlated",), "exact"),
    "pld": _Scope(("poisson",), ("gaussian",), "upper_bound"),
    "rdp": _Scope(("poisson",), ("gaussian",), "upper_bound", adjacencies=("zero_out",)),
    "mixture": _Scope(("fixed",), ("gaussian",), "exact"),
    "rdp_without_replacement": _Scope(
        ("fixed",), ("gaussian",), "upper_bound", views=("released_sequence",)
    ),
    "randomized_response": _Scope(SCHEMES, ("pure",), "upper_bound"),
    "basic": _Scope(SCHEMES, ("pure",), "upper_bound", never_better=True),
    "clt": _Scope(("poisson",), ("gaussian",), "approximate", adjacencies=("zero_out",)),
}


def require_match(accountant: str | None, scheme: SamplingScheme, event: PrivacyEvent) -> None:
    """Raise ValueError unless an accountant, or any, describes a sampler and a mechanism."""
    if accountant is None:
        if not any(scope.describes(scheme, event) for scope in _SCOPES.values()):
            known = {
                s for scope in _SCOPES.values() if event.kind in scope.events for s in scope.schemes
            }
            raise ValueError(
                f"no accountant describes {event.kind!r} releases under {scheme.kind!r} sampling; "
                f"sampling must be {' or '.join(sorted(known))}"
            )
        return
    if accountant not in _SCOPES:
        raise ValueError(f"accountant must be one of {', '.join(_SCOPES)}, got {accountant!r}")
    scope = _SCOPES[accountant]
    if scope.describes(scheme, event):
        return
    allowed = [name for name, other in _SCOPES.items() if other.describes(scheme, event)]
    raise ValueError(
        f"accountant {accountant!r} describes {' or '.join(scope.events)} releases under "
        f"{' or '.join(scope.schemes)} sampling, not {event.kind!r} releases under "
        f"{scheme.kind!r} sampling; for those use {' or '.join(allowed) or 'none: no ε is known'}"
    )


def overflow_probability(entries: Sequence[Entry], scheme: SamplingScheme) -> float:
    """Compute τ, a bound on the probability that any Poisson cohort exceeded the capacity."""
    if scheme.kind != "poisson":
        return 0.0
    excess = (
        entry.rounds * binomial.excess(scheme.capacity, scheme.clients, entry.sampling_rate)
        for entry in entries
    )
    return min(1.0, math.fsum(excess))


def any_overflow(charges: Sequence[PrivacySpend]) -> float:
    """Compute a bound on the probability that any cohort of several kinds exceeded its capacity."""
    return min(1.0, math.fsum(overflow_probability(c.entries, c.scheme) for c in charges))


def effective_scheme(entries: Sequence[Entry], scheme: SamplingScheme) -> SamplingScheme:
    """Return the scheme; Poisson sampling at p = 1 in every round becomes full participation."""
    full = scheme.capacity == scheme.clients and all(e.sampling_rate == 1 for e in entries)
    if scheme.kind == "poisson" and full:
        return SamplingScheme("full", scheme.clients, scheme.clients)
    return scheme


def check_entries(entries: Sequence[Entry], scheme: SamplingScheme) -> None:
    """Raise ValueError unless the rounds can have come from the scheme."""
    for z, p, rounds in entries:
        if not z >= 0:
            raise ValueError(f"noise_multiplier must be at least 0, got {z}")
        if not 0 <= p <= 1:
            raise ValueError(f"sampling_rate must lie in [0, 1], got {p}")
        if rounds < 0:
            raise ValueError(f"rounds must be at least 0, got {rounds}")
        if scheme.kind == "full" and p != 1:
            raise ValueError(f"sampling_rate must be 1 for full participation, got {p}")
        fraction = scheme.capacity / scheme.clients
        if scheme.kind == "fixed" and not math.isclose(p, fraction, rel_tol=1e-6):
            raise ValueError(
                f"sampling_rate must be {fraction}, the cohort's share of the clients, for fixed "
                f"sampling, got {p}"
            )


def met_by_one_client(
    entries: Sequence[Entry], scheme: SamplingScheme, event: PrivacyEvent
) -> list[Entry]:
    """Return the rounds that may cost one client something: all, or the costliest it can meet.

    Rounds with correlated noise become one release with the cost of all.
    """
    spent = [entry for entry in entries if entry.rounds and entry.sampling_rate > 0]
    if event.kind == "correlated":
        return correlated.as_one_release(spent, event, scheme.groups or 1)
    if scheme.max_participations is None and scheme.groups is None:
        return spent
    chosen, left = [], scheme.max_participations
    if left is None:
        left = math.ceil(sum(entry.rounds for entry in spent) / (scheme.groups or 1))
    # A release costs more with less noise; the entry of a pure one holds ε instead.
    for z, p, rounds in sorted(spent, reverse=event.kind == "pure"):
        chosen.append(Entry(z, p, min(rounds, left)))
        left -= chosen[-1].rounds
    return [entry for entry in chosen if entry.rounds]


def covers(accountant: str, adjacency: Adjacency, view: View) -> bool:
    """Return whether an accountant covers an adjacency and a view."""
    scope = _SCOPES[accountant]
    return adjacency in scope.adjacencies and view in scope.views


def is_approximate(accountant: str) -> bool:
    """Return whether an accountant gives an approximation instead of a bound."""
    return _SCOPES[accountant].status == "approximate"


def default_accountants(
    scheme: SamplingScheme, event: PrivacyEvent, adjacency: Adjacency, view: View
) -> tuple[str, ...]:
    """Return all sound accountants that may be the best, possibly none; the smallest ε counts."""
    return tuple(
        name
        for name, scope in _SCOPES.items()
        if scope.describes(scheme, event)
        and scope.status != "approximate"
        and not scope.never_better
        and covers(name, adjacency, view)
    )


def status(accountant: str, entries: Sequence[Entry], scheme: SamplingScheme) -> Status:
    """Return the kind of number that an accountant gives for these rounds."""
    rounded = (accountant == "mixture" or scheme.kind == "groups") and len(entries) > 1
    if rounded or scheme.max_participations is not None:
        return "upper_bound"
    return _SCOPES[accountant].status


def profiles(
    charged: PrivacySpend, adjacency: Adjacency, view: View, accountant: str | None = None
) -> dict[str, Profile]:
    """Compute the profile of one spend by one accountant, or by all of `default_accountants`."""
    scheme, event, entries = charged[:3]
    names: tuple[str, ...] = (accountant or "",)
    if accountant is None:
        scheme = effective_scheme(entries, scheme)
        names = default_accountants(scheme, event, adjacency, view)
    return {name: profile(entries, scheme, event, adjacency, view, name) for name in names}


def profile(
    entries: Sequence[Entry],
    scheme: SamplingScheme,
    event: PrivacyEvent,
    adjacency: Adjacency,
    view: View,
    accountant: str,
) -> Profile:
    """Compute the privacy profile of a run, overflow of cohorts included.

    In the view "joint_dp" the adversary is all other clients, who know when they took part; in
    "released_sequence" it sees only what the server published.

    Raises:
      ValueError: if the accountant does not describe the request.
    """
    require_match(accountant, scheme, event)
    scope = _SCOPES[accountant]
    if not covers(accountant, adjacency, view):
        raise ValueError(
            f"accountant {accountant!r} covers the adjacencies {', '.join(scope.adjacencies)} and "
            f"the views {', '.join(scope.views)}, not {adjacency!r} with {view!r}"
        )
    check_entries(entries, scheme)
    met = tuple(met_by_one_client(entries, scheme, event))
    return _described(met, scheme, event, adjacency, accountant) if met else NOTHING


@functools.lru_cache(maxsize=4)
def _described(
    spent: tuple[Entry, ...],
    scheme: SamplingScheme,
    event: PrivacyEvent,
    adjacency: Adjacency,
    accountant: str,
) -> Profile:
    """Compute the profile; the last few are cached, as a report asks for both views."""
    sensitivity = event.sensitivity(adjacency)
    if event.kind == "pure":

        def composed(sampled):
            whole = randomized_response.answers(spent, event, adjacency, sampled)
            basic = randomized_response.profile_of_sum(whole)
            if accountant == "basic":
                return basic
            merged = merge_pure(spent, _MOST_PURE)
            grouped = randomized_response.answers(merged, event, adjacency, sampled)
            return smaller(basic, randomized_response.profile(grouped))

        if scheme.kind != "poisson":
            return composed(False)
        failure = overflow_probability(spent, scheme)
        return smaller(composed(False), with_failure(composed(True), failure))
    if any(entry.noise_multiplier == 0 for entry in spent):
        return Profile(lambda _: 1.0, lambda _: math.inf)
    if accountant in ("gaussian", "correlated"):
        return gaussian.profile(gaussian.mu(spent, sensitivity))
    # These import scipy.stats and dp_accounting, which are slow.
    from fedjaxsim.privacy.accounting import mixture, pld, rdp_without_replacement

    if accountant == "mixture":
        return mixture.profile(spent, scheme.capacity / scheme.clients, sensitivity)
    if accountant == "rdp_without_replacement":
        values = rdp_without_replacement.compose(
            merge(spent), scheme.capacity, scheme.clients, event.replace
        )
        return rdp.profile(values, rdp.INTEGER_ORDERS)
    if accountant == "clt":
        described = gaussian.profile(clt.mu(spent, sensitivity))
    elif accountant == "rdp":
        described = rdp.profile(rdp.compose(merge(spent), sensitivity))
    else:
        described = pld.profile(spent, event, replace=adjacency == "replace")
    return with_failure(described, overflow_probability(spent, scheme))
