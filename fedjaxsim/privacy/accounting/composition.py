"""The privacy profile of charges: one Gaussian release, or losses on a grid.

* Gaussian noise without sampling is exact: one Gaussian release with Σ 1/z_t². Of passes and groups
  the costliest rounds that one client may meet count.
* Correlated noise is exact for full participation and groups: one release of all rounds with
  μ = max_g ‖D⁻¹u_g‖/z, for the indicator u_g of the rounds of group g, and one z.
* Random allocation has periods of t rounds, and a client takes part in one of each. The law of the
  likelihood ratio (1/t) Σ exp(x_i/z² − 1/(2z²)) is spread to a grid with the same mean, which
  bounds both directions. A replacement is two zeroings. The least z of all rounds counts.
* Everything else (Poisson, cohorts of a fixed size, pure releases) is convolved as privacy losses,
  an upper bound tight to a few units of the grid (`pld`). Beside it Rényi divergences add up
  (`rdp`), looser and for any δ. The smallest sound number counts.
* `wishart`, `client-noise` and `plain-mean` have no ε.

A pure release costs as much as randomized response; no bound for all pure releases can be lower. If
each client takes part independently with probability p, its zero-out cost ε becomes
log(1 + p(e^ε − 1)). Cohorts of a fixed size amplify nothing against those who know who took part.

The adversary of joint differential privacy knows when it took part; the reader of the released
sequence knows less, so a number for the first bounds the second.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedjaxsim import checks
from fedjaxsim.checks import Name, SettingError
from fedjaxsim.privacy.accounting import gaussian, losses, one_round, rdp
from fedjaxsim.privacy.accounting.profile import NO_PRIVACY, Profile
from fedjaxsim.privacy.entries import Adjacency, Entry, SamplingScheme, Status
from fedjaxsim.privacy.events import PrivacyEvent, PrivacySpend

INTERVAL = 1e-4
"""Grid of privacy losses, in nats, unless rounds are too cheap or too many for it."""
_COARSEST = INTERVAL * 2.0**13
"""The grid on which the range of losses is looked for, in nats."""
_FINEST = -20
"""The finest grid is INTERVAL · 2^−20: below it, differences of masses drown in rounding."""
_OF_DEVIATION = 0.08
"""Grid in units of the standard deviation of a round's loss; it adds 0.1 % to the variance."""
_LEAST_WEIGHT = 1e-25
"""Rarer cases of what others may know count as an infinite loss."""
_MOST_POINTS = 6e6
_MOST_POINTS_OF_ONE_ROUND = 1e6


def overflow_probability(charges: Sequence[PrivacySpend]) -> float:
    """Compute τ, a bound on the probability that any random cohort exceeded its capacity."""
    often = (
        entry.rounds * scheme.overflow(entry.sampling_rate)
        for scheme, _, entries, *_ in charges
        for entry in entries
    )
    return min(1.0, math.fsum(often))


def check_entries(entries: Sequence[Entry], scheme: SamplingScheme) -> None:
    """Raise ValueError unless the rounds can have come from the scheme."""
    for z, p, rounds in entries:
        checks.in_range("[0, inf]", noise_multiplier=z)
        checks.in_range("[0, 1]", sampling_rate=p)
        checks.count(0, rounds=rounds)
        if scheme.kind == "full" and p != 1:
            raise SettingError(Name("sampling_rate"), f" must be 1 for full participation, got {p}")
        fraction = scheme.capacity / scheme.clients
        if scheme.period is not None and not math.isclose(p * scheme.period, 1, rel_tol=1e-6):
            raise SettingError(
                Name("sampling_rate"),
                f" must be 1/{scheme.period} for periods of {scheme.period} rounds, got {p}",
            )
        if scheme.kind == "cyclic" and p * (groups := scheme.groups or 1) > 1 + 1e-6:
            raise SettingError(
                Name("sampling_rate"),
                f" must be at most 1/{groups} for {groups} groups in turn, got {p}",
            )
        if scheme.kind == "fixed" and not math.isclose(p, fraction, rel_tol=1e-6):
            raise SettingError(
                Name("sampling_rate"),
                f" must be {fraction}, the cohort's share of the clients, for fixed "
                f"sampling, got {p}",
            )


