"""Privacy losses on a grid, and their composition.

A privacy loss distribution (Koskela et al. 2020) holds the log ratio of two output distributions P
and Q, drawn from P. Independent releases add their losses, so the distribution of a whole run is a
convolution: one product of Fourier transforms for all releases.

A transform knows masses up to 1e-16 of their sum, which is too coarse for δ = 1e-12 after many
rounds. So masses are first tilted by e^(t·loss), which centres their sum at the losses that matter
for the δ in question, and tilted back at the end.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import fft

from fedjaxsim.privacy.accounting.profile import Profile

_OUTSIDE = 1e-15
"""Share of the tilted mass above the window of losses, and below it."""
_ROUNDING = 2.0**-50
"""Share of the tilted mass that rounding may move, for each round."""
_RESOLVED = 1e-4
"""Largest part of δ that rounding may be without a tilt."""
_STEPS = np.geomspace(0.03, 30.0, 40)
"""Exponents of Chernoff's bound, in units of the one that suits a Gaussian sum."""
_BLOCKS = 2048
"""Number of blocks of losses from which Chernoff's bounds are computed."""


class Losses(NamedTuple):
    """The losses of one release, in one direction, rounded to the pessimistic side.

    Their probabilities are `masses`, (n,), at the losses `interval` · (`first` + place), in nats,
    and `infinite` at ∞.
    """

    interval: float
    first: int
    masses: np.ndarray
    infinite: float

    @property
    def values(self) -> np.ndarray:
        """The losses in nats, (n,)."""
        return self.interval * (self.first + np.arange(len(self.masses)))


Pair = tuple[Losses, ...]
"""Losses of P against Q and of Q against P; one if both are the same."""


def adapted(losses: Any) -> Pair:
    """Return losses as a pair, also `dp_accounting`'s `PrivacyLossDistribution`."""
    if isinstance(losses, tuple):
        return losses
    return tuple(
        Losses(
            float(dense._discretization),
            int(dense._lower_loss),
            np.asarray(dense._probs, np.float64),
            float(dense._infinity_mass),
        )
        for dense in (losses._pmf_remove.to_dense_pmf(), losses._pmf_add.to_dense_pmf())
    )


def rounded(
    upper: np.ndarray, lower: np.ndarray, first: int, interval: float, infinite: float
) -> Losses:
    """Move the mass of cells to their ends, so that both distributions keep their mass.

    The tightest pessimistic rounding ("connect the dots", Doroshenko et al. 2022). Splitting the
    mass of cells, instead of differencing δ(ε) twice, keeps the total mass exact: the differences
    have an excess of 1e-8 a round, 10 % after 10⁷ rounds.

    `upper` and `lower`, (n,), are masses of P and Q in cells between neighbouring losses, from the
    loss `first` · `interval` on; `infinite` is P's mass above the last cell.
    """
    losses = interval * (first + np.arange(len(upper)))
    with np.errstate(over="ignore", invalid="ignore"):
        to_upper_end = (upper - np.exp(losses) * lower) / -math.expm1(-interval)
    # If masses underflow the split is unknown, and the upper end is the safe one.
    resolved = (losses < 700) & (lower > 1e-290)
    to_upper_end = np.where(resolved, np.clip(to_upper_end, 0, upper), upper)
    masses = np.zeros(len(upper) + 1)
    masses[1:] += to_upper_end
    masses[:-1] += upper - to_upper_end
    return Losses(interval, first, masses, infinite)


def mixture(weighted: Sequence[tuple[float, Pair | None]], interval: float) -> Pair:
    """Return the losses of a release drawn publicly; None stands for a loss of 0."""
    nothing = (Losses(interval, 0, np.ones(1), 0.0),)
    parts = [(weight, pair or nothing) for weight, pair in weighted if weight > 0]
    if len(parts) == 1 and parts[0][0] == 1:
        return parts[0][1]
    return tuple(
        _mixed([(weight, pair[min(way, len(pair) - 1)]) for weight, pair in parts])
        for way in range(max(len(pair) for _, pair in parts))
    )


def _mixed(parts: Sequence[tuple[float, Losses]]) -> Losses:
    first = min(losses.first for _, losses in parts)
    masses = np.zeros(max(losses.first + len(losses.masses) for _, losses in parts) - first)
    for weight, losses in parts:
        masses[losses.first - first :][: len(losses.masses)] += weight * losses.masses
    infinite = math.fsum(weight * losses.infinite for weight, losses in parts)
    return Losses(parts[0][1].interval, first, masses, infinite)


