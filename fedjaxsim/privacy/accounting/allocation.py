"""Accounting of random allocation: a client sends one Gaussian message in one of t rounds.

The round is uniformly random and hidden. For zero-out the pair of t rounds is

    P = (1/t) Σ_i N(e_i, z² I),  Q = N(0, z² I),  L = dP/dQ = (1/t) Σ_i exp(x_i/z² − 1/(2z²)),

also for messages that depend on earlier releases (Feldman and Shenfeld 2025, arXiv 2502.08202). To
see this, make a round's release from x_i by a rotation that points e to the message, and by more
noise for a norm below 1: both may follow from earlier releases, and the client's message does not
follow from its turn, since a client that has had its turn sends nothing more. Later turns are
independent of all earlier ones, so periods compose. (If messages follow from earlier turns, P is a
mixture of such pairs, and δ is jointly convex.)

Under Q, L is the mean of t independent lognormal numbers with mean 1. Both δ(ε) = E_Q[(L − e^ε)₊],
of P against Q, and E_Q[(1 − e^ε L)₊], of Q against P, are expectations of convex functions of L. So
a spread of L that keeps its mean makes both larger, and sums of spread numbers are spread sums.
Here a value between two points of a grid moves to both such that the mean stays the same. This is
the law of a pair that dominates the true one, in both directions and at every ε.

RDP of P against Q at integers α follows from

    E[L^α] = t^(−α) α! [s^α] (Σ_j e^(j(j−1)/(2z²)) s^j/j!)^t,

and RDP of Q against P from E[L^(−b)] = ∫ E[e^(−λL)] λ^(b−1) dλ/Γ(b), by quadrature. Neither
cancels: both are computed less 1.

A replacement costs most if messages become the opposite ones. With messages a_i, b_i of norm 1
(shorter ones are padded) and u = ⟨a_i, x_i⟩, v = ⟨b_i, x_i⟩ of the last round,

    δ = E[ψ(s + e^u/t − c e^v/t)]

under N(0, z² I), with a convex ψ and an s of earlier rounds. Its derivative in the correlation of u
and v is E[∂²ψ/∂u∂v] = −c E[ψ″ e^(u+v)]/t² ≤ 0 (Plackett's identity), so −1 is the worst. δ is then
a convex function of s, and the argument goes on with the round before. The ratio of both correlated
sums has no law that is cheap to compute, so two zeroings are charged, which cost more: by losses,
the composition of both roc curves, exact for a known turn; by RDP, the weak triangle inequality
(Mironov 2017, Proposition 11).
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from scipy.special import gammaln, ndtr

from fedjaxsim.privacy.accounting.gaussian import cell_masses, sampled
from fedjaxsim.privacy.accounting.losses import Losses, Pair, chained
from fedjaxsim.privacy.accounting.rdp import log_expm1

LARGEST_ORDER = 64
"""RDP of larger orders is a known turn's, without amplification."""
_LEAST_NOISE = 0.1
"""Less noise costs as much as with a known turn: the hidden one saves at most log t."""
_TAIL = 9.5
"""Standard deviations beyond which likelihood ratios count as 0 or ∞."""
_NEGLIGIBLE = 1e-24
"""Mass at either end that counts as a ratio of 0 or ∞, of each sum."""
_OF_DEVIATION = 0.04
"""Grid of log L in units of the standard deviation of L, or of 1 if that is larger."""
_COARSEST = 0.1
_WIDEST = 1.0
"""On a coarser grid of losses, in nats, turns count as known."""
_SLACK = 1e-3
"""Relative error that the quadrature is granted."""
_NODES = 512
_MOST_LOG = 60.0
"""Largest log λ of the quadrature: e^60 is a float32."""


class _Law(NamedTuple):
    """The law of a likelihood ratio under Q: `masses`, (n,), at e^(step · (first + place)).

    Q has the mass `zero` at 0, and P the mass `infinite` at ∞.
    """

    step: float
    first: int
    masses: np.ndarray
    zero: float
    infinite: float

    @property
    def values(self) -> np.ndarray:
        return np.exp(self.step * (self.first + np.arange(len(self.masses))))