class _Rounds(NamedTuple):
    """Equal rounds that one client may have met; z and the number are in `entry`."""

    event: PrivacyEvent
    entry: Entry
    inclusions: tuple[tuple[float, float], ...]

    @property
    def always(self) -> bool:
        """Return whether the client is in for certain."""
        return self.inclusions == ((1.0, 1.0),)

    def at(self, sampling_rate: float) -> Entry:
        return Entry(self.entry.noise_multiplier, sampling_rate, 1)

    def losses(self, adjacency: Adjacency, interval: float) -> losses.Pair | None:
        """Compute the losses of one round on a grid; None if they are not known."""
        never = (losses.Losses(interval, 0, np.zeros(1), 1.0),)
        weighted: list[tuple[float, losses.Pair | None]] = []
        for weight, p in self.inclusions:
            if p == 0:
                weighted.append((weight, None))
            elif weight < _LEAST_WEIGHT:
                weighted.append((weight, never))
            else:
                pair = one_round.losses(self.event, self.at(p), adjacency, interval)
                if pair is None:
                    return None
                weighted.append((weight, pair))
        return losses.mixture(weighted, interval)

    def rdp(self, adjacency: Adjacency, orders: tuple[float, ...]) -> np.ndarray:
        """Compute RDP of one round, (orders,); order ∞ may be the last one."""
        z = self.entry.noise_multiplier
        return one_round.mixed_rdp(self.event, z, self.inclusions, adjacency, orders)


def met_by_one_client(charges: Sequence[PrivacySpend], merged: bool = True) -> list[_Rounds]:
    """Return the rounds with noise that may cost one client something."""
    rounds = []
    for spend in charges:
        check_entries(spend.entries, spend.scheme)
        if not len((cost := spend.cost).rounds):
            continue
        met = spend.event.met(cost, np)
        groups = [
            Entry(*group) for group in zip(*(column.tolist() for column in met[2:]), strict=True)
        ]
        groups = [entry for entry in groups if entry.rounds]
        for entry in merge(groups, met.event.different) if merged else groups:
            if entry.noise_multiplier < math.inf:
                inclusions = met.scheme.inclusions(entry.sampling_rate)
                rounds.append(_Rounds(met.event, entry, inclusions))
    return rounds


def rdp_of(
    charges: Sequence[PrivacySpend], adjacency: Adjacency, orders: tuple[float, ...]
) -> np.ndarray:
    """Compute RDP of all rounds, (orders,), including what full cohorts tell of a client."""
    return _total_rdp(met_by_one_client(charges, merged=False), adjacency, orders)


def _total_rdp(
    met: Sequence[_Rounds], adjacency: Adjacency, orders: tuple[float, ...]
) -> np.ndarray:
    if any(rounds.entry.noise_multiplier < one_round.LEAST_NOISE for rounds in met):
        return np.full(len(orders), math.inf)
    costs = (rounds.entry.rounds * rounds.rdp(adjacency, orders) for rounds in met)
    return sum(costs, np.zeros(len(orders)))