def chained(there: Losses, back: Losses) -> Losses:
    """Return the losses of P against Q from P against M and M against Q.

    A test of power α at Q has a power of at most F(α) at M, and of at most G(F(α)) at P (Dong, Roth
    and Su 2022, Theorem 2.14). This is the law with the roc curve G ∘ F: both likelihood ratios
    fall together over M.
    """
    steps = there.values[::-1]
    shares = there.masses[::-1] * np.exp(-steps)
    # M's mass from the largest ratios on, as each of the two has it.
    totals = np.cumsum(shares)
    other = np.cumsum(np.append(back.infinite, back.masses[::-1]))
    cuts = np.union1d(totals, other)
    cuts = cuts[(cuts > 0) & (cuts <= totals[-1])]
    widths = np.diff(cuts, prepend=0.0)
    middles = cuts - widths / 2
    place, step = np.searchsorted(totals, middles), np.searchsorted(other, middles)
    masses = widths * np.exp(steps[place])
    unbounded = step == 0
    # The last cell takes what rounding leaves of M.
    step = np.clip(step, 1, len(back.masses))[~unbounded]
    sums = there.first + len(steps) - 1 - place[~unbounded] + back.first + len(back.masses) - step
    first = int(np.min(sums, initial=there.first))
    total = np.bincount(sums - first, weights=masses[~unbounded], minlength=1)
    out_of_reach = float(np.sum(masses[unbounded]) + np.sum(there.masses[::-1][shares == 0]))
    return Losses(there.interval, first, total, there.infinite + out_of_reach)


def profile(groups: Sequence[tuple[Pair, int]]) -> Profile:
    """Compute the privacy profile of groups of equal releases, (losses, number), on one grid."""
    ways = [
        _Sum([(pair[min(way, len(pair) - 1)], rounds) for pair, rounds in groups])
        for way in range(max(len(pair) for pair, _ in groups))
    ]
    return Profile(
        lambda epsilon: max(way.delta(epsilon) for way in ways),
        lambda target: max(way.epsilon(target) for way in ways),
        lambda epsilons: np.max([way.deltas(epsilons) for way in ways], axis=0),
    )


