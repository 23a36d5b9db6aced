"""Random allocation: its cost against brute force, and its turns against what others can know."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import ndtr
from scipy.stats import binom
from support.plans import charged
from support.problems import least_squares, read_by, untrained

import fedjaxsim as fjs
from fedjaxsim.keys import seed_key
from fedjaxsim.privacy import guarantee
from fedjaxsim.privacy import ledger as ledgers
from fedjaxsim.privacy.accounting import allocation, composition, gaussian, losses, simulation
from fedjaxsim.privacy.accounting.in_loop import rdp_epsilon_in_jit
from fedjaxsim.privacy.calibration import noise_multiplier
from fedjaxsim.privacy.entries import SamplingScheme
from fedjaxsim.privacy.events import GAUSSIAN, Correlated, Dominated, Gaussian, PrivacyEvent, Pure
from fedjaxsim.privacy.samplers import _multiple, fixed_groups, poisson, random_allocation
from fedjaxsim.privacy.samplers.law import check_law

DELTA = 1e-5
HPARAMS = fjs.Hyperparameters(sampling_rate=0.25).as_arrays()


def scheme(period, clients=10_000, capacity=None):
    return SamplingScheme("allocation", clients, capacity or clients, period=period)


def plan(z, period, rounds, event: PrivacyEvent = GAUSSIAN, capacity=None):
    return [charged(scheme(period, capacity=capacity), event, (z, 1 / period, rounds))]


# --- cost -----------------------------------------------------------------------------------------


def call(strike, z):
    """Compute E[(Y − strike)₊] of a lognormal Y with mean 1 and deviation 1/z of its logarithm."""
    positive = np.maximum(strike, 1e-300)
    d = -np.log(positive) * z + 1 / (2 * z)
    return np.where(strike > 0, ndtr(d) - positive * ndtr(d - 1 / z), 1 - strike)


def some_terms(z, period, points):
    """Return (1/t) Σ of t − 1 lognormal terms, and weights, by the trapezoidal rule."""
    x = np.linspace(-10, 10 + 1 / z, points)
    weight = np.exp(-(x**2) / 2) * (x[1] - x[0]) / math.sqrt(2 * math.pi)
    ratio = np.exp(x / z - 1 / (2 * z**2)) / period
    ratios = functools.reduce(np.add.outer, [ratio] * (period - 1))
    return ratios.ravel(), functools.reduce(np.multiply.outer, [weight] * (period - 1)).ravel()


def excess_of(strike, z, period, points=None):
    """Compute E_Q[(L − strike)₊] by integration, the last term in closed form."""
    ratios, weights = some_terms(z, period, points or 401)
    return float(weights @ call((strike - ratios) * period, z)) / period


def both_ways(excess, epsilon):
    """Compute δ of P against Q and of Q against P; E(c − L)₊ = E(L − c)₊ − 1 + c."""
    remove = excess(math.exp(epsilon))
    return remove, math.exp(epsilon) * (excess(math.exp(-epsilon)) - 1) + 1


@pytest.mark.parametrize(
    ("z", "period"),
    [
        pytest.param(z, period, marks=[] if (z, period) == (1.0, 3) else [pytest.mark.thorough])
        for z in (0.6, 1.0, 3.0)
        for period in (2, 3)
    ],
)
def test_one_period_is_that_of_brute_force_in_both_directions(z, period):
    pair = allocation.losses(z, period, 1e-4)
    for epsilon in (0.0, 0.1, 0.5, 1.0):
        exact = both_ways(lambda strike: excess_of(strike, z, period), epsilon)
        for one_way, truth in zip(pair, exact, strict=True):
            found = losses.profile([((one_way,), 1)]).delta(epsilon)
            assert truth * (1 - 1e-7) - 1e-13 <= found <= truth * 1.006 + 1e-13


def test_two_periods_of_two_rounds_are_those_of_brute_force():
    z = 1.5
    terms, weights = some_terms(z, 2, 61)
    first = np.add.outer(terms, terms).ravel()
    first_weights = np.multiply.outer(weights, weights).ravel()

    def excess(strike):
        """E(L L' − c)₊ = E[L E(L' − c/L)₊], L' a known term and half a lognormal one."""
        inner = call((strike / first[:, None] - terms[None, :]) * 2, z) / 2
        return float((first_weights * first) @ inner @ weights)

    profile = composition.profile(plan(z, 2, 4), "zero_out")
    for epsilon in (0.3, 1.0, 2.0):
        truth = max(both_ways(excess, epsilon))
        assert truth * (1 - 1e-6) <= profile.delta(epsilon) <= truth * 1.004


