"""Cohorts of a fixed size, seen by the other clients.

In joint differential privacy the adversary is all other clients, who know when they took part. With
cohorts of exactly q clients their bits reveal the victim's, so sampling hides nothing: the
adversary learns the victim's number of participations k ~ Bin(T, q/m), the only random quantity,
and sees k Gaussian releases. Hence δ(ε) = E_k δ_Gauss(ε; s √k / z), exactly.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import binom

from fedjaxsim.privacy.accounting import gaussian
from fedjaxsim.privacy.accounting.profile import NOTHING, Profile, smallest
from fedjaxsim.privacy.events import Entry, check_delta

_POINTS = 2**15
_DROPPED = 1e-18


def _precision(entries: Sequence[Entry], fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the distribution of Σ k/z² over participations k, as values (n,) and weights (n,).

    Exact for one noise level; with several, each group's k/z² is rounded up to one of _POINTS.
    """
    if len(entries) == 1:
        z, _, rounds = entries[0]
        low = int(binom.ppf(_DROPPED, rounds, fraction))
        high = int(binom.isf(_DROPPED, rounds, fraction))
        k = np.arange(low, min(rounds, high) + 1)
        return k / z**2, binom.pmf(k, rounds, fraction)
    unit = sum(rounds / z**2 for z, _, rounds in entries) / _POINTS
    size = 2 * _POINTS  # Room for the sum of all groups' largest places, one more each.
    transform = np.ones(size // 2 + 1, complex)
    for z, _, rounds in entries:
        k = np.arange(rounds + 1)
        places = np.ceil(k / z**2 / unit).astype(int)
        transform *= np.fft.rfft(np.bincount(places, binom.pmf(k, rounds, fraction), size))
    return unit * np.arange(size), np.maximum(np.fft.irfft(transform, size), 0)


def profile(entries: Sequence[Entry], fraction: float, sensitivity: float) -> Profile:
    """Compute the privacy profile under fixed-size sampling with known participations.

    `entries` have z > 0; `fraction` is q/m in (0, 1], `sensitivity` in units of z.
    """
    if not entries:
        return NOTHING
    values, weights = _precision(entries, fraction)
    keep = (weights > _DROPPED) & (values > 0)
    # Dropped weights count as a breach.
    breach = max(0.0, 1 - float(np.sum(weights[keep])) - float(np.sum(weights[values == 0])))
    mus, weights = sensitivity * np.sqrt(values[keep]), weights[keep]

    def delta(epsilon):
        return min(1.0, breach + float(weights @ np.exp(gaussian.log_delta(epsilon, mus))))

    def epsilon(target):
        check_delta(target)
        if not mus.size:
            return 0.0
        if breach >= target:
            return math.inf
        upper = gaussian.epsilon((target - breach) / 2, float(mus[-1]))
        if math.isinf(upper):
            return math.inf
        return smallest(delta, target, upper)

    return Profile(delta, epsilon)
