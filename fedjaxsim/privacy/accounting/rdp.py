"""Rényi differential privacy of the Poisson-subsampled Gaussian mechanism.

An upper bound, 5 to 15 % above the truth if it is good; cheap enough to bracket the tight
accountant, and sound at any δ. In float64 on the host; at integer orders also inside jit. Sources:
Mironov, Talwar and Zhang 2019 (the mechanism); Canonne, Kamath and Steinke 2020, Proposition 12
(conversion to ε).
"""

import functools
import math
from typing import Any

import numpy as np
from scipy.special import gammaln, logsumexp

from fedjaxsim.privacy.accounting.profile import Profile, costs
from fedjaxsim.privacy.entries import Adjacency, Entry, check_delta

INTEGER_ORDERS = (*range(2, 65), 72, 80, 96, 128, 192, 256, 384, 512, 1024)
"""Orders of the closed form, shared with the bound inside jit."""
FRACTIONAL_ORDERS = tuple(tenths / 10 for tenths in range(11, 100) if tenths % 10)
"""Best orders for large ε (from about 10)."""
ORDERS = (*sorted((*INTEGER_ORDERS, *FRACTIONAL_ORDERS)), math.inf)
"""At order ∞, RDP is ε at δ = 0."""

_LEAST_NOISE = 1e-100
"""Squares of less noise underflow, and it certifies next to nothing."""
_SMALL = 64
"""Orders above it form a group, so that no smaller order is padded to 1024 terms."""
_POINTS = 200_000
"""Most points of a quadrature."""


@functools.cache
def _log_binomials(orders: tuple[int, ...]) -> np.ndarray:
    """Return log C(α, k) for k = 2, …, largest order, (orders, k); −inf for k > α."""
    alpha, k = np.array(orders, np.float64)[:, None], np.arange(2, max(orders) + 1)
    table = gammaln(alpha + 1) - gammaln(k + 1) - gammaln(np.maximum(alpha - k, 0) + 1)
    return np.where(k <= alpha, table, -np.inf)


def log_expm1(x: Any, xp: Any = np) -> Any:
    """Return log(e^x − 1) for x > 0, without overflow, by numpy or jax.numpy."""
    return x + xp.log(-xp.expm1(-x))


def gaussian(
    entry: Entry, replace: float, adjacency: Adjacency, orders: tuple[float, ...], xp: Any = np
) -> Any:
    """Compute RDP of one Gaussian round, (orders,); inside jit at integer orders, for z > 0.

    There a replacement under sampling, which needs a quadrature, costs ∞.
    """
    z, p, _ = entry
    replaced = adjacency == "replace"
    distance = replace if replaced else 1.0
    if xp is np:
        return np.array(one_round(orders, *((z / distance, 1.0) if p == 1 else (z, p, replaced))))
    z = xp.asarray(z)
    full = xp.asarray(orders, z.dtype) / (2 * (z / distance) ** 2)
    if isinstance(p, float) and p == 1:
        return full
    sampled = (p > 0) & (p < 1)
    amplified = xp.inf if replaced else poisson(z, xp.where(sampled, p, 0.5), orders, xp)
    return xp.where(sampled, amplified, xp.where(xp.asarray(p) >= 1, full, 0.0))


@functools.lru_cache(maxsize=4096)
def one_round(
    orders: tuple[float, ...], z: float, p: float, replace: bool = False
) -> tuple[float, ...]:
    """Compute RDP of one round at some orders.

    z is in units of one message's norm. Without sampling, take z over the distance and zero-out.
    """
    alphas = np.asarray(orders, np.float64)
    if p == 0 or z == math.inf:
        return (0.0,) * len(orders)
    if z < _LEAST_NOISE:
        return (math.inf,) * len(orders)
    if p == 1:
        return tuple((alphas / (2 * z**2)).tolist())
    values = np.full_like(alphas, math.inf)
    if replace:
        finite = np.isfinite(alphas)
        values[finite] = _by_quadrature(alphas[finite], z, p, True)
        return tuple(values.tolist())
    are_integers = alphas == np.floor(alphas)
    integers = are_integers & np.isfinite(alphas)
    if np.any(integers):
        with np.errstate(over="ignore"):
            values[integers] = poisson(np.float64(z), p, tuple(alphas[integers]), np)
    if not np.all(are_integers):
        values[~are_integers] = _by_quadrature(alphas[~are_integers], z, p, False)
    return tuple(values.tolist())


def poisson(z: Any, p: Any, orders: tuple[float, ...], xp: Any) -> Any:
    """Compute RDP of one sampled round at ascending integer orders, (orders,), for 0 < p < 1.

    Σ_k C(α, k) p^k (1 − p)^(α−k) e^{k(k−1)/(2z²)} minus Σ_k C(α, k) p^k (1 − p)^(α−k) = 1 leaves
    terms with e^x − 1 in place of e^x: no cancellation, however little a round costs. (In float32
    the textbook sum is wrong by half.)
    """
    if xp is np:
        from scipy.special import logsumexp
    else:
        from jax.scipy.special import logsumexp
    integers, logs = tuple(map(int, orders)), []
    small = sum(order <= _SMALL for order in integers)
    for group in filter(None, (integers[:small], integers[small:])):
        table = _log_binomials(group).astype(z.dtype)
        k = xp.arange(2, table.shape[1] + 2, dtype=z.dtype)[None]
        cost = log_expm1(k * (k - 1) / (2 * z**2), xp) + k * xp.log(p)
        absent = xp.maximum(np.array(group, z.dtype)[:, None] - k, 0) * xp.log1p(-p)
        logs.append(logsumexp(table + absent + cost, axis=1))
    return xp.logaddexp(xp.concatenate(logs), 0.0) / (xp.asarray(orders, z.dtype) - 1)


