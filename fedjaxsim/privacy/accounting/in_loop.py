"""Privacy inside jit: whether a budget allows a round, and the noise that meets a target.

The noise is by RDP at integer orders, in the precision of the program. Every reported ε is computed
on the host in float64, from the counts of the ledger.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjaxsim.privacy import filter as filters
from fedjaxsim.privacy.accounting.rdp import INTEGER_ORDERS, poisson
from fedjaxsim.privacy.events import PrivacyLimit
from fedjaxsim.privacy.ledger import Ledger

_ALPHAS = np.array(INTEGER_ORDERS, np.float64)
_LEAST_NOISE = 0.05
"""Start of the search for a noise multiplier: an ε of about 200 a round."""


def allows(limit: PrivacyLimit, ledger: Ledger) -> jax.Array:
    """Return whether a ledger is within a budget, ().

    Every round must have been charged, with noise and randomness of its own.
    """
    certain, accounts = jnp.array(True), []
    for each in ledger.charges:
        if each.event.releases and each.event.unit == "client":
            z, used = each.noise_multiplier, each.rounds > 0
            certain &= ~each.overflowed & jnp.all((z > 0) & jnp.isfinite(z) | ~used)
            if each.event.of_whole_run:
                certain &= jnp.sum(used) <= 1
            accounts.append((each.scheme, each.event, z, each.sampling_rate, each.rounds))
    for draws in ledger.draws:
        certain &= ~draws.repeated
    return certain & ~filters.exceeds(limit, accounts, jnp)


def _epsilon(z: jax.Array, delta: jax.Array, p: jax.Array, rounds: jax.Array) -> jax.Array:
    """Compute the smallest ε ≥ 0 that RDP certifies for equal rounds (see `rdp.epsilon`)."""
    alphas = _ALPHAS.astype(z.dtype)
    sampled = p < 1
    amplified = poisson(z, jnp.where(sampled, p, 0.5), INTEGER_ORDERS, jnp)
    rdp = rounds * jnp.where(sampled, amplified, alphas / (2 * z**2))
    values = rdp + np.log1p(-1 / alphas) - (jnp.log(delta) + np.log(alphas)) / (alphas - 1)
    # The margin keeps rounding from calling a small ε zero.
    nothing = jnp.any(0.9999 * delta**2 > -jnp.expm1(-rdp))
    return jnp.where(nothing, 0.0, jnp.maximum(jnp.min(values), 0.0))


@jax.custom_jvp
def _inverse(
    epsilon: jax.Array, delta: jax.Array, sampling_rate: jax.Array, rounds: jax.Array
) -> jax.Array:
    # Even with full participation z = √T (√(2 log 1/δ) + 1) (1 + 1/ε) is enough.
    enough = jnp.sqrt(rounds) * (jnp.sqrt(-2 * jnp.log(delta)) + 1) * (1 + 1 / epsilon)

    def halve(_, ends):
        lower, upper = ends
        middle = (lower + upper) / 2
        costs = _epsilon(jnp.exp(middle), delta, sampling_rate, rounds)
        return jnp.where(costs > epsilon, middle, lower), jnp.where(costs > epsilon, upper, middle)

    ends = jnp.full_like(enough, np.log(_LEAST_NOISE)), jnp.log(4 * enough)
    steps = 30 if enough.dtype == jnp.float32 else 60
    return jnp.exp(jax.lax.fori_loop(0, steps, halve, ends)[1])


@_inverse.defjvp
def _inverse_jvp(primals, tangents):
    epsilon, delta, sampling_rate, rounds = primals
    z = _inverse(epsilon, delta, sampling_rate, rounds)
    slopes = jax.grad(_epsilon, argnums=(0, 1, 2, 3))(z, delta, sampling_rate, rounds)
    # ε(z, δ, p, T) = ε along the solution, so ε_z dz = dε − ε_δ dδ − ε_p dp − ε_T dT.
    other = sum(slope * tangent for slope, tangent in zip(slopes[1:], tangents[1:], strict=True))
    return z, (tangents[0] - other) / slopes[0]


def noise_multiplier_in_jit(
    epsilon: ArrayLike, delta: ArrayLike, sampling_rate: ArrayLike, rounds: ArrayLike
) -> jax.Array:
    """Compute the z, (), at which T equal rounds meet (ε, δ) by the RDP bound, for zero-out.

    For sweeps and gradients over privacy targets: safe under jit and vmap, and differentiable in
    all four arguments, () floats, forward and backward (by the implicit function theorem; in p not
    at 1). ε is above about log(1/δ)/1000, the least that the largest order allows. Integer orders
    ask for more noise than `calibration.noise_multiplier`, and in float32 ε may be missed by 1e-4:
    the report of a run is computed from its ledger.
    """
    values = jnp.broadcast_arrays(
        *(jnp.asarray(value, float) for value in (epsilon, delta, sampling_rate, rounds))
    )
    return _inverse(*values)
