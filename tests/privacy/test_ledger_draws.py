"""One seed, one publication: what a run drew, and what is said where it was drawn twice."""

import dataclasses
import functools
import itertools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import copied, least_squares, read_by

import fedjaxsim as fjs
from fedjaxsim.cli.program import main
from fedjaxsim.engine.checkpoint import CheckpointFolder
from fedjaxsim.engine.state import state_of
from fedjaxsim.gradients.modes import Forward, Reverse
from fedjaxsim.gradients.whole_run import hypergradient
from fedjaxsim.privacy import ledger as ledgers
from fedjaxsim.privacy.accounting import gaussian
from fedjaxsim.privacy.assumptions import DECLARED_ROWS, KNOWN_SEED, SHARED_SEED
from fedjaxsim.privacy.entries import Drawn, drawn_twice
from fedjaxsim.privacy.events import NoRelease
from fedjaxsim.privacy.guarantee import Report, compose_reports
from fedjaxsim.runs.directory import RunDirectory
from fedjaxsim.simulation_batch import SimulationBatch

M, DELTA, Z = 8, 1e-3, 50.0
POPULATION, TASK = least_squares([4] * M, features=3)
POPULATION = dataclasses.replace(POPULATION, max_rows=4)
VALUES = {"clip": 1.0, "noise_multiplier": Z, "learning_rate": 0.1}


def simulation(algorithm=None, sampling=None, task=TASK):
    algorithm = fjs.fedavg(task) if algorithm is None else algorithm
    sampling = fjs.full_participation() if sampling is None else sampling
    return fjs.Simulation(algorithm, POPULATION, sampling, fjs.Minibatches(2, steps=1))


def values(sim, **changes):
    """The hyperparameters of a simulation, with changes."""
    return read_by(sim, **(VALUES | changes))


@pytest.fixture(scope="module")
def sim():
    return simulation()


def rounds(sim, state, count, hparams=None):
    hparams = values(sim) if hparams is None else hparams
    for _ in range(count):
        state, _ = sim.round(state, hparams)
    return state


def fresh(sim, seed=0):
    return sim.init(seed, values(sim))


def released(state):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state.shared)])


@functools.cache
def in_jit(sim):
    return jax.jit(lambda state: sim.epsilon(state, DELTA))


def zero_out(sim, state):
    return sim.guarantee(state, DELTA).find("zero_out")


def check_no_epsilon(sim, state):
    found = sim.guarantee(state, DELTA)
    for each in found.guarantees:
        assert each.epsilon is None
        assert each.reason.startswith("the state drew a round's random numbers twice or")
    assert np.isinf(sim.epsilon(state, DELTA))
    assert np.isinf(in_jit(sim)(state))


def check_refused(reports):
    with pytest.raises(ValueError, match=r"no joint ε.*: report 1, report 2"):
        compose_reports(reports, DELTA)


# --- the record -----------------------------------------------------------------------------------


ROUNDS = st.integers(0, 20)


@jax.jit
def drawn(numbers):
    """The ledger of rounds of these numbers."""
    key = jax.random.key(3)

    def step(ledger, number):
        return ledgers.drew(ledger, key, number), None

    return jax.lax.scan(step, ledgers.with_key(ledgers.Ledger(()), key), numbers)[0]


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([1, 2, 6]).flatmap(lambda n: st.lists(ROUNDS, min_size=n, max_size=n)))
def test_a_ledger_knows_whether_rounds_were_drawn_in_their_order_each_once(numbers):
    [draws] = drawn(jnp.array(numbers, jnp.int32)).draws
    assert int(draws.next_round) == max(numbers) + 1
    assert bool(draws.repeated) == any(b <= a for a, b in itertools.pairwise(numbers))


