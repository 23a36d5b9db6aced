"""Released evaluations: what they show, what they cost, and that their noise is theirs alone."""

import dataclasses
import functools
import math

import numpy as np
import pytest
from support import simulations
from support.problems import read_by

from fedjaxsim.callbacks import Patience
from fedjaxsim.engine.evaluation import (
    Evaluation,
    EvaluationPlan,
    check_released,
    prepare_release,
    release_evaluation,
)
from fedjaxsim.metrics import Metric
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.accounting import gaussian
from fedjaxsim.privacy.guarantee import compose_reports

M, Z, DELTA = len(simulations.COUNTS), 3.0, 1e-3
pytestmark = pytest.mark.usefixtures("shared_full")
simulation = functools.partial(simulations.shared, "fedavg", "full participation")


def started(plan, seed=0):
    sim = simulation()
    hparams = read_by(sim, clip=1.0, noise_multiplier=Z)
    return sim, prepare_release(sim.init(seed, hparams), plan, M), hparams


def of(*values):
    return Evaluation("validation", np.ones(len(values), int), {"accuracy": np.array(values)})


def test_the_mean_is_of_clipped_values():
    plan = EvaluationPlan(1e-6, "accuracy", largest=2.0)
    sim, state, _ = started(plan)
    _, found = release_evaluation(state, of(-1.0, 0.4, 2.0, 9.0, np.nan), plan)
    assert found is not None
    # 0, 0.4, 2, 2, and nothing from the client without a value, over all five.
    assert found.mean == pytest.approx(4.4 / 5, abs=1e-4)
    assert sim.guarantee(state, DELTA).find("zero_out").epsilon == 0
    # A model that diverged has the worst loss, not none.
    lost = Evaluation("validation", np.ones(2, int), {"loss": np.array([0.5, np.nan])})
    plan = EvaluationPlan(1e-6, "loss", largest=2.0)
    state = prepare_release(state, plan, 2)
    _, found = release_evaluation(state, lost, plan)
    assert found is not None
    assert found.mean == pytest.approx((0.5 + 2.0) / 2, abs=1e-4)


def test_a_metric_must_state_its_direction():
    """Without it nobody knows whether a client without a value is the best or the worst."""
    plan = EvaluationPlan(1e-6, "hits")
    with pytest.raises(ValueError, match="'hits' must state whether larger is better"):
        started(plan)
    values = {"hits": np.array([0.5, np.nan])}
    for better, worst in ((True, 0.0), (False, 1.0)):
        records = {"hits": Metric("hits", larger_is_better=better)}
        hits = Evaluation("validation", np.ones(2, int), values, records=records)
        sim = simulation()
        state = sim.init(0, read_by(sim, clip=1.0, noise_multiplier=Z))
        state = prepare_release(state, plan, 2, records)
        _, found = release_evaluation(state, hits, plan)
        assert found is not None
        assert found.mean == pytest.approx((0.5 + worst) / 2, abs=1e-4)


@pytest.mark.usefixtures("exact_noise")
def test_noise_has_the_charged_scale():
    plan = EvaluationPlan(5.0, "accuracy")
    _, state, _ = started(plan)
    found = []
    for _ in range(150):
        state, one = release_evaluation(state, of(*[0.5] * M), plan)
        assert one is not None
        found.append(one.mean)
    spread = 5.0 / M
    assert np.std(found) == pytest.approx(spread, rel=0.2)
    assert np.mean(found) == pytest.approx(0.5, abs=5 * spread / 150**0.5)
    (spend,) = [each for each in ledger.charged(state.privacy) if each.entries]
    assert spend.entries == ((5.0, 1.0, 150),)
    assert not spend.redrawn


