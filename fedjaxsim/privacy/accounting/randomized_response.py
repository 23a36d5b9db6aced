"""Composition of pure releases, each ε-differentially private, with different ε.

A release that is ε-differentially private for two neighbours is a function of the answer of
randomized response, whose privacy loss is ε or −ε (Kairouz, Oh and Viswanath 2017, section 6.1). So
rounds cost at most what such answers cost together, and no bound for all pure releases is smaller.
Equal answers are counted by a binomial distribution (their Theorem 3.3); the losses of different
ones are convolved on a grid.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedjaxsim.privacy import binomial
from fedjaxsim.privacy.accounting import rdp
from fedjaxsim.privacy.accounting.profile import NOTHING, Profile, smallest
from fedjaxsim.privacy.events import Adjacency, Entry, PrivacyEvent

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

_ROUNDING = 1e-11
"""Relative error of the binomial tails."""
_OUTSIDE = 1e-15
"""Probability of losses outside of the grid; they count as infinite."""


class Answers(NamedTuple):
    """Rounds in which the worst pair of neighbours has two privacy losses.

    Attributes:
      high: the larger loss, the ε of one round.
      low: minus the smaller loss; at most `high`, and equal to it without sampling.
      rounds: the number of rounds.
    """

    high: float
    low: float
    rounds: int


def answers(
    entries: Sequence[Entry], event: PrivacyEvent, adjacency: Adjacency, sampled: bool
) -> list[Answers]:
    """Return the losses of pure rounds, entries with ε in place of noise; or after sampling."""

    def one(entry):
        s, p = event.sensitivity(adjacency) * entry.noise_multiplier, entry.sampling_rate
        if not sampled or p == 1 or math.isinf(s):
            return Answers(s, s, entry.rounds)
        high = amplified(entry, event, adjacency)
        # For zero-out the pair is (1 − p) Q + p P against Q, with the two answers P and Q of ε = s.
        low = -math.log1p(p * math.expm1(-s)) if adjacency == "zero_out" else high
        return Answers(high, low, entry.rounds)

    return [one(entry) for entry in entries]


def amplified(entry: Entry, event: PrivacyEvent, adjacency: Adjacency) -> float:
    """Compute ε of one Poisson-sampled pure round.

    Let a, b and c be the densities of a release with one message of the client, with another one
    (for zero-out, with none) and without the client, whose participation only the client knows.
    Then a/c ≤ e^s, a/b ≤ e^r, and (p a + (1 − p) c)/(p b + (1 − p) c) is largest, increasing in a
    and decreasing in b, where a = e^s c and b = e^(s − r) c: ε is

        log(1 + p (e^s − 1)) − log(1 − p (1 − e^(s − r))),

    s and r being the costs of zero-out and of the adjacency without sampling; for zero-out, r = s,
    the second term is 0. A message far from the release's centre reaches it, so no smaller ε
    exists.
    """
    charged, p, _ = entry
    s, r = event.zero_out * charged, event.sensitivity(adjacency) * charged
    # log(1 − p + p e^s), without overflow, and for small s without cancellation.
    first = math.log1p(p * math.expm1(s)) if s < 30 else s + math.log1p((1 - p) * math.expm1(-s))
    return first - math.log1p(p * math.expm1(s - r))


def renyi(rounds: Sequence[Answers], orders: Sequence[float] = rdp.INTEGER_ORDERS) -> np.ndarray:
    """Compute RDP at some orders (Bun and Steinke 2016, Proposition 3.3)."""
    alphas = np.asarray(orders, np.float64)
    each = (n * np.minimum(alphas * high**2 / 2, high) for high, _, n in rounds)
    return sum(each, 0.0 * alphas)


def profile_of_sum(rounds: Sequence[Answers]) -> Profile:
    """Return the privacy profile of basic composition: Σ ε at every δ."""
    total = math.fsum(each.rounds * each.high for each in rounds)
    return Profile(lambda epsilon: 0.0 if epsilon >= total else 1.0, lambda _: total)


def profile(rounds: Sequence[Answers]) -> Profile:
    """Return the privacy profile of the composition."""
    rounds = [each for each in rounds if each.high > 0 and each.rounds]
    if any(math.isinf(each.high) for each in rounds):
        return profile_of_sum(rounds)
    if len({(high, low) for high, low, _ in rounds}) > 1:
        return _of_different(rounds)
    if not rounds:
        return NOTHING
    return _of_equal(rounds[0]._replace(rounds=sum(each.rounds for each in rounds)))


def _of_equal(rounds: Answers) -> Profile:
    """Compute the profile of equal rounds: tails of the numbers of answers with the high loss."""
    high, low, number = rounds

    def one_way(epsilon, above, below):
        # With k answers of loss `above` the loss is k · above − (number − k) · below.
        likely = math.expm1(-below) / math.expm1(-above - below)
        most = math.floor((epsilon + number * below) / (above + below))
        one = binomial.excess(most, number, likely)
        other = binomial.excess(most, number, likely * math.exp(-above))
        gain = math.exp(epsilon + math.log(other)) if other > 0 else 0.0
        return one * (1 + _ROUNDING) - gain * (1 - _ROUNDING)

    def delta(epsilon):
        both = one_way(epsilon, high, low), one_way(epsilon, low, high)
        return min(1.0, max(0.0, *both))

    return Profile(delta, lambda target: smallest(delta, target, number * high))


def _of_different(rounds: Sequence[Answers]) -> Profile:
    """Compute the profile of different rounds: powers of the Fourier transform of their losses."""
    both = [_composed(rounds)]
    if any(high != low for high, low, _ in rounds):
        both.append(_composed([Answers(low, high, number) for high, low, number in rounds]))
    rounding = math.ldexp(sum(each.rounds for each in rounds), -50) + _OUTSIDE

    def delta(epsilon):
        values = (
            float(np.sum(-np.expm1(np.minimum(epsilon - losses, 0)) * masses))
            for losses, masses in both
        )
        return min(1.0, max(values) + rounding)

    total = math.fsum(number * max(high, low) for high, low, number in rounds)
    return Profile(
        delta,
        lambda target: smallest(delta, target, total) if target > delta(total) else total,
    )


def _composed(rounds: Sequence[Answers]) -> tuple[np.ndarray, np.ndarray]:
    """Compute the losses on a grid (n,), and their probabilities (n,), up to _OUTSIDE in all."""
    width = interval(rounds)
    squares = math.fsum(n * (high + low + 2 * width) ** 2 for high, low, n in rounds)
    # Beyond this distance from the mean the losses have half of _OUTSIDE (Hoeffding 1963).
    reach = math.sqrt(squares * math.log(2 / _OUTSIDE) / 2)
    size = 2 ** math.ceil(math.log2(2 * reach / width + 3))
    spectrum, mean = np.ones(size // 2 + 1, complex), 0.0
    for high, low, number in rounds:
        first, masses = _on_grid(high, low, width)
        mean += number * float(np.sum((first + np.arange(len(masses))) * masses))
        spread = np.zeros(size)
        np.add.at(spread, (first + np.arange(len(masses))) % size, masses)
        spectrum *= np.fft.rfft(spread) ** number
    begin = math.floor(mean) - size // 2
    masses = np.roll(np.fft.irfft(spectrum, size), -(begin % size))
    return width * (begin + np.arange(size)), np.maximum(masses, 0.0)


def interval(rounds: Sequence[Answers]) -> float:
    """Choose a grid; it adds at most a quarter of its square to the variance of a round's loss."""
    number = sum(each.rounds for each in rounds)
    variance = math.fsum(n * high * low for high, low, n in rounds) / number
    total = math.fsum(n * max(high, low) for high, low, n in rounds)
    return min(0.03 * math.sqrt(variance), 2e-4 * total)