def _by_quadrature(alphas: np.ndarray, z: float, p: float, replace: bool) -> np.ndarray:
    """Compute RDP of one round at any orders α > 1, (orders,), by quadrature.

    With 1 + w = e^l the likelihood ratio of P and Q, E_Q[w] = 0, so E_Q[(1 + w)^α] − 1 = E_Q[(1 +
    w)^α − 1 − αw]: an integral of positive terms. The trapezoidal rule converges geometrically: the
    nearest pole is at distance πz from the real line. P is (1 − p) N(0, z²) + p N(1, z²); Q is N(0,
    z²), or for a replacement its mirror image, the worst pair (see `accounting.gaussian`).
    """
    # Sampling never costs more than full participation, at the distance of the pair.
    full = alphas * ((2.0 if replace else 1.0) / z) ** 2 / 2
    if z < 0.05:
        return full
    step = min(0.1, z / 4)
    by_group = []
    for group in np.split(alphas, range(16, len(alphas), 16)):
        span = -13.0 - 1 / z, group.max() / z + 13.0
        if (span[1] - span[0]) / step > _POINTS / len(group):
            by_group.append(
                np.array([_quadrature(np.array([a]), z, p, replace, step) for a in group])
            )
        else:
            by_group.append(_quadrature(group, z, p, replace, step))
    return np.minimum(np.concatenate([np.ravel(group_costs) for group_costs in by_group]), full)


def _quadrature(alphas: np.ndarray, z: float, p: float, replace: bool, step: float) -> np.ndarray:
    last = alphas.max() / z + 13.0
    if last / step > _POINTS:
        return np.full_like(alphas, math.inf)
    x = np.arange(-13.0 - 1 / z, last, step)

    def log_mixture(u: np.ndarray) -> np.ndarray:
        small = np.log1p(p * np.expm1(np.minimum(u, 1.0)))
        return np.where(u < 1, small, np.logaddexp(math.log1p(-p), math.log(p) + u))

    lower = log_mixture(-x / z - 1 / (2 * z**2)) if replace else 0.0
    ratio = log_mixture(x / z - 1 / (2 * z**2)) - lower
    alpha = alphas[:, None]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        # e^(αl) − 1 − α(e^l − 1), as a multiple of e^(αl) if l > 0.
        above = (alpha - 1) * np.expm1(-alpha * ratio) - alpha * np.expm1((1 - alpha) * ratio)
        below = np.expm1(alpha * ratio) - alpha * np.expm1(ratio)
        series = alpha * (alpha - 1) / 2 * ratio**2 * (1 + (alpha + 1) * ratio / 3)
        terms = np.log(np.where(ratio > 0, above, below)) + np.where(ratio > 0, alpha * ratio, 0.0)
        terms = np.where(np.abs(alpha * ratio) < 1e-4, np.log(series), terms)
    total: Any = logsumexp(terms + lower - x**2 / 2, axis=1)
    total = total + math.log(step / math.sqrt(2 * math.pi))
    return np.logaddexp(0.0, total) / (alphas - 1)


def epsilon(rdp: np.ndarray, delta: float, orders: tuple[float, ...] = ORDERS) -> float:
    """Compute the smallest ε that RDP values, (number of orders,), certify at δ in (0, 1)."""
    check_delta(delta)
    alphas, rdp = np.asarray(orders, np.float64), costs(rdp)
    # δ² ≥ 1 − e^{−RDP} bounds the total variation by δ (through the KL divergence): ε = 0.
    if np.any(delta**2 > -np.expm1(-rdp)):
        return 0.0
    finite = np.minimum(alphas, 1e300)
    excess = np.log1p(-1 / finite) - (math.log(delta) + np.log(finite)) / (finite - 1)
    return max(0.0, float(np.min(rdp + np.where(np.isinf(alphas), 0.0, excess))))


def delta(rdp: np.ndarray, epsilon: float, orders: tuple[float, ...] = ORDERS) -> float:
    """Compute the smallest δ that RDP values certify at ε ≥ 0."""
    alphas, rdp = np.asarray(orders, np.float64), costs(rdp)
    finite = np.minimum(alphas, 1e300)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        log_total_variation = 0.5 * np.log(-np.expm1(-rdp))
        log_delta = (finite - 1) * (rdp - epsilon + np.log1p(-1 / finite)) - np.log(finite)
    log_delta = np.where(np.isinf(alphas), np.where(rdp <= epsilon, -math.inf, 0.0), log_delta)
    least = float(np.min(np.minimum(log_total_variation, log_delta)))
    return 0.0 if least == -math.inf else math.exp(min(0.0, least))


def profile(rdp: np.ndarray, orders: tuple[float, ...] = ORDERS) -> Profile:
    """Return the privacy profile that RDP values certify."""
    return Profile(
        lambda value: delta(rdp, value, orders), lambda value: epsilon(rdp, value, orders)
    )
