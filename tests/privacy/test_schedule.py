"""Budgets over rounds: what a schedule costs, what noise it draws, and what is refused."""

import math
from typing import Any

import dp_accounting
import jax
import numpy as np
import pytest
import scipy.stats
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from support.plans import compose
from support.problems import least_squares

import fedjaxsim as fjs
from fedjaxsim.privacy import calibration, ledger
from fedjaxsim.privacy.accounting import composition, gaussian, rdp
from fedjaxsim.privacy.accounting.in_loop import rdp_epsilon_in_jit
from fedjaxsim.privacy.entries import Entry, SamplingScheme
from fedjaxsim.privacy.events import Gaussian, PrivacySpend, Pure
from fedjaxsim.privacy.guarantee import report, tight_epsilon
from fedjaxsim.privacy.mechanisms.gram import gaussian_gram, pure_gram
from fedjaxsim.privacy.schedule import CONSTANT, Schedule, entries, equally_costly

DELTA, M, T = 1e-5, 40, 6
EVERYONE, POISSON = SamplingScheme("full", M, M), SamplingScheme("poisson", M, M)
GAUSSIAN, PURE = Gaussian(), Pure()
QUICK = "power:0.4", 1.0
SCHEDULES = ("power:0.4", "power:-1", "geometric:0.8", "geometric:1.1")


def explicit(budget, z, p=1.0, rounds=T):
    """Every round of a plan as an event of dp_accounting, in the order of the rounds."""
    gaussians: Any = [
        dp_accounting.GaussianDpEvent(float(each)) for each in budget.noise(z, rounds)
    ]
    sampled: Any = [dp_accounting.PoissonSampledDpEvent(p, each) for each in gaussians]
    return dp_accounting.ComposedDpEvent(gaussians if p == 1 else sampled)


# --- what a schedule is ---------------------------------------------------------------------------


def test_weights_by_hand():
    # ω = 1, 4, 9 has the mean square 98/3; for Q = 1/2 it is 2, 4, 8, of which 84/3.
    found = Schedule.parse("power:2").weights(3)
    np.testing.assert_allclose(found, np.array([1, 4, 9]) / math.sqrt(98 / 3))
    found = Schedule.parse("geometric:0.5").weights(3)
    np.testing.assert_allclose(found, np.array([2, 4, 8]) / math.sqrt(84 / 3))


@pytest.mark.parametrize("text", SCHEDULES)
def test_noise_is_in_inverse_proportion_to_the_share_and_z_is_its_scale(text):
    budget = Schedule.parse(text)
    z: Any = budget.noise(3.0, 20)
    assert z.dtype == np.float32
    np.testing.assert_allclose(z * budget.weights(20), 3.0, rtol=1e-6)
    assert np.sum(1 / z.astype(float) ** 2) == pytest.approx(20 / 3**2, rel=1e-6)
    assert equally_costly(z) == pytest.approx(3.0, rel=1e-6)
    assert str(budget) == text


def test_a_constant_budget_is_the_number_itself():
    for budget in (CONSTANT, Schedule.parse(None), Schedule.parse("constant")):
        assert budget.noise(0.1, 10**9) == 0.1
        assert budget.entries(0.1, 0.5, 10**9) == (Entry(0.1, 0.5, 10**9),)
    assert equally_costly(0.1) == 0.1


def test_rounds_without_noise_have_none():
    np.testing.assert_array_equal(Schedule.parse("power:1").noise(0.0, 4), np.zeros(4))
    assert equally_costly(np.array([1.0, 0.0])) == 0


@pytest.mark.parametrize(
    ("text", "rounds", "message"),
    [
        ("linear", 5, "noise_schedule"),
        ("power", 5, "got 'power'"),
        ("power:x", 5, "got 'power:x'"),
        ("power:inf", 5, "got 'power:inf'"),
        ("power:nan", 5, "got 'power:nan'"),
        ("geometric:0", 5, "got 'geometric:0'"),
        ("geometric:-2", 5, "got 'geometric:-2'"),
        ("constant:1", 5, "got 'constant:1'"),
        ("geometric:0.5", 22, "round 22 of 22"),
        ("geometric:2", 22, "round 1 of 22"),
        ("power:10", 100, r"1e\+06"),
        ("power:0.1", 100_001, "rounds"),
    ],
)
def test_what_is_no_schedule_is_refused(text, rounds, message):
    with pytest.raises(ValueError, match=message):
        Schedule.parse(text).check(rounds)


