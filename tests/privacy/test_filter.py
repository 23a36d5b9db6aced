"""A budget holds for runs that choose rounds by their releases; a report of rounds does not."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plans import compose

from fedjaxsim.privacy import filter as filters
from fedjaxsim.privacy import ledger as ledgers
from fedjaxsim.privacy.accounting import gaussian, rdp
from fedjaxsim.privacy.accounting.in_loop import allows, epsilon_in_jit
from fedjaxsim.privacy.events import GAUSSIAN, Entry, PrivacyLimit, PrivacySpend, SamplingScheme
from fedjaxsim.privacy.guarantee import compose_reports, report, spent

FULL = SamplingScheme("full", 100, 100)
POISSON = SamplingScheme("poisson", 100, 100)
RUNS, DELTA = 10_000, 1e-2


def rounds_of(z, n, p=1.0, scheme=FULL):
    return PrivacySpend(scheme, GAUSSIAN, (Entry(z, p, n),))


def spent_delta(loss, epsilon):
    """The δ of (ε, δ)-DP, E[(1 − e^(ε − loss))₊], from losses of runs."""
    return np.mean(np.maximum(0, 1 - np.exp(epsilon - loss)))


def surely_below(limit):
    """The ε that a loss within the budget exceeds with probability at most δ, by Markov."""
    return limit.rdp - math.log(limit.delta) / (limit.order - 1)


def test_rounds_that_follow_releases_break_a_report_of_rounds_and_not_a_budget():
    rng = np.random.default_rng(0)
    z, T = 4.0, 400
    # The exact ε of t rounds, for each t: right if t was fixed beforehand.
    reported = np.array([gaussian.epsilon(DELTA, math.sqrt(t) / z) for t in range(1, T + 1)])
    steps = rng.normal(size=(RUNS, T)) / z + 1 / (2 * z**2)
    loss = np.cumsum(steps, axis=1)
    over = loss > reported
    stop = np.where(over.any(axis=1), over.argmax(axis=1), T - 1)
    stopped = np.take_along_axis(loss, stop[:, None], axis=1)[:, 0]
    assert np.mean(stopped > reported[stop]) > 5 * DELTA
    assert spent_delta(stopped, reported[stop]) > 1.3 * DELTA

    limit = filters.limit_for(2.0, DELTA, [rounds_of(z, 1)])
    allowed = math.floor(limit.rdp / (limit.order / (2 * z**2)))
    assert 0 < allowed < T
    worst = loss[:, :allowed].max(axis=1)  # the adversary stops at the best moment for it
    assert spent_delta(worst, 2.0) <= DELTA
    assert np.mean(worst > surely_below(limit)) <= DELTA


@pytest.mark.parametrize("p", [0.3, pytest.param(1.0, marks=pytest.mark.thorough)])
def test_the_filter_stops_runs_whose_noise_follows_their_releases(p):
    """The loss of a client who takes part, exactly; noise shrinks once a run is unlucky."""
    epsilon, quiet, loud = 2.0, 3.0, 1.5
    limit = filters.limit_for(epsilon, DELTA, [rounds_of(quiet, 1, p, POISSON)])

    def one(key):
        def step(carry, key):
            charges, loss = carry
            z = jnp.where(loss > epsilon / 2, loud, quiet)
            after = ledgers.charge(charges, z, p, 0)
            goes_on = allows(limit, ledgers.Ledger((after,))) & (loss <= epsilon)
            member, noise = jax.random.split(key)
            x = jax.random.bernoulli(member, p) + z * jax.random.normal(noise)
            change = jnp.log1p(p * jnp.expm1((2 * x - 1) / (2 * z**2)))
            loss = loss + jnp.where(goes_on, change, 0.0)
            after = jax.tree.map(lambda new, old: jnp.where(goes_on, new, old), after, charges)
            return (after, loss), goes_on

        start = ledgers.no_charges(POISSON, GAUSSIAN, 2), jnp.zeros(())
        (charges, loss), went_on = jax.lax.scan(step, start, jax.random.split(key, 120))
        return charges, loss, went_on

    charges, loss, went_on = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), RUNS))
    assert not np.asarray(went_on)[:, -1].any()  # all were stopped
    assert spent_delta(np.asarray(loss), epsilon) <= DELTA
    assert np.mean(np.asarray(loss) > surely_below(limit)) <= DELTA
    both = np.asarray((charges.rounds > 0).all(axis=1))
    assert both.any()  # some changed their noise
    for run in [*np.flatnonzero(both)[:3], *np.flatnonzero(~both)[:3]]:
        of_run = jax.tree.map(lambda leaf, run=run: leaf[run], charges)
        spend = PrivacySpend(POISSON, GAUSSIAN, tuple(ledgers.entries(of_run)))
        assert filters.exceeded(limit, [spend]) == ""


@pytest.mark.parametrize(("p", "scheme"), [(1.0, FULL), (0.2, POISSON)])
def test_odometer_and_guarantee_agree_on_a_constant_plan(p, scheme):
    n, z = 3, 6.0
    plan = rounds_of(z, 1, p, scheme)
    limit = filters.limit_for(2.0, 1e-5, [plan])
    done = rounds_of(z, n, p, scheme)
    value = filters.odometer(limit, [done])
    alone = compose((z, p, n), orders=rdp.INTEGER_ORDERS)
    tight = spent([done], 1e-5)
    # Never below the tight accountant of n rounds, and near RDP with all orders.
    assert tight <= rdp.epsilon(alone, 1e-5, rdp.INTEGER_ORDERS) <= value <= 2.0
    # A budget of that much has room for n rounds, and for no more.
    same = PrivacyLimit(value, 1e-5, limit.order, 0.0)
    room = value - (math.log1p(-1 / same.order) - math.log(0.99e-5 * same.order) / (same.order - 1))
    same = same._replace(rdp=room * (1 + 1e-9))
    assert filters.fits(same, [done])
    assert not filters.fits(same, [rounds_of(z, n + 1, p, scheme)])


def test_the_order_is_the_best_for_the_plan():
    # Full participation: α V ≤ ε − log(1/δ)/(α − 1) − … by hand for every order.
    limit = filters.limit_for(1.0, 1e-5)
    rooms = [
        (1.0 - math.log1p(-1 / a) + math.log(0.99e-5 * a) / (a - 1)) / a for a in rdp.INTEGER_ORDERS
    ]
    assert limit.rdp / limit.order == pytest.approx(max(rooms), rel=1e-12)
    with pytest.raises(ValueError, match="least"):
        filters.limit_for(1e-3, 1e-5)
    with pytest.raises(ValueError, match="budget_epsilon"):
        filters.limit_for(math.inf, 1e-5)


def test_in_jit_and_on_the_host_the_same_rounds_fit():
    limit = filters.limit_for(2.0, 1e-5, [rounds_of(6.0, 1)])
    most = int(limit.rdp / filters.MARGIN / (limit.order / 72))
    for n, fits in ((most, True), (most + 1, False)):
        charges = dataclasses.replace(
            ledgers.no_charges(FULL, GAUSSIAN, 1),
            noise_multiplier=jnp.full(1, 6.0),
            sampling_rate=jnp.ones(1),
            rounds=jnp.full(1, n, jnp.int32),
        )
        assert bool(allows(limit, ledgers.Ledger((charges,)))) == fits
        assert filters.fits(limit, [rounds_of(6.0, n)]) == fits
    lost = dataclasses.replace(charges, rounds=jnp.ones(1, jnp.int32), overflowed=jnp.array(True))
    assert not allows(limit, ledgers.Ledger((lost,)))


def test_what_a_state_shows_of_a_budget_is_never_above_its_guarantee():
    limit = filters.limit_for(2.0, 1e-5, [rounds_of(6.0, 1)])
    most = int(limit.rdp / filters.MARGIN / (limit.order / 72))
    spend = dataclasses.replace(
        ledgers.no_charges(FULL, GAUSSIAN, 1),
        noise_multiplier=jnp.full(1, 6.0),
        sampling_rate=jnp.ones(1),
        rounds=jnp.full(1, most, jnp.int32),
    )
    shown = float(epsilon_in_jit(ledgers.Ledger((spend,), limit=limit), 1e-5))
    found = report([rounds_of(6.0, most)], 1e-5, limit=limit, draws=()).find("zero_out")
    assert shown <= filters.odometer(limit, [rounds_of(6.0, most)]) <= 2.0 == found.epsilon


def test_the_report_is_of_the_budget_and_not_of_the_rounds():
    limit = filters.limit_for(2.0, 1e-5, [rounds_of(6.0, 1)])
    few = report([rounds_of(6.0, 3)], 1e-5, limit=limit, draws=())
    zero_out = few.find("zero_out")
    assert (zero_out.epsilon, zero_out.accountant) == (2.0, "rdp_filter")
    assert f"order {limit.order}" in str(few)
    # Zeroing twice: two neighbours, each of RDP B, cost more than one and less than four times.
    replace = few.find("replace").epsilon
    assert replace is not None
    assert 2.0 < replace < 8.0
    smaller = report([rounds_of(6.0, 3)], 1e-7, limit=limit, draws=()).find("zero_out").epsilon
    assert smaller is not None
    assert smaller > 2.0
    many = report([rounds_of(6.0, 10_000)], 1e-5, limit=limit)
    assert many.find("zero_out").epsilon is None
    assert "budget" in many.find("zero_out").reason
    with pytest.raises(ValueError, match="budget"):
        compose_reports([few])