def profiles(
    charges: Sequence[PrivacySpend],
    adjacency: Adjacency,
    accountant: str | None = None,
    coarse: float = 0.0,
) -> tuple[dict[str, Profile], Status]:
    """Compute the privacy profile of charges by each accountant, and the kind of its numbers.

    Those are "pld" and "rdp", unless one is named, or the closed Gaussian form alone. A grid that
    is `coarse` = 1 suits rounds however few, for ε within 0.1 % in a tenth of the time; one that is
    4 times as coarse suits a search.
    """
    met = tuple(met_by_one_client(charges))
    if any(rounds.entry.noise_multiplier < one_round.LEAST_NOISE for rounds in met):
        return {accountant or "pld": NO_PRIVACY}, "exact"
    mu, open_rounds = _closed(met, adjacency)
    if accountant != "rdp" and not open_rounds:
        unknown = any(
            scheme.turns and (len(entries) > 1 or scheme.period not in (None, 1))
            for scheme, _, entries, *_ in charges
        )
        return {"gaussian": gaussian.profile(mu)}, "upper_bound" if unknown else "exact"
    by_accountant = {}
    if accountant != "rdp":
        by_accountant["pld"] = _lazy(functools.partial(_convolved, met, adjacency, coarse))
    if accountant != "pld":
        by_accountant["rdp"] = _lazy(functools.partial(_by_rdp, met, adjacency))
    return by_accountant, "upper_bound"


def profile(charges: Sequence[PrivacySpend], adjacency: Adjacency) -> Profile:
    """Compute the smallest sound privacy profile of charges."""
    sound = profiles(charges, adjacency)[0].values()
    return Profile(
        lambda epsilon: min(candidate.delta(epsilon) for candidate in sound),
        lambda delta: min(candidate.epsilon(delta) for candidate in sound),
        lambda epsilons: np.min([candidate.deltas(epsilons) for candidate in sound], axis=0),
    )


def _closed(met: Sequence[_Rounds], adjacency: Adjacency) -> tuple[float, tuple[_Rounds, ...]]:
    """Return μ of the Gaussian releases without sampling, and all other rounds."""
    squares, open_rounds = [], []
    for rounds in met:
        mu = one_round.mu(rounds.event, rounds.entry, adjacency) if rounds.always else None
        if mu is None:
            open_rounds.append(rounds)
        else:
            squares.append(rounds.entry.rounds * mu**2)
    return math.sqrt(math.fsum(squares)), tuple(open_rounds)


def _lazy(compute: Callable[[], Profile]) -> Profile:
    """Return a profile that is computed at its first use."""
    computed = functools.cache(compute)
    return Profile(
        lambda epsilon: computed().delta(epsilon),
        lambda delta: computed().epsilon(delta),
        lambda epsilons: computed().deltas(epsilons),
    )


def _by_rdp(met: Sequence[_Rounds], adjacency: Adjacency) -> Profile:
    return rdp.profile(_total_rdp(met, adjacency, rdp.ORDERS))


@functools.lru_cache(maxsize=16)
def _convolved(met: tuple[_Rounds, ...], adjacency: Adjacency, coarse: float) -> Profile:
    """Compute the profile of losses on a grid."""
    mu, open_rounds = _closed(met, adjacency)
    interval = _interval(mu, open_rounds, adjacency, coarse)
    if math.isinf(interval):
        return NO_PRIVACY
    groups = []
    for rounds in open_rounds:
        pair = rounds.losses(adjacency, interval)
        if pair is None:
            return NO_PRIVACY
        groups.append((pair, rounds.entry.rounds))
    if mu > 0:
        groups.append((gaussian.sampled(1 / mu, 1.0, False, interval), 1))
    return losses.profile(groups)


def grid(met: Sequence[_Rounds], adjacency: Adjacency) -> float:
    """Return a grid of losses, in nats, that suits rounds if each is composed on it."""
    return _interval(0.0, met, adjacency, 0.0) if met else INTERVAL


