"""ε inside jit: an upper bound for display, control and gradients, composed from the ledger.

RDP accounting at integer orders, in the precision of the program. The host computes the reported
number in float64, from the counts.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjaxsim.privacy import filter as filters
from fedjaxsim.privacy.accounting.one_round import mixed_rdp
from fedjaxsim.privacy.accounting.rdp import INTEGER_ORDERS, gaussian
from fedjaxsim.privacy.entries import Adjacency, Entry
from fedjaxsim.privacy.events import Account, Cost
from fedjaxsim.privacy.ledger import Charges, Draws, Ledger

_ALPHAS = np.array(INTEGER_ORDERS, np.float64)
_BATCH = 64
"""Number of ledger places composed at once, each with a table of orders."""
_LEAST_NOISE = 0.05
"""Start of the search for a noise multiplier: an ε of about 200 a round."""


def _epsilon(rdp: jax.Array, delta: ArrayLike) -> jax.Array:
    """Compute the smallest ε ≥ 0 that RDP at INTEGER_ORDERS certifies at δ (see `rdp.epsilon`)."""
    alphas = _ALPHAS.astype(rdp.dtype)
    delta = jnp.asarray(delta, rdp.dtype)
    values = rdp + np.log1p(-1 / alphas) - (jnp.log(delta) + np.log(alphas)) / (alphas - 1)
    # The margin keeps rounding from calling a small ε zero.
    nothing = jnp.any(0.9999 * delta**2 > -jnp.expm1(-rdp))
    return jnp.where(nothing, 0.0, jnp.maximum(jnp.min(values), 0.0))


def rdp_epsilon_in_jit(
    ledger: Ledger, delta: ArrayLike, adjacency: Adjacency = "zero_out"
) -> jax.Array:
    """Compute an upper bound on the joint-DP ε spent so far, (); inf if nothing is guaranteed.

    In the ledger's precision, safe under jit, vmap and scan, and differentiable in the ledger's z.
    About 10⁴ exponentials per place of the ledger, twice if cohorts may exceed their capacity.
    Charges of different kinds add up. Under Poisson sampling ε is inf for "replace".
    """
    limit = ledger.limit
    most, least_delta = (np.inf, 0.0) if limit is None or adjacency != "zero_out" else limit[:2]
    redrawn = _redrawn(ledger.draws)
    return _rdp_epsilon(_costly(ledger), redrawn, most, least_delta, delta, adjacency)


# One program for a report that asks for it, whatever its sentences, stages and budget.
@functools.partial(jax.jit, static_argnames="adjacency")
def _rdp_epsilon(
    accounts: list[Charges],
    redrawn: ArrayLike,
    most: ArrayLike,
    least_delta: ArrayLike,
    delta: ArrayLike,
    adjacency: Adjacency,
) -> jax.Array:
    """Compute the bound, which is `most` at most for `least_delta` and larger δ."""
    costs = (_rdp(charges, adjacency) for charges in accounts)
    spent = _epsilon(sum(costs, jnp.zeros(len(INTEGER_ORDERS))), delta)
    spent = jnp.where(jnp.asarray(delta) >= least_delta, jnp.minimum(spent, most), spent)
    return jnp.where(_is_certain(accounts, redrawn), spent, jnp.inf)


def allows(ledger: Ledger) -> jax.Array:
    """Return whether a ledger is within its budget, ()."""
    accounts, room = _costly(ledger), ledger.room
    if room is None:
        assert ledger.limit is not None
        room = filters.room_in(ledger.limit, list(map(_kind, accounts)))
    return _within(accounts, _redrawn(ledger.draws), room)


def room_of(ledger: Ledger, part: Ledger) -> filters.Room | None:
    """Return the places of a ledger's budget, if it has one, for the accounts of its `part`.

    Other accounts stay as they are.
    """
    if ledger.limit is None:
        return None
    mine = list(map(id, part.charges))
    earlier_charges = [charges for charges in _costly(ledger) if id(charges) not in mine]
    kinds, earlier = [list(map(_kind, accounts)) for accounts in (_costly(part), earlier_charges)]
    draws = ledger.draws[: len(ledger.draws) - len(part.draws)]
    is_open: Any = np.True_
    if earlier_charges or draws:
        is_open = _within(earlier_charges, _redrawn(draws), filters.room_in(ledger.limit, earlier))
    return filters.room_in(ledger.limit, kinds, earlier, is_open)


@jax.jit
def _within(accounts: list[Charges], redrawn: ArrayLike, room: filters.Room) -> jax.Array:
    """Return whether releases are certain and have places, ()."""
    within = _is_certain(accounts, redrawn) & room.open
    for places, charges in zip(room.places, accounts, strict=True):
        groups = charges.noise_multiplier, charges.sampling_rate, charges.rounds
        within &= ~filters.lacks_places(places, *groups)
    return within


def _kind(charges: Charges) -> Account:
    return charges.scheme, charges.event


def _redrawn(draws: Sequence[Draws]) -> Any:
    """Return whether random numbers of a round were drawn twice, ()."""
    repeated = [record.repeated for record in draws]
    return functools.reduce(operator.or_, repeated) if repeated else np.False_


def _costly(ledger: Ledger) -> list[Charges]:
    """Return the accounts of clients' releases."""
    return [c for c in ledger.charges if c.event.releases and c.event.unit == "client"]