def test_draws_of_a_simulation_have_the_moments_of_the_ratio():
    """E[L] = 1, and E[L²] = 1 + (e^(1/z²) − 1)/t; both parts of the grid add up to 1."""
    z, period = 0.7, 6
    logs, weights = map(np.concatenate, zip(*simulation._weighted(z, period), strict=True))
    means = [np.sum(weights * np.exp(power * logs)) / len(logs) for power in range(3)]
    assert means == pytest.approx([1, 1, 1 + math.expm1(1 / z**2) / period], rel=5e-3)
    for one_way in simulation.losses(z, period, 1e-3):
        assert np.sum(one_way.masses) == pytest.approx(1, rel=1e-12)


def test_ten_rounds_three_times_are_those_of_a_simulation():
    z, period, periods, epsilon, draws = 1.0, 10, 3, 1.0, 100_000
    random = np.random.default_rng(0)

    def logs(present):
        x = random.normal(size=(draws, periods, period)) * z
        x[..., 0] += present
        return np.log(np.mean(np.exp(x / z**2 - 1 / (2 * z**2)), axis=2)).sum(axis=1)

    found = composition.profile(plan(z, period, period * periods), "zero_out").delta(epsilon)
    remove = -np.expm1(np.minimum(epsilon - logs(1), 0))
    add = -np.expm1(np.minimum(epsilon + logs(0), 0))
    for values in (remove, add):
        assert np.mean(values) - 5 * np.std(values) / math.sqrt(draws) < found
    assert found == pytest.approx(np.mean(remove), abs=float(5 * np.std(remove) / math.sqrt(draws)))


@pytest.mark.parametrize("z", [0.7, 2.0])
def test_rdp_is_that_of_brute_force(z):
    """At integers P against Q is exact, and it is the larger one here."""
    # E[L^α] needs x up to α/z.
    x = np.linspace(-12, 12 + 8 / z, 1601)
    weight = np.exp(-(x**2) / 2) * (x[1] - x[0]) / math.sqrt(2 * math.pi)
    ratio = np.exp(x / z - 1 / (2 * z**2)) / 2
    logs = np.log(np.add.outer(ratio, ratio))
    both = np.log(weight)[:, None] + np.log(weight)[None, :]

    def divergence(power, order):
        values = both + power * logs
        top = np.max(values)
        return (top + math.log(np.sum(np.exp(values - top)))) / (order - 1)

    orders = (1.5, 2.0, 3.0, 6.0)
    for order, found in zip(orders, allocation.rdp(z, 2, orders), strict=True):
        truth = max(divergence(order, order), divergence(1 - order, order))
        assert truth * (1 - 1e-9) <= found
        if order == int(order):
            assert found <= truth * 1.002


def test_inverse_moments_are_those_of_brute_force():
    """The direction Q against P, which integer moments do not bound: it has its own quadrature."""
    z, powers = 1.0, np.array([0.5, 1.0, 7.0])
    terms, weights = some_terms(z, 3, 81)
    x = np.linspace(-10, 10, 81)
    last = np.exp(x / z - 1 / (2 * z**2)) / 3
    weight = np.exp(-(x**2) / 2) * (x[1] - x[0]) / math.sqrt(2 * math.pi)
    found = allocation._log_inverse_moments(np.float64(z), 3, powers, np)
    for power, value in zip(powers, found, strict=True):
        values = np.add.outer(terms, last) ** -power * np.multiply.outer(weights, weight)
        truth = float(np.sum(values))
        assert math.log(truth) <= value <= math.log(truth) + 2e-3 * max(1.0, truth - 1)


