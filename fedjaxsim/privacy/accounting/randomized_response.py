"""Pure releases, each ε-differentially private.

A release that is ε-differentially private for two neighbours is a function of the answer of
randomized response, whose privacy loss is ε or −ε (Kairouz, Oh and Viswanath 2017, section 6.1). So
rounds cost at most what such answers cost together, and no bound for all pure releases is smaller.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjaxsim.privacy.accounting.losses import Losses, Pair
from fedjaxsim.privacy.entries import Adjacency, Entry


def answer(entry: Entry, replace: float, adjacency: Adjacency) -> tuple[float, float]:
    """Return h and l ≤ h: a round's worst pair of neighbours has the losses h, its ε, and −l.

    Without sampling ε is 1/z or, for a replacement, `replace`/z, and l = h.
    Let a, b and c be the densities of a release with one message of the client, with another one
    (for zero-out, with none) and without the client, whose participation only the client knows.
    Then a/c ≤ e^s, a/b ≤ e^r, and (p a + (1 − p) c)/(p b + (1 − p) c) is largest, increasing in a
    and decreasing in b, where a = e^s c and b = e^(s − r) c: ε is

        log(1 + p (e^s − 1)) − log(1 − p (1 − e^(s − r))),

    s and r being the costs of zero-out and of the adjacency without sampling; for zero-out, r = s,
    the second term is 0. A message far from the release's centre reaches it, so no smaller ε
    exists.
    """
    z, p, _ = entry
    s, r = 1 / z, (replace if adjacency == "replace" else 1.0) / z
    if p == 1:
        return r, r
    # log(1 − p + p e^s), without overflow, and for small s without cancellation.
    first = math.log1p(p * math.expm1(s)) if s < 30 else s + math.log(p + (1 - p) * math.exp(-s))
    high = first - math.log1p(p * math.expm1(s - r))
    # For zero-out the pair is (1 − p) Q + p P against Q, with the two answers P and Q of ε = s.
    return high, -math.log1p(p * math.expm1(-s)) if adjacency == "zero_out" else high


def losses(worst_losses: tuple[float, float], interval: float) -> Pair:
    """Return the losses of a round on a grid, rounded to the pessimistic side."""
    high, low = worst_losses
    if high == low:
        return (_on_grid(high, low, interval),)
    return _on_grid(high, low, interval), _on_grid(low, high, interval)


def _on_grid(above: float, below: float, interval: float) -> Losses:
    """Split the masses of the losses `above` and −`below` between their neighbours on the grid."""
    first = math.floor(-below / interval)
    masses = np.zeros(math.ceil(above / interval) - first + 1)
    likely = math.expm1(-below) / math.expm1(-above - below)
    for loss, mass in ((-below, 1 - likely), (above, likely)):
        place = min(math.floor(loss / interval), first + len(masses) - 2)
        # Both distributions keep their mass, as in `losses.rounded`.
        upper = mass * max(0.0, math.expm1(place * interval - loss) / math.expm1(-interval))
        masses[place + 1 - first] += upper
        masses[place - first] += mass - upper
    return Losses(interval, first, masses, 0.0)


def renyi(
    entry: Entry, replace: float, adjacency: Adjacency, orders: tuple[float, ...], xp: Any
) -> Any:
    """Compute RDP of one round, (orders,); inside jit Bun and Steinke 2016, Proposition 3.3."""
    if xp is np:
        return np.array(_renyi(*answer(entry, replace, adjacency), orders))
    s = 1 / entry.noise_multiplier
    r = (replace if adjacency == "replace" else 1.0) / entry.noise_multiplier
    sampled = entry.sampling_rate < 1
    p = xp.where(sampled, entry.sampling_rate, 0.5)
    small = xp.log1p(p * xp.expm1(xp.minimum(s, 30)))
    first = xp.where(s < 30, small, s + xp.log(p + (1 - p) * xp.exp(-s)))
    high = xp.where(sampled, first - xp.log1p(p * xp.expm1(s - r)), r)
    return xp.minimum(xp.asarray(orders, high.dtype) * high**2 / 2, high)


@functools.lru_cache(maxsize=512)
def _renyi(high: float, low: float, orders: Sequence[float]) -> tuple[float, ...]:
    """Compute the larger Rényi divergence of the two answers at each order."""

    def one_way(above: float, below: float) -> np.ndarray:
        alphas = np.asarray(orders, np.float64)
        likely = math.expm1(-below) / math.expm1(-above - below)
        up, down = (alphas - 1) * above, -(alphas - 1) * below
        with np.errstate(over="ignore", invalid="ignore"):
            # E[e^x] − 1 with E[e^−loss] = 1, so small losses do not cancel.
            moment = likely * np.expm1(up) + (1 - likely) * np.expm1(down)
            values = np.where(up < 700, np.log1p(moment), up + math.log(likely)) / (alphas - 1)
        return np.clip(values, 0.0, above)

    return tuple(np.maximum(one_way(high, low), one_way(low, high)).tolist())
