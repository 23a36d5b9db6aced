"""Composition of releases that are each ε-differentially private, with different ε.

Kairouz, Oh and Viswanath 2017, Theorem 3.5; MP-MTL, equation 6: the smallest of the sum and of two
bounds that grow with the root of the rounds.
"""

import math
from collections.abc import Sequence

from fedjaxsim.privacy.accounting.profile import Profile
from fedjaxsim.privacy.events import Adjacency, Entry, PrivacyEvent


def amplified(entry: Entry, event: PrivacyEvent, adjacency: Adjacency) -> Entry:
    """Return a Poisson-sampled pure round with its ε after sampling in place of the charged one.

    Let a, b and c be the densities of a release with one message of the client, with another one
    (for zero-out, with none) and without the client, whose participation only the client knows.
    Then a/c ≤ e^s, a/b ≤ e^r, and (p a + (1 − p) c)/(p b + (1 − p) c) is largest, increasing in a
    and decreasing in b, where a = e^s c and b = e^(s − r) c: ε is

        log(1 + p (e^s − 1)) − log(1 − p (1 − e^(s − r))),

    s and r being the costs of zero-out and of the adjacency without sampling; for zero-out, r = s,
    the second term is 0. A message far from the release's centre reaches it, so no smaller ε
    exists.
    """
    charged, p, rounds = entry
    if math.isinf(charged):
        return entry
    s, r = event.zero_out * charged, event.sensitivity(adjacency) * charged
    # log(1 − p + p e^s), without overflow, and for small s without cancellation.
    first = math.log1p(p * math.expm1(s)) if s < 30 else s + math.log1p((1 - p) * math.expm1(-s))
    return Entry(first - math.log1p(p * math.expm1(s - r)), p, rounds)


def _moments(entries: Sequence[Entry]) -> tuple[float, float, float]:
    """Compute Σ ε, Σ ε (e^ε − 1)/(e^ε + 1) and √Σ ε² over all rounds."""
    # (e^ε − 1)/(e^ε + 1) = tanh(ε/2), which does not overflow.
    total = math.fsum(rounds * epsilon for epsilon, _, rounds in entries)
    drift = math.fsum(rounds * epsilon * math.tanh(epsilon / 2) for epsilon, _, rounds in entries)
    return total, drift, math.sqrt(math.fsum(n * epsilon**2 for epsilon, _, n in entries))


def compose(entries: Sequence[Entry], delta: float) -> float:
    """Compute the ε of the composition at δ in [0, 1), of entries with ε in place of noise."""
    if not 0 <= delta < 1:
        raise ValueError(f"delta must lie in [0, 1), got {delta}")
    total, drift, scale = _moments(entries)
    if delta == 0 or scale == 0 or math.isinf(total):
        return total
    spread = min(math.log(1 / delta), math.log(math.e + scale / delta))
    return min(total, drift + scale * math.sqrt(2 * spread))


def profile_of_sum(entries: Sequence[Entry]) -> Profile:
    """Return the privacy profile of basic composition: Σ ε at every δ."""
    total, *_ = _moments(entries)
    return Profile(lambda epsilon: 0.0 if epsilon >= total else 1.0, lambda _: total)


def profile(entries: Sequence[Entry]) -> Profile:
    """Return the privacy profile of the composition."""
    total, drift, scale = _moments(entries)

    def delta(epsilon):
        if epsilon >= total:
            return 0.0
        if epsilon <= drift:
            return 1.0
        exponent = ((epsilon - drift) / scale) ** 2 / 2
        # Either logarithm in `compose` may be the smaller one: δ = e^−x and δ = s / (e^x − e).
        found = math.exp(-exponent)
        if 1 < exponent < 700:
            found = min(found, scale / (math.exp(exponent) - math.e))
        return found

    return Profile(delta, lambda target: compose(entries, target))
