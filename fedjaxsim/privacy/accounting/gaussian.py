"""Accounting of Gaussian releases: without sampling, with it, and correlated over rounds.

Releases with full participation are, for the adversary, one Gaussian release with
μ = s √(Σ rounds / z²), s the sensitivity in units of z. Its profile is exact:
δ(ε) = Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2) (Balle and Wang 2018, Theorem 8; Dong, Roth and Su 2022,
Corollary 2.13).

A Poisson-sampled release has privacy losses on a grid. For zero-out the pair is N(0, z²) against
(1−p) N(0, z²) + p N(1, z²), with the numbers of add/remove: an absent client and a zero message
look the same. Replacing a client is the pair (1−p) N(0, z²) + p N(±1, z²), the worst case of
opposite messages. For messages a, b of norm at most 1, pad both to norm 1 with orthogonal
coordinates, and let a point the first axis. The best test of a against a mixture of 0 and b,
averaged over the other axes' noise, is as good against 0 and −a: moving the output by a + b scales
the likelihood ratio of a by e^(1+⟨a, b⟩) and b's by no more. So sensitivities below 2 gain
nothing here: the direction shared by a and b reveals participation. (dp_accounting's PLD reads
replacement in the same way, its RDP as fixed-size sampling, with z relative to the distance of the
two.)

With correlated noise and messages of norm 1, round t releases x_t + z Σ_{j<b} d_j ξ_{t−j}, ξ_s
independent standard normal. With D the lower triangular Toeplitz matrix of d, all releases are
D (D⁻¹ x + z ξ): one Gaussian release of D⁻¹ x, also for messages that depend on earlier releases
(Denisov et al. 2022, Theorem 2.1). A client of group g of B takes part in the rounds g, g + B, …,
and d makes all entries of D⁻¹ nonnegative, so equal messages of group 0 move D⁻¹ x furthest.

With a banded C the noise is z C⁻¹ ξ, and a message of round t moves C x in rounds t to t + b − 1
alone, by multiples of the b coefficients c. If a client's turns are b rounds apart or more, and it
takes part in each by its own coin, the likelihood ratio of all releases is a product over its
turns. Given all earlier releases, each factor is 1 − p + p e^(⟨c ⊗ m, y⟩/z² − ‖c ⊗ m‖²/(2z²)), with
y the C-transformed releases of these rounds less what others sent: the ratio of one sampled release
at z/‖c‖, though others' messages follow from the releases in between. (The client's own message may
follow from its earlier coins: a mixture of such pairs, and δ is jointly convex.)
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import erfcx, ndtr

from fedjaxsim import checks
from fedjaxsim.privacy.accounting.losses import Pair, rounded
from fedjaxsim.privacy.accounting.profile import NOTHING, Profile, smallest
from fedjaxsim.privacy.entries import check_delta

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
_MOST_MU = 1e12
"""At a larger μ, ε is about 10²³ at most, beyond the resolution of float64."""
_MOST_WEIGHTS, _LEAST_WEIGHT = 2**15, 2.0**-40
_TAIL = 10.0
"""Standard deviations beyond which losses count as infinite (probability 1e-23 a round)."""


def _mills(x: np.ndarray) -> np.ndarray:
    """Return (1 − Φ(x)) / φ(x), without cancellation or underflow for large x."""
    return math.sqrt(math.pi / 2) * erfcx(x / math.sqrt(2))


def _mills_drop(x: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Return _mills(x) − _mills(x + step) for step > 0."""
    # For small steps the difference would cancel, and three-point Gauss-Legendre integration of
    # −m'(t) = 1 − t m(t) is exact to rounding.
    middle, reach = x + step / 2, step / 2 * math.sqrt(0.6)
    slopes = [1 - t * _mills(t) for t in (middle - reach, middle, middle + reach)]
    integral = step * (5 * slopes[0] + 8 * slopes[1] + 5 * slopes[2]) / 18
    return np.where(step > 0.01, _mills(x) - _mills(x + step), integral)


def log_delta(epsilon: float, mu: ArrayLike) -> np.ndarray:
    """Compute log δ(ε) of μ-GDP, (...), μ finite and positive, with a small relative error in δ."""
    mus = np.asarray(mu, np.float64)
    a = mus / 2 - epsilon / mus
    b = -mus / 2 - epsilon / mus
    log_density = -a * a / 2 - _LOG_SQRT_2PI
    # e^ε Φ(b) = φ(a) (1 − Φ(−b)) / φ(b), since e^ε φ(b) = φ(a).
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        likely = np.log(ndtr(a) - np.exp(log_density) * _mills(-b))
        rare = log_density + np.log(_mills_drop(-a, mus))
    return np.where(a > 1, likely, rare)


def delta(epsilon: float, mu: float) -> float:
    """Compute δ(ε) of μ-GDP, for ε, μ ≥ 0; 1 for μ above 10¹²."""
    checks.in_range("[0, inf]", epsilon=epsilon)
    if mu == 0 or epsilon == math.inf:
        return 0.0
    if mu > _MOST_MU:
        return 1.0
    return float(np.exp(log_delta(epsilon, mu)))