def test_a_replacement_costs_at_most_its_bound():
    """Two rounds; the two messages are at right angles, between, or opposite, the worst case."""
    z, orders, epsilons = 1.2, (2.0, 3.0, 5.0), (0.2, 1.0)
    x = np.linspace(-12, 12, 33)
    axes = np.meshgrid(x, x, x, x, indexing="ij", sparse=True)  # two coordinates of each round
    first, second = axes[:2], axes[2:]
    density = sum(-(axis**2) / 2 - math.log(2 * math.pi) / 2 for axis in axes)
    volume = (x[1] - x[0]) ** 4

    def log_mixture(message):
        turns = [(message[0] * u + message[1] * v) / z for u, v in (first, second)]
        return np.logaddexp(*turns) - 1 / (2 * z**2) - math.log(2)

    one = log_mixture((1.0, 0.0))
    bounds = allocation.replaced(z, 2, orders, 2.0)
    profile = losses.profile([(allocation.replaced_losses(z, 2, 2.0, 1e-3), 1)])
    deltas = []
    for angle in (0.5, 0.75, 1.0):
        another = log_mixture((math.cos(math.pi * angle), math.sin(math.pi * angle)))
        for order, bound in zip(orders, bounds, strict=True):
            values = density + order * one + (1 - order) * another
            top = np.max(values)
            moment = top + math.log(np.sum(np.exp(values - top)) * volume)
            assert 0 < moment / (order - 1) <= bound
        gaps = [np.exp(density + one) - np.exp(density + another + ε) for ε in epsilons]
        deltas.append([float(np.sum(np.maximum(gap, 0)) * volume) for gap in gaps])
    assert deltas == sorted(deltas)
    for worst, epsilon in zip(deltas[-1], epsilons, strict=True):
        assert worst < profile.delta(epsilon) < 1.4 * worst


def test_a_replacement_in_a_known_turn_is_a_gaussian_release_at_twice_the_distance():
    hidden = losses.chained(*gaussian.sampled(1.3, 1.0, False, 1e-3))
    for epsilon in (0.0, 0.5, 3.0):
        found = losses.profile([((hidden,), 1)]).delta(epsilon)
        assert found == pytest.approx(gaussian.delta(epsilon, 2 / 1.3), rel=1e-6)


def test_chained_losses_have_the_least_delta_of_all_ways_to_split_epsilon():
    random, step = np.random.default_rng(0), 0.1

    def law(first):
        """Return losses of which a fifth of the other distribution is out of reach."""
        masses = random.random(30)
        values = step * (first + np.arange(30))
        return losses.Losses(step, first, 0.8 * masses / np.sum(masses * np.exp(-values)), 0.0)

    def delta(one, place):
        with_loss = -np.expm1(np.minimum(step * place - one.values, 0)) @ one.masses
        return float(with_loss + one.infinite)

    def normal(one, infinite):
        rest = 1 - infinite
        return one._replace(masses=rest * one.masses / np.sum(one.masses), infinite=infinite)

    there, back = normal(law(-10), 0.01), normal(law(-8), 0.02)
    for one in (there, back):
        assert np.sum(one.masses * np.exp(-one.values)) <= 1
    chain = losses.chained(there, back)
    assert np.sum(chain.masses) + chain.infinite == pytest.approx(1, rel=1e-12)
    for place in (0, 5, 13):
        splits = [
            delta(there, other) + math.exp(step * other) * delta(back, place - other)
            for other in range(-60, 80)
        ]
        assert delta(chain, place) == pytest.approx(min(splits), rel=1e-9)


@pytest.mark.parametrize(
    ("z", "period", "periods", "lower", "upper"),
    [
        (1.0, 10, 10, 6.0738, 6.1616),
        (2.0, 10, 10, 2.0982, 2.1849),
        pytest.param(0.6, 100, 1, 3.4193, 3.4440, marks=pytest.mark.thorough),
        pytest.param(0.8, 100, 10, 2.8672, 2.9505, marks=pytest.mark.thorough),
    ],
)
def test_epsilon_lies_between_the_bounds_of_feldman_and_shenfeld(z, period, periods, lower, upper):
    """Of `gaussian_allocation_epsilon_range` in PLD-accounting 2.0 (arXiv 2602.17284)."""
    found = guarantee.tight_epsilon(plan(z, period, period * periods), DELTA)
    assert lower <= found <= upper


