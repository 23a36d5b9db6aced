"""Clients that do not answer, or do a part of their steps: charged as drawn, and never by data."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy.stats import norm
from support.problems import least_squares, numbers, read_by, simulation_of

import fedjaxsim as fjs
from fedjaxsim.algorithm import Algorithm
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.engine.state import state_of
from fedjaxsim.privacy import available, intermittent
from fedjaxsim.privacy.ledger import charged
from fedjaxsim.privacy.samplers import Availability, full_participation, poisson
from fedjaxsim.simulation_batch import SimulationBatch
from fedjaxsim.testing import check_billboard

M = 6


def recorded(trace):
    """Clients that answer as a matrix, rounds by clients, says."""
    shares = np.asarray(trace, np.float32)

    def work(key, round_, client_id):
        return jnp.asarray(shares)[round_ % len(shares), client_id]

    return Availability(work, float(np.mean(shares > 0)))


TRACE = np.zeros((2, M), np.float32)
TRACE[0] = [1, 0, 0.5, 0.01, 0, 1]
VALUES = {"learning_rate": 0.1, "clip": 0.5, "noise_multiplier": 0.8, "sampling_rate": 0.5}


@functools.cache
def problem():
    return least_squares([5, 3, 7, 4, 6, 5], test=0.3)


def counting(task, message=1.0):
    """Each client sends one number and keeps the steps that it took in all rounds."""

    def client(shared, personal, data, hparams, context):
        taken = data.fold(lambda count, batch: count + 1, jnp.zeros(()))
        return personal + taken, jnp.full(1, message), {"loss": taken}

    return Algorithm(
        lambda key, hparams: (jnp.zeros(1), jnp.zeros(())),
        client,
        lambda shared, release, hparams, round_: release,
        lambda shared, personal, hparams, client_id: task.init(jax.random.key(0)),
        task,
    )


def simulation(availability, minibatches=Minibatches(2, steps=4), sampling=None, **settings):
    population, task = problem()
    sampling = full_participation() if sampling is None else sampling
    sampling = sampling if availability is None else available(sampling, availability)
    return fjs.Simulation(counting(task), population, sampling, minibatches, **settings)


# --- attacks first --------------------------------------------------------------------------------


def test_answers_that_follow_from_other_clients_rows_are_refused():
    """A client's zero message at another client's bidding leaves no bound on the other's part."""
    population, _ = problem()
    first = np.asarray(population.fields["x"])[:5]

    def work(key, round_, client_id):
        return jnp.where(jnp.asarray(first).sum() > 0, 1.0, 0.0)

    sim = simulation(Availability(work, 0.5))
    with pytest.raises(ValueError, match="rows"):
        sim.init(0, sim.hyperparameters(clip=1.0))


def test_answers_cannot_call_back_and_must_be_one_number():
    def calls(key, round_, client_id):
        return jax.pure_callback(lambda: np.float32(1), jax.ShapeDtypeStruct((), jnp.float32))

    for work, words in ((calls, "callback"), (lambda *_: jnp.ones(2), "share of a client's steps")):
        sim = simulation(Availability(work, 0.5))
        with pytest.raises(ValueError, match=words):
            sim.init(0, sim.hyperparameters(clip=1.0))


def test_a_silent_client_changes_the_release_by_its_bounded_message_alone():
    """The divisor m·answers is public: who answered cannot be read from it."""
    releases = []
    for silent in (False, True):
        trace = np.asarray([[1, 1, 0, 1, 0, 1]], np.float32)
        trace[0, 0] = not silent
        sim = simulation(Availability(recorded(trace).work, 4 / 6))
        hparams = sim.hyperparameters(clip=0.5)
        state, metrics = sim.round(sim.init(0, hparams), hparams)
        releases.append(float(state.shared[0]))
        assert metrics["participants"] == 4 - silent
        assert metrics["clipped"] == 4 - silent
    np.testing.assert_allclose(releases, [4 * 0.5 / 4, 3 * 0.5 / 4], rtol=1e-4)


def test_a_sampler_may_bring_its_own_availability():
    seldom = intermittent(dropout=0.5)
    own = full_participation().sampler(M)._replace(availability=seldom)
    sampling = full_participation()._replace(for_clients=lambda num_clients: own)
    assert sampling.sampler(M).availability is seldom
    always = intermittent()
    assert available(sampling, always).sampler(M).availability is always