@pytest.mark.thorough
def test_a_run_is_charged_for_rounds_and_evaluations_together():
    plan = EvaluationPlan(4.0, "loss", largest=2.0)
    sim, state, hparams = started(plan)
    state, history = sim.run(state, hparams, 6, eval_every=2, evaluate_privately=plan)
    assert all(segment.private is not None for segment in history)
    mu = math.sqrt(6 / Z**2 + 3 / 4.0**2)
    report = sim.guarantee(state, DELTA)
    assert report.find("zero_out").epsilon == pytest.approx(gaussian.epsilon(DELTA, mu), rel=1e-6)
    # A mean of numbers in [0, 1] moves by one if a client is replaced, a sum of vectors by two.
    mu = math.sqrt(4 * 6 / Z**2 + 3 / 4.0**2)
    assert report.find("replace").epsilon == pytest.approx(gaussian.epsilon(DELTA, mu), rel=1e-6)


def test_every_evaluation_has_noise_of_its_own_and_a_fork_is_found():
    plan = EvaluationPlan(2.0, "accuracy")
    sim, state, _ = started(plan)
    values = of(*[0.5] * M)
    once, first = release_evaluation(state, values, plan)
    twice, second = release_evaluation(once, values, plan)
    assert first is not None
    assert second is not None
    assert first.mean != second.mean
    assert release_evaluation(state, values, plan)[1] == first  # a resumed run repeats it
    # Two evaluations with one noise: their difference would be exact, so there is no joint ε.
    fork, _ = release_evaluation(state, of(*[0.1] * M), plan)
    with pytest.raises(ValueError, match="same key"):
        compose_reports([sim.guarantee(each, DELTA) for each in (twice, fork)])
    other, _ = release_evaluation(started(plan, seed=1)[1], values, plan)
    compose_reports([sim.guarantee(each, DELTA) for each in (twice, other)])


def test_evaluations_at_other_rounds_have_other_noise():
    """A run that is killed may go on from its checkpoint to another round than before."""
    plan = EvaluationPlan(5.0, "accuracy")
    _, state, _ = started(plan)
    other = dataclasses.replace(state, round=state.round + 1)
    found = [release_evaluation(each, of(*[0.5] * M), plan)[1] for each in (state, other)]
    assert found[0] != found[1]


def test_a_budget_covers_evaluations_and_ends_with_them():
    plan = EvaluationPlan(2.0, "loss", largest=2.0)
    sim, state, hparams = started(plan)
    budget = sim.budget(hparams, epsilon=4.0, delta=DELTA, evaluate_privately=plan, eval_every=1)
    state = sim.with_budget(sim.init(0, hparams), budget)
    state = prepare_release(state, plan, M)
    patience = Patience(100, released=True)
    state, history = sim.run(
        state, hparams, 30, eval_every=1, evaluate_privately=plan, callbacks=[patience]
    )
    rounds, done = int(state.round), sum(s.private is not None for s in history) + 1  # and before
    assert len(patience.memory) == done
    # One evaluation may be in vain: a stage, or a resumed run, has another one of its last round.
    costs = [
        gaussian.epsilon(DELTA, math.sqrt(n / Z**2 + (n + 2) / 2.0**2))
        for n in (rounds, rounds + 1)
    ]
    assert costs[0] <= 4.0 < costs[1]
    assert done == rounds + 1
    assert sim.guarantee(state, DELTA).find("zero_out").epsilon == pytest.approx(costs[0])


def test_patience_that_follows_releases_needs_a_budget():
    """No other guarantee covers the number of rounds, and reports without one say that."""
    plan = EvaluationPlan(2.0, "loss", largest=2.0)
    sim, state, hparams = started(plan)
    with pytest.raises(ValueError, match="needs a state with a budget"):
        sim.run(state, hparams, 2, evaluate_privately=plan, callbacks=[Patience(1, released=True)])


def test_bad_plans_are_refused():
    for bad in ({"noise_multiplier": 0.0}, {"largest": 0.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            EvaluationPlan(**{"noise_multiplier": 1.0, "metric": "accuracy", **bad})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="variance of all"):  # one client moves everybody's nMSE
        check_released(EvaluationPlan(1.0, "nmse"), {})
    plan = EvaluationPlan(1.0, "auc")
    with pytest.raises(ValueError, match="auc"):
        release_evaluation(started(plan)[1], of(0.5), plan)
