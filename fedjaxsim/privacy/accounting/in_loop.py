"""ε inside jit: an upper bound for display, control and gradients, composed from the ledger.

RDP accounting at integer orders, in the precision of the program, by the sums of positive terms in
`rdp`: in float32 the textbook sum is wrong by half. The host computes the reported number in
float64, from the counts.
"""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjaxsim.privacy import filter as filters
from fedjaxsim.privacy.accounting import correlated
from fedjaxsim.privacy.accounting.rdp import INTEGER_ORDERS, log_expm1
from fedjaxsim.privacy.accounting.rdp_in_jit import epsilon_from_rdp, poisson_rdp
from fedjaxsim.privacy.entries import Adjacency, Entry, SamplingScheme
from fedjaxsim.privacy.events import Correlated, PrivacyEvent, PrivacyLimit
from fedjaxsim.privacy.ledger import Charges, Ledger

_BATCH = 64
"""Number of ledger places composed at once, each with a table of orders."""
_LEAST_NOISE = 0.05
"""Start of the search for a noise multiplier: an ε of about 200 a round."""


def _round_rdp(
    z: jax.Array,
    p: jax.Array,
    scheme: SamplingScheme,
    event: PrivacyEvent,
    adjacency: Adjacency,
    orders: tuple[int, ...] = INTEGER_ORDERS,
) -> jax.Array:
    """Compute RDP of one round at some orders, (orders,), for z > 0."""
    in_cohort = p if scheme.kind == "poisson" else 1.0
    entry = Entry(cast(Any, z), cast(Any, in_cohort), 1)
    own = jnp.asarray(event.rdp(entry, adjacency, orders, jnp), z.dtype)
    if scheme.kind != "fixed" or scheme.capacity == scheme.clients:
        return own
    # Others know when the client took part: E[e^x] over its participation.
    alphas = jnp.asarray(orders, z.dtype)
    odds = np.log(scheme.capacity / scheme.clients)
    return jax.nn.softplus(odds + log_expm1((alphas - 1) * own, jnp)) / (alphas - 1)


def epsilon_in_jit(
    ledger: Ledger, delta: ArrayLike, adjacency: Adjacency = "zero_out"
) -> jax.Array:
    """Compute an upper bound on the joint-DP ε spent so far, (); inf if nothing is guaranteed.

    In the ledger's precision, safe under jit, vmap and scan, and differentiable in the ledger's z.
    About 10⁴ exponentials per place of the ledger. Charges of different kinds add up.

    Args:
      ledger: the rounds so far, at most its budget. The cost of overflowing cohorts is not
        included.
      delta: () δ in (0, 1).
      adjacency: under Poisson sampling ε is inf for "replace", whose RDP is not known here.
    """
    spent = epsilon_from_rdp(spent_rdp(ledger, adjacency), delta)
    if ledger.limit is not None and adjacency == "zero_out":
        within = jnp.asarray(delta) >= ledger.limit.delta
        spent = jnp.where(within, jnp.minimum(spent, ledger.limit.epsilon), spent)
    return jnp.where(is_certain(ledger), spent, jnp.inf)


def is_certain(ledger: Ledger) -> jax.Array:
    """Return whether every round was charged, with noise and randomness of its own, ()."""
    certain = jnp.array(True)
    for charges in ledger.charges:
        if charges.event.releases and charges.event.unit == "client":
            certain &= ~charges.overflowed & jnp.all(_valid(charges) | (charges.rounds == 0))
    for draws in ledger.draws:
        certain &= ~draws.repeated
    return certain


def allows(limit: PrivacyLimit, ledger: Ledger) -> jax.Array:
    """Return whether a ledger is within a budget, ()."""
    accounts = [
        (each.scheme, each.event, each.noise_multiplier, each.sampling_rate, each.rounds)
        for each in ledger.charges
        if each.event.releases and each.event.unit == "client"
    ]
    return is_certain(ledger) & ~filters.exceeds(limit, accounts, jnp)


def _squared_sensitivity(rounds: jax.Array, event: Correlated, groups: int) -> jax.Array:
    """Compute `correlated.squared_sensitivity` of a traced number of rounds, ()."""
    past = jnp.asarray(-correlated.coefficients(event.bands, event.power)[1:], dtype=float)

    def add(t, carry):
        total, last = carry
        effect = (t % groups == 0) + jnp.sum(past * last)
        return total + effect**2, jnp.concatenate([effect[None], last])[: len(past)]

    return jax.lax.fori_loop(0, rounds, add, (jnp.zeros(()), jnp.zeros(len(past))))[0]


def _valid(charges: Charges) -> jax.Array:
    valid = (charges.noise_multiplier > 0) & jnp.isfinite(charges.noise_multiplier)
    if charges.event.of_whole_run:
        valid &= jnp.sum(charges.rounds > 0) <= 1
    return valid


