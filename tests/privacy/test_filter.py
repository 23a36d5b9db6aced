"""A budget holds for runs that choose rounds by their releases; a report of rounds does not."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.optimize import linear_sum_assignment
from scipy.special import ndtr
from support.plans import POISSON, charged, profile_of

from fedjaxsim.engine.loop import RunLoop
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.privacy import calibration
from fedjaxsim.privacy import filter as filters
from fedjaxsim.privacy import ledger as ledgers
from fedjaxsim.privacy.accounting import gaussian
from fedjaxsim.privacy.accounting.in_loop import allows, rdp_epsilon_in_jit
from fedjaxsim.privacy.entries import Entry, SamplingScheme
from fedjaxsim.privacy.events import GAUSSIAN, Correlated, Gaussian, PrivacyLimit, PrivacySpend
from fedjaxsim.privacy.guarantee import compose_reports, report

FULL = SamplingScheme("full", 100, 100)
DELTA = 1e-2


def budget(epsilon, delta, z, p=1.0, scheme=FULL):
    return calibration.budget(epsilon, delta, lambda n: [charged(scheme, GAUSSIAN, (z, p, n))])


def rounds_in(limit):
    return sum(entry.rounds for spend in limit.planned for entry in spend.entries)


def test_rounds_that_follow_releases_break_a_report_of_rounds_and_not_a_budget():
    rng = np.random.default_rng(0)
    z, T = 4.0, 400
    # The exact ε of t rounds, for each t: right if t was fixed beforehand.
    reported = np.array([gaussian.epsilon(DELTA, math.sqrt(t) / z) for t in range(1, T + 1)])
    steps = rng.normal(size=(10_000, T)) / z + 1 / (2 * z**2)
    loss = np.cumsum(steps, axis=1)
    over = loss > reported
    stop = np.where(over.any(axis=1), over.argmax(axis=1), T - 1)
    stopped = np.take_along_axis(loss, stop[:, None], axis=1)[:, 0]
    assert np.mean(stopped > reported[stop]) > 5 * DELTA
    spent = np.mean(np.maximum(0, 1 - np.exp(reported[stop] - stopped)))
    assert spent > 1.3 * DELTA
    # The same runs keep a budget of ε if they stop at the first round above it.
    limit = budget(2.0, DELTA, z)
    n = rounds_in(limit)
    over = loss[:, :n] > 2.0
    stop = np.where(over.any(axis=1), over.argmax(axis=1), n - 1)
    stopped = np.take_along_axis(loss, stop[:, None], axis=1)[:, 0]
    assert np.mean(np.maximum(0, 1 - np.exp(2.0 - stopped))) <= DELTA


def steps_of(z, p, way, width, edge):
    """Return the masses of a round's losses on a grid, rounded to the nearest, by differences.

    Losses of the client in against out, of out against in, or of a message against its opposite.
    """
    x = np.linspace(-12 * z - 1, 12 * z + 1, 40_001)
    cells = {mean: np.diff(ndtr((x - mean) / z)) for mean in (-1.0, 0.0, 1.0)}
    middle = (x[1:] + x[:-1]) / 2

    def ratio(mean):
        return np.log1p(p * np.expm1((2 * mean * middle - 1) / (2 * z**2)))

    mixed = (1 - p) * cells[0.0] + p * cells[1.0]
    losses, masses = {
        "in": (ratio(1.0), mixed),
        "out": (-ratio(1.0), cells[0.0]),
        "replaced": (ratio(1.0) - ratio(-1.0), mixed),
    }[way]
    places = np.clip(np.round(losses / width).astype(int) + edge, 0, 2 * edge)
    return np.bincount(places, masses, 2 * edge + 1)


@pytest.mark.parametrize("way", ["in", "out", "replaced"])
def test_the_worst_of_all_runs_that_choose_noise_and_rate_by_their_releases(way):
    """Dynamic programming: the largest δ that any policy reaches, which is that of the plan."""
    epsilon, delta, z, p = 2.0, 1e-2, 2.0, 0.5
    limit = budget(epsilon, delta, z, p, POISSON)
    n = rounds_in(limit)
    assert 2 < n < 30
    adjacency = "replace" if way == "replaced" else "zero_out"
    if way == "replaced":
        epsilon = profile_of(*limit.planned, adjacency=adjacency).epsilon(delta)
    width, edge = 0.005, 2400
    losses = width * (np.arange(2 * edge + 1) - edge)
    choices = [(z, p), (1.5 * z, p), (4 * z, p), (z, p / 2), (z, p / 20), (2 * z, p / 2)]
    kernels = [steps_of(*choice, way, width, edge) for choice in choices]
    size = 8 * edge
    spectra = [np.conj(np.fft.rfft(np.roll(np.pad(k, (0, size - k.size)), -edge))) for k in kernels]

    def expected(value, spectrum):
        wide = np.pad(value, (3 * edge, 3 * edge - 1), mode="edge")
        return np.fft.irfft(np.fft.rfft(wide) * spectrum, size)[3 * edge : 5 * edge + 1]

    policy = constant = np.maximum(0.0, -np.expm1(epsilon - losses))
    for _ in range(n):  # a policy may also stop
        policy = np.max([policy, *(expected(policy, each) for each in spectra)], axis=0)
        constant = expected(constant, spectra[0])
    assert policy[edge] <= constant[edge] * (1 + 1e-4)
    assert policy[edge] <= 1.01 * delta
    if way == "in":
        assert policy[edge] >= 0.9 * delta


@pytest.mark.parametrize(
    ("epsilon", "delta", "z", "p"),
    [pytest.param(4.0, 1e-6, 0.6, 0.01, marks=pytest.mark.thorough), (2.0, 1e-5, 2.0, 0.1)],
)
def test_a_budget_has_all_the_rounds_of_a_plan(epsilon, delta, z, p):
    n = rounds_in(budget(epsilon, delta, z, p, POISSON))
    one = pld.from_gaussian_mechanism(
        z, sampling_prob=p, value_discretization_interval=1e-4, use_connect_dots=True
    )
    assert one.self_compose(n).get_epsilon_for_delta(delta) <= epsilon * (1 + 1e-4)
    assert one.self_compose(n + 1).get_epsilon_for_delta(delta) > epsilon


def test_places_suffice_if_and_only_if_every_release_can_be_matched():
    rng = np.random.default_rng(1)
    seen = set()
    for _ in range(300):
        planned = [
            (float(z), 0.1, int(n)) for z, n in zip(*rng.integers(1, 4, (2, 3)), strict=True)
        ]
        done = [
            (float(z), float(p), int(n))
            for z, p, n in zip(
                rng.integers(1, 6, 3),
                rng.choice([0.05, 0.1], 3),
                rng.integers(0, 4, 3),
                strict=True,
            )
        ]
        places = [z for z, _, n in planned for _ in range(n)]
        releases = [z for z, _, n in done for _ in range(n)]
        cost = np.array([[z < place for place in places] for z in releases], float).reshape(
            len(releases), len(places)
        )
        fits = len(releases) <= len(places) and cost[linear_sum_assignment(cost)].sum() == 0
        limit = PrivacyLimit(1.0, 1e-5, (charged(POISSON, GAUSSIAN, *planned),))
        assert (filters.exceeded(limit, [charged(POISSON, GAUSSIAN, *done)]) == "") == fits
        seen.add(fits)
    assert seen == {True, False}


def test_only_planned_releases_have_places():
    def fits(*charges):
        return filters.exceeded(limit, charges) == ""

    limit = PrivacyLimit(1.0, 1e-5, (charged(POISSON, GAUSSIAN, (2.0, 0.1, 5)),))
    assert fits(charged(POISSON, GAUSSIAN, (2.0, 0.1, 5)))
    assert fits(
        charged(POISSON, GAUSSIAN, (2.0, 0.1, 2)), charged(POISSON, GAUSSIAN, (3.0, 0.1, 3))
    )
    for z, p, n in ((2.0, 0.1, 6), (1.9999, 0.1, 1), (2.0, 0.1001, 1), (math.nan, 0.1, 1)):
        assert not fits(charged(POISSON, GAUSSIAN, (z, p, n)))
    fewer = dataclasses.replace(POISSON, capacity=100)  # a full cohort tells of a client
    for scheme, event in ((POISSON, Gaussian(replace=1.5)), (FULL, GAUSSIAN), (fewer, GAUSSIAN)):
        assert not fits(charged(scheme, event, (9.0, 0.05, 1)))
    # One after the other, ten rounds of two groups meet a client five times. In two stages of five
    # rounds each it is six times.
    turns = SamplingScheme("groups", 10, 5, groups=2)
    for event in (GAUSSIAN, Correlated(bands=2)):
        limit = PrivacyLimit(1.0, 1e-5, (charged(turns, event, (2.0, 0.5, 10)),))
        assert fits(charged(turns, event, (2.0, 0.5, 10)))
        assert not fits(*[charged(turns, event, (2.0, 0.5, 5))] * 2)


def test_a_second_account_of_a_kind_has_no_place():
    limit, kind = budget(2.0, DELTA, 4.0), (FULL, GAUSSIAN)
    release = np.array([4.0]), np.array([1.0]), np.array([1])
    first, second = filters.room_in(limit, [kind, kind]).places
    (later,) = filters.room_in(limit, [kind], earlier=[kind]).places
    assert not filters.lacks_places(first, *release)
    assert filters.lacks_places(second, *release)
    assert filters.lacks_places(later, *release)


def test_a_cohort_with_few_places_costs_no_less_at_a_larger_rate():
    scheme = SamplingScheme("poisson", 50, 8)
    for adjacency in ("zero_out", "replace"):
        profiles = [
            profile_of(charged(scheme, GAUSSIAN, (0.8, p, 5)), adjacency=adjacency)
            for p in (0.02, 0.05, 0.06, 0.08)
        ]
        deltas = [[profile.delta(e) for e in (0.0, 0.3, 1.0, 3.0)] for profile in profiles]
        assert np.all(np.diff(deltas, axis=0) > 0)


def test_in_jit_the_same_rounds_have_places():
    rng = np.random.default_rng(2)
    noise = np.array([1.0, 1.5, 2.0, 5.0, 0.9, np.nan, np.inf], np.float32)
    noise = np.concatenate([rng.choice(noise[:4], (20, 12)), rng.choice(noise, (20, 12))])
    rates = np.array([0.05, 0.1, 0.2], np.float32)
    largest = float(rates[1])
    planned = charged(POISSON, GAUSSIAN, (1.0, largest, 2), (2.0, largest, 3))
    limit = PrivacyLimit(1.0, 1e-5, (planned,))
    rates = rng.choice(rates, (40, 12), p=[0.45, 0.5, 0.05])

    @jax.jit
    @jax.vmap
    def run(noise, rates):
        def step(charges, entry):
            after = ledgers.charge(charges, entry[0], entry[1], 0)
            fits = allows(ledgers.Ledger((after,), limit=limit))
            return jax.tree.map(lambda a, b: jnp.where(fits, a, b), after, charges), fits

        return jax.lax.scan(step, ledgers.no_charges(POISSON, GAUSSIAN, 12), (noise, rates))

    charges, went_on = run(noise, rates)
    for place, went in enumerate(np.asarray(went_on)):
        done: list[Entry] = []
        for z, p, on in zip(noise[place], rates[place], went, strict=True):
            new = [*done, Entry(float(z), float(p), 1)]
            found = filters.exceeded(limit, [PrivacySpend(POISSON, GAUSSIAN, tuple(new))])
            assert bool(on) == (not found and math.isfinite(z))
            done = new if on else done
        assert int(charges.rounds[place].sum()) == len(done) <= 5
    assert np.asarray(went_on).sum(axis=1).max() == 5
    lost = jax.tree.map(lambda leaf: leaf[0], charges)
    lost = dataclasses.replace(lost, overflowed=jnp.array(True))
    assert not allows(ledgers.Ledger((lost,), limit=limit))


def test_what_a_state_shows_of_a_budget_is_never_above_its_guarantee():
    limit = budget(2.0, 1e-5, 6.0)
    most = rounds_in(limit)
    spend = dataclasses.replace(
        ledgers.no_charges(FULL, GAUSSIAN, 1),
        noise_multiplier=jnp.full(1, 6.0),
        sampling_rate=jnp.ones(1),
        rounds=jnp.full(1, most, jnp.int32),
    )
    ledger = ledgers.Ledger((spend,), limit=limit)
    shown = jax.jit(lambda it: [rdp_epsilon_in_jit(it, delta) for delta in (1e-4, 1e-5, 1e-6)])(
        ledger
    )
    found = [
        report([charged(FULL, GAUSSIAN, (6.0, 1.0, most))], delta, limit=limit).find("zero_out")
        for delta in (1e-4, 1e-5, 1e-6)
    ]
    tight = [each.epsilon or math.nan for each in found]
    assert 1.9 < tight[1] <= shown[1] == 2.0
    assert tight[0] < 2.0 < tight[2] < shown[2]


def test_a_record_has_the_epsilon_of_its_guarantee_and_what_was_spent_of_the_budget():
    most, done = 40, 3
    limit = PrivacyLimit(4.0, 1e-5, (charged(FULL, GAUSSIAN, (6.0, 1.0, most)),))
    account = dataclasses.replace(
        ledgers.no_charges(FULL, GAUSSIAN, 1),
        noise_multiplier=jnp.array([6.0]),
        sampling_rate=jnp.ones(1),
        rounds=jnp.array([done]),
    )
    key = jax.random.key(0)
    drawn = ledgers.drew(ledgers.with_key(ledgers.Ledger((account,), limit=limit), key), key, done)
    state = SimulationState(jnp.int32(done), (), (), (), drawn, key)
    run: Any = RunLoop(lambda *_: None, most, 1e-5)  # type: ignore[arg-type]
    columns = run._epsilons(state, last=False)
    whole = report([charged(FULL, GAUSSIAN, (6.0, 1.0, done))], 1e-5, limit=limit).find("zero_out")
    assert columns["epsilon"] == [whole.epsilon]
    # Three rounds alone cost what a Gaussian release with z = 6/√3 does; RDP is above it.
    alone = gaussian.epsilon(1e-5, math.sqrt(done) / 6)
    assert whole.epsilon is not None
    assert alone <= columns["epsilon_spent"][0] <= 1.35 * alone < whole.epsilon
    free = dataclasses.replace(state, privacy=dataclasses.replace(drawn, limit=None))
    assert run._epsilons(free, last=False)["epsilon_tight"] is False
    assert run._epsilons(free, last=True) == {
        "epsilon": [pytest.approx(alone)], "epsilon_tight": True,
    }  # fmt: skip


def test_the_report_is_of_the_budget_and_not_of_the_rounds():
    limit = budget(2.0, 1e-5, 6.0)
    n = rounds_in(limit)
    few = report([charged(FULL, GAUSSIAN, (6.0, 1.0, 3))], 1e-5, limit=limit, draws=())
    zero_out, replace = few.find("zero_out"), few.find("replace")
    assert zero_out.epsilon == pytest.approx(gaussian.epsilon(1e-5, math.sqrt(n) / 6), rel=1e-9)
    assert replace.epsilon == pytest.approx(gaussian.epsilon(1e-5, 2 * math.sqrt(n) / 6), rel=1e-9)
    assert (zero_out.status, zero_out.accountant) == ("upper_bound", "gaussian")
    assert f"allows {n} gaussian releases" in str(few)
    many = report([charged(FULL, GAUSSIAN, (6.0, 1.0, n + 1))], 1e-5, limit=limit)
    assert many.find("zero_out").epsilon is None
    assert "budget" in many.find("zero_out").reason
    # Two runs compose, each with all that it was allowed.
    both = compose_reports([few, few]).find("zero_out")
    assert both.epsilon == pytest.approx(gaussian.epsilon(1e-5, math.sqrt(2 * n) / 6), rel=1e-9)
    assert f"allows {n} gaussian releases" in " ".join(both.assumptions)
    with pytest.raises(ValueError, match="no room"):
        budget(1e-3, 1e-5, 1.0)
    with pytest.raises(ValueError, match="epsilon"):
        budget(math.inf, 1e-5, 1.0)