def test_a_period_of_one_round_is_full_participation():
    found = guarantee.report(plan(4.0, 1, 10), DELTA).find("zero_out")
    assert found.epsilon == pytest.approx(gaussian.epsilon(DELTA, math.sqrt(10) / 4), rel=1e-9)
    assert found.status == "exact"


@pytest.mark.parametrize(
    ("z", "period", "rounds", "of_poisson", "of_turns", "of_groups"),
    [
        (1.0, 10, 100, 7.05, 6.12, 17.9),
        pytest.param(0.6, 100, 100, 3.82, 3.44, 8.0, marks=pytest.mark.thorough),
        pytest.param(0.8, 100, 1000, 3.14, 2.91, 24.0, marks=pytest.mark.thorough),
    ],
)
def test_epsilon_is_below_that_of_poisson_cohorts(
    z, period, rounds, of_poisson, of_turns, of_groups
):
    """The table of docs/privacy.md."""
    m = 10_000
    cohorts = [charged(SamplingScheme("poisson", m, m), GAUSSIAN, (z, 1 / period, rounds))]
    turns = SamplingScheme("groups", m, m // period, groups=period)
    groups = [charged(turns, GAUSSIAN, (z, 1 / period, rounds))]
    hidden = guarantee.tight_epsilon(plan(z, period, rounds), DELTA)
    assert guarantee.tight_epsilon(cohorts, DELTA) == pytest.approx(of_poisson, abs=0.01)
    assert hidden == pytest.approx(of_turns, abs=0.01)
    assert guarantee.tight_epsilon(groups, DELTA) == pytest.approx(of_groups, abs=0.05)
    assert hidden <= guarantee.rdp_epsilon(plan(z, period, rounds), DELTA)


def test_a_turn_drawn_anew_costs_less_than_one_that_a_client_keeps():
    """One period is balls in bins; with a kept turn two of them are one at z/√2."""
    anew, kept = plan(1.0, 4, 8), plan(1.0 / math.sqrt(2), 4, 4)
    for epsilon in (0.5, 2.0):
        redrawn, same = (
            composition.profile(each, "zero_out").delta(epsilon) for each in (anew, kept)
        )
        assert 0 < redrawn < 0.85 * same


def test_an_unfinished_period_is_whole_and_counts_the_least_noise():
    whole = guarantee.tight_epsilon(plan(2.0, 4, 8), DELTA)
    for rounds in (5, 7):
        assert guarantee.tight_epsilon(plan(2.0, 4, rounds), DELTA) == whole
    assert guarantee.tight_epsilon(plan(2.0, 4, 9), DELTA) > whole
    mixed = [charged(scheme(4), GAUSSIAN, (50.0, 0.25, 7), (2.0, 0.25, 1))]
    assert guarantee.tight_epsilon(mixed, DELTA) == whole


def test_a_replaced_client_costs_at_most_a_known_turn_and_more_than_a_zeroed_one():
    turns = plan(2.0, 10, 100)
    known = gaussian.epsilon(DELTA, 2 * math.sqrt(10) / 2)
    assert guarantee.tight_epsilon(turns, DELTA) < guarantee.tight_epsilon(turns, DELTA, "replace")
    assert guarantee.tight_epsilon(turns, DELTA, "replace") < known


def test_a_message_of_a_turn_dominates_that_about_an_example_as_a_replacement():
    found = composition.profile(plan(2.0, 4, 8, Dominated(release=GAUSSIAN)), "zero_out")
    replaced = composition.profile(plan(2.0, 4, 8), "replace")
    assert found.epsilon(DELTA) == pytest.approx(replaced.epsilon(DELTA), rel=1e-9)


@dataclasses.dataclass(frozen=True)
class Believer(Gaussian):
    """An event of a user's own, whose costs follow from p as for Poisson sampling."""


@pytest.mark.parametrize("event", [Believer(), Pure()])
def test_other_events_cost_what_they_do_in_known_turns(event):
    known = [charged(SamplingScheme("full", 10_000, 10_000), event, (5.0, 1.0, 2))]
    for adjacency in ("zero_out", "replace"):
        found = guarantee.tight_epsilon(plan(5.0, 4, 8, event), DELTA, adjacency)
        assert found == pytest.approx(guarantee.tight_epsilon(known, DELTA, adjacency), rel=1e-9)


def test_correlated_noise_under_random_allocation_is_refused():
    with pytest.raises(ValueError, match="no known cost under 'allocation' sampling"):
        guarantee.tight_epsilon(plan(5.0, 4, 8, Correlated(bands=2)), DELTA)


def test_calibrated_noise_meets_epsilon():
    z = noise_multiplier(2.0, DELTA, rounds=40, sampling_rate=0.1, scheme=scheme(10))
    assert 1.998 <= guarantee.tight_epsilon(plan(z, 10, 40), DELTA) <= 2.0


@pytest.mark.thorough
def test_a_search_needs_few_values_of_the_fine_grid(monkeypatch):
    grids, convolved = [], composition._convolved
    monkeypatch.setattr(
        composition,
        "_convolved",
        lambda met, *rest: grids.append(rest[-1]) or convolved(met, *rest),
    )
    z = noise_multiplier(2.0, DELTA, rounds=1000, sampling_rate=0.01, scheme=scheme(100))
    assert 0 < grids.count(0.0) <= 3
    assert 1.998 <= guarantee.tight_epsilon(plan(z, 100, 1000), DELTA) <= 2.0


def test_the_bound_inside_jit_is_above_the_tight_one():
    account = ledgers.no_charges(scheme(10), GAUSSIAN, 1)

    def epsilon(z, rounds):
        charges = dataclasses.replace(
            account, noise_multiplier=z[None], sampling_rate=jnp.array([0.1]), rounds=rounds[None]
        )
        return rdp_epsilon_in_jit(ledgers.Ledger((charges,)), DELTA)

    with_slope = jax.jit(jax.value_and_grad(epsilon))
    assert with_slope(jnp.ones(()), jnp.int32(0)) == (0, 0)
    for rounds in (7, 100):
        value, slope = with_slope(jnp.ones(()), jnp.int32(rounds))
        tight = guarantee.tight_epsilon(plan(1.0, 10, rounds), DELTA)
        assert tight <= value <= 1.4 * tight
        assert slope < 0


# --- attacks --------------------------------------------------------------------------------------


@functools.cache
def turns_of(every, m, periods=3000):
    """Draw the turns of clients, (periods, m), and check that each has exactly one."""
    sampler = random_allocation(every=every).for_clients(m)

    @jax.jit
    def cohorts():
        rounds = jnp.arange(every * periods)
        return jax.lax.map(lambda t: sampler.draw(seed_key(1), t, HPARAMS)[:2], rounds)

    ids, mask = map(np.asarray, cohorts())
    drawn = np.zeros((len(ids), m + 1), bool)
    drawn[np.arange(len(ids))[:, None], np.where(mask, ids, m)] = True
    by_period = drawn[:, :m].reshape(periods, every, m)
    assert np.all(by_period.sum(axis=1) == 1)
    return by_period.argmax(axis=1)


def likely(successes, trials, probability):
    tails = binom.cdf(successes, trials, probability), binom.sf(successes - 1, trials, probability)
    return 2 * min(tails) > 1e-9


def test_who_sees_all_others_does_not_know_a_clients_turn():
    """The sum of all others' turns would tell it if cohorts had equal sizes (mod t)."""
    every, m = 4, 8
    turns = turns_of(every, m)
    guess = -turns[:, 1:].sum(axis=1) % every
    assert likely(np.sum(guess == turns[:, 0]), len(turns), 1 / every)
    balanced = np.argsort(np.random.default_rng(0).random((len(turns), m)), axis=1) % every
    total = sum(np.arange(m) % every)
    assert np.all((total - balanced[:, 1:].sum(axis=1)) % every == balanced[:, 0])


def test_turns_of_earlier_periods_do_not_tell_later_ones():
    turns = turns_of(4, 8)
    for lag, place in itertools.product((1, 2), (0, 3)):
        again = turns[lag:, place] == turns[:-lag, place]
        assert likely(np.sum(again), len(again), 0.25)


def test_the_period_and_the_id_decide_the_turn_not_the_number_of_clients():
    few, many = turns_of(3, 5, periods=20), turns_of(3, 9, periods=20)
    np.testing.assert_array_equal(few, many[:, :5])


def test_full_cohorts_make_turns_known():
    """Two clients, one place: whoever sees the other's turn may learn the client's."""
    tiny = SamplingScheme("allocation", 2, 1, period=2)
    assert tiny.full_in_period == 1
    found = guarantee.tight_epsilon([charged(tiny, GAUSSIAN, (2.0, 0.5, 4))], DELTA)
    assert found >= gaussian.epsilon(DELTA, math.sqrt(2) / 2) * (1 - 1e-9)
    assert scheme(10).full_in_period == 0
    usual = random_allocation(every=10).for_clients(10_000).scheme
    assert 0 < usual.full_in_period < 1e-26
    costs = [
        guarantee.tight_epsilon(plan(2.0, 10, 100, capacity=capacity), DELTA)
        for capacity in (usual.capacity, 1_150, 1_050)
    ]
    assert costs == sorted(costs)
    assert costs[0] == pytest.approx(guarantee.tight_epsilon(plan(2.0, 10, 100), DELTA), rel=1e-6)


charge = jax.jit(ledgers.charge)


@pytest.mark.parametrize("rounds", [[0, 1, 1, 2], [1, 0, 2, 3], [0, 1, 3, 4], [4, 5, 6, 7]])
def test_rounds_out_of_order_have_no_epsilon(rounds):
    def overflows(order):
        account = ledgers.no_charges(scheme(4), GAUSSIAN, 1)
        for round_ in order:
            account = charge(account, 2.0, 0.25, round_)
        return bool(account.overflowed)

    assert overflows(rounds)
    assert not overflows(range(4))


LAWFUL = random_allocation(every=4).for_clients(40)
COINS = poisson(0.25, capacity=40).for_clients(40)
LIARS = {
    "Poisson cohorts": (LAWFUL._replace(draw=COINS.draw), "one round of every 4"),
    "fixed groups": (
        LAWFUL._replace(draw=fixed_groups(groups=4).for_clients(40).draw),
        "take part together|takes part",
    ),
    "the turns of one period in all": (
        LAWFUL._replace(draw=lambda key, t, hparams: LAWFUL.draw(key, t % 4, hparams)),
        "same turn in two periods",
    ),
    "turns charged as Poisson": (COINS._replace(draw=LAWFUL.draw), "a round and the next"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.thorough] if place else [])
        for place, name in enumerate(LIARS)
    ],
)
def test_a_sampler_of_another_law_is_refused(name):
    sampler, words = LIARS[name]
    with pytest.raises(ValueError, match=words):
        check_law(sampler, HPARAMS)


