"""Privacy losses of one Poisson-sampled Gaussian release, on a grid, rounded pessimistically.

For zero-out the pair is N(0, z²) against (1−p) N(0, z²) + p N(1, z²), with the numbers of
add/remove: an absent client and a zero message look the same.

Replacing a client is the pair (1−p) N(0, z²) + p N(±1, z²), the worst case of opposite messages.
For messages a, b of norm at most 1, pad both to norm 1 with orthogonal coordinates, and let a point
the first axis. The best test of a against a mixture of 0 and b, averaged over the other axes'
noise, is as good against 0 and −a: moving the output by a + b scales the likelihood ratio of a by
e^(1+⟨a, b⟩) and that of b by no more. So sensitivities below 2 gain nothing here: the direction
shared by a and b reveals participation. (dp_accounting's PLD reads replacement in the same way, its
RDP as fixed-size sampling, with z relative to the distance of the two.)
"""

import functools
import math

import numpy as np
from scipy.special import ndtr

from fedjaxsim.privacy.accounting.losses import Pair, rounded

_TAIL = 10.0
"""Standard deviations beyond which losses count as infinite (probability 1e-23 a round)."""


def largest_loss(z: float, p: float) -> float:
    """Return the loss of one release at the end of the grid."""
    exponent = _TAIL / z + 1 / (2 * z**2)
    return math.log1p(p * math.expm1(exponent)) if exponent < 700 else exponent + math.log(p)


def _low_loss(exponent: float, p: float) -> float:
    """Return log(1 − p + p e^exponent), for an exponent below 0."""
    return exponent if p == 1 else math.log1p(p * math.expm1(exponent))


def _cell_masses(edges: np.ndarray, mean: float) -> np.ndarray:
    """Return the mass of N(mean, 1) between edges, (n + 1,) -> (n,), exact in both tails."""
    x = edges - mean
    upper_half = x[:-1] > 0
    return np.where(upper_half, ndtr(-x[:-1]) - ndtr(-x[1:]), ndtr(x[1:]) - ndtr(x[:-1]))


def _edges_zero_out(losses: np.ndarray, z: float, p: float) -> np.ndarray:
    """Solve log(1 − p + p e^(x/z − 1/(2z²))) = loss for x; −inf below its range."""
    if p == 1:
        return z * losses + 1 / (2 * z)
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


@functools.lru_cache(maxsize=64)
def one_round(z: float, p: float, replace: bool, interval: float) -> Pair:
    """Compute the losses of one release, in both directions, for 0 < p ≤ 1.

    z is in units of one message's norm. Without sampling, take z over the distance and zero-out.
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
        return (rounded(lifted, mixed[::-1], first, interval, float(above)),)
    remove = rounded(lifted, absent, first, interval, float(above))
    # Losses change sign with the direction, so the cells come in the opposite order: mass above the
    # last cell is lifted, and mass below the first one counts as infinite.
    lifted = absent[::-1].copy()
    lifted[0] += ndtr(-edges[-1])
    return remove, rounded(lifted, mixed[::-1], -last, interval, float(ndtr(edges[0])))
