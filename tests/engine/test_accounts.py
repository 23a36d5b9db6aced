"""A state keeps its charges and its noise, whichever simulation reads it."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import simulations
from support.problems import copied, read_by

import fedjaxsim as fjs
from fedjaxsim.privacy.accounting import gaussian as gdp
from fedjaxsim.privacy.assumptions import KNOWN_SEED, SECRET_SEED
from fedjaxsim.privacy.guarantee import compose_reports
from fedjaxsim.privacy.ledger import charged
from fedjaxsim.privacy.mechanisms.sums import client_noise
from fedjaxsim.privacy.samplers import fixed_groups, fixed_size

DELTA = 1e-3


def given(sim, **changes):
    """The hyperparameters of a simulation; cohorts are a quarter of the clients if drawn."""
    values = {"clip": 1.0, "noise_multiplier": 4.0, "sampling_rate": 0.25}
    return read_by(sim, **(values | changes))


def simulation(sampling, mechanism=fjs.gaussian()):
    population, task = simulations.problem()
    return fjs.Simulation(
        fjs.fedavg(task), population, sampling, fjs.Minibatches(4, steps=1), mechanism
    )


def epsilon(sim, state, adjacency="zero_out", view="joint_dp"):
    return sim.guarantee(state, DELTA).find(adjacency, view).epsilon


def run(sim, state, rounds, **changes):
    """The state after more rounds, one after the other, so that one program serves any number."""
    for _ in range(rounds):
        state, _ = sim.round(state, given(sim, **changes))
    return state


def begin(sim, seed=0, **changes):
    """The state before the first round."""
    return sim.init(seed, given(sim, **changes))


def test_a_stage_without_releases_does_not_forget_what_was_released(shared_full, shared_local):
    full, fine_tuning = shared_full, shared_local
    state = run(full, begin(full), 20)
    paid = epsilon(full, state)
    assert paid == pytest.approx(gdp.epsilon(DELTA, np.sqrt(20) / 4), rel=1e-6)
    assert epsilon(full, state, "replace") == pytest.approx(
        gdp.epsilon(DELTA, 2 * np.sqrt(20) / 4), rel=1e-6
    )
    alone = run(fine_tuning, begin(fine_tuning), 3)
    assert charged(alone.privacy)[0].entries == ()
    assert epsilon(fine_tuning, alone) == 0
    tuned = dataclasses.replace(
        begin(fine_tuning, 1),
        personal=jax.tree.map(
            lambda leaf: jnp.stack([leaf] * full.num_clients), state.shared.params
        ),
        privacy=state.privacy,
    )
    tuned = run(fine_tuning, tuned, 3)
    assert epsilon(fine_tuning, tuned) == paid
    assert float(fine_tuning.epsilon(tuned, DELTA)) >= paid


@pytest.mark.thorough
def test_another_sampler_does_not_make_charges_cheaper(shared_full, shared_fedavg):
    full, poisson, fixed = shared_full, shared_fedavg, simulation(fixed_size(cohort=2))
    state = run(fixed, begin(fixed), 30)

    def epsilons(report):
        places = itertools.product(("zero_out", "replace"), ("joint_dp", "released_sequence"))
        return [report.find(*place).epsilon for place in places]

    own = epsilons(fixed.guarantee(state, DELTA))
    for other in (poisson, full):
        assert epsilons(other.guarantee(state, DELTA)) == own
    # Going on under another sampler costs more, in every view, whoever reads it.
    continued = run(poisson, copied(state), 5)
    alone = run(poisson, begin(poisson, 1), 5)
    both = poisson.guarantee(continued, DELTA)
    assert {each.status for each in both.guarantees} == {"upper_bound"}
    assert {each.sampling for each in both.guarantees} == {"fixed and poisson"}
    assert epsilons(fixed.guarantee(continued, DELTA)) == epsilons(both)
    assert np.all(np.array(epsilons(both)) > own)
    assert np.all(np.array(epsilons(both)) > epsilons(poisson.guarantee(alone, DELTA)))


def test_rounds_of_a_mechanism_without_guarantee_have_none_for_any_reader(shared_full):
    full = shared_full
    without_cost = simulation(fjs.full_participation(), client_noise())
    state = run(without_cost, begin(without_cost), 1)
    found = full.guarantee(state, DELTA).find("zero_out")
    assert found.epsilon is None
    assert "no guarantee is known" in found.reason
    assert float(full.epsilon(state, DELTA)) == np.inf
    state = run(full, state, 1)
    assert epsilon(full, state) is None


@pytest.mark.thorough
def test_groups_do_not_survive_a_second_start():
    groups = simulation(fixed_groups(groups=4))
    state = run(groups, begin(groups), 4)
    assert epsilon(groups, state) == pytest.approx(gdp.epsilon(DELTA, 1 / 4), rel=1e-6)
    again = dataclasses.replace(begin(groups, 1), privacy=state.privacy)
    again = run(groups, again, 1)
    assert epsilon(groups, again) is None
    # Another key's groups have clients of this one's first two: they have an account of their own.
    half = run(groups, begin(groups), 2)
    stage = run(groups, groups.start_from(half, given(groups)), 2)
    found = epsilon(groups, stage)
    assert found == pytest.approx(gdp.epsilon(DELTA, np.sqrt(2) / 4), rel=1e-3)


# --- draws ----------------------------------------------------------------------------------------


def test_a_state_that_forks_shares_its_draws(shared_full):
    full = shared_full
    state = run(full, begin(full), 3)
    ends = [run(full, copied(state), 2, learning_rate=rate) for rate in (0.2, 0.3)]
    reports = [full.guarantee(end, DELTA) for end in ends]
    for report in reports:
        assert report.draws is not None
        assert [each.rounds for each in report.draws] == [5]
        assert report.find("zero_out").epsilon == pytest.approx(
            gdp.epsilon(DELTA, np.sqrt(5) / 4), rel=1e-6
        )
    with pytest.raises(ValueError, match="report 1, report 2"):
        compose_reports(reports)


def test_runs_with_seeds_of_their_own_compose(shared_full):
    full = shared_full
    ends = [run(full, begin(full, seed), 1) for seed in (0, 1)]
    both = compose_reports([full.guarantee(end, DELTA) for end in ends])
    assert both.find("zero_out").epsilon == pytest.approx(
        gdp.epsilon(DELTA, np.sqrt(2) / 4), rel=1e-6
    )
    assert len({each.digest for each in both.draws or ()}) == 2
    assert "rows were divided anew" in str(both)


def test_guarantees_say_who_may_know_the_seed_and_that_no_other_published_run_used_it(shared_full):
    full = shared_full
    state = run(full, begin(full), 1)
    found = full.guarantee(state, DELTA)
    for report, sentence in ((found, KNOWN_SEED), (found.of_secret_seed(), SECRET_SEED)):
        for each in report.guarantees:
            assert {KNOWN_SEED, SECRET_SEED} & {*each.assumptions} == {sentence}
