"""Audits of real runs: their bounds, sound runs that they spare, broken ones that they find."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import audit as bench
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_privacy.auditing import CanaryScoreAuditor, Explicit
from scipy.special import ndtr
from support.problems import classification, read_by

import fedjaxsim as fjs
from fedjaxsim.audit.bounds import audit, lower_bound, of_scores, result
from fedjaxsim.audit.canaries import Directions, Watched, with_canaries
from fedjaxsim.engine import program
from fedjaxsim.engine.shard import CLIENTS
from fedjaxsim.privacy import guarantee
from fedjaxsim.privacy.accounting import gaussian
from fedjaxsim.privacy.entries import Entry, SamplingScheme
from fedjaxsim.privacy.events import EXAMPLE, GAUSSIAN, Examples, PrivacySpend


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


def test_independent_canaries_prove_more():
    """All of 400 guesses right: a rate above q = (0.05/4)^(1/400), so e^ε ≥ (q − δ)/(1 − q)."""
    sent = np.arange(400) < 200
    q = (0.05 / 4) ** (1 / 400)
    alone, any_way = (of_scores(1.0 * sent, sent, 1e-2, allowed=each) for each in (0.9, None))
    assert alone.epsilon == pytest.approx(math.log((q - 0.01) / (1 - q)))
    assert any_way.epsilon < 0.5 * alone.epsilon


@pytest.mark.parametrize("mu", [0.92, pytest.param(0.5, marks=pytest.mark.thorough)])
def test_guesses_on_gaussian_noise_prove_most_of_epsilon(mu):
    """Beside jax_privacy's bound for f-DP (Mahloujifar et al. 2024), for dependent canaries."""
    rng, delta, proved, beside = np.random.default_rng(0), 1e-5, [], []
    epsilon = gaussian.epsilon(delta, mu)
    coins = rng.random((60, 1000)) < 0.5
    for run, sent in enumerate(coins):
        scores = rng.normal(size=1000) + mu * sent
        found = of_scores(scores, sent, delta, epsilon, 2 * ndtr(mu / 2) - 1, is_gaussian=True)
        proved.append((found.gaussian or 0.0) / epsilon)
        if run == 0:
            assert "if noise is Gaussian" in str(found)
            auditor = CanaryScoreAuditor(scores[sent], scores[~sent])
            beside.append(auditor.epsilon_one_run_fdp(0.05, delta) / epsilon)
    assert np.mean(np.array(proved) > 1) < 0.15  # 0.05, and some luck
    assert np.median(proved) > 0.65
    assert np.median(proved) > 1.5 * np.median(beside)
    assert "if noise" not in str(of_scores(coins[0] + 0.0, coins[0], delta, epsilon, 0.9))


def test_the_guess_in_the_middle_counts_as_wrong():
    """Else the middle one of three canaries, the least certain, would leave the surer guesses."""
    found = of_scores(np.arange(3.0), np.array([False, True, True]), 1e-3, allowed=0.5)
    rate = (1 + found.advantage) / 2
    assert 3 * rate**2 - 2 * rate**3 == pytest.approx(1e-4)  # at least two right ones of three


def test_the_verdict_is_about_clients_alone():
    """Charges of examples allow canaries nothing: one Gaussian release of μ = ½ has 2Φ(¼) − 1."""
    scheme = SamplingScheme("full", 9, 9)
    spent = PrivacySpend(scheme, GAUSSIAN, (Entry(2.0, 1.0, 1),))
    examples = [PrivacySpend(scheme, each, (Entry(1.0, 1.0, 3),)) for each in (Examples(), EXAMPLE)]
    noted: Any = Watched((), Directions.draw(4, 8), jnp.zeros(8), jnp.zeros(4, bool))
    state: Any = SimpleNamespace(shared=noted, mechanism=())
    report = dataclasses.replace(guarantee.report([spent], 1e-3), charges=(spent, *examples))
    found = result([state], report)
    assert found.allowed == pytest.approx(2 * ndtr(0.25) - 1)
    assert found.gaussian is not None
    sampled = PrivacySpend(SamplingScheme("poisson", 9, 9), GAUSSIAN, (Entry(2.0, 0.5, 1),))
    assert result([state], guarantee.report([sampled], 1e-3)).gaussian is None


def test_directions_are_orthonormal_and_cover_all_coordinates():
    directions = jax.jit(lambda: Directions.draw(3, 11))()
    basis = np.stack([directions.along(axis) for axis in np.eye(11)], axis=1)
    np.testing.assert_allclose(basis @ basis.T, np.eye(3), atol=1e-12)
    assert np.all(np.abs(basis).sum(axis=0) > 0)


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["full", "poisson", "groups", "cyclic"])
def test_sound_runs_are_spared(kind):
    mechanisms = {
        "groups": fjs.privacy.correlated(bands=3), "cyclic": fjs.privacy.banded(bands=2)
    }  # fmt: skip
    mechanism = mechanisms.get(kind, fjs.gaussian())
    states, report = bench.states_of(kind, mechanism, 25, z=2.0)
    found = [result([state], report) for state in states]
    assert sum(one.epsilon > (one.reported or 0.0) for one in found) <= 1
    assert sum(one.refuted for one in found) <= 1  # each with probability 1e-4 at most
    # The audit sees something: a bound that is always zero would spare everything.
    assert np.median([one.epsilon for one in found]) > 0.1
    together = result(states, report)
    assert together.reported is not None
    assert 0.4 < together.epsilon < together.reported
    assert together.canaries == 400 * len(states)
    assert not together.refuted