def epsilon(delta: float, mu: float) -> float:
    """Compute the smallest ε ≥ 0 with δ(ε) ≤ delta, never rounded below it; inf at μ > 10¹²."""
    check_delta(delta)
    if mu == 0:
        return 0.0
    if mu > _MOST_MU:
        return math.inf
    # δ(ε) ≤ Φ(μ/2 − ε/μ) ≤ exp(−(ε/μ − μ/2)²/2) for ε ≥ μ²/2 bounds the root.
    upper = mu * mu / 2 + mu * math.sqrt(-2 * math.log(delta))
    return smallest(lambda value: float(log_delta(value, mu)), math.log(delta), upper)


def profile(mu: float) -> Profile:
    """Return the privacy profile of μ-GDP."""
    if mu == 0:
        return NOTHING
    return Profile(lambda value: delta(value, mu), lambda value: epsilon(value, mu))


def _log_mixture(exponent: float, p: float) -> float:
    """Return log(1 − p + p e^exponent)."""
    if exponent > 700:
        return exponent + math.log(p)
    return exponent if p == 1 else math.log1p(p * math.expm1(exponent))


def cell_masses(edges: np.ndarray, mean: float) -> np.ndarray:
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
def sampled(z: float, p: float, replace: bool, interval: float) -> Pair:
    """Compute the losses of one sampled release, in both directions, for 0 < p ≤ 1.

    z is in units of one message's norm. Without sampling, take z over the distance and zero-out.
    """
    shift = 1 / z
    top = _log_mixture(_TAIL / z + 1 / (2 * z**2), p)
    if replace:
        # The opposite message's loss where one message's loss is `top`.
        opposite = _log_mixture(-_TAIL * shift - 1.5 * shift**2, p)
        last = math.ceil((top - opposite) / interval) + 1
        first = -last
        edges = _edges_replace(interval * np.arange(first, last + 1), z, p)
    else:
        last = math.ceil(top / interval)
        first = math.floor(_log_mixture(-_TAIL * shift - shift**2 / 2, p) / interval)
        edges = _edges_zero_out(interval * np.arange(first, last + 1), z, p)
    absent, present = cell_masses(edges, 0.0), cell_masses(edges, shift)
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


def coefficients(bands: int, power: float) -> np.ndarray:
    """Compute d, (bands,): the first coefficients of (1 − x)^power, float32 numbers in float64.

    Power 1/2 is the banded inverse square root of Kalinin, McKenna, Upadhyay and Lampert (2025,
    arXiv 2505.12128); with one band noise is independent.
    """
    j = np.arange(1, bands)
    return np.cumprod([1.0, *((j - 1 - power) / j)]).astype(np.float32).astype(np.float64)


def square_root(bands: int) -> np.ndarray:
    """Compute the first coefficients of (1 − x)^(−1/2), C(2j, j)/4^j, over their norm, (bands,)."""
    j = np.arange(1, bands)
    c = np.cumprod([1.0, *((j - 0.5) / j)])
    return c / np.linalg.norm(c)


def inverse_series(coefficients: Sequence[float]) -> np.ndarray:
    """Compute w, the coefficients of 1/c(x), without a tail below 2⁻⁴⁰ of the first one.

    Raises:
      ValueError: if w does not decay so within 2¹⁵ terms: noise would grow from round to round.
    """
    from scipy.signal import lfilter  # slow to import

    first = np.zeros(2 * _MOST_WEIGHTS)
    first[0] = 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        weights = np.asarray(lfilter([1.0], np.asarray(coefficients, np.float64), first))
        tails = np.sqrt(np.cumsum(np.square(weights[::-1]))[::-1])
    length = int(np.sum(~(tails <= _LEAST_WEIGHT * weights[0])))
    if length > _MOST_WEIGHTS:
        raise ValueError(
            "coefficients must have an inverse series that decays, as positive and decreasing ones "
            f"have: the noise of {tuple(coefficients)} would not"
        )
    return weights[:length]


def squared_sensitivity(d: np.ndarray, rounds: Any, groups: int, xp: Any = np) -> Any:
    """Compute max_g ‖D⁻¹ u_g‖², u_g the indicator of the rounds of group g, in units of z.

    `d`, (bands,), begins with 1, and no other is positive: then no entry of D⁻¹ is negative. The
    number of rounds may be traced if `xp` is jax.numpy.
    """
    if xp is np:
        from scipy.signal import lfilter  # slow to import

        takes_part = (np.arange(rounds) % groups == 0).astype(np.float64)
        effect = lfilter([1.0], d, takes_part)
        return np.float64(math.fsum(np.square(effect)))
    from jax.lax import fori_loop

    past = xp.asarray(-d[1:], dtype=float)

    def add(t, carry):
        total, last = carry
        effect = (t % groups == 0) + xp.sum(past * last)
        return total + effect**2, xp.concatenate([effect[None], last])[: len(past)]

    return fori_loop(0, rounds, add, (xp.zeros(()), xp.zeros(len(past))))[0]
