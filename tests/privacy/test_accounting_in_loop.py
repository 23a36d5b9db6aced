"""ε inside jit, in float32, against float64 on the host."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.plans import charged, compose, poisson, profile_of

from fedjaxsim.privacy import guarantee
from fedjaxsim.privacy import ledger as ledgers
from fedjaxsim.privacy.accounting import in_loop, randomized_response, rdp
from fedjaxsim.privacy.accounting.in_loop import rdp_epsilon_in_jit
from fedjaxsim.privacy.entries import Adjacency, Entry, SamplingScheme
from fedjaxsim.privacy.events import Gaussian, NoKnownCost, NoRelease, PrivacyEvent, Pure
from fedjaxsim.privacy.ledger import charge, entries

POISSON = SamplingScheme("poisson", 1000, 1000)
GAUSSIAN = Gaussian()


def account(*groups, scheme=POISSON, event: PrivacyEvent = GAUSSIAN):
    z, p, rounds = zip(*groups, strict=True)
    return dataclasses.replace(
        ledgers.no_charges(scheme, event, len(groups)),
        noise_multiplier=jnp.asarray(z, float),
        sampling_rate=jnp.asarray(p, float),
        rounds=jnp.asarray(rounds, jnp.int32),
    )


def host(charges, delta):
    values = compose(*entries(charges), orders=rdp.INTEGER_ORDERS)
    return rdp.epsilon(values, float(np.float32(delta)), rdp.INTEGER_ORDERS)


def epsilon_of(charges, delta, adjacency: Adjacency = "zero_out"):
    return rdp_epsilon_in_jit(ledgers.Ledger((charges,)), delta, adjacency)


epsilon_of_poisson = jax.jit(epsilon_of)


@jax.jit
def rdp_of_poisson(z, p):
    return rdp.gaussian(Entry(z, p, 1), 2.0, "zero_out", rdp.INTEGER_ORDERS, jnp)


@pytest.mark.parametrize(
    "p",
    [
        *(pytest.param(p, marks=pytest.mark.thorough) for p in (1e-5, 0.02, 0.5, 0.9)),
        *(1e-3, 0.3, 1.0),
    ],
)
@pytest.mark.parametrize(
    "z",
    [0.5, 2.0, 100.0, *(pytest.param(z, marks=pytest.mark.thorough) for z in (0.8, 10.0, 1000.0))],
)
def test_float32_agrees_with_float64(z, p):
    one = account((z, p, 1))
    exact = compose(*entries(one), orders=rdp.INTEGER_ORDERS)
    values = rdp_of_poisson(one.noise_multiplier[0], one.sampling_rate[0])
    np.testing.assert_allclose(values, exact, rtol=3e-5)
    for rounds in (1, 1000, 10**6):
        for delta in (1 / 205, 1e-5, 1e-8):
            ledger = account((z, p, rounds))
            expected = host(ledger, delta)
            found = float(epsilon_of_poisson(ledger, delta))
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_million_rounds_do_not_drift():
    def run(ledger):
        return jax.lax.scan(lambda c, _: (charge(c, 0.8, 0.01, 0), None), ledger, length=10**6)[0]

    ledger = jax.jit(run)(ledgers.no_charges(POISSON, GAUSSIAN, 1))
    assert entries(ledger)[0].rounds == 10**6
    assert float(epsilon_of_poisson(ledger, 1e-5)) == pytest.approx(host(ledger, 1e-5), rel=1e-5)


@pytest.mark.parametrize(
    ("p", "z", "rounds", "delta"),
    [(0.02, 1.0, 2000, 1e-4), (0.1, 2.0, 500, 1e-5), (100 / 205, 25.0, 200, 1 / 205)],
)
def test_never_below_the_tight_accountant(p, z, rounds, delta):
    ledger = account((z, p, rounds))
    tight = poisson(*entries(ledger)).epsilon(delta)
    assert float(epsilon_of_poisson(ledger, delta)) >= tight * (1 - 1e-6)


def test_heterogeneous_ledgers_and_unused_places():
    ledger = account((1.0, 0.1, 5), (3.0, 0.02, 100), (0.0, 0.0, 0))
    expected = host(ledger, 1e-5)
    assert float(epsilon_of_poisson(ledger, 1e-5)) == pytest.approx(expected, rel=1e-5)
    assert float(epsilon_of_poisson(ledgers.no_charges(POISSON, GAUSSIAN, 3), 1e-5)) == 0


def test_no_guarantee_is_infinite():
    assert float(epsilon_of_poisson(account((0.0, 0.5, 1)), 1e-5)) == np.inf
    assert float(epsilon_of_poisson(account((float("nan"), 0.5, 1)), 1e-5)) == np.inf
    full = account((1.0, 0.5, 1))
    full = dataclasses.replace(full, overflowed=jnp.ones((), bool))
    assert float(epsilon_of_poisson(full, 1e-5)) == np.inf
    without_cost, closed = (
        account((1.0, 0.5, 1), event=event) for event in (NoKnownCost(), NoRelease())
    )
    assert float(jax.jit(epsilon_of)(without_cost, 1e-5)) == np.inf
    assert float(jax.jit(epsilon_of)(closed, 1e-5)) == 0
    # Whatever is charged besides.
    both = ledgers.Ledger((account((9.0, 0.5, 1)), without_cost))
    assert float(jax.jit(rdp_epsilon_in_jit)(both, 1e-5)) == np.inf


def test_charges_of_unlike_kinds_add_up():
    # Full participation for n rounds at z costs n/2 rounds twice.
    full = SamplingScheme("full", 1000, 1000)
    expected = host(account((5.0, 1.0, 40)), 1e-5)
    half = account((5.0, 1.0, 20), scheme=full)
    other = account((5.0, 1.0, 20))
    both = ledgers.Ledger((half, other))
    assert float(rdp_epsilon_in_jit(both, 1e-5)) == pytest.approx(expected, rel=1e-5)


def test_other_schemes_are_bounds_on_their_accountants():
    cases: list[tuple[SamplingScheme, Adjacency]] = [
        (SamplingScheme("fixed", 1000, 100), "zero_out"),
        (SamplingScheme("groups", 1000, 100, groups=10), "replace"),
        (SamplingScheme("cyclic", 1000, 370, groups=2), "zero_out"),
    ]
    for scheme, adjacency in cases:
        charges = account((5.0, 0.1, 400), scheme=scheme)
        bound = float(epsilon_of(charges, 1e-5, adjacency))
        plan = charged(scheme, GAUSSIAN, (5.0, 0.1, 400))
        tight = profile_of(plan, adjacency=adjacency).epsilon(1e-5)
        assert tight < bound < 1.3 * tight


@pytest.mark.parametrize(
    ("m", "p", "capacity"),
    [(1000, 0.001, 9), (1000, 0.05, 146), (10**7, 0.001, 10_600), (30, 0.3, 15), (30, 0.5, 10)],
)
def test_full_cohorts_tell_at_most_as_much_as_in_jit(m, p, capacity):
    scheme = SamplingScheme("poisson", m, capacity)
    (_, usual), (near, chance), _ = scheme.inclusions(p)
    in_jit = jax.jit(lambda rate: scheme.inclusions_in_jit(rate, jnp))
    (weight, rate), (near_in_jit, chance_in_jit) = in_jit(np.float32(p))
    assert (weight, float(rate)) == (1, pytest.approx(usual))
    assert near <= float(near_in_jit) <= max(1.15 * near, 1.0 if p * m > capacity else 0.0)
    assert chance <= float(chance_in_jit) <= max(1.1 * chance, 1.0 if p * m > capacity else 0.0)


def test_three_methods_price_full_cohorts_alike():
    scheme, rounds, delta = SamplingScheme("poisson", 1000, 9), (0.7, 0.001, 2000), 1e-5
    spend = charged(scheme, GAUSSIAN, rounds)
    tight, by_rdp = guarantee.tight_epsilon([spend], delta), guarantee.rdp_epsilon([spend], delta)
    in_jit = float(epsilon_of(account(rounds, scheme=scheme), delta))
    # The loop has integer orders alone.
    assert tight < by_rdp <= in_jit * (1 + 1e-6) < 1.1 * by_rdp


def test_pure_releases_are_bounded_too():
    # Two releases of ε = 0.1 cost 0.2; RDP adds log(1/δ)/(α − 1) at its largest order.
    bound = float(epsilon_of(account((10.0, 1.0, 2), event=Pure()), 1e-5))
    assert 0.2 <= bound <= 0.2 + math.log(1e5) / 1023


def test_sampled_pure_releases_cost_as_much_as_on_the_host():
    event, orders = Pure(), np.array(rdp.INTEGER_ORDERS)

    @functools.partial(jax.jit, static_argnums=2)
    def in_jit(z, p, adjacency):
        return event.rdp(Entry(z, p, 1), adjacency, rdp.INTEGER_ORDERS, jnp)

    for z, p in ((7.0, 1e-4), (0.7, 0.2), (0.02, 0.2), (7.0, 1.0)):
        for adjacency in ("zero_out", "replace"):
            exact = randomized_response.answer(Entry(z, p, 1), 2.0, adjacency)[0]
            found = in_jit(np.float32(z), np.float32(p), adjacency)
            np.testing.assert_allclose(found, np.minimum(orders * exact**2 / 2, exact), rtol=1e-5)


def test_replacing_under_poisson_sampling_has_no_bound_here():
    assert float(epsilon_of(account((1.0, 0.5, 1)), 1e-5, "replace")) == math.inf


@pytest.mark.thorough
@pytest.mark.parametrize("p", [0.01, 1.0])
def test_gradient_in_z_against_differences(p):
    with jax.enable_x64(True):

        @jax.jit
        def epsilon(z):
            charges = dataclasses.replace(account((0.0, p, 500)), noise_multiplier=z[None])
            return epsilon_of(charges, 1e-5)

        z, step = jnp.asarray(2.0), 1e-5
        difference = (epsilon(z + step) - epsilon(z - step)) / (2 * step)
        assert float(jax.jit(jax.grad(epsilon))(z)) == pytest.approx(float(difference), rel=1e-6)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [((1.0, 1 / 205, 100 / 205, 200.0), 16.8323), ((2.0, 1e-4, 0.01, 20000.0), 2.77982)],
)
def test_noise_for_a_target_in_jit(plan, expected):
    z = jax.jit(in_loop.noise_multiplier_in_jit)(*plan)
    assert float(z) == pytest.approx(expected, rel=2e-5)


@pytest.mark.thorough
def test_the_inverse_returns_the_upper_end_and_has_all_derivatives():
    arguments = (0, 1, 2, 3)
    inverse = jax.jit(in_loop.noise_multiplier_in_jit)
    backward = jax.jit(jax.grad(in_loop.noise_multiplier_in_jit, argnums=arguments))
    forward = jax.jit(jax.jacfwd(in_loop.noise_multiplier_in_jit, argnums=arguments))
    with jax.enable_x64(True):
        for plan in ((1.0, 1 / 205, 100 / 205, 200.0), (2.0, 1e-4, 0.01, 20000.0)):
            epsilon, delta, p, rounds = plan
            rounds_of_plan = (float(inverse(*plan)), p, int(rounds))
            values = compose(rounds_of_plan, orders=rdp.INTEGER_ORDERS)
            met = rdp.epsilon(values, delta, rdp.INTEGER_ORDERS)
            assert epsilon * (1 - 1e-9) < met <= epsilon * (1 + 1e-12)
            back, ahead = backward(*plan), forward(*plan)
            for index, value in enumerate(plan):
                step = 1e-4 * value
                above, below = (
                    inverse(*(x + sign * step * (i == index) for i, x in enumerate(plan)))
                    for sign in (1, -1)
                )
                difference = float(above - below) / (2 * step)
                assert float(back[index]) == pytest.approx(difference, rel=1e-4)
                assert float(ahead[index]) == pytest.approx(difference, rel=1e-4)


def test_the_inverse_maps_over_targets():
    targets = jnp.array([0.5, 1.0, 8.0])
    mapped = jax.jit(jax.vmap(lambda e: in_loop.noise_multiplier_in_jit(e, 1e-5, 0.1, 100.0)))
    one = jax.jit(in_loop.noise_multiplier_in_jit)
    np.testing.assert_allclose(
        mapped(targets), [one(e, 1e-5, 0.1, 100.0) for e in targets], rtol=1e-5
    )