@pytest.mark.thorough
@pytest.mark.parametrize("name", bench.BROKEN)
def test_broken_runs_are_refuted(name):
    states, report = bench.states_of("full", bench.BROKEN[name](fjs.gaussian()), 20)
    assert sum(result([state], report).refuted for state in states) > 10
    assert result(states, report).refuted


def test_several_runs_find_missing_noise_together():
    # μ = √16/4 = 1 is charged, and 1/0.6 is real: guesses have an advantage of 0.38 and of 0.60.
    simulation, hparams = bench.simulated("full", bench.half_the_noise(fjs.gaussian(), 0.6))
    done: list[tuple[int, int]] = []
    found = audit(
        simulation, hparams, bench.ROUNDS, canaries=300, runs=5, delta=bench.DELTA,
        on_run=lambda *progress: done.append(progress),
    )  # fmt: skip
    assert found.refuted
    assert found.advantage == pytest.approx(2 * ndtr(0.5 / 0.6) - 1, abs=0.15)
    assert found.allowed == pytest.approx(2 * ndtr(0.5) - 1, rel=1e-6)
    assert done == [(run, 5) for run in range(1, 6)]
    assert "1500 canaries" in str(found)
    assert "NOT" in str(found)


@pytest.mark.thorough
def test_noise_with_each_chunk_is_found():
    mechanism = bench.noise_per_chunk(fjs.gaussian(), 16)
    assert result(*bench.states_of("poisson", mechanism, 20)).refuted


def noise_per_shard(patch, share):
    """Each of two devices adds noise of so much of the whole deviation to its own sum."""

    told = {}

    def remembered(self, state, hparams, rows, drawn, work=program.Program.work):
        told.update(key=drawn.noise, deviation=hparams.noise_multiplier * hparams.clip)
        return work(self, state, hparams, rows, drawn)

    def noised(*given, filled, work=program.work):
        worked = work(*given, filled=filled)
        leaves, structure = jax.tree.flatten(worked.accumulator.total)
        key = jax.random.fold_in(told["key"], jax.lax.axis_index(CLIENTS))
        own = jax.random.split(key, len(leaves))
        noise = [jax.random.normal(k, leaf.shape) for k, leaf in zip(own, leaves, strict=True)]
        total = [
            leaf + share * told["deviation"] * drawn
            for leaf, drawn in zip(leaves, noise, strict=True)
        ]
        total = jax.tree.unflatten(structure, total)
        return worked._replace(accumulator=worked.accumulator._replace(total=total))

    patch.setattr(program.Program, "work", remembered)
    patch.setattr(program, "work", noised)


@pytest.mark.thorough
def test_mechanisms_are_judged_alike_on_shards(monkeypatch):
    def refuted(mechanism):
        simulation, hparams = bench.simulated("full", mechanism, devices=jax.devices()[:2])
        return audit(simulation, hparams, bench.ROUNDS, canaries=401, runs=10).refuted

    assert not refuted(fjs.gaussian())
    assert refuted(bench.half_the_noise(fjs.gaussian()))
    assert refuted(bench.unclipped(fjs.gaussian(), range(0, 420, 2)))
    left_to_shards = bench.drawing(fjs.gaussian(), lambda z, _: 0 * z)
    for share, wrong in ((math.sqrt(1 / 2), False), (1 / 2, True)):  # variances add up
        with monkeypatch.context() as patch:
            noise_per_shard(patch, share)
            assert refuted(left_to_shards) == wrong


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
    extra, directions = flat[1] - flat[0], seen.shared.directions
    sent = np.asarray(seen.shared.sent, float)
    np.testing.assert_allclose(directions.along(extra), sent / 5, atol=1e-5)
    assert np.linalg.norm(extra) == pytest.approx(math.sqrt(sent.sum()) / 5, abs=1e-4)
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


# --- what is refused ------------------------------------------------------------------------------


def test_runs_whose_canaries_would_prove_nothing_are_refused():
    population, task = classification([6] * 5)

    def refused(match, sampling=None, mechanism=fjs.gaussian(), canaries=3, rate: Any = 0.1):
        sampling = fjs.full_participation() if sampling is None else sampling
        sim = fjs.Simulation(fjs.fedavg(task), population, sampling, mechanism=mechanism)
        with pytest.raises(ValueError, match=match):
            with_canaries(sim, read_by(sim, learning_rate=rate), canaries)

    refused("the number of canaries must lie in", canaries=16)
    refused("fixed", fjs.privacy.fixed_size(cohort=2))
    refused("one value for all clients", rate=np.full(5, 0.1))
    levels = fjs.privacy.privacy_levels([0, 0, 1, 1, 1], (1.0, 0.5))
    refused("one privacy level", fjs.privacy.available(fjs.poisson(0.5), levels))
    refused("would have no weight", mechanism=fjs.gaussian(np.ones(5)))
    local = fjs.Simulation(
        fjs.local(task), population, fjs.full_participation(), mechanism=fjs.no_release()
    )
    with pytest.raises(ValueError, match="sends none"):
        with_canaries(local, read_by(local, learning_rate=0.1), 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"delta": 0.0}, "delta"), ({"runs": 0}, "runs"), ({"rounds": 0}, "rounds")],
)
def test_bad_settings_are_refused(settings, message):
    simulation, hparams = bench.simulated("full", fjs.gaussian())
    with pytest.raises(ValueError, match=message):
        audit(simulation, hparams, **{"rounds": 2, **settings})
