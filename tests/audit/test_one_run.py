"""The audit inside one run: its bounds, sound runs that it spares, broken ones that it finds."""

import math
from typing import Any

import jax
import numpy as np
import one_run_audit
import pytest
from jax_privacy.auditing import CanaryScoreAuditor, Explicit
from problems import classification, read_by
from scipy.special import ndtr

import fedjaxsim as fjs
from fedjaxsim.audit.attacks import Directions
from fedjaxsim.audit.one_run import lower_bound, of_scores, with_canaries


@pytest.mark.parametrize(
    ("half", "moved", "delta"), [(40, 1.0, 1e-5), (30, 2.5, 1e-3), (9, 9, 0.01)]
)
def test_bounds_are_those_of_jax_privacy(half, moved, delta):
    """Its guesses are one-sided: all scores above a threshold."""
    rng = np.random.default_rng(half)
    inside, outside = rng.normal(moved, 1, half), rng.normal(0, 1, half)
    auditor = CanaryScoreAuditor(inside, outside)
    guesses, correct = int((inside >= 1).sum() + (outside >= 1).sum()), int((inside >= 1).sum())
    steinke = auditor.epsilon_one_run(0.05, delta, threshold_strategy=Explicit(1.0))
    assert lower_bound(2 * half, guesses, correct, delta, 0.05) == pytest.approx(steinke, abs=1e-5)


def test_without_delta_the_bound_is_the_binomial_tail():
    """All of r guesses right: (e^ε/(1 + e^ε))^r = 0.05."""
    q = 0.05 ** (1 / 100)
    assert lower_bound(100, 100, 100, 0.0, 0.05) == pytest.approx(math.log(q / (1 - q)), abs=1e-6)
    assert lower_bound(100, 100, 50, 0.0, 0.05) == 0


def test_the_advantage_is_that_of_the_best_test_for_each_canary():
    """Scores N(0, 1) and N(μ, 1): the best threshold is right with probability Φ(μ/2)."""
    rng = np.random.default_rng(0)
    sent = rng.random(20_000) < 0.5
    found = of_scores(rng.normal(size=len(sent)) + sent, sent, 1e-3, allowed=2 * ndtr(0.5) - 1)
    assert found.advantage == pytest.approx(2 * ndtr(0.5) - 1, abs=0.04)
    assert not found.refuted
    assert of_scores(rng.normal(size=len(sent)) + 1.3 * sent, sent, 1e-3, allowed=0.39).refuted


def test_directions_are_orthonormal_and_cover_all_coordinates():
    directions = Directions.draw(3, 11)
    basis = directions.dense()
    np.testing.assert_allclose(directions.along(np.arange(11.0)), basis @ np.arange(11.0))
    np.testing.assert_allclose(basis @ basis.T, np.eye(3), atol=1e-12)
    assert np.all(np.abs(basis).sum(axis=0) > 0)


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    ["full", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("poisson", "groups"))],
)
def test_sound_runs_are_spared(kind):
    mechanism = fjs.privacy.correlated(bands=3) if kind == "groups" else fjs.gaussian()
    runs = 25 if kind == "full" else 100
    found = one_run_audit.audits(kind, mechanism, runs, noise_multiplier=2.0)
    assert sum(one.epsilon > (one.reported or 0.0) for one in found) <= 1
    assert sum(one.refuted for one in found) <= 1  # each with probability 1e-4 at most
    # The audit sees something: a bound that is always zero would spare everything.
    assert np.median([one.epsilon for one in found]) > 0.1


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.thorough] if number else [])
        for number, name in enumerate(one_run_audit.BROKEN)
    ],
)
def test_broken_runs_are_refuted(name):
    mechanism = one_run_audit.BROKEN[name](fjs.gaussian())
    found = one_run_audit.audits("full", mechanism, 20)
    assert sum(one.refuted for one in found) > 10


def test_canaries_leave_the_update_of_the_real_clients_as_it_is():
    """Without noise the release is that of the real clients and, beside it, the canaries' sum."""
    population, task = classification([6] * 5)
    sim = fjs.Simulation(fjs.fedavg(task), population, fjs.full_participation())
    hparams = read_by(sim, learning_rate=0.1)
    audited = with_canaries(sim, hparams, 6)
    plain, seen = sim.init(0, hparams), audited.init(0, hparams)
    plain, metrics = sim.round(plain, hparams)
    seen, other = audited.round(seen, hparams)
    flat = [
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(shared.params)])
        for shared in (plain.shared, seen.shared.inner)
    ]
    notes = seen.shared.notes
    sum_of_canaries = np.asarray(notes.sent, float) @ notes.directions.dense()
    np.testing.assert_allclose(flat[1] - flat[0], sum_of_canaries / 5, atol=1e-5)
    assert float(metrics["loss"]) == pytest.approx(float(other["loss"]), rel=1e-5)
    assert np.isfinite(audited.evaluate(seen, hparams).mean("accuracy"))
    assert audited.num_clients == 11


@pytest.mark.thorough
def test_real_clients_predict_with_their_data_as_without_canaries():
    population, task = classification([5, 9, 6])
    sim = fjs.Simulation(fjs.perfedavg(task), population, fjs.full_participation())
    hparams = sim.hyperparameters()
    with_some = with_canaries(sim, hparams, 2)
    alone = sim.evaluate(sim.init(0, hparams), hparams)
    found = with_some.evaluate(with_some.init(0, hparams), hparams, clients=np.arange(3))
    np.testing.assert_allclose(found.values["loss"], alone.values["loss"], rtol=1e-6)


def test_runs_whose_canaries_would_prove_nothing_are_refused():
    population, task = classification([6] * 5)

    def refused(match, sampling=None, mechanism=fjs.gaussian(), canaries=3, rate: Any = 0.1):
        sampling = fjs.full_participation() if sampling is None else sampling
        sim = fjs.Simulation(fjs.fedavg(task), population, sampling, mechanism=mechanism)
        with pytest.raises(ValueError, match=match):
            with_canaries(sim, read_by(sim, learning_rate=rate), canaries)

    refused("audit_canaries must lie in", canaries=16)
    refused("fixed", fjs.privacy.fixed_size(cohort=2))
    refused("one value for all clients", rate=np.full(5, 0.1))
    local = fjs.Simulation(
        fjs.local(task), population, fjs.full_participation(), mechanism=fjs.no_release()
    )
    with pytest.raises(ValueError, match="audit_canaries"):
        with_canaries(local, read_by(local, learning_rate=0.1), 1)