@pytest.mark.thorough
def test_other_clients_see_nothing_of_one_who_is_slow_or_silent():
    population, task = problem()
    flaky = intermittent(dropout=0.3, least_work=0.3, period=3, window=2)
    sampling = available(poisson(0.7), flaky)
    sim = fjs.Simulation(fjs.pmtl(task), population, sampling, Minibatches(2, epochs=2))
    check_billboard(sim, read_by(sim, **VALUES))


def test_whoever_is_drawn_is_charged_and_the_report_says_so():
    spent = []
    for availability in (None, intermittent(dropout=0.5, period=3, window=1)):
        sim = simulation(availability, sampling=poisson(0.5))
        hparams = read_by(sim, **VALUES)
        state, _ = sim.round(sim.init(3, hparams), hparams)
        spent.append(charged(sim.round(state, hparams)[0].privacy))
        report = str(sim.guarantee(state, delta=1e-3))
        assert ("whoever is drawn is charged" in " ".join(report.split())) == bool(availability)
    assert spent[0] == spent[1]


@pytest.mark.parametrize("answers", [0.9, 0.5, 0.1])
def test_a_round_costs_a_client_that_may_be_silent_no_more(answers):
    """δ(ε) of one sampled Gaussian release, by integration: a coin, seen or not, lowers it."""
    x, p, z = np.linspace(-9, 10, 40_001), 0.3, 0.8
    without, present = (norm.pdf(x, center, z) for center in (0, 1))

    def delta(rate, epsilon):
        of = (1 - rate) * without + rate * present
        pairs = ((of, without), (without, of))
        return [np.maximum(a - np.exp(epsilon) * b, 0).sum() * (x[1] - x[0]) for a, b in pairs]

    for epsilon in (0.01, 0.3, 1.0, 2.0):
        charged, unseen = (np.asarray(delta(rate, epsilon)) for rate in (p, p * answers))
        seen = answers * charged  # silent rounds of a known coin cost nothing
        assert np.all(unseen <= seen + 1e-12)
        assert np.all(seen <= charged)


@pytest.mark.thorough
def test_the_rate_is_that_of_an_available_client():
    """The numbers of the page, by dp_accounting: a third of the rounds at 3p costs more."""

    def epsilon(p, rounds):
        one = privacy_loss_distribution.from_gaussian_mechanism(1.0, sampling_prob=p)
        return one.self_compose(rounds).get_epsilon_for_delta(1e-5)

    found = [epsilon(0.01, 2000), epsilon(0.01, 667), epsilon(0.03, 667)]
    np.testing.assert_allclose(found, [2.58, 1.51, 4.96], atol=0.01)


# --- laws -----------------------------------------------------------------------------------------


