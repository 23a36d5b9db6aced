"""A state keeps its charges and its noise, whichever simulation reads it."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import classification

import fedjaxsim as fjs
from fedjaxsim.privacy.accounting import gaussian as gdp
from fedjaxsim.privacy.doors import client_noise
from fedjaxsim.privacy.guarantee import together_published
from fedjaxsim.privacy.samplers.fixed import fixed_size
from fedjaxsim.privacy.samplers.passes import passes

M, DELTA = 12, 1e-3
HPARAMS = fjs.Hyperparameters(clip_norm=1.0, noise_multiplier=4.0, lam=0.1)
QUARTER = HPARAMS.replace(sampling_rate=0.25)


def simulation(sampling, mechanism=None, algorithm=fjs.fedavg):
    population, task = classification([4] * M)
    return fjs.Simulation(
        algorithm(task), task, population, sampling, fjs.Minibatches(2, steps=1), mechanism
    )


@pytest.fixture(scope="module")
def everyone():
    return simulation(fjs.everyone(M))


@pytest.fixture(scope="module")
def fixed():
    return simulation(fixed_size(M, 3))


@pytest.fixture(scope="module")
def poisson():
    return simulation(fjs.poisson(M))


@pytest.fixture(scope="module")
def fine_tuning():
    return simulation(fjs.everyone(M), fjs.closed(), lambda task: fjs.local(task))


def epsilon(sim, state, adjacency="zero_out", view="joint_dp"):
    return sim.guarantee(state, DELTA).find(adjacency, view).epsilon


def run(sim, state, hparams, rounds):
    """One round after the other, so that one program serves runs of any length."""
    return sim.run(state, hparams, rounds, eval_every=1)[0]


def copied(state):
    return jax.tree.map(jnp.copy, state)


def test_a_closed_door_does_not_forget_what_was_released(everyone, fine_tuning):
    state = run(everyone, everyone.init(0, HPARAMS), HPARAMS, 20)
    paid = epsilon(everyone, state)
    assert paid == pytest.approx(gdp.epsilon(DELTA, np.sqrt(20) / 4), rel=1e-6)
    still = HPARAMS.replace(noise_multiplier=0.0, clip_norm=np.inf)
    tuned = dataclasses.replace(
        fine_tuning.init(1, still),
        personal=jax.tree.map(lambda leaf: jnp.stack([leaf] * M), state.shared.params),
        privacy=state.privacy,
    )
    tuned = run(fine_tuning, tuned, still, 3)
    assert epsilon(fine_tuning, tuned) == paid
    assert float(fine_tuning.epsilon(tuned, DELTA)) >= paid


@pytest.mark.thorough
def test_another_sampler_does_not_make_charges_cheaper(everyone, fixed, poisson):
    state = run(fixed, fixed.init(0, QUARTER), QUARTER, 30)

    def epsilons(report):
        places = itertools.product(("zero_out", "replace"), ("joint_dp", "released_sequence"))
        return [report.find(*place).epsilon for place in places]

    own = epsilons(fixed.guarantee(state, DELTA))
    for other in (poisson, everyone, simulation(passes(M, 3, 1))):
        assert epsilons(other.guarantee(state, DELTA)) == own
    # Going on under another sampler costs more, in every view, whoever reads it.
    continued = run(poisson, copied(state), QUARTER, 5)
    alone = run(poisson, poisson.init(1, QUARTER), QUARTER, 5)
    both = poisson.guarantee(continued, DELTA)
    assert {each.status for each in both.guarantees} == {"upper_bound"}
    assert {each.sampling for each in both.guarantees} == {"fixed and poisson"}
    assert epsilons(fixed.guarantee(continued, DELTA)) == epsilons(both)
    assert np.all(np.array(epsilons(both)) > own)
    assert np.all(np.array(epsilons(both)) > epsilons(poisson.guarantee(alone, DELTA)))


def test_rounds_of_a_door_without_guarantee_have_none_for_any_reader(everyone):
    unprotected = simulation(fjs.everyone(M), client_noise())
    state = run(unprotected, unprotected.init(0, HPARAMS), HPARAMS, 1)
    found = everyone.guarantee(state, DELTA).find("zero_out")
    assert found.epsilon is None
    assert "no guarantee is known" in found.reason
    assert float(everyone.epsilon(state, DELTA)) == np.inf
    state = run(everyone, state, HPARAMS, 1)
    assert epsilon(everyone, state) is None


@pytest.mark.thorough
def test_a_cap_does_not_survive_a_second_start():
    capped = simulation(passes(M, 3, 1))
    state = run(capped, capped.init(0, QUARTER), QUARTER, 4)
    assert epsilon(capped, state) == pytest.approx(gdp.epsilon(DELTA, 1 / 4), rel=1e-6)
    again = dataclasses.replace(capped.init(1, QUARTER), privacy=state.privacy)
    again = run(capped, again, QUARTER, 1)
    assert epsilon(capped, again) is None


# --- noise ----------------------------------------------------------------------------------------


def parameters(state):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state.shared)])


def test_runs_with_other_settings_do_not_share_their_noise(everyone):
    loud = HPARAMS.replace(clip_norm=100.0, noise_multiplier=10.0)
    other = loud.replace(learning_rate=0.2)
    scale = 10 * 100 / M  # of the noise in the mean

    def after_one_round(hparams, **options):
        return run(everyone, everyone.init(0, hparams, **options), hparams, 1)

    one, same, two = (after_one_round(hparams) for hparams in (loud, loud, other))
    np.testing.assert_array_equal(parameters(one), parameters(same))
    # 15 differences of independent noise: their size is that of √2 times the noise.
    difference = parameters(two) - parameters(one)
    assert 0.3 < np.sqrt(np.mean(difference**2)) / (np.sqrt(2) * scale) < 1.9
    # On purpose, and then said: what is left is what the learning rates make.
    shared = [after_one_round(hparams, common_noise=True) for hparams in (loud, other)]
    assert np.abs(parameters(shared[1]) - parameters(shared[0])).max() < scale / 100

    reports = [everyone.guarantee(state, DELTA) for state in (one, two, *shared)]
    assert len({report.noise[0].digest for report in reports}) == 3
    with pytest.raises(ValueError, match="guarantees that share noise do not compose"):
        together_published(reports[2:])
    with pytest.raises(ValueError, match="share noise"):
        together_published([reports[0], reports[0]])
    both = together_published(reports[:2]).find("zero_out")
    assert both.epsilon == pytest.approx(gdp.epsilon(DELTA, np.sqrt(2) / 10), rel=1e-6)


def test_a_state_that_forks_shares_the_noise_before_the_fork_only(everyone):
    state = run(everyone, everyone.init(0, HPARAMS), HPARAMS, 3)
    forks = [HPARAMS.replace(learning_rate=rate) for rate in (0.2, 0.3)]
    ends = [run(everyone, copied(state), hparams, 2) for hparams in forks]
    assert np.abs(parameters(ends[0]) - parameters(ends[1])).max() > 0.01
    reports = [everyone.guarantee(end, DELTA) for end in ends]
    for report in reports:
        assert [(s.first, s.rounds) for s in report.noise] == [(0, 3), (3, 2)]
    with pytest.raises(ValueError, match="rounds 0 and on drew their noise"):
        together_published(reports)


def test_a_run_that_repeats_its_rounds_has_no_guarantee(everyone):
    state = run(everyone, everyone.init(0, HPARAMS), HPARAMS, 2)
    again = dataclasses.replace(state, round=jnp.zeros_like(state.round))
    again = run(everyone, again, HPARAMS, 1)
    found = everyone.guarantee(again, DELTA).find("zero_out")
    assert found.epsilon is None
    assert "twice" in found.reason


def test_rounds_one_by_one_are_the_run_and_its_noise(everyone):
    state = everyone.init(0, HPARAMS)
    for _ in range(3):
        state, _ = everyone.round(state, HPARAMS)
    whole = run(everyone, everyone.init(0, HPARAMS), HPARAMS, 3)
    np.testing.assert_allclose(parameters(state), parameters(whole), rtol=1e-5)
    assert everyone.guarantee(state, DELTA).noise == everyone.guarantee(whole, DELTA).noise


def test_noise_that_nobody_knows_is_not_composed(everyone):
    hparams = HPARAMS.as_arrays()
    # As in a function of one's own that is compiled.
    state = jax.jit(everyone.program.init)(jax.random.key(0), hparams)
    state, _ = everyone.round(state, HPARAMS)
    report = everyone.guarantee(state, DELTA)
    assert report.find("zero_out").epsilon is not None
    assert report.noise is None
    with pytest.raises(ValueError, match="not known which noise"):
        together_published([report])


def test_guarantees_say_that_seed_and_key_are_secret(everyone):
    state = run(everyone, everyone.init(0, HPARAMS), HPARAMS, 1)
    assert "Seed and key are secret" in str(everyone.guarantee(state, DELTA))
