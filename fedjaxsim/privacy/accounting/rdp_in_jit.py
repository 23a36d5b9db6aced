"""RDP of one Gaussian round inside jit, at integer orders and in the precision of the program.

The sums of positive terms are those of `rdp`: in float32 the textbook sum is wrong by half. The
formulas are repeated here because their terms are summed in another order (padded tables of all
orders at once, branches as `where`).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.privacy.accounting.rdp import INTEGER_ORDERS, log_binomials, log_expm1
from fedjaxsim.privacy.entries import Adjacency, Entry

_SMALL = 64
"""Orders above it form a group, so that no smaller order is padded to 1024 terms."""


@functools.cache
def _log_binomial_table(orders: tuple[int, ...]) -> np.ndarray:
    """Return log C(α, k) for some orders, (orders, largest order − 1); −inf for k > α."""
    table = np.full((len(orders), max(orders) - 1), -np.inf)
    for row, order in zip(table, orders, strict=True):
        row[: order - 1] = log_binomials(order)
    return table


def gaussian(
    entry: Entry, replace: float, adjacency: Adjacency, orders: tuple[float, ...]
) -> jax.Array:
    """Compute RDP of one round at ascending integer orders, (orders,), for traced z > 0 and p.

    For a replacement under sampling, which needs a quadrature, it is ∞.
    """
    z, p = jnp.asarray(entry.noise_multiplier), entry.sampling_rate
    distance = replace if adjacency == "replace" else 1.0
    full = jnp.asarray(orders, z.dtype) / (2 * (z / distance) ** 2)
    if not isinstance(p, jax.Array) and p == 1:
        return full
    if adjacency == "zero_out":
        return poisson_rdp(z, jnp.asarray(p), orders)
    return jnp.where(jnp.asarray(p) >= 1, full, jnp.inf)


def poisson_rdp(
    noise_multiplier: jax.Array,
    sampling_rate: jax.Array,
    orders: tuple[float, ...] = INTEGER_ORDERS,
) -> jax.Array:
    """Compute RDP of one Poisson-sampled Gaussian round at ascending orders, (orders,), z > 0."""
    z = noise_multiplier
    alphas = jnp.asarray(orders, z.dtype)
    sampled = (sampling_rate > 0) & (sampling_rate < 1)
    p = jnp.where(sampled, sampling_rate, 0.5)
    logs = []
    whole = tuple(map(int, orders))
    small = tuple(order for order in whole if order <= _SMALL)
    for group in filter(None, (small, whole[len(small) :])):
        table = _log_binomial_table(group).astype(z.dtype)
        k = jnp.arange(2, table.shape[1] + 2, dtype=z.dtype)
        cost = log_expm1(k * (k - 1) / (2 * z**2), jnp) + k * jnp.log(p)
        absent = jnp.maximum(jnp.asarray(group, z.dtype)[:, None] - k, 0) * jnp.log1p(-p)
        logs.append(jax.nn.logsumexp(table + absent + cost, axis=1))
    amplified = jax.nn.softplus(jnp.concatenate(logs)) / (alphas - 1)
    full = jnp.where(sampling_rate >= 1, alphas / (2 * z**2), 0.0)
    return jnp.where(sampled, amplified, full)