def spent_rdp(
    ledger: Ledger, adjacency: Adjacency = "zero_out", orders: tuple[int, ...] = INTEGER_ORDERS
) -> jax.Array:
    """Compute RDP of all rounds at some orders, (orders,); a bound only if `is_certain`."""
    of_clients = [charges for charges in ledger.charges if charges.event.unit == "client"]
    costly = [charges for charges in of_clients if charges.event.releases]
    return sum((_spent(each, adjacency, orders) for each in costly), jnp.zeros(len(orders)))


def _spent(charges: Charges, adjacency: Adjacency, orders: tuple[int, ...]) -> jax.Array:
    """Compute RDP of rounds of one kind at some orders, (orders,)."""
    scheme, event, counts = charges.scheme, charges.event, charges.rounds
    z = jnp.where((counts > 0) & _valid(charges), charges.noise_multiplier, 1.0)
    rate = charges.sampling_rate
    one = functools.partial(
        _round_rdp, scheme=scheme, event=event, adjacency=adjacency, orders=orders
    )
    rdp = jax.lax.map(lambda entry: one(*entry), (z, rate), batch_size=_BATCH)
    total = jnp.sum(counts)
    if isinstance(event, Correlated):
        squared = _squared_sensitivity(total, event, scheme.groups or 1)
        return squared.astype(z.dtype) * jnp.max(jnp.where(counts[:, None] > 0, rdp, 0.0), axis=0)
    if scheme.max_participations is not None or scheme.groups is not None:
        # Any rounds of a client cost at most the costliest round as often as allowed.
        total = jnp.minimum(total, scheme.max_participations or -(-total // (scheme.groups or 1)))
        return total.astype(z.dtype) * jnp.max(jnp.where(counts[:, None] > 0, rdp, 0.0), axis=0)
    return jnp.sum(jnp.where(counts[:, None] > 0, counts.astype(z.dtype)[:, None] * rdp, 0), axis=0)


def _epsilon_of_plan(
    noise_multiplier: jax.Array, delta: jax.Array, sampling_rate: jax.Array, rounds: jax.Array
) -> jax.Array:
    rdp = rounds * poisson_rdp(noise_multiplier, sampling_rate)
    return epsilon_from_rdp(rdp, delta)


@jax.custom_jvp
def _inverse(
    epsilon: jax.Array, delta: jax.Array, sampling_rate: jax.Array, rounds: jax.Array
) -> jax.Array:
    # Even with full participation z = √T (√(2 log 1/δ) + 1) (1 + 1/ε) is enough.
    enough = jnp.sqrt(rounds) * (jnp.sqrt(-2 * jnp.log(delta)) + 1) * (1 + 1 / epsilon)

    def halve(_, ends):
        lower, upper = ends
        middle = (lower + upper) / 2
        costs = _epsilon_of_plan(jnp.exp(middle), delta, sampling_rate, rounds)
        return jnp.where(costs > epsilon, middle, lower), jnp.where(costs > epsilon, upper, middle)

    ends = jnp.full_like(enough, np.log(_LEAST_NOISE)), jnp.log(4 * enough)
    steps = 30 if enough.dtype == jnp.float32 else 60
    return jnp.exp(jax.lax.fori_loop(0, steps, halve, ends)[1])


@_inverse.defjvp
def _inverse_jvp(primals, tangents):
    epsilon, delta, sampling_rate, rounds = primals
    z = _inverse(epsilon, delta, sampling_rate, rounds)
    slopes = jax.grad(_epsilon_of_plan, argnums=(0, 1, 2, 3))(z, delta, sampling_rate, rounds)
    # ε(z, δ, p, T) = ε along the solution, so ε_z dz = dε − ε_δ dδ − ε_p dp − ε_T dT.
    other = sum(slope * tangent for slope, tangent in zip(slopes[1:], tangents[1:], strict=True))
    return z, (tangents[0] - other) / slopes[0]


def noise_multiplier_in_jit(
    epsilon: ArrayLike, delta: ArrayLike, sampling_rate: ArrayLike, rounds: ArrayLike
) -> jax.Array:
    """Compute the z, (), at which T equal rounds meet (ε, δ) by the RDP bound, for zero-out.

    For sweeps and gradients over privacy targets: safe under jit and vmap, and differentiable in
    all four arguments, forward and backward (by the implicit function theorem). RDP at integer
    orders asks for more noise than `calibration.noise_multiplier`, and in float32 may miss ε by
    1e-4: the report of a run is computed from its ledger.

    Args:
      epsilon: () target ε > 0; above about log(1/δ)/1000, the least that the largest order allows.
      delta: () δ in (0, 1).
      sampling_rate: () p in (0, 1] of Poisson sampling; at p = 1 its derivative is taken to be 0.
      rounds: () T > 0, a float so that it has a derivative.
    """
    values = jnp.broadcast_arrays(
        *(jnp.asarray(value, float) for value in (epsilon, delta, sampling_rate, rounds))
    )
    return _inverse(*values)