def test_clients_answer_in_their_window_with_the_probability_of_the_others():
    """Counts of 2,048 rounds of fixed keys against binomial ones, to five standard deviations."""
    p, lost, rounds = 0.5, 0.25, 2048
    sim = simulation(intermittent(dropout=lost, period=3, window=2), sampling=poisson(p))
    hparams = read_by(sim, **VALUES).as_arrays()
    state = sim.init(0, hparams)

    def one(round_):
        cohort = sim.program.draw(dataclasses.replace(state, round=round_), hparams).cohort
        return jnp.zeros(M + 1).at[jnp.where(cohort.mask, cohort.ids, M)].add(1)[:M]

    drawn = np.asarray(jax.jit(lambda: jax.lax.map(one, jnp.arange(rounds)))())
    awake = (np.arange(rounds)[:, None] + np.arange(M)) % 3 < 2
    assert drawn.max() == 1
    assert not drawn[~awake].any()
    answers = p * (1 - lost)
    for counted, trials, rate in (
        (drawn.sum(axis=0), awake.sum(axis=0), answers),  # each client
        ((drawn[:, 0] * drawn[:, 3]).sum(), awake[:, 0].sum(), answers**2),  # two of one time zone
        ((drawn[:-3, 0] * drawn[3:, 0]).sum(), awake[3:, 0].sum(), answers**2),  # two days of one
    ):
        spread = np.sqrt(trials * rate * (1 - rate))
        assert np.all(np.abs(counted - trials * rate) < 5 * spread)
    assert np.isclose(sim.sampler.answer_rate(jnp.asarray(p)), p * (1 - lost) * 2 / 3)
    assert float(sim.sampler.rate(hparams)) == p


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("minibatches", "most"),
    [
        pytest.param(Minibatches(2, steps=4), [4] * M, marks=pytest.mark.thorough),
        # 2⌈n_k/2⌉ of 4, 2, 5, 3, 4, 4 rows
        pytest.param(Minibatches(2, epochs=2), [4, 2, 6, 4, 4, 4], marks=pytest.mark.thorough),
        (Minibatches(2, steps=4, passes=3), [4, 3, 4, 4, 4, 4]),  # at most 3⌈n_k/2⌉ in all
    ],
)
def test_a_part_of_the_steps_is_rounded_up_and_consumed(minibatches, most):
    sim = simulation(recorded(TRACE), minibatches)
    rows = np.asarray(sim.population.splits["train"].count)
    assert minibatches.epochs is None or most == [2 * -(-n // 2) for n in rows]
    hparams = sim.hyperparameters(clip=0.5)
    assert sim.program.client_bytes(hparams.as_arrays(), sim.rows["train"]) > 0
    state, metrics = sim.round(sim.init(0, hparams), hparams)
    steps = np.ceil(TRACE[0] * np.asarray(most))
    np.testing.assert_array_equal(state.personal, steps)
    if state.consumed is not None:
        np.testing.assert_array_equal(state.consumed, steps)
    np.testing.assert_allclose(metrics["loss"], steps.sum() / 4, rtol=1e-6)  # of those who answer
    empty, metrics = sim.round(state, hparams)
    assert metrics["participants"] == 0
    np.testing.assert_array_equal(empty.personal, steps)
    np.testing.assert_array_equal(empty.shared, [0])


@pytest.mark.thorough
def test_a_silo_is_charged_for_the_minibatches_that_it_took():
    """Examples: 4, 2, 1 and no minibatches of four equal silos; a silent one releases nothing."""
    population, task = least_squares([4, 4, 4, 4])
    trace = recorded([[1, 0.5, 0.25, 0]])
    algorithm = fjs.fedavg(fjs.private_examples(task))
    spent = []
    for sampling, rounds in ((available(full_participation(), trace), 1), (None, 4)):
        steps = Minibatches(2, steps=4 if rounds == 1 else 1)
        sim = fjs.Simulation(algorithm, population, sampling or full_participation(), steps)
        hparams = read_by(sim, clip=0.5, noise_multiplier=0.8, example_noise_multiplier=2.0)
        state = sim.init(0, hparams)
        for _ in range(rounds):
            state, _ = sim.round(state, hparams)
            examples = sim.guarantee(state, delta=1e-2).examples
            assert examples is not None
            spent.append(examples.zero_out)
    np.testing.assert_array_equal(spent[0], [spent[4][0], spent[2][0], spent[1][0], 0])


def states(name, availability, sampling, batched=False, **settings: Any):
    population, task = problem()
    sampling = sampling if availability is None else available(sampling, availability)
    batches = Minibatches(2, epochs=2)
    sim = simulation_of(name, task, population, sampling, batches, **settings)
    hparams = read_by(sim, **VALUES, lam=0.3)
    if batched:
        many = SimulationBatch(sim, [read_by(sim, **VALUES, lam=0.5), hparams])
        state = state_of(many.run(many.init(0), 3)[0], 1)
    else:
        state = sim.init(0, hparams)
        for _ in range(3):
            state, _ = sim.run(state, hparams, 1) if sim.streamed else sim.round(state, hparams)
    return numbers((state.shared, state.personal))


@pytest.mark.thorough
def test_clients_that_always_answer_change_nothing():
    ones = recorded(np.ones((1, M)))
    always, plain = (states("pmtl", each, poisson(0.5)) for each in (ones, None))
    np.testing.assert_allclose(always, plain, rtol=1e-5, atol=1e-6)


PLACEMENTS: tuple[dict[str, Any], ...] = (
    {"chunk_map": "vmap"},
    {"devices": jax.devices()[:2]},
    {"streamed": True},
    {"chunk_size": 2, "chunk_map": "scan"},
    {"batched": True},
)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["pmtl", "scaffold"])
def test_placements_agree(name):
    """All placements but devices are of one system."""
    flaky = intermittent(dropout=0.3, least_work=0.2, period=3, window=2)
    whole, *others = (
        states(name, flaky, poisson(0.7), **each)
        for each in PLACEMENTS[: 5 if name == "pmtl" else 2]
    )
    for other in others:
        np.testing.assert_allclose(whole, other, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: intermittent(dropout=1.0), "dropout"),
        (lambda: intermittent(least_work=0.0), "least_work"),
        (lambda: intermittent(period=4, window=5), "window"),
        (lambda: available(poisson(0.5), full_participation()), "intermittent"),  # type: ignore
    ],
)
def test_what_cannot_be_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
