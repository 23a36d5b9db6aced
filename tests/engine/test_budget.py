"""A state with a budget runs up to it, and no further, whoever runs it."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from support import simulations
from support.problems import compilations, read_by, same

from fedjaxsim.engine.checkpoint import CheckpointFolder
from fedjaxsim.privacy import compose_reports, ledger
from fedjaxsim.privacy.accounting import gaussian
from fedjaxsim.privacy.entries import Entry

EPSILON, DELTA, Z = 4.0, 1e-3, 3.0


def started(sim, epsilon: float | None = EPSILON, z=Z):
    hparams = read_by(sim, clip=1.0, noise_multiplier=z, sampling_rate=0.5)
    state = sim.init(0, hparams)
    if epsilon is not None:
        state = sim.with_budget(state, sim.budget(hparams, epsilon=epsilon, delta=DELTA))
    return state, hparams


def room(z=Z, epsilon=EPSILON):
    """The number of rounds with full participation: a Gaussian release of μ = √T/z."""
    return max(t for t in range(1, 30) if gaussian.epsilon(DELTA, math.sqrt(t) / z) <= epsilon)


def test_a_run_ends_before_the_round_that_would_exceed_its_budget(shared_full):
    sim = shared_full
    state, hparams = started(sim)
    most = room()
    assert 3 < most < 29
    # Less noise than planned has no place; more has.
    for z, done in ((2.9, 0), (1000.0, 1)):
        assert int(sim.round(state, hparams.replace(noise_multiplier=z))[0].round) == done
    state, history = sim.run(state, hparams, 30, eval_every=2)
    assert int(state.round) == most
    assert history[-1].round == most
    assert len(history[-1].metrics["participants"]) == (most - 1) % 2 + 1
    found = sim.guarantee(state, DELTA).find("zero_out")
    assert found.epsilon == gaussian.epsilon(DELTA, math.sqrt(most) / Z)
    # Nothing is released, charged or counted beyond it, by a round, a run or a stage.
    after, metrics = sim.round(state, hparams)
    assert same(after, state)
    assert metrics["participants"] == 0
    unspent, _ = started(sim, epsilon=None)
    for _ in range(most):
        unspent, _ = sim.round(unspent, hparams)
    np.testing.assert_allclose(
        jax.tree.leaves(unspent.shared)[0], jax.tree.leaves(state.shared)[0], rtol=1e-5
    )
    stage = sim.start_from(state, hparams)
    assert int(sim.round(stage, hparams)[0].round) == 0


@pytest.mark.usefixtures("every_program")
def test_any_number_of_budgets_stages_and_sentences_compiles_each_program_once(shared_full):
    sim = shared_full

    def end(epsilon, sentences=(), stages=1):
        state, hparams = started(sim, epsilon)
        for _ in range(stages):
            state = sim.start_from(state.announce(sentences=sentences), hparams)
            state, _ = sim.run(state, hparams, 2)
        return int(state.privacy.charges[0].rounds.sum()), float(sim.epsilon(state, DELTA))

    end(epsilon=EPSILON, stages=2)
    with compilations() as programs:
        few, spent = end(epsilon=1.9, sentences=["a sentence"], stages=3)
        many, all_spent = end(epsilon=8.0, stages=4)
    assert not programs
    assert (few, many) == (room(epsilon=1.9), 8)
    assert spent <= 1.9 < all_spent <= 8.0


def test_rounds_of_a_schedule_have_places_in_any_order(shared_full):
    sim = shared_full
    loud, quiet = np.float32(2.0), np.float32(8.0)
    planned = read_by(sim, clip=1.0, noise_multiplier=[loud, loud, quiet, quiet])
    budget = sim.budget(planned, epsilon=9.0, delta=DELTA)
    assert budget.planned[0].entries == (Entry(2.0, 1.0, 2), Entry(8.0, 1.0, 2))
    state = sim.with_budget(sim.init(0, planned), budget)
    done = []
    for z in (8.0, 2.0, 8.0, 9.0, 2.0, 1000.0):
        state, _ = sim.round(state, planned.replace(noise_multiplier=[z] * 4))
        done.append(int(state.round))
    assert done == [1, 2, 3, 4, 4, 4]  # a place of loud rounds went to a quiet one
    report = sim.guarantee(state, DELTA).find("zero_out")
    assert report.epsilon == gaussian.epsilon(DELTA, math.sqrt(2 / 4 + 2 / 64))
    assert gaussian.epsilon(DELTA, math.sqrt(2 / 4 + 2 / 64)) <= 9.0
    # Where ε is less, the first rounds of the plan are allowed.
    few = sim.budget(planned, epsilon=1.7, delta=DELTA).planned[0].entries
    assert few == (Entry(2.0, 1.0, 1),)


def test_a_budget_comes_before_the_first_release_and_stays(shared_full):
    sim = shared_full
    state, hparams = started(sim, epsilon=None)
    late, _ = sim.round(state, hparams)
    with pytest.raises(ValueError, match="before the first release"):
        sim.with_budget(late, sim.budget(hparams, epsilon=2.0))
    state = sim.with_budget(state, sim.budget(hparams, epsilon=2.0))
    assert sim.with_budget(state, sim.budget(hparams, epsilon=2.0)) is state
    with pytest.raises(ValueError, match="before the first release"):
        sim.with_budget(state, sim.budget(hparams, epsilon=3.0))
    with pytest.raises(ValueError, match="no noise"):
        started(sim, z=0.0)


@pytest.mark.thorough
def test_the_budget_ends_everywhere_after_the_same_round(shared_pmtl):
    del shared_pmtl
    states = []
    for kind in simulations.PLACEMENTS:
        sim = simulations.shared("pmtl", kind)
        state, hparams = started(sim)
        states.append(sim.run(state, hparams, 80, eval_every=2)[0])
    one, *others = states
    assert int(one.round) == one.privacy.limit.planned[0].entries[0].rounds < 80
    for other in others:
        assert ledger.charged(one.privacy) == ledger.charged(other.privacy)
        np.testing.assert_allclose(
            jax.tree.leaves(one.shared)[0], jax.tree.leaves(other.shared)[0], rtol=1e-4, atol=1e-6
        )


def test_a_killed_run_spends_no_planned_round_twice(shared_full, tmp_path):
    sim = shared_full
    begun, hparams = started(sim)
    whole, _ = sim.run(begun, hparams, 30, eval_every=2)
    folder = CheckpointFolder(tmp_path)

    def save_then_die(state, segment):
        if segment.round > 4:
            raise KeyboardInterrupt  # rounds 5 and 6 were released, and are in no checkpoint
        folder.save(segment.round, state, {})

    with pytest.raises(KeyboardInterrupt):
        sim.run(started(sim)[0], hparams, 30, eval_every=2, callbacks=[save_then_die])
    ends = []
    for _ in range(2):  # killed and resumed again from the same file
        saved = folder.last()
        assert saved is not None
        state = saved.state(sim.init(0, hparams))
        assert int(state.round) == 4
        state, _ = sim.run(state, hparams, 30, eval_every=2)
        # Rounds that come again are the same releases, of the same numbers; no other one has room.
        assert same(state, whole)
        assert same(sim.round(state, hparams)[0], whole)
        ends.append(sim.guarantee(state, DELTA))
    assert ends[0].charges == ends[1].charges == sim.guarantee(whole, DELTA).charges
    # With other noise they would be other releases from the same numbers: no two reports compose.
    state = folder.last().state(sim.init(0, hparams))  # pyright: ignore[reportOptionalMemberAccess]
    other, _ = sim.run(state, hparams.replace(noise_multiplier=4.0), 30, eval_every=2)
    with pytest.raises(ValueError, match="no joint ε"):
        compose_reports([ends[0], sim.guarantee(other, DELTA)])
    # A file from before the budget was set spends nothing beside it: the budget is in the state.
    unlimited = dataclasses.replace(whole, privacy=dataclasses.replace(whole.privacy, limit=None))
    with pytest.raises(ValueError, match="before the first release"):
        sim.with_budget(unlimited, sim.budget(hparams, epsilon=EPSILON, delta=DELTA))