@functools.lru_cache(maxsize=64)
def losses(z: float, period: int, interval: float) -> Pair:
    """Compute the losses of t rounds with one hidden turn, for zero-out, in both directions."""
    if not hides(z, period, interval):
        return sampled(z, 1.0, False, interval)
    deviation = math.sqrt(math.expm1(1 / z**2) / period)
    finest = _OF_DEVIATION * min(1.0, deviation)
    stride = 2 ** max(0, math.floor(math.log2(finest / interval)))
    law = _allocated(z, period, interval * stride)
    absent = np.zeros(stride * (len(law.masses) - 1) + 1)
    absent[::stride] = law.masses
    present = np.zeros_like(absent)
    present[::stride] = law.masses * law.values
    first, last = stride * law.first, stride * (law.first + len(law.masses) - 1)
    remove = Losses(interval, first, present, law.infinite)
    return remove, Losses(interval, -last, absent[::-1].copy(), law.zero)


@functools.lru_cache(maxsize=64)
def replaced_losses(z: float, period: int, distance: float, interval: float) -> Pair:
    """Compute the losses of t rounds with one hidden turn, for a replacement; see `replaced`."""
    turn_known = sampled(z / distance, 1.0, False, interval)
    if not hides(z, period, interval):
        return turn_known
    hidden = (chained(*losses(z, period, interval)),)
    if distance == 2:  # two zeroings, whose turn is known, cost no less
        return hidden
    return min(turn_known, hidden, key=lambda pair: float(pair[0].masses @ pair[0].values))


def hides(z: float, period: int, interval: float) -> bool:
    """Return whether losses belong to a hidden turn; else the turn counts as known."""
    return z >= _LEAST_NOISE and period > 1 and interval <= _WIDEST


def _allocated(z: float, period: int, step: float) -> _Law:
    """Return a spread law of L on a grid of log L, by doubling the number of terms.

    A mean of n terms enters L with the weight n/t, so its grid may be √(t/n) times as coarse.
    """

    def width(terms: int) -> float:
        halvings = math.floor(math.log2(period / terms) / 2)
        room = math.floor(math.log2(max(1.0, _COARSEST / step)))
        return step * 2.0 ** max(0, min(halvings, room))

    terms, law = 1, _one_term(z, width(1))
    for bit in f"{period:b}"[1:]:
        law, terms = _mean(law, law, 0.5, width(2 * terms)), 2 * terms
        if bit == "1":
            weight = terms / (terms + 1)
            law = _mean(law, _one_term(z, law.step), weight, width(terms + 1))
            terms += 1
    return law


def _one_term(z: float, step: float) -> _Law:
    """Return a spread law of the ratio of N(1, z²) and N(0, z²)."""
    shift = 1 / z
    last = math.ceil((_TAIL * shift + shift**2 / 2) / step)
    first = -last
    logs = step * np.arange(first, last + 1)
    values, edges = np.exp(logs), z * logs + shift / 2
    absent, present = cell_masses(edges, 0.0), cell_masses(edges, shift)
    upper = np.clip((present / values[:-1] - absent) / math.expm1(step), 0, absent)
    masses = np.append(absent - upper, ndtr(-edges[-1]))
    masses[1:] += upper
    below = float(ndtr(edges[0] - shift) / values[0])
    masses[0] += below
    zero = max(0.0, float(ndtr(edges[0])) - below)
    infinite = max(0.0, float(ndtr(shift - edges[-1]) - values[-1] * ndtr(-edges[-1])))
    return _Law(step, first, masses, zero, infinite)


