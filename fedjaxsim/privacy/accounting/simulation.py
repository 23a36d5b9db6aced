"""Random allocation by simulation, for a second opinion: no bound, but no grid of ratios either.

`allocation` says what L and the worst pair are. Draws come in equal parts from distributions that
together reach both tails of L: from Q · L^j/E_Q[L^j] for small j, and from Q with all rounds moved.
The first throws j balls into the t rounds, so that round i has the mean c_i, with a probability in
proportion to Π e^(c_i(c_i − 1)/(2z²))/c_i!. Each draw has the weight of Q over the mean of all
their densities (the balance heuristic of Veach and Guibas 1995).
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy.special import logsumexp

from fedjaxsim.privacy.accounting.losses import Losses, Pair

LONGEST_PERIOD = 2_000
"""Longest period whose simulation takes less than half a minute."""
_DRAWS = 30_000
"""Draws from each of the distributions."""
_MOST_BALLS = 6
_MOVES = (-5.0, -2.5, 2.5, 5.0)
"""Moves of the mean over all rounds, in its standard deviations."""
_AT_ONCE = 2_000_000
_LEAST_OF_LIGHT_TAILS = 3.0


@functools.lru_cache(maxsize=16)
def losses(z: float, period: int, interval: float) -> Pair:
    """Estimate the losses of t rounds with one hidden turn, for zero-out, in both directions."""
    logs, weights = map(np.concatenate, zip(*_weighted(z, period), strict=True))
    weights = _calibrated(logs, weights, z, period)
    remove = _on_grid(logs, weights * np.exp(logs), interval)
    return remove, _on_grid(-logs, weights, interval)


def _calibrated(logs: np.ndarray, weights: np.ndarray, z: float, period: int) -> np.ndarray:
    """Return weights with the true E_Q of 1, L and L²; the same ones if L has heavy tails.

    Many periods together cost what these moments say, so errors of theirs would add up.
    """
    if z < _LEAST_OF_LIGHT_TAILS:
        return weights
    moments = np.array([1.0, 1.0, 1 + math.expm1(1 / z**2) / period])
    powers = np.exp(logs[:, None] * np.arange(3))
    factors = powers @ np.linalg.solve((powers * weights[:, None]).T @ powers, moments)
    return weights * np.maximum(factors, 0.0)


def _weighted(z: float, period: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield log L of draws and their weights under Q."""
    random = np.random.default_rng(0)
    throws = [_throws(z, period, balls) for balls in range(_MOST_BALLS + 1)]
    moments = np.array([_log_sum(chances) for _, chances in throws])
    moves = np.array(_MOVES) / math.sqrt(period)
    size = min(_DRAWS, max(1, _AT_ONCE // period))
    of_throws = [(counts, chances, 0.0) for counts, chances in throws]
    of_moves = [(((),), np.zeros(1), move) for move in moves]
    for counts, chances, move in (*of_throws, *of_moves):
        for _ in range(-(-_DRAWS // size)):
            x = random.standard_normal((size, period)) + move
            kind = random.choice(len(counts), size, p=np.exp(chances - _log_sum(chances)))
            for place, means in enumerate(counts):
                x[kind == place, : len(means)] += np.array(means, float) / z
            logs = _log_sum(x / z) - math.log(period) - 1 / (2 * z**2)
            tilts = logs[:, None] * np.arange(len(throws)) - moments
            moved = np.sum(x, axis=1)[:, None] * moves - period * moves**2 / 2
            densities = np.concatenate([tilts, moved], axis=1)
            yield logs, densities.shape[1] * np.exp(-_log_sum(densities))


def _log_sum(values: np.ndarray) -> Any:
    return logsumexp(values, axis=-1)


def _throws(z: float, period: int, balls: int) -> tuple[tuple[tuple[int, ...], ...], np.ndarray]:
    """Return the counts of balls in the rounds that have some, and the log weight of each."""
    patterns, weights = [], []
    for counts in _partitions(balls, balls):
        if len(counts) > period:
            continue
        alike = [len(list(group)) for _, group in itertools.groupby(counts)]
        ways = math.lgamma(period + 1) - math.lgamma(period - len(counts) + 1)
        ways -= sum(map(math.lgamma, (n + 1 for n in alike)))
        orders = math.lgamma(balls + 1) - sum(map(math.lgamma, (n + 1 for n in counts)))
        tilt = sum(n * (n - 1) for n in counts) / (2 * z**2)
        patterns.append(counts)
        weights.append(ways + orders + tilt - balls * math.log(period))
    return tuple(patterns), np.array(weights)


def _partitions(number: int, largest: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write a number as a sum, from the largest term on."""
    if number == 0:
        yield ()
    for first in range(min(number, largest), 0, -1):
        for smaller in _partitions(number - first, first):
            yield (first, *smaller)


def _on_grid(values: np.ndarray, weights: np.ndarray, interval: float) -> Losses:
    """Return losses on a grid that keeps their mean."""
    places = np.floor(values / interval).astype(int)
    part = values / interval - places
    first = int(np.min(places))
    masses = np.bincount(places - first, weights * (1 - part), int(np.ptp(places)) + 2)
    masses += np.bincount(places - first + 1, weights * part, len(masses))
    return Losses(interval, first, masses / np.sum(masses), 0.0)
