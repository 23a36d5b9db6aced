"""Privacy losses of one Poisson-sampled Gaussian release, on a grid, rounded pessimistically.

The mass of each cell moves to its two ends so that both distributions keep their mass ("connect the
dots", Doroshenko et al. 2022), the tightest pessimistic rounding. Splitting the mass of cells,
instead of differencing δ(ε) twice, keeps the total mass exact: the differences have an excess of
1e-8 a round, 10 % after 10⁷ rounds.
"""

import math

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy.special import ndtr

_TAIL = 10.0
"""Standard deviations beyond which losses count as infinite (probability 1e-23 a round)."""


class Masses(DensePLDPmf):
    """Losses with a tight cut-off for sums over very many rounds.

    The library tries Chernoff's bounds at the orders 1/size to 20/size. These are too large for
    more than about size² rounds, and the ends lie far out, hundreds of millions of losses apart.
    Appended masses of zero bring the orders down.
    """

    def self_compose(self, num_times: int, tail_mass_truncation: float = 1e-15) -> DensePLDPmf:
        """Compute the losses of `num_times` rounds."""
        places = np.arange(self.size)
        mean = np.average(places, weights=self._probs)
        variance = np.average((places - mean) ** 2, weights=self._probs)
        best_order = math.sqrt(2 * math.log(2 / tail_mass_truncation) / (num_times * variance))
        size = int(4 / best_order)
        if size <= 16 * self.size:
            return super().self_compose(num_times, tail_mass_truncation)
        return DensePLDPmf(
            self._discretization,
            self._lower_loss,
            np.pad(self._probs, (0, size - self.size)),
            self._infinity_mass,
            self._pessimistic_estimate,
        ).self_compose(num_times, tail_mass_truncation)


def largest_loss(z: float, p: float) -> float:
    """Return the loss of one release at the end of the grid."""
    exponent = _TAIL / z + 1 / (2 * z**2)
    return math.log1p(p * math.expm1(exponent)) if exponent < 700 else exponent + math.log(p)


def _low_loss(exponent: float, p: float) -> float:
    """Return log(1 − p + p e^exponent), for an exponent below 0."""
    return math.log1p(p * math.expm1(exponent))


def _cell_masses(edges: np.ndarray, mean: float) -> np.ndarray:
    """Return the mass of N(mean, 1) between edges, (n + 1,) -> (n,), exact in both tails."""
    x = edges - mean
    upper_half = x[:-1] > 0
    return np.where(upper_half, ndtr(-x[:-1]) - ndtr(-x[1:]), ndtr(x[1:]) - ndtr(x[:-1]))


def _round_up(
    upper: np.ndarray, lower: np.ndarray, first: int, interval: float, infinite: float
) -> Masses:
    """Move the mass of cells to their ends, keeping the mass of both distributions.

    Losses are drawn from `upper`, (n,), against `lower`, (n,). The first cell begins at `first`
    intervals; `infinite` is the mass of `upper` above the last cell.
    """
    losses = interval * (first + np.arange(len(upper)))
    with np.errstate(over="ignore", invalid="ignore"):
        to_upper_end = (upper - np.exp(losses) * lower) / -math.expm1(-interval)
    # Where masses underflow the split is unknown, and the upper end is the safe one.
    known = (losses < 700) & (lower > 1e-290)
    to_upper_end = np.where(known, np.clip(to_upper_end, 0, upper), upper)
    masses = np.zeros(len(upper) + 1)
    masses[1:] += to_upper_end
    masses[:-1] += upper - to_upper_end
    # Composition divides by masses; adding 1e-250 costs nothing and cannot overflow there.
    return Masses(interval, first, masses + 1e-250, infinite, True)