def _mean(a: _Law, b: _Law, weight: float, step: float) -> _Law:
    """Return a spread law of w A + (1 − w) B, on a grid of a `step` that divides theirs.

    Pairs of places at one distance have the same ratio, so they move by the same amount.
    """
    ratio = round(a.step / step)
    same = a is b
    logs = math.log(weight), math.log1p(-weight)
    low = min(a.first, b.first)
    most = max(a.first + len(a.masses), b.first + len(b.masses))
    first = ratio * low + math.floor(min(logs) / step) - 1
    masses = np.zeros(ratio * (most - low) + math.ceil(-min(logs) / step) + 4)
    growth = math.expm1(step)

    def add(place: int, amounts: np.ndarray, shift: float) -> None:
        """Add masses that start at a place of the coarse grid, moved by a shift of log L."""
        cells = math.floor(shift / step)
        part = min(1.0, max(0.0, math.expm1(shift - cells * step) / growth))
        start = ratio * place + cells - first
        end = start + ratio * (len(amounts) - 1) + 1
        masses[start:end:ratio] += (1 - part) * amounts
        masses[start + 1 : end + 1 : ratio] += part * amounts

    offset = b.first - a.first
    for distance in range(0 if same else -len(a.masses) + 1 + offset, len(b.masses) + offset):
        begin = max(0, offset - distance)
        end = min(len(a.masses), len(b.masses) + offset - distance)
        if begin >= end:
            continue
        lag = distance - offset
        amounts = a.masses[begin:end] * b.masses[begin + lag : end + lag]
        shift = float(np.logaddexp(logs[0], logs[1] + distance * a.step))
        add(a.first + begin, 2 * amounts if same and distance else amounts, shift)
    if b.zero > 0:
        add(a.first, a.masses * b.zero, logs[0])
    if a.zero > 0:
        add(b.first, b.masses * a.zero, logs[1])
    infinite = weight * a.infinite + (1 - weight) * b.infinite
    return _trimmed(_Law(step, first, masses, a.zero * b.zero, infinite))


def _trimmed(law: _Law) -> _Law:
    """Move the rarest ratios to 0 and ∞, with the same mean."""
    values = law.values
    begin = int(np.searchsorted(np.cumsum(law.masses), _NEGLIGIBLE))
    above = np.cumsum((law.masses * values)[::-1])
    end = len(values) - int(np.searchsorted(above, _NEGLIGIBLE))
    masses = law.masses[begin:end].copy()
    few, many = law.masses[:begin], law.masses[end:]
    lifted = float(few @ (values[:begin] / values[begin]))
    masses[0] += lifted
    masses[-1] += float(np.sum(many))
    zero = law.zero + max(0.0, float(np.sum(few)) - lifted)
    infinite = law.infinite + float(many @ (values[end:] - values[end - 1]))
    return _Law(law.step, law.first + begin, masses, zero, infinite)


def rdp(z: Any, period: int, orders: tuple[float, ...], xp: Any = np) -> Any:
    """Compute an upper bound on RDP of t rounds with one hidden turn, for zero-out, (orders,).

    Between integers log E[L^α] is convex, so the chord bounds it. The turn's being known bounds
    every order.
    """
    z = xp.asarray(z, float)
    alphas = np.asarray(orders, np.float64)
    turn_known = xp.asarray(alphas / 2, z.dtype) / z**2
    small = alphas <= LARGEST_ORDER
    if period == 1 or not np.any(small):
        return turn_known
    chosen = alphas[small]
    logs = xp.concatenate([xp.zeros(2, z.dtype), xp.logaddexp(0.0, _log_moments(z, period, xp))])
    lower = np.floor(chosen).astype(int)
    part = xp.asarray(chosen - lower, z.dtype)
    remove = (1 - part) * logs[lower] + part * logs[np.minimum(lower + 1, LARGEST_ORDER)]
    cost = xp.maximum(remove, _log_inverse_moments(z, period, chosen - 1, xp))
    cost = cost / xp.asarray(chosen - 1, z.dtype)
    # Rest orders, which the turn's being known bounds, keep their places.
    places = np.cumsum(small) - 1
    return xp.where(small, xp.fmin(cost[np.maximum(places, 0)], turn_known), turn_known)


def replaced(z: Any, period: int, orders: tuple[float, ...], distance: float, xp: Any = np) -> Any:
    """Compute an upper bound on RDP for replacing a client, (orders,), the messages so far apart.

    D_α ≤ (α − 1/2)/(α − 1) D_2α + D_(2α−1), both for zero-out.
    """
    alphas = np.asarray(orders, np.float64)
    z = xp.asarray(z, float)
    turn_known = xp.asarray(distance**2 * alphas / 2, z.dtype) / z**2
    there = rdp(z, period, tuple((2 * alphas).tolist()), xp)
    back = rdp(z, period, tuple((2 * alphas - 1).tolist()), xp)
    factor = xp.asarray((alphas - 0.5) / (alphas - 1), z.dtype)
    return xp.fmin(factor * there + back, turn_known)