def test_a_digest_tells_keys_apart_and_shows_none_of_their_words():
    keys = jax.random.split(jax.random.key(0), 1000)
    digests = np.asarray(jax.jit(jax.vmap(ledgers.key_digest))(keys))
    assert digests.shape == (1000, 4)
    assert len(np.unique(digests, axis=0)) == 1000
    assert not np.isin(digests, np.asarray(jax.random.key_data(keys))).any()
    one = ledgers.hex_digest(ledgers.key_digest(keys[7]))
    assert one == "".join(f"{word:08x}" for word in digests[7])


def test_a_key_that_a_state_has_had_before_is_no_key_of_a_new_stage():
    first, other = jax.random.key(0), jax.random.key(1)
    ledger = ledgers.with_key(ledgers.with_key(ledgers.Ledger(()), first), other)
    assert not any(draws.repeated for draws in ledger.draws)
    assert ledgers.with_key(ledger, first).draws[-1].repeated


@pytest.mark.parametrize(("count", "meets"), [(0, False), (1, True), (9, True)])
def test_runs_meet_where_they_have_a_round_of_one_key(count, meets):
    one, other = Drawn("a", 5), Drawn("a", count)
    sentence = drawn_twice({"x": (one,), "y": (Drawn("b", 5), other), "z": ()})
    assert sentence.endswith("own: x, y.") if meets else not sentence
    assert not drawn_twice({"x": (one,), "z": (Drawn("b", count),)})


# --- one state ------------------------------------------------------------------------------------


def test_rounds_drawn_once_have_their_epsilon_and_their_record(sim):
    state = rounds(sim, fresh(sim), 3)
    assert zero_out(sim, state).epsilon == pytest.approx(
        gaussian.epsilon(DELTA, np.sqrt(3) / Z), rel=1e-6
    )
    report = sim.guarantee(state, DELTA)
    [drawn] = report.draws
    assert report.to_json()["draws"] == [{"digest": drawn.digest, "rounds": 3}]


def test_a_round_that_comes_again_subtracts_its_noise_and_leaves_no_epsilon(sim):
    start = fresh(sim)
    first = rounds(sim, copied(start), 1)
    back = dataclasses.replace(first, round=jnp.zeros_like(first.round))
    second = rounds(sim, copied(back), 1)
    steps = [released(first) - released(start), released(second) - released(first)]
    # The noise of the mean, z C/m, is 6.25 a coordinate; messages have a norm of at most 1.
    assert np.abs(steps[0]).max() > 2.5
    assert np.abs(steps[1] - steps[0]).max() < 2
    check_no_epsilon(sim, second)
    check_no_epsilon(sim, rounds(sim, second, 4))


def test_however_often_settings_change_a_round_is_not_drawn_twice(sim):
    state = fresh(sim)
    for index in range(12):
        state = rounds(sim, state, 1, values(sim, learning_rate=0.1 + 0.01 * index))
    assert zero_out(sim, state).epsilon is not None
    check_no_epsilon(sim, rounds(sim, dataclasses.replace(state, round=jnp.int32(11)), 1))


def test_a_foreign_key_leaves_no_epsilon(sim):
    state = dataclasses.replace(rounds(sim, fresh(sim), 1), key=jax.random.key(7))
    assert zero_out(sim, state).epsilon is not None
    check_no_epsilon(sim, rounds(sim, state, 1))


def test_a_ledger_that_lost_its_draws_leaves_no_epsilon(sim):
    state = rounds(sim, fresh(sim), 2)
    [draws] = fresh(sim, 5).privacy.draws
    forged = dataclasses.replace(state.privacy, draws=(draws,))
    found = zero_out(sim, dataclasses.replace(state, privacy=forged))
    assert found.epsilon is None
    assert "drew a round's random numbers" in found.reason