def _on_grid(above: float, below: float, interval: float) -> tuple[int, np.ndarray]:
    """Return the place of the smallest loss on a grid, and the probabilities from there on.

    A loss is split over its two neighbours so that both distributions keep their mass.
    """
    first = math.floor(-below / interval)
    masses = np.zeros(math.floor(above / interval) + 2 - first)
    likely = math.expm1(-below) / math.expm1(-above - below)
    unlikely = math.exp(-below) * math.expm1(-above) / math.expm1(-above - below)
    for loss, mass in ((above, likely), (-below, unlikely)):
        place = math.floor(loss / interval)
        upper = mass * max(0.0, math.expm1(place * interval - loss) / math.expm1(-interval))
        masses[place + 1 - first] += upper
        masses[place - first] += mass - upper
    return first, masses


def distributions(rounds: Sequence[Answers], interval: float) -> list["PrivacyLossDistribution"]:
    """Return the losses of each group of rounds, to compose with those of other releases."""
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    from fedjaxsim.privacy.accounting.subsampled_gaussian_pld import Masses

    def one_way(above, below):
        first, masses = _on_grid(above, below, interval)
        # Composition divides by masses; 1e-250 in place of 0 costs nothing.
        return Masses(interval, first, masses + 1e-250, 0.0, True)

    def group(high, low, number):
        pair = (one_way(high, low),) if high == low else (one_way(high, low), one_way(low, high))
        return PrivacyLossDistribution(*pair).self_compose(number)

    return [group(*each) for each in rounds]