# --- what it costs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "p"),
    [
        pytest.param(text, p, marks=[] if (text, p) == QUICK else [pytest.mark.thorough])
        for text in SCHEDULES
        for p in (1.0, 0.2)
    ],
)
def test_epsilon_is_that_of_an_independent_composition_of_every_round(text, p):
    budget, scheme = Schedule.parse(text), EVERYONE if p == 1 else POISSON
    charged = PrivacySpend(scheme, GAUSSIAN, budget.entries(2.0, p, T))
    whole = explicit(budget, 2.0, p)
    tight = PLDAccountant(value_discretization_interval=1e-3).compose(whole).get_epsilon(DELTA)
    assert tight_epsilon([charged], DELTA) == pytest.approx(tight, rel=2e-3)
    if p < 1:
        loose = RdpAccountant(rdp.INTEGER_ORDERS).compose(whole).get_epsilon(DELTA)
        values = compose(*charged.entries, orders=rdp.INTEGER_ORDERS)
        assert rdp.epsilon(values, DELTA, rdp.INTEGER_ORDERS) == pytest.approx(loose, rel=1e-6)
    # Charging the average, or the loudest round, understates the truth.
    z: Any = budget.noise(2.0, T)
    for wrong in (float(np.mean(z)), float(np.max(z))):
        too_little = tight_epsilon([charged._replace(entries=(Entry(wrong, p, T),))], DELTA)
        assert too_little < 0.98 * tight


def test_at_full_participation_no_schedule_changes_epsilon_and_the_order_never_does():
    for text in SCHEDULES:
        planned = Schedule.parse(text).entries(3.0, 1.0, T)
        found = report([PrivacySpend(EVERYONE, GAUSSIAN, planned)], DELTA).find("zero_out")
        exact = gaussian.epsilon(DELTA, math.sqrt(T) / 3)
        assert found.epsilon == pytest.approx(exact, rel=1e-6)
        assert found.status == "exact"
    for scheme, p in ((EVERYONE, 1.0), (POISSON, 0.3), (SamplingScheme("fixed", M, 10), 0.25)):
        planned = Schedule.parse("power:1").entries(3.0, p, T)
        shuffled = tuple(planned[i] for i in (3, 0, 5, 1, 4, 2))
        one, other = (
            tight_epsilon([PrivacySpend(scheme, GAUSSIAN, e)], DELTA) for e in (planned, shuffled)
        )
        assert one == pytest.approx(other, rel=1e-9)


@pytest.mark.parametrize("text", SCHEDULES)
def test_pure_rounds_add_up_to_the_target_and_share_it_as_the_schedule_says(text):
    budget = Schedule.parse(text)
    plan: Any = {"rounds": T, "sampling_rate": 1.0, "scheme": EVERYONE, "event": PURE}
    z = calibration.noise_multiplier(2.0, 1e-300, noise_schedule=budget, **plan)
    each = 1 / np.asarray(budget.noise(z, T), np.float64)
    assert 2.0 * (1 - calibration.TOLERANCE) <= each.sum() <= 2.0
    np.testing.assert_allclose(each / each.sum(), budget.weights(T) / budget.weights(T).sum())


@pytest.mark.thorough
def test_many_pure_rounds_meet_the_target_nearly_as_gaussian_ones():
    rounds, budget = 2000, Schedule.parse("power:0.6666667")
    plan: Any = {"rounds": rounds, "sampling_rate": 1.0, "scheme": EVERYONE, "event": PURE}
    z = calibration.noise_multiplier(1.0, DELTA, noise_schedule=budget, **plan)
    each = 1 / np.asarray(budget.noise(z, rounds), np.float64)
    # Many answers of randomized response are nearly Gaussian: μ² = Σ ε².
    limit = gaussian.epsilon(DELTA, math.sqrt(np.sum(each**2)))
    assert limit == pytest.approx(1, rel=0.02)
    # The sum, which holds at δ = 0, asks for more noise.
    basic = calibration.noise_multiplier(1.0, 1e-300, noise_schedule=budget, **plan)
    assert basic > 2 * z