def _logsumexp(values: Any, xp: Any) -> Any:
    if xp is np:
        from scipy.special import logsumexp
    else:
        from jax.scipy.special import logsumexp
    return logsumexp(values, axis=1)


def _log_moments(z: Any, period: int, xp: Any) -> Any:
    """Compute log(E[L^α] − 1) at α = 2, …, 64.

    A power of (Σ s^j/j! + rest) less the power of the sum is a polynomial with positive
    coefficients, known in logarithms; that sum to the n is Σ (n s)^j/j!.
    """
    j = np.arange(LARGEST_ORDER + 1)
    factorial = gammaln(j + 1)
    place = j[2:, None] - j[None, 2:]

    def power(terms: int) -> Any:
        return xp.asarray(j * math.log(terms) - factorial, z.dtype)

    def joined(first: Any, second: Any) -> Any:
        """Add coefficients from j = 2 on to those from j = 0 on."""
        return xp.concatenate([second[:2], xp.logaddexp(first, second[2:])])

    def product(first: Any, second: Any) -> Any:
        """Multiply polynomials with coefficients from j = 0 and from j = 2 on."""
        terms = first[np.maximum(place, 0)] + second[None, :]
        return _logsumexp(xp.where(place >= 0, terms, -math.inf), xp)

    single = log_expm1(xp.asarray(j[2:] * (j[2:] - 1) / 2, z.dtype) / z**2, xp) - factorial[2:]
    single = xp.asarray(single, z.dtype)
    excess, terms = single, 1
    for bit in f"{period:b}"[1:]:
        excess = product(joined(excess, power(terms) + math.log(2)), excess)
        terms *= 2
        if bit == "1":
            grown = product(joined(excess, power(terms)), single)
            excess = xp.logaddexp(grown, product(power(1), excess))
            terms += 1
    return excess + xp.asarray(factorial[2:] - j[2:] * math.log(period), z.dtype)


def _log_inverse_moments(z: Any, period: int, powers: np.ndarray, xp: Any) -> Any:
    """Compute log E[L^(−b)] for powers b > 0, (powers,), and ∞ where it is not resolved."""
    largest = float(np.max(powers))
    # E[L^−b] is largest where every x is about −b/(t z), in standard deviations.
    reach = largest / (period * z) + 13 / math.sqrt(period)
    last = xp.maximum(reach / z, math.log((largest + 12 * math.sqrt(largest) + 80) / period))
    resolved = last < _MOST_LOG
    last = xp.where(resolved, last, 0.0)
    start = -14.0 - math.log(period)
    fractions = xp.asarray(np.linspace(0, 1, _NODES), z.dtype)
    logs = start + (last - start) * fractions
    rates = xp.exp(logs)[:, None]
    span = -xp.minimum(reach, 1e3) - 10, 10.0
    width = (span[1] - span[0]) / (_NODES - 1)
    x = span[0] + (span[1] - span[0]) * fractions
    weights = -(x**2) / 2 + xp.log(width / math.sqrt(2 * math.pi))
    distance = xp.expm1(x / z - 1 / (2 * z**2))[None, :]  # L − 1
    gap = rates * distance
    near = xp.abs(gap) < 0.1
    little = xp.where(near, gap, 0.0)
    series = little**2 / 2 * (1 - little / 3 * (1 - little / 4 * (1 - little / 5)))
    bounded = xp.clip(gap, -1.0, 1e30)
    surplus = xp.where(near, series, xp.expm1(-bounded) + bounded)
    small = xp.log1p(surplus @ xp.exp(weights))
    large = _logsumexp(weights[None, :] - xp.minimum(gap, 1e30), xp)
    # t log(E[e^(−λ(L − 1))]), which is positive.
    excess = period * xp.where(rates[:, 0] < 1, small, large)
    term = xp.log(-xp.expm1(-xp.maximum(excess, 1e-37))) + excess - period * rates[:, 0]
    spread = xp.asarray(powers, z.dtype)[:, None] * (logs + math.log(period))[None, :]
    step = xp.log((last - start) / (_NODES - 1))
    total = _logsumexp(spread + term[None, :], xp) + step - xp.asarray(gammaln(powers), z.dtype)
    return xp.where(resolved, xp.logaddexp(0.0, total + math.log1p(_SLACK)), math.inf)