@pytest.mark.thorough
def test_many_seeds_at_once_have_a_record_each(sim):
    keys = jax.vmap(jax.random.key)(jnp.arange(3))
    hparams, rows = values(sim).as_arrays(), sim.rows["train"]

    def run(key):
        return sim.program.rounds(sim.program.init(key, hparams), hparams, rows, 2)[0].privacy

    privacy = jax.jit(jax.vmap(run))(keys)
    found = [ledgers.drawn(jax.tree.map(lambda leaf, i=i: leaf[i], privacy)) for i in range(3)]
    assert found == [sim.guarantee(rounds(sim, fresh(sim, seed), 2)).draws for seed in range(3)]
    assert len({drawn.digest for [drawn] in found}) == 3


@pytest.mark.thorough
def test_the_epsilon_of_a_run_has_derivatives_in_both_modes(sim):
    def spent(state, hparams):
        return sim.epsilon(state, DELTA)

    for mode in (Forward(), Reverse()):
        function = hypergradient(sim, spent, 2, "noise_multiplier", mode=mode)
        value, slope = function(0, values(sim))
        assert 0 < float(value) < np.inf
        assert float(slope["noise_multiplier"]) < 0


# --- stages and files -----------------------------------------------------------------------------


def test_a_stage_says_what_all_stages_drew(sim):
    first = rounds(sim, fresh(sim), 2)
    begun = sim.start_from(first, values(sim))
    assert sim.guarantee(begun, DELTA).draws == sim.guarantee(first, DELTA).draws
    second = rounds(sim, begun, 3)
    report = sim.guarantee(second, DELTA)
    assert [each.rounds for each in report.draws] == [2, 3]
    assert len({each.digest for each in report.draws}) == 2
    assert report.find("zero_out").epsilon == pytest.approx(
        gaussian.epsilon(DELTA, np.sqrt(5) / Z), rel=1e-6
    )
    for state in (first, begun, second):
        sentences = " ".join(zero_out(sim, state).assumptions)
        assert KNOWN_SEED in sentences
    check_refused([sim.guarantee(first, DELTA), report])
    # Two stages from one state draw from one key.
    again = rounds(sim, sim.start_from(first, values(sim)), 1)
    check_refused([report, sim.guarantee(again, DELTA)])


def test_a_checkpoint_keeps_the_record_of_every_key(sim, tmp_path):
    state = rounds(sim, sim.start_from(rounds(sim, fresh(sim), 2), values(sim)), 1)
    CheckpointFolder(tmp_path).save(1, state, {})
    last = CheckpointFolder(tmp_path).last()
    assert last is not None
    read = last.state(fresh(sim, 3))
    assert sim.guarantee(read).draws == sim.guarantee(state).draws
    assert sim.guarantee(rounds(sim, read, 2)).draws[1].rounds == 3
    check_no_epsilon(sim, rounds(sim, dataclasses.replace(read, round=jnp.int32(0)), 1))


@pytest.mark.thorough
def test_what_a_report_assumes_goes_with_the_state(sim, tmp_path):
    # Two settings of one seed, stopped by private rows; read back, and continued by another system.
    settings = [values(sim, learning_rate=rate) for rate in (0.1, 0.2)]
    many = SimulationBatch(sim, settings, devices=jax.devices()[:1])
    watched, _ = many.run(many.init(0), 1, callbacks=[Watching()])
    rows = DECLARED_ROWS.format(4)
    public = (rows, SHARED_SEED, *Watching.public)
    state = state_of(watched, 0)
    CheckpointFolder(tmp_path).save(1, state, {})
    last = CheckpointFolder(tmp_path).last()
    assert last is not None
    read = last.state(fresh(sim))
    other = simulation(fjs.pmtl(TASK)._replace(public=("M is public.",)))
    begun = other.start_from(read, values(other), sim, values(sim))
    for state, assumed in ((read, public), (begun, (*public, "M is public."))):
        found = (sim if state is read else other).guarantee(state, DELTA)
        assert sorted(found.assumed) == sorted(assumed)
        assert set(assumed) < set(found.find("zero_out").assumptions)
        assert Report.from_json(found.to_json()).assumed == assumed
    # The sentences of other runs do not go along.
    assert sim.guarantee(fresh(sim), DELTA).assumed == (rows,)