def _edges_zero_out(losses: np.ndarray, z: float, p: float) -> np.ndarray:
    """Solve log(1 − p + p e^(x/z − 1/(2z²))) = loss for x; −inf below its range."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        odds = np.where(losses < 30, np.log(np.maximum(np.expm1(losses) + p, 0)), losses)
    return z * (odds - math.log(p)) + 1 / (2 * z)


def _edges_replace(losses: np.ndarray, z: float, p: float) -> np.ndarray:
    """Solve for the x at which the log ratio of the mixtures around +1 and −1 is each loss."""
    half = np.abs(losses) / 2
    with np.errstate(divide="ignore"):
        # log of (1 − p)/p e^(1/(2z²)) sinh(|loss|/2)
        log_sinh = math.log1p(-p) - math.log(p) + 1 / (2 * z**2) + half
        log_sinh += np.log(-np.expm1(-2 * half)) - math.log(2)
    asinh = np.where(
        log_sinh < 20, np.arcsinh(np.exp(np.minimum(log_sinh, 20))), log_sinh + math.log(2)
    )
    return z * np.sign(losses) * (half + asinh)


def one_fixed_size_round(z: float, fraction: float, interval: float) -> PrivacyLossDistribution:
    """Compute the privacy loss distribution of one Gaussian release with known participation.

    With probability `fraction` = q/m the client is in, known to all others, and the pair is N(0,
    z²) against N(1, z²); otherwise the loss is 0. z is in units of the client's distance.
    """
    shift = 1 / z
    last = math.ceil((_TAIL / z + 1 / (2 * z**2)) / interval)
    losses = interval * np.arange(-last, last + 1)
    edges = losses * z + shift / 2  # the loss at x is x/z − 1/(2z²)
    absent, present = (fraction * _cell_masses(edges, mean) for mean in (0.0, shift))
    # Below the grid: to the lowest cell, whose loss is larger.
    present[0] += fraction * ndtr(edges[0] - shift)
    absent[last] += 1 - fraction
    present[last] += 1 - fraction
    above = fraction * ndtr(shift - edges[-1])
    return PrivacyLossDistribution(_round_up(present, absent, -last, interval, float(above)))


def one_round(z: float, p: float, replace: bool, interval: float) -> PrivacyLossDistribution:
    """Compute the privacy loss distribution of one release, for 0 < p < 1.

    The pair is N(0, z²) against (1−p) N(0, z²) + p N(1, z²), in both directions, or, where a client
    is replaced, (1−p) N(0, z²) + p N(±1, z²). z is in units of one message's norm.
    """
    shift = 1 / z
    top = largest_loss(z, p)
    if replace:
        # The opposite message's loss where one message's loss is `top`.
        opposite = _low_loss(-_TAIL * shift - 1.5 * shift**2, p)
        last = math.ceil((top - opposite) / interval) + 1
        first = -last
        edges = _edges_replace(interval * np.arange(first, last + 1), z, p)
    else:
        last = math.ceil(top / interval)
        first = math.floor(_low_loss(-_TAIL * shift - shift**2 / 2, p) / interval)
        edges = _edges_zero_out(interval * np.arange(first, last + 1), z, p)
    absent, present = _cell_masses(edges, 0.0), _cell_masses(edges, shift)
    mixed = (1 - p) * absent + p * present
    above = (1 - p) * ndtr(-edges[-1]) + p * ndtr(shift - edges[-1])
    # Mass below the first cell has smaller losses, and is lifted to that cell.
    lifted = mixed.copy()
    lifted[0] += (1 - p) * ndtr(edges[0]) + p * ndtr(edges[0] - shift)
    if replace:
        # The other distribution is the mirror image, and so is the grid.
        return PrivacyLossDistribution(
            _round_up(lifted, mixed[::-1], first, interval, float(above))
        )
    remove = _round_up(lifted, absent, first, interval, float(above))
    # Losses change sign with the direction, so the cells come in the opposite order: mass above the
    # last cell is lifted, and mass below the first one counts as infinite.
    lifted = absent[::-1].copy()
    lifted[0] += ndtr(-edges[-1])
    add = _round_up(lifted, mixed[::-1], -last, interval, float(ndtr(edges[0])))
    return PrivacyLossDistribution(remove, add)