class _Sum:
    """The sum of independent losses in one direction."""

    def __init__(self, parts: Sequence[tuple[Losses, int]]) -> None:
        self.parts = parts
        self.interval = parts[0][0].interval
        finite = (n * math.log1p(-losses.infinite) for losses, n in parts)
        self.infinite = -math.expm1(math.fsum(finite))
        self.margin = _ROUNDING * sum(rounds for _, rounds in parts) + 2 * _OUTSIDE
        self.tilted = functools.lru_cache(maxsize=2)(self._tilted)

    def delta(self, epsilon: float) -> float:
        """Compute δ at ε ≥ 0."""
        losses, masses, floor = self.tilted(0.0)
        above = losses > epsilon
        delta = float(-np.expm1(epsilon - losses[above]) @ masses[above]) + floor(epsilon)
        if delta * _RESOLVED < self.margin:
            losses, masses, floor = self.tilted(self._tilt(lambda logs, t: logs - t * epsilon))
            above = losses > epsilon
            fine = float(-np.expm1(epsilon - losses[above]) @ masses[above]) + floor(epsilon)
            delta = min(delta, fine)
        return min(1.0, max(0.0, delta + self.infinite))

    def deltas(self, epsilons: np.ndarray) -> np.ndarray:
        """Compute δ at ε ≥ 0, (n,), without a tilt: rounding counts as part of a tiny δ."""
        losses, masses, floor = self.tilted(0.0)
        # Sums of the masses above each place, and of none above the last.
        upper = np.append(np.cumsum(masses[::-1])[::-1], 0.0)
        weights = masses * np.exp(np.minimum(-losses, 700.0))
        lower = np.append(np.cumsum(weights[::-1])[::-1], 0.0)
        above = np.searchsorted(losses, epsilons, side="right")
        excess = upper[above] - np.exp(np.minimum(epsilons, 700.0)) * lower[above]
        return np.clip(np.maximum(excess, 0.0) + floor(epsilons) + self.infinite, 0.0, 1.0)

    def epsilon(self, target: float) -> float:
        """Compute the smallest ε ≥ 0 at a δ; inf if there is none."""
        left = target - self.infinite
        if left <= 0:
            return math.inf
        tilt = 0.0
        if left * _RESOLVED < self.margin:
            tilt = self._tilt(lambda logs, t: (logs - math.log(left)) / t)
        losses, masses, floor = self.tilted(tilt)
        upper = np.cumsum(masses[::-1])[::-1]
        with np.errstate(over="ignore"):
            lower = np.cumsum((masses * np.exp(np.minimum(-losses, 700)))[::-1])[::-1]
            # δ at each loss, from the masses above it.
            at = upper - np.exp(np.minimum(losses, 700)) * lower + floor(losses)
        over = np.flatnonzero(~(at <= left))
        place = 0 if not over.size else int(over[-1]) + 1
        if place == len(losses):
            return math.inf
        if losses[place] <= 0:
            return 0.0
        # Between two losses δ(ε) = upper − e^ε lower; its floor is the larger one, at the lower.
        begin = max(0.0, float(losses[place]) - self.interval)
        excess = float(upper[place]) + floor(begin) - left
        if excess <= 0 or lower[place] <= 0:
            return begin
        return min(max(begin, math.log(excess / lower[place])), float(losses[place]))

    def _tilt(self, cost: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> float:
        """Return the exponent t > 0 with the least `cost(log E[e^(t·sum)], t)`, roughly."""
        blocks = [_Blocks.of(losses, losses.masses) for losses, _ in self.parts]
        deviation = math.sqrt(self._variance(blocks))
        tilts = np.geomspace(1e-2, 1e4, 121) / deviation
        logs = self._log_moments(blocks, tilts)
        return float(tilts[np.argmin(cost(logs, tilts))])

    def _variance(self, blocks: "Sequence[_Blocks]") -> float:
        pairs = zip(blocks, self.parts, strict=True)
        total = math.fsum(rounds * block.variance for block, (_, rounds) in pairs)
        return max(total, 1e-6 * self.interval**2)

    def _log_moments(self, blocks: "Sequence[_Blocks]", steps: np.ndarray) -> np.ndarray:
        """Compute log E[e^(s·sum)] at exponents s, (k,)."""
        pairs = zip(blocks, self.parts, strict=True)
        logs = (rounds * block.log_moments(steps) for block, (_, rounds) in pairs)
        return np.sum(list(logs), axis=0)

    def _tilted(self, tilt: float) -> tuple[np.ndarray, np.ndarray, Callable[[Any], Any]]:
        """Return losses, their masses, and ε -> what rounding and cut tails may add to δ."""
        weights, moment = [], 0.0
        for part, rounds in self.parts:
            tilted, top = part.masses, 0.0
            if tilt:
                shifted = tilt * part.values
                top = float(np.max(shifted[tilted > 0]))
                tilted = tilted * np.exp(np.minimum(shifted - top, 0.0))
            total = float(np.sum(tilted))
            moment += rounds * (top + math.log(total))
            weights.append(tilted / total)
        begin, size = self._window(weights)
        spectrum: Any = 1.0
        for tilted, (_, rounds) in zip(weights, self.parts, strict=True):
            if len(tilted) > size:
                tilted = np.pad(tilted, (0, -len(tilted) % size)).reshape(-1, size).sum(axis=0)
            spectrum = spectrum * np.fft.rfft(tilted, size) ** rounds
        base = sum(part.first * rounds for part, rounds in self.parts)
        masses = np.roll(np.fft.irfft(spectrum, size), (base - begin) % size)
        losses = self.interval * (begin + np.arange(size))

        def scale(epsilon: Any) -> Any:
            return np.exp(np.minimum(moment - tilt * epsilon, 700.0))

        if tilt or moment:
            masses = masses * scale(losses)
        return losses, masses, lambda epsilon: self.margin * scale(epsilon)

    def _window(self, weights: Sequence[np.ndarray]) -> tuple[int, int]:
        """Return the first place and the number of the losses that hold the tilted mass."""
        blocks = [
            _Blocks.of(part, weight) for weight, (part, _) in zip(weights, self.parts, strict=True)
        ]
        steps = math.sqrt(2 * math.log(1 / _OUTSIDE) / self._variance(blocks)) * _STEPS
        least = sum(part.first * rounds for part, rounds in self.parts)
        most = sum((part.first + len(part.masses) - 1) * n for part, n in self.parts)
        log_outside = -math.log(_OUTSIDE)
        above = np.min((self._log_moments(blocks, steps) + log_outside) / steps)
        below = -np.min((self._log_moments(blocks, -steps) + log_outside) / steps)
        end = min(float(most), float(above) / self.interval)
        begin = max(float(least), float(below) / self.interval)
        first = math.floor(begin)
        return first, int(fft.next_fast_len(math.ceil(end) - first + 1, real=True) or 0)


class _Blocks(NamedTuple):
    """A distribution of losses in blocks, for bounds on its moments."""

    means: np.ndarray
    weights: np.ndarray
    width: float
    variance: float

    @classmethod
    def of(cls, losses: Losses, masses: np.ndarray) -> "_Blocks":
        size = -(-len(masses) // _BLOCKS)
        padded = np.pad(masses, (0, -len(masses) % size)).reshape(-1, size)
        weights = padded.sum(axis=1)
        used = weights > 0
        places = (
            size * np.arange(len(weights))[used] + padded[used] @ np.arange(size) / weights[used]
        )
        weights = weights[used] / np.sum(weights)
        means = losses.interval * (losses.first + places)
        width = losses.interval * (size - 1)
        variance = float(weights @ np.square(means - weights @ means)) + width**2 / 4
        return cls(means, weights, width, variance)

    def log_moments(self, steps: np.ndarray) -> np.ndarray:
        """Bound log E[e^(s·loss)] from above, (k,), by Hoeffding's lemma in each block."""
        exponents = steps[:, None] * self.means
        top = np.max(exponents, axis=1)
        sums = np.exp(exponents - top[:, None]) @ self.weights
        return top + np.log(sums) + np.square(steps * self.width) / 8