def _interval(
    mu: float, open_rounds: Sequence[_Rounds], adjacency: Adjacency, coarse: float
) -> float:
    """Choose the grid, a power of two times INTERVAL: fine for every round, with room for all.

    Pessimistic rounding adds about interval²/6 to the variance of the losses of each round: the
    grid is finer if that would exceed 0.1 % of the truth, and coarser if the losses would not fit
    into memory. Both follow from RDP for zero-out, whose value at order 2 is log(1 + variance). If
    that is not known, the grid is INTERVAL, unless a round's losses have no room on it.
    """
    variance, rounds, largest = 0.0, 0, 0.0
    total = np.asarray(rdp.ORDERS) * mu**2 / 2 if mu > 0 else np.zeros(len(rdp.ORDERS))
    second = rdp.ORDERS.index(2)
    for group in open_rounds:
        cost = group.rdp("zero_out", rdp.ORDERS)
        if not np.isfinite(cost[second]):
            largest = max(_largest_loss(group, adjacency) for group in open_rounds)
            return _with_room_for(2 * largest / _MOST_POINTS_OF_ONE_ROUND)
        variance += group.entry.rounds * math.expm1(min(float(cost[second]), 50.0))
        rounds += group.entry.rounds
        largest = max(largest, rdp.epsilon(cost, 1e-23))
        total = total + group.entry.rounds * cost
    finest = _power_of_two(_OF_DEVIATION * math.sqrt(variance / rounds), coarse)
    together = max(largest, rdp.epsilon(total, 1e-15))
    least = max(2 * largest / _MOST_POINTS_OF_ONE_ROUND, 2 * together / _MOST_POINTS)
    return max(finest, _with_room_for(least, _FINEST))


def _with_room_for(width: float, least: int = 0) -> float:
    """Return INTERVAL · 2^`least`, or the smallest larger power of two that is at least `width`."""
    power = math.log2(max(width, 1e-300) / INTERVAL)
    return power if math.isinf(power) else INTERVAL * 2.0 ** max(least, math.ceil(power))


def _largest_loss(rounds: _Rounds, adjacency: Adjacency) -> float:
    """Return about the largest loss of a round on a coarse grid; ∞ if it has no losses there."""
    pair = rounds.losses(adjacency, _COARSEST)
    if pair is None:
        return math.inf
    return float(np.max([np.abs(direction.values[[0, -1]]) for direction in pair]))


def _power_of_two(width: float, coarse: float) -> float:
    """Return the largest power of two times INTERVAL up to `width`, at most 1 if not coarse."""
    power = math.floor(math.log2(max((coarse or 1.0) * width / INTERVAL, 2.0**_FINEST)))
    return INTERVAL * 2.0 ** (power if coarse else min(power, 0))


def merge(entries: Sequence[Entry], most: int) -> list[Entry]:
    """Merge rounds into at most `most` groups per sampling rate, each with its smallest z.

    Less noise only costs more, so the result stays an upper bound; it is exact up to `most`
    different entries. Groups are narrow where the cost Σ 1/z² is: their number per logarithm of z
    is proportional to the root of its density, which wastes the least.
    """
    if len(entries) <= most:
        return list(entries)
    rounds = sorted(entries, key=lambda entry: (entry.sampling_rate, entry.noise_multiplier))
    groups: list[Entry] = []
    for rate in dict.fromkeys(entry.sampling_rate for entry in rounds):
        groups += _of_one_rate([entry for entry in rounds if entry.sampling_rate == rate], most)
    return groups


def _of_one_rate(rounds: list[Entry], most: int) -> list[Entry]:
    logs = np.log([entry.noise_multiplier for entry in rounds])
    costs = np.array([entry.rounds for entry in rounds]) * np.exp(2 * (logs[0] - logs))
    steps = np.sqrt(costs[1:] * np.diff(logs))
    cumulative = np.concatenate([[0.0], np.cumsum(steps)])
    places = np.minimum(cumulative / (cumulative[-1] or 1.0) * most, most - 1).astype(int)
    groups: dict[int, Entry] = {}
    for place, entry in zip(places.tolist(), rounds, strict=True):
        first = groups.setdefault(place, entry._replace(rounds=0))
        groups[place] = first._replace(rounds=first.rounds + entry.rounds)
    return list(groups.values())