def test_a_turn_is_a_multiple_of_64_bits_rounded_down():
    numbers = [0, 1, 2**32 - 1, 2**63, 2**64 // 3, 2**64 - 1]
    words = ([n >> s & 0xFFFFFFFF for n in numbers] for s in (32, 0))
    high, low = (jnp.asarray(np.array(each, np.uint32)) for each in words)
    for factor in (1, 3, 1000, 2**16 - 1):
        assert _multiple(high, low, factor).tolist() == [n * factor >> 64 for n in numbers]


def test_a_run_charges_whole_periods():
    population, task = least_squares([2] * 12, features=2)
    sampling = random_allocation(every=3)
    sim = fjs.Simulation(untrained(task), population, sampling, fjs.Minibatches(2, steps=1))
    hparams = read_by(sim, clip=1.0, noise_multiplier=2.0)
    state = sim.init(0, hparams)
    for _ in range(4):
        state, _ = sim.round(state, hparams)
    found = sim.guarantee(state, delta=1e-3).find("zero_out")
    expected = [charged(sim.sampler.scheme, GAUSSIAN, (2.0, 1 / 3, 6))]
    assert found.epsilon == pytest.approx(guarantee.tight_epsilon(expected, 1e-3), rel=1e-9)
    assert found.sampling == "allocation"
