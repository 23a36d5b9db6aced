"""Reported ε under Poisson sampling: numerical composition of privacy losses.

Privacy loss distributions (Koskela et al. 2020) of dp_accounting, discretized pessimistically
("connect the dots", Doroshenko et al. 2022), give an upper bound on ε, tight to a few units of the
grid. Zero-out adjacency has the numbers of add/remove: an absent client and a zero message look the
same.

Replacing a client is the pair (1−p) N(0, z²) + p N(±1, z²), the worst case of opposite messages.
For messages a, b of norm at most 1, pad both to norm 1 with orthogonal coordinates, and let a point
the first axis. The best test of a against a mixture of 0 and b, averaged over the other axes'
noise, is as good against 0 and −a: moving the output by a + b scales the likelihood ratio of a by
e^(1+⟨a, b⟩) and that of b by no more. So sensitivities below 2 gain nothing here: the direction
shared by a and b reveals participation.

For this relation dp_accounting wants z relative to *one* message and doubles it inside, for Poisson
sampling. (Its RDP accountant reads the same relation as fixed-size sampling, with z relative to the
distance of the two.)
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from fedjaxsim.privacy.accounting import gaussian, rdp, subsampled_gaussian_pld
from fedjaxsim.privacy.accounting.groups import merge
from fedjaxsim.privacy.accounting.profile import NOTHING, Profile
from fedjaxsim.privacy.events import Entry, PrivacyEvent

INTERVAL = 1e-4
"""Grid of privacy losses, in nats, unless rounds are too cheap or too many for it."""
_FINEST = -20
"""The finest grid is INTERVAL · 2^−20: below it, differences of masses drown in rounding."""
_LEAST_NOISE = 1e-100
"""Below this noise there is no useful guarantee, and squares underflow."""
_LOOSE_END = 0.6
"""The library's cut of the losses of many rounds, in nats, however small all of them are."""
_MOST_POINTS, _MANY_ROUNDS = 6e6, 10**8
_MOST_POINTS_OF_ONE_ROUND = 1e6


_one_round = functools.lru_cache(maxsize=128)(subsampled_gaussian_pld.one_round)
"""Cached, as ε is computed after every evaluation of a run."""


def interval(entries: Sequence[Entry]) -> float:
    """Choose the grid, a power of two times INTERVAL, so rounds of one run share it.

    Pessimistic rounding adds about interval²/6 to the variance of the losses of each round: the
    grid is finer where that would exceed 0.1 % of the truth, and coarser where the losses would not
    fit into memory.
    """
    rounds = sum(entry.rounds for entry in entries)
    variance = sum(n * p**2 * math.expm1(min(z**-2, 50.0)) for z, p, n in entries) / rounds
    one_round = max(subsampled_gaussian_pld.largest_loss(z, p) for z, p, _ in entries)
    loose = min(rounds * one_round, _LOOSE_END)
    together = max(one_round, rdp.epsilon(rdp.compose(entries), 1e-15), loose)
    return max(grid(0.08 * math.sqrt(variance)), coarsest(one_round, together, rounds))


def grid(width: float) -> float:
    """Return INTERVAL, or the largest power of two times it that is at most `width`."""
    return INTERVAL * 2.0 ** min(math.floor(math.log2(max(width / INTERVAL, 2.0**_FINEST))), 0)


def coarsest(one_round: float, together: float, rounds: int) -> float:
    """Return the finest grid on which the losses, of one round and of all, fit into memory."""
    points = _MOST_POINTS if rounds < _MANY_ROUNDS else _MOST_POINTS / 3
    smallest = max(2 * one_round / _MOST_POINTS_OF_ONE_ROUND, 2 * together / points)
    return INTERVAL * 2.0 ** math.ceil(math.log2(smallest / INTERVAL))


def sampled_rounds(
    entries: Sequence[Entry], replace: bool, interval: float
) -> list[PrivacyLossDistribution]:
    """Compute the losses of rounds with 0 < p < 1, z in units of one message's norm, on a grid."""
    return [_one_round(z, p, replace, interval).self_compose(rounds) for z, p, rounds in entries]


def profile(entries: Sequence[Entry], event: PrivacyEvent, replace: bool) -> Profile:
    """Compute the privacy profile of Poisson-sampled Gaussian releases with z > 0.

    Rounds at p = 1 are composed exactly; alone they need no grid.
    """
    if any(0 < entry.noise_multiplier < _LEAST_NOISE for entry in entries):
        return Profile(lambda _: 1.0, lambda _: math.inf)
    full = [entry for entry in entries if entry.sampling_rate == 1]
    mu = gaussian.mu(full, event.sensitivity("replace" if replace else "zero_out"))
    sampled = [
        entry._replace(noise_multiplier=entry.noise_multiplier / event.zero_out)
        for entry in entries
        if 0 < entry.sampling_rate < 1 and entry.noise_multiplier < math.inf
    ]
    if not sampled:
        return gaussian.profile(mu) if mu > 0 else NOTHING
    sampled = merge(sampled)
    width = interval(sampled)
    pieces = sampled_rounds(sampled, replace, width)
    return composed(pieces, mu, width, sum(entry.rounds for entry in sampled))


def composed(
    pieces: Sequence[PrivacyLossDistribution], mu: float, interval: float, rounds: int
) -> Profile:
    """Compute the profile of pieces on one grid, and of a Gaussian release of μ > 0 besides."""
    whole = functools.reduce(PrivacyLossDistribution.compose, pieces)
    if mu > 0:
        whole = whole.compose(
            privacy_loss_distribution.from_gaussian_mechanism(
                1 / mu, value_discretization_interval=interval
            )
        )
    # Powers of a Fourier transform carry its rounding errors once for each round.
    rounding = math.ldexp(rounds, -50)

    def delta(epsilon):
        with np.errstate(over="ignore"):
            value = float(whole.get_delta_for_epsilon(epsilon)) + rounding
        return min(1.0, max(0.0, value))

    def epsilon(target):
        left = target - rounding
        if left <= 0:
            return math.inf
        with np.errstate(over="ignore"):
            # The library goes through all losses one by one, and fails at those far below zero.
            if whole.get_delta_for_epsilon(0.0) <= left:
                return 0.0
            return float(whole.get_epsilon_for_delta(left))

    return Profile(delta, epsilon)