@pytest.mark.parametrize(
    ("scheme", "p"),
    [
        pytest.param(POISSON, 0.2, marks=pytest.mark.thorough),
        (SamplingScheme("fixed", M, 10), 0.25),
        (SamplingScheme("groups", M, M // 4, groups=4), 0.25),
    ],
)
def test_calibrated_schedules_meet_the_target(scheme, p):
    budget = Schedule.parse("geometric:0.7")
    plan: Any = {"rounds": T, "sampling_rate": p, "scheme": scheme}
    z = calibration.noise_multiplier(1.0, DELTA, noise_schedule=budget, **plan)
    assert z == float(np.float32(z))
    drawn = budget.noise(z, T)
    charged = PrivacySpend(scheme, GAUSSIAN, entries(drawn, float(np.float32(p)), T))
    found = tight_epsilon([charged], DELTA)
    assert 1 - calibration.TOLERANCE <= found <= 1
    if scheme.kind == "groups":
        # One client may meet a quarter of the rounds, those with the least noise.
        met = np.sort(np.asarray(drawn, np.float64))[: math.ceil(T / 4)]
        exact = gaussian.epsilon(DELTA, math.sqrt(np.sum(1 / met**2)))
        assert found == pytest.approx(exact, rel=1e-9)


def test_rounds_of_pure_releases_add_up_to_the_target():
    # z = 4: 1/2 each where data are replaced, 1/4 each for zero-out.
    plan: Any = {"noise_multiplier": 4.0, "sampling_rate": 1.0, "scheme": EVERYONE, "event": PURE}
    assert calibration.rounds(2.1, DELTA, adjacency="replace", **plan) == 4
    assert calibration.rounds(2.1, DELTA, **plan) == 8
    assert calibration.rounds(0.2, DELTA, **plan) == 0


def test_the_rate_of_sampled_pure_releases_has_a_closed_form():
    # One round of ε = 1/4, sampled: log(1 + p (e^ε − 1)).
    plan: Any = {"noise_multiplier": 4.0, "scheme": POISSON, "event": PURE}
    p = calibration.sampling_rate(0.1, DELTA, rounds=1, **plan)
    # δ takes its part of the probability e^0.1/(1 + e^ε) of the high loss.
    high = math.exp(0.1) / (1 + math.exp(0.25))
    exact = math.expm1(0.1 - math.log1p(-DELTA / high)) / math.expm1(0.25)
    assert exact * (1 - 1.1 * calibration.TOLERANCE) <= p <= exact
    # Two rounds with the budgets 1 and 2, which are 1/z √(2/5) and twice that.
    rising = Schedule.parse("power:1")
    p = calibration.sampling_rate(0.2, DELTA, rounds=2, noise_schedule=rising, **plan)
    each = np.log1p(p * np.expm1(np.array([1, 2]) * math.sqrt(2 / 5) / 4))
    assert 0.2 * (1 - 1.1 * calibration.TOLERANCE) <= each.sum() <= 0.2


def test_merged_rounds_are_a_close_upper_bound():
    rounds = 400
    planned = Schedule.parse("power:0.4").entries(10.0, 0.1, rounds)
    merged = composition.merge(planned, 32)
    assert sum(entry.rounds for entry in merged) == rounds
    assert len(merged) <= 32
    # In the order of noise, none of the rounds has more of it than it had.
    before = np.sort([z for z, _, _ in planned])
    after = np.sort(np.repeat([z for z, _, _ in merged], [n for _, _, n in merged]))
    assert np.all(after <= before)
    exact, bound = (math.sqrt(sum(n / z**2 for z, _, n in each)) for each in (planned, merged))
    assert exact <= bound < 1.02 * exact


# --- what a run draws and is charged --------------------------------------------------------------


@pytest.fixture(scope="module")
def scheduled():
    """FedAvg of a model of 2,000 numbers whose clients send nothing but zeros, by its schedule."""
    population, task = least_squares([3] * M, features=2000)
    sim = fjs.Simulation(
        fjs.fedavg(task), population, fjs.full_participation(), fjs.Minibatches(3, steps=1)
    )
    z = Schedule.parse("power:1.5").noise(4.0, T)
    hparams = sim.hyperparameters(learning_rate=0.0, clip=0.5, noise_multiplier=z)
    state = sim.init(3, hparams)
    states = [state]
    for _ in range(T):
        state, _ = sim.round(state, hparams)
        states.append(state)
    return z, states


def test_the_noise_of_round_t_has_the_standard_deviation_of_its_share(scheduled):
    z, states = scheduled
    leaves = [jax.tree.leaves(state.shared.params) for state in states]
    models = [np.concatenate([np.ravel(leaf) for leaf in of_round]) for of_round in leaves]
    drawn = [(models[t + 1] - models[t]) * M / 0.5 for t in range(T)]
    apart = np.abs(np.corrcoef(drawn) - np.eye(T))
    assert apart.max() < 6 / math.sqrt(models[0].size)
    for t, noise in enumerate(drawn):
        low, high = scipy.stats.chi2.ppf([1e-6, 1 - 1e-6], noise.size)
        assert low < np.sum(np.square(noise, dtype=np.float64)) / float(z[t]) ** 2 < high
        # Other rounds have other noise.
        assert all(
            not low < np.sum(noise**2) / float(other) ** 2 < high for other in np.delete(z, t)
        )


def test_the_ledger_holds_at_every_round_what_has_been_spent_so_far(scheduled):
    z, states = scheduled
    for t, state in enumerate(states):
        [charged] = ledger.charged(state.privacy)
        assert charged.entries == tuple(Entry(float(each), 1.0, 1) for each in z[:t])
        exact = gaussian.epsilon(DELTA, math.sqrt(np.sum(1 / np.asarray(z[:t], np.float64) ** 2)))
        assert tight_epsilon([charged], DELTA) == pytest.approx(exact, rel=1e-12)
    # In the loop: RDP of the same rounds, added up.
    exact = RdpAccountant(rdp.INTEGER_ORDERS)
    for each in z:
        exact.compose(dp_accounting.GaussianDpEvent(float(each)))
    found = rdp_epsilon_in_jit(states[-1].privacy, DELTA)
    assert float(found) == pytest.approx(exact.get_epsilon(DELTA), rel=1e-4)


@pytest.mark.thorough
def test_a_ledger_has_room_for_each_round_of_a_schedule_in_a_later_stage_too():
    population, task = least_squares([3] * 4, features=2)
    sim = fjs.Simulation(fjs.fedavg(task), population, fjs.full_participation())
    constant = sim.hyperparameters(clip=1.0, noise_multiplier=1.0)
    rising = constant.replace(noise_multiplier=np.linspace(1.0, 3.0, 20))
    for state in (sim.init(0, rising), sim.start_from(sim.init(0, constant), rising)):
        for _ in range(20):
            state, _ = sim.round(state, rising)
        [charged] = ledger.charged(state.privacy)
        assert not charged.overflowed
        assert len(charged.entries) == 20


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mechanism", "cost"),
    [
        # δ(ε) of Gaussian rounds at √2 √Σ 1/z²; the sum of √2/z of pure ones.
        (gaussian_gram(), lambda z: gaussian.epsilon(DELTA, math.sqrt(2 * np.sum(1 / z**2)))),
        (pure_gram(), lambda z: math.sqrt(2) * np.sum(1 / z)),
    ],
    ids=["gaussian-gram", "pure-gram"],
)
def test_mp_mtl_is_charged_what_its_schedule_draws(mechanism, cost):
    population, task = least_squares([3] * 4, features=2)
    sim = fjs.Simulation(
        fjs.mpmtl(task), population, fjs.full_participation(), fjs.Minibatches(1, steps=1),
        mechanism,
    )  # fmt: skip
    event, full = mechanism.event, SamplingScheme("full", 4, 4)
    budget, epsilon = Schedule.parse("power:0.4"), 2.0
    aim: Any = {"rounds": T, "sampling_rate": 1.0, "scheme": full, "event": event}
    aim |= {"adjacency": "replace", "noise_schedule": budget}
    z = calibration.noise_multiplier(epsilon, DELTA, **aim)
    hparams = sim.hyperparameters(
        learning_rate=0.1, lam=1.0, clip=1.0, noise_multiplier=budget.noise(z, T)
    )
    state, _ = sim.run(sim.init(0, hparams), hparams, T)
    by_hand = cost(np.asarray(hparams.noise_multiplier, np.float64))
    assert epsilon * (1 - calibration.TOLERANCE) <= by_hand <= epsilon
    found = sim.guarantee(state, DELTA).find("replace").epsilon
    # At δ > 0 a few pure rounds cost a little less than their sum.
    assert by_hand * (1 - (1e-6 if event.kind == "gaussian" else 1e-3)) <= found
    assert found <= by_hand * (1 + 1e-6)