class Watching(fjs.callbacks.Callback):
    """A callback that reads private rows."""

    public = ("The end was chosen.",)


# --- several runs ---------------------------------------------------------------------------------


def after_one_round(algorithm, task=TASK, **changes):
    """The released mean of one round, and the report."""
    return first_round(simulation(algorithm, task=task), **changes)


def first_round(sim, **changes):
    hparams = values(sim, **changes)
    state, _ = sim.round(sim.init(0, hparams), hparams)
    return released(state).astype(np.float64), sim.guarantee(state, DELTA)


SOURCE = """
import jax, jax.numpy as jnp, fedjaxsim as fjs
FACTOR = {factor}

def make(task):
    def client(shared, personal, data, hparams, context):
        def step(w, batch):
            return w + {slope} * jnp.{function}(batch.fields["x"].mean(0))

        return personal, FACTOR * data.fold(step, jnp.zeros(3)), {{}}

    return fjs.Algorithm(
        lambda key, hparams: (jnp.zeros(3), ()),
        client,
        lambda shared, release, hparams, round_: release,
        lambda *_: {{"kernel": jnp.zeros((1, 3)), "bias": jnp.zeros(1)}},
        task,
    )
"""


def own_code(factor=0.1, slope=0.01, function="sin"):
    module = types.ModuleType("own_code")
    exec(SOURCE.format(factor=factor, slope=slope, function=function), module.__dict__)
    return module.make(TASK)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "change",
    [
        {"factor": 3.0},
        {"slope": 1.0},
        {"function": "cos"},
    ],
)
def test_other_code_with_the_same_seed_draws_the_same_noise_and_reports_say_so(change):
    silent: Any = {"noise_multiplier": 0.0}
    original, changed = simulation(own_code()), simulation(own_code(**change))
    one, report = first_round(original)
    two, other = first_round(changed)
    truth = first_round(changed, **silent)[0] - first_round(original, **silent)[0]
    assert np.abs(truth).max() > 1e-5
    np.testing.assert_allclose(two - one, truth, atol=1e-5)  # whatever the noise
    assert report.draws == other.draws
    check_refused([report, other])


@pytest.mark.thorough
def test_another_activation_draws_the_same_noise_and_reports_say_so():
    nn = pytest.importorskip("flax.linen")

    def report(activation):
        model = fjs.models.from_flax(nn.Sequential([nn.Dense(4), activation, nn.Dense(1)]), (3,))
        task = fjs.tasks.squared(model)
        return after_one_round(fjs.fedavg(task), task=task)[1]

    reports = [report(nn.relu), report(nn.tanh)]
    assert reports[0].draws == reports[1].draws
    check_refused(reports)


@pytest.mark.thorough
def test_settings_that_differ_in_double_precision_alone_share_draws():
    with jax.enable_x64(True):
        found = [
            after_one_round(fjs.fedavg(TASK), learning_rate=0.1 + step) for step in (0.0, 1e-9)
        ]
    assert np.abs(found[0][0] - found[1][0]).max() < 1e-6
    check_refused([report for _, report in found])


