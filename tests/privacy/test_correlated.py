"""Correlated noise: its cost against brute force and jax_privacy, and combinations refused."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_privacy.matrix_factorization import toeplitz
from support.problems import classification, copied, read_by, untrained

import fedjaxsim as fjs
from fedjaxsim.privacy import ledger as ledgers
from fedjaxsim.privacy.accounting import gaussian as gdp
from fedjaxsim.privacy.entries import Entry, SamplingScheme
from fedjaxsim.privacy.events import Correlated, PrivacySpend
from fedjaxsim.privacy.guarantee import tight_epsilon
from fedjaxsim.privacy.mechanisms import zeros
from fedjaxsim.privacy.mechanisms.sums import correlated
from fedjaxsim.privacy.noise import normal
from fedjaxsim.privacy.samplers import fixed_groups

pytestmark = pytest.mark.exact_keys
M, B, DELTA, Z = 10, 4, 1e-3, 5.0
PLANS = [(1, 0.5, 12, 4), (2, 1.0, 9, 3), (3, 0.5, 11, 4), (8, 0.3, 20, 5), (6, 0.7, 13, 13)]


def event_of(bands, power=0.5):
    return Correlated(bands=bands, power=power)


def inverse(event, rounds):
    """The matrix D⁻¹."""
    d = np.zeros(rounds)
    d[: event.bands] = gdp.coefficients(event.bands, event.power)[:rounds]
    matrix = sum(np.diag(np.full(rounds - j, d[j]), -j) for j in range(rounds))
    return np.linalg.inv(matrix)


@pytest.mark.parametrize(("bands", "power", "rounds", "groups"), PLANS)
def test_no_messages_of_a_client_cost_more_than_equal_ones(bands, power, rounds, groups):
    event = event_of(bands, power)
    matrix = inverse(event, rounds)
    assert matrix.min() > -1e-9
    worst = max(
        np.linalg.norm(matrix[:, g::groups] @ signs) ** 2
        for g in range(groups)
        for signs in itertools.product((-1, 0, 1), repeat=len(range(g, rounds, groups)))
    )
    squared = gdp.squared_sensitivity(event.series, rounds, groups)
    assert squared == pytest.approx(worst, rel=1e-9)
    if bands == 1:
        assert squared == math.ceil(rounds / groups)


@pytest.mark.parametrize(
    ("bands", "power", "rounds", "groups"),
    [
        PLANS[2],
        *(pytest.param(*plan, marks=pytest.mark.thorough) for plan in PLANS if plan != PLANS[2]),
    ],
)
def test_the_cost_is_that_of_jax_privacy(bands, power, rounds, groups):
    event = event_of(bands, power)

    @jax.jit
    def squared(noising):
        strategy = toeplitz.inverse_coef(noising, rounds)
        return toeplitz.minsep_sensitivity_squared(strategy, groups, n=rounds, skip_checks=True)

    reference = squared(np.asarray(gdp.coefficients(bands, power), np.float32))
    assert gdp.squared_sensitivity(event.series, rounds, groups) == pytest.approx(
        float(reference), rel=1e-5
    )


def test_coefficients_of_a_buffered_toeplitz_matrix_cost_what_jax_privacy_says():
    rounds, groups = 30, 6
    decays, scales = np.array([0.9, 0.4]), np.array([0.3, 0.25])
    strategy = np.r_[1.0, (decays ** np.arange(rounds - 1)[:, None]) @ scales]

    @jax.jit
    def of_jax_privacy(strategy):
        squared = toeplitz.minsep_sensitivity_squared(strategy, groups, skip_checks=True)
        return toeplitz.inverse_coef(strategy), squared

    noising, reference = map(np.asarray, of_jax_privacy(strategy.astype(np.float32)))
    event: Any = correlated(coefficients=(2 * noising).tolist()).event
    np.testing.assert_allclose(np.convolve(event.series, strategy)[:rounds], np.eye(rounds)[0],
                               atol=1e-6)  # fmt: skip
    squared = gdp.squared_sensitivity(event.series, rounds, groups)
    assert squared == pytest.approx(float(reference), rel=1e-5)
    in_loop = jax.jit(lambda: gdp.squared_sensitivity(event.series, rounds, groups, jnp))()
    assert squared == pytest.approx(float(in_loop), rel=1e-5)
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"coefficients": (1.0, 0.5)}, "no other may be positive"),
        ({"coefficients": (1.0, math.nan)}, "no other may be positive"),
        ({"coefficients": (0.0, -1.0)}, "the first positive"),
        ({"coefficients": (1.0, -0.5), "bands": 3}, "bands must be 2"),
        ({"coefficients": (1.0, -0.5), "power": 0.5}, "power has no effect"),
    )
    for arguments, message in refused:
        with pytest.raises(ValueError, match=message):
            correlated(**arguments)


def test_the_square_root_has_the_published_error_for_one_participation():
    """Σ_k (binom(2k, k)/4^k)² = (ln n + γ + 4 ln 2)/π + o(1), once as cost and once as error."""
    n = 1024
    published = (math.log(n) + np.euler_gamma + 4 * math.log(2)) / math.pi
    assert gdp.squared_sensitivity(gdp.coefficients(n, 0.5), n, n) == pytest.approx(
        published, rel=1e-3
    )
    last = np.sum(np.cumsum(gdp.coefficients(n, 0.5)) ** 2)
    assert last == pytest.approx(published, rel=1e-3)


def test_an_attack_reaches_the_cost_and_exceeds_the_cost_of_independent_noise():
    """The best test of a client of group 0 whitens all releases; no round alone shows as much."""
    rounds, event = 40, event_of(4, 0.6)
    matrix = inverse(event, rounds)
    takes_part = (np.arange(rounds) % B == 0).astype(float)
    effect = matrix @ takes_part
    noise = Z * np.random.default_rng(0).normal(size=(20_000, rounds)) @ np.linalg.inv(matrix).T
    scores = (noise @ matrix.T) @ effect / np.linalg.norm(effect) / Z
    assert np.std(scores) == pytest.approx(1, rel=0.02)
    found = float(np.linalg.norm(effect)) / Z
    scheme = SamplingScheme("groups", M, 3, groups=B)
    entries = (Entry(Z, 1 / B, rounds),)
    epsilon = tight_epsilon([PrivacySpend(scheme, event, entries)], DELTA)
    assert epsilon == pytest.approx(gdp.epsilon(DELTA, found), rel=1e-9)
    size = float(np.linalg.norm(gdp.coefficients(4, 0.6)))
    assert epsilon > gdp.epsilon(DELTA, math.sqrt(rounds / B) / (Z * size))
    independent = tight_epsilon([PrivacySpend(scheme, event_of(1), entries)], DELTA)
    assert independent == pytest.approx(gdp.epsilon(DELTA, math.sqrt(rounds / B) / Z), rel=1e-9)


def test_a_release_adds_the_noise_of_earlier_rounds_again():
    mechanism = correlated(bands=3)
    message = {"a": jnp.zeros(2), "b": jnp.zeros(())}
    hparams = fjs.Hyperparameters(clip=2.0, noise_multiplier=1.5).as_arrays()
    key = jax.random.key(7, impl="threefry2x32")

    @jax.jit
    def release(round_):
        return mechanism.release(zeros(message), 4.0, key, (), hparams, round_)

    of_round = jax.jit(lambda t: normal(jax.random.fold_in(key, t), (3,)))
    drawn = [of_round(t) for t in range(5)]
    for t in range(5):
        out = release(jnp.int32(t))
        d = [1.0, -0.5, -0.125]
        wanted = sum(d[j] * np.asarray(drawn[t - j]) for j in range(min(3, t + 1))) * 3 / 4
        got = np.append(np.asarray(out.value["a"]), np.asarray(out.value["b"]))
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
        assert float(out.noise_multiplier) == 1.5


@pytest.mark.parametrize(("clients", "groups"), [(10, 4), (7, 7), (9, 1), (12, 3)])
def test_a_client_takes_part_in_every_round_of_its_group_and_no_other(clients, groups):
    sampler = fixed_groups(groups=groups).for_clients(clients)
    draw = jax.jit(sampler.draw)
    key, hparams = jax.random.key(3, impl="threefry2x32"), fjs.Hyperparameters()
    cohorts = []
    for t in range(2 * groups):
        ids, mask, overflow = draw(key, jnp.int32(t), hparams)
        assert int(overflow) == 0
        assert mask.tolist() == sorted(mask.tolist(), reverse=True)
        cohorts.append(sorted(np.asarray(ids)[np.asarray(mask)].tolist()))
    assert cohorts[:groups] == cohorts[groups:]
    assert sorted(itertools.chain.from_iterable(cohorts[:groups])) == list(range(clients))
    sizes = [len(cohort) for cohort in cohorts]
    assert max(sizes) - min(sizes) <= 1


def simulation(sampling=None, mechanism=None):
    population, task = classification([4] * M)
    return fjs.Simulation(
        untrained(task),
        population,
        fixed_groups(groups=B) if sampling is None else sampling,
        fjs.Minibatches(2, steps=1),
        correlated(bands=3) if mechanism is None else mechanism,
    )


@pytest.fixture(scope="module")
def sim():
    return simulation()


@pytest.fixture(scope="module")
def independent():
    return simulation(mechanism=fjs.gaussian())


def given(sim, **changes):
    values = {"clip": 1.0, "noise_multiplier": Z, "sampling_rate": 0.25}
    return read_by(sim, **(values | changes))


def run(sim, state, rounds, **changes):
    for _ in range(rounds):
        state, _ = sim.round(state, given(sim, **changes))
    return state


def epsilon(sim, state, adjacency="zero_out"):
    return sim.guarantee(state, DELTA).find(adjacency).epsilon


def mu(rounds, z=Z):
    return math.sqrt(gdp.squared_sensitivity(event_of(3).series, rounds, B)) / z


@pytest.mark.thorough
def test_the_epsilon_of_a_run_its_prefixes_and_its_stages(sim):
    state, in_jit = sim.init(0, given(sim)), jax.jit(lambda state: sim.epsilon(state, DELTA))
    for done in (1, 3, 5):
        state = run(sim, state, done - int(state.round))
        exact = gdp.epsilon(DELTA, mu(done))
        assert epsilon(sim, state) == pytest.approx(exact, rel=1e-6)
        assert exact < float(in_jit(state)) < 1.2 * exact
    assert epsilon(sim, state, "replace") == pytest.approx(gdp.epsilon(DELTA, 2 * mu(5)), rel=1e-6)
    guarantee = sim.guarantee(state, DELTA).find("zero_out")
    assert (guarantee.status, guarantee.accountant) == ("exact", "gaussian")
    # The clip norm may change between rounds, and another stage begins another account.
    state = run(sim, state, 1, clip=0.5)
    stage = run(sim, sim.start_from(state, given(sim)), 2)
    both = math.hypot(mu(6), mu(2))
    assert epsilon(sim, stage) == pytest.approx(gdp.epsilon(DELTA, both), rel=1e-6)
    assert len(stage.privacy.charges) == 2


def test_calibration_meets_its_target(sim):
    hparams = sim.calibrate(given(sim), epsilon=2.0, rounds=9, delta=DELTA)
    z = float(hparams.noise_multiplier)
    assert gdp.epsilon(DELTA, mu(9, z)) == pytest.approx(2, rel=1e-3)


def test_other_noise_and_rounds_out_of_order_have_no_epsilon(sim, independent):
    state = run(sim, sim.init(0, given(sim)), 2)
    assert epsilon(sim, run(sim, copied(state), 1, noise_multiplier=9.0)) is None
    skipped = dataclasses.replace(state, round=state.round + 1)
    assert epsilon(sim, run(sim, skipped, 1)) is None
    # A stage of another simulation closes the account: its key drew other noise.
    begun = independent.start_from(state, given(independent))
    back = run(sim, begun, 1)
    assert epsilon(sim, back) is None


def test_independent_noise_of_fixed_groups_costs_the_rounds_of_one_group(independent):
    state = run(independent, independent.init(0, given(independent)), 5)
    assert epsilon(independent, state) == pytest.approx(
        gdp.epsilon(DELTA, math.sqrt(2) / Z), rel=1e-6
    )


@pytest.mark.parametrize(
    "sampling",
    [
        fjs.poisson(0.25),
        fjs.privacy.fixed_size(cohort=2),
    ],
)
def test_samplers_that_promise_no_separation_are_refused(sampling):
    with pytest.raises(ValueError, match=r"correlated noise .* full or groups"):
        simulation(sampling)


def test_a_schedule_of_noise_is_refused(sim):
    with pytest.raises(ValueError, match="noise_multiplier"):
        given(sim, noise_multiplier=[1.0, 2.0])


def test_events_and_schemes_have_no_impossible_numbers():
    with pytest.raises(ValueError, match="bands"):
        correlated(bands=0)
    for power in (0.0, 1.5):
        with pytest.raises(ValueError, match="power"):
            correlated(power=power)
    with pytest.raises(ValueError, match="groups"):
        SamplingScheme("full", 10, 10, groups=2)
    for groups in (None, 11):
        with pytest.raises(ValueError, match="groups"):
            SamplingScheme("groups", 10, 10, groups=groups)
    account = ledgers.no_charges(SamplingScheme("full", 3, 3), event_of(2), 1)
    assert jax.jit(lambda: ledgers.charge(account, 1.0, 1.0, 1).overflowed)()