def _is_certain(accounts: Sequence[Charges], redrawn: ArrayLike) -> jax.Array:
    """Return whether every round was charged, with its own noise and randomness, ()."""
    certain = ~jnp.asarray(redrawn)
    for charges in accounts:
        certain &= ~charges.overflowed & jnp.all(_valid(charges) | (charges.rounds == 0))
    return certain


def _valid(charges: Charges) -> jax.Array:
    valid = (charges.noise_multiplier > 0) & jnp.isfinite(charges.noise_multiplier)
    if charges.event.of_whole_run:
        valid &= jnp.sum(charges.rounds > 0) <= 1
    return valid


def _rdp(charges: Charges, adjacency: Adjacency) -> jax.Array:
    """Compute RDP of all rounds of one account, (orders,); a bound only if it `_is_certain`."""
    scheme, event = charges.scheme, charges.event
    z = jnp.where((charges.rounds > 0) & _valid(charges), charges.noise_multiplier, 1.0)
    met = event.met(Cost(scheme, event, z, charges.sampling_rate, charges.rounds), jnp)

    def one_round(group):
        inclusions = scheme.inclusions_in_jit(group[1], jnp)
        return mixed_rdp(met.event, group[0], inclusions, adjacency, INTEGER_ORDERS, jnp)

    groups = met.noise_multiplier, met.sampling_rate
    costs = jax.lax.map(one_round, groups, batch_size=_BATCH).astype(z.dtype)
    counts = met.rounds[:, None]
    return jnp.sum(jnp.where(counts > 0, counts.astype(z.dtype) * costs, 0), axis=0)


def _epsilon_of_plan(
    noise_multiplier: jax.Array, delta: jax.Array, sampling_rate: jax.Array, rounds: jax.Array
) -> jax.Array:
    entry = Entry(cast(Any, noise_multiplier), cast(Any, sampling_rate), 1)
    return _epsilon(rounds * gaussian(entry, 2.0, "zero_out", INTEGER_ORDERS, jnp), delta)


@jax.custom_jvp
def _inverse(
    epsilon: jax.Array, delta: jax.Array, sampling_rate: jax.Array, rounds: jax.Array
) -> jax.Array:
    # Even with full participation z = √T (√(2 log 1/δ) + 1) (1 + 1/ε) is enough.
    enough = jnp.sqrt(rounds) * (jnp.sqrt(-2 * jnp.log(delta)) + 1) * (1 + 1 / epsilon)

    def halve(_, bracket):
        lower, upper = bracket
        middle = (lower + upper) / 2
        costs = _epsilon_of_plan(jnp.exp(middle), delta, sampling_rate, rounds)
        return jnp.where(costs > epsilon, middle, lower), jnp.where(costs > epsilon, upper, middle)

    bracket = jnp.full_like(enough, np.log(_LEAST_NOISE)), jnp.log(4 * enough)
    steps = 30 if enough.dtype == jnp.float32 else 60
    return jnp.exp(jax.lax.fori_loop(0, steps, halve, bracket)[1])


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
    all four arguments, () floats, forward and backward (by the implicit function theorem; in p not
    at 1). ε is above about log(1/δ)/1000, the least that the largest order allows. Integer orders
    ask for more noise than `calibration.noise_multiplier`, and in float32 ε may be missed by 1e-4:
    the report of a run is computed from its ledger.
    """
    values = jnp.broadcast_arrays(
        *(jnp.asarray(value, float) for value in (epsilon, delta, sampling_rate, rounds))
    )
    return _inverse(*values)