@pytest.mark.thorough
def test_runs_of_one_seed_have_the_same_cohorts_and_no_joint_epsilon():
    sim = simulation(sampling=fjs.poisson(0.5, capacity=M))
    p = values(sim, noise_multiplier=1.0)
    settings_ = [p.replace(learning_rate=0.1 * (1 + index)) for index in range(4)]
    cohort = jax.jit(lambda state, arrays: sim.program.draw(state, arrays).cohort)

    def cohorts(seed, hparams):
        arrays, start = hparams.as_arrays(), sim.init(seed, hparams)
        draw = [cohort(dataclasses.replace(start, round=jnp.int32(t)), arrays) for t in range(5)]
        return [np.sort(np.asarray(each.ids)[np.asarray(each.mask)]).tolist() for each in draw]

    assert all(cohorts(0, each) == cohorts(0, p) for each in settings_)
    assert cohorts(1, p) != cohorts(0, p)
    ends = [rounds(sim, sim.init(0, each), 5, each) for each in settings_]
    reports = [sim.guarantee(end, DELTA) for end in ends]
    with pytest.raises(ValueError, match="own: report 1, report 2, report 3, report 4"):
        compose_reports(reports, DELTA)
    apart = rounds(sim, sim.init(1, p), 5, p)
    both = compose_reports([reports[0], sim.guarantee(apart, DELTA)], DELTA)
    assert sum(len(each.draws or ()) for each in (reports[0], both)) == 3
    assert both.find("zero_out").epsilon is not None
    # A sweep's runs draw what each draws alone.
    many = SimulationBatch(sim, settings_)
    state, _ = many.run(many.init(0), 5)
    assert sim.guarantee(state_of(state, 2), DELTA).draws == reports[2].draws


def test_one_state_run_twice_is_fine_alone_and_has_no_joint_epsilon(sim):
    start = rounds(sim, fresh(sim), 1)
    ends = [
        rounds(sim, copied(start), 1),
        rounds(sim, copied(start), 2, values(sim, learning_rate=0.3)),
        # The first result fed on to the second, under a ledger that does not know of it.
        rounds(sim, dataclasses.replace(start, shared=rounds(sim, copied(start), 1).shared), 1),
    ]
    reports = [sim.guarantee(end, DELTA) for end in ends]
    assert all(report.find("zero_out").epsilon is not None for report in reports)
    check_refused(reports[:2])
    check_refused(reports[::2])


def test_a_report_that_does_not_say_what_was_drawn_is_not_composed(sim):
    report = sim.guarantee(rounds(sim, fresh(sim), 1), DELTA)
    unknown = dataclasses.replace(report, draws=None)
    with pytest.raises(ValueError, match="draws"):
        compose_reports([report, unknown], DELTA)


@pytest.mark.thorough
def test_compare_names_private_runs_of_one_seed(tmp_path, capsys):
    # The default seed, and settings of which no function of the run makes anything.
    flags = "run --data digits --clients 10 --rounds 2 --algorithm fedavg --quiet --clip 0.2"
    runs = {
        "a": "--noise-multiplier 2",
        "b": "--noise-multiplier 2 --validation-fraction 0.5",
        "bare": "--epsilon inf",
    }
    for name, more in runs.items():
        words = flags.replace("--clip 0.2", "") if name == "bare" else flags
        assert main([*words.split(), *more.split(), "--out", str(tmp_path / name)]) == 0
    paths = [str(tmp_path / name) for name in runs]
    capsys.readouterr()
    assert main(["compare", *paths]) == 0
    [said] = [line for line in capsys.readouterr().out.splitlines() if "no joint ε" in line]
    assert said.endswith("published under its own: a, b.")
    draws = [RunDirectory(tmp_path / name).draws() for name in runs]
    assert draws[0] == draws[1]
    assert main(["compare", *paths[1:]]) == 0
    assert "joint" not in capsys.readouterr().out


def test_rounds_without_a_release_draw_nothing_that_counts():
    sim = fjs.Simulation(
        fjs.local(TASK),
        POPULATION,
        fjs.full_participation(),
        fjs.Minibatches(2, steps=1),
        fjs.no_release(),
    )
    hparams = values(sim)
    state = rounds(sim, sim.init(0, hparams), 2, hparams)
    report = sim.guarantee(state, DELTA)
    assert report.draws == ()
    assert report.find("zero_out").epsilon == 0
    assert compose_reports([report, report], DELTA).find("zero_out").epsilon == 0
    assert ledgers.charged(state.privacy)[0].event == NoRelease()
