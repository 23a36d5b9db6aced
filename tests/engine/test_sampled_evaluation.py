"""Evaluations of a sample of clients: who is in it, what reads it, and what it costs."""

from threading import Event

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from support import simulations
from support.problems import read_by, simulation_of

from fedjaxsim.callbacks import (
    MetricsFile,
    Patience,
    Progress,
    Records,
    StopOnInterrupt,
    Validation,
)
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.data.splitting import split
from fedjaxsim.engine.evaluation import EvaluationPlan, sample_of
from fedjaxsim.models.model import linear
from fedjaxsim.privacy.samplers import poisson
from fedjaxsim.simulation_batch import SimulationBatch
from fedjaxsim.tasks.task import softmax

VALUES = {"learning_rate": 0.3, "lam": 0.5, "clip": 1.0, "noise_multiplier": 0.5}
SEED, SIZE = 3, 3


def run(sim, callbacks=(), rounds=4, **options):
    hparams = read_by(sim, **VALUES, sampling_rate=0.6)
    state, history = sim.run(
        sim.init(SEED, hparams),
        hparams,
        rounds,
        callbacks=callbacks,
        **{"eval_every": simulations.SEGMENT, "eval_clients": SIZE} | options,
    )
    return state, hparams, history


# --- who is in it ---------------------------------------------------------------------------------


def test_a_sample_is_uniform_and_its_mean_unbiased():
    clients, size, draws = 12, 5, 2000
    keys = jax.random.split(jax.random.key(0), draws)
    samples = np.array([sample_of(key, clients, size) for key in keys])
    assert np.all(np.diff(samples) > 0)
    # Each client's inclusions are Bin(draws, k/m).
    p, included = size / clients, np.bincount(samples.ravel(), minlength=clients)
    assert np.all(np.abs(included - draws * p) < 4.5 * np.sqrt(draws * p * (1 - p)))
    # Cochran (1977), theorem 2.2: the mean of a sample has variance S²/k · (1 − k/m).
    values = np.arange(clients) ** 2.0
    variance = np.var(values, ddof=1) / size * (1 - p)
    means = values[samples].mean(axis=1)
    assert abs(means.mean() - values.mean()) < 4.5 * np.sqrt(variance / draws)
    np.testing.assert_allclose(np.var(means), variance, rtol=0.15)  # 4.5 · √(2/draws)


def test_few_clients_are_all_evaluated():
    key = jax.random.key(0)
    assert sample_of(key, 1000, 1000) is None
    assert sample_of(key, 10**7, None) is None


# --- the same on every placement ------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("placement", ["devices", "streamed"])
def test_placements_evaluate_the_same_clients(shared_pmtl, placement):
    sim = simulations.shared("pmtl", placement)  # two devices do not divide five clients evenly
    state, hparams, history = run(sim)
    for ours, theirs in zip(history, run(shared_pmtl)[2], strict=True):
        np.testing.assert_array_equal(ours.evaluation.clients, theirs.evaluation.clients)
        for name, values in theirs.evaluation.values.items():
            np.testing.assert_allclose(ours.evaluation.values[name], values, rtol=1e-5)
    ids = np.array([0, 3, 4])
    whole, some = (sim.evaluate(state, hparams, clients=each) for each in (None, ids))
    np.testing.assert_array_equal(some.count, whole.count[ids])
    for name, values in whole.values.items():
        np.testing.assert_allclose(some.values[name], values[ids], rtol=1e-6)


@pytest.mark.thorough
def test_runs_of_a_batch_share_the_sample_of_their_key(shared_pmtl):
    settings = [
        read_by(shared_pmtl, **(VALUES | {"lam": lam}), sampling_rate=0.6) for lam in (0.1, 0.5)
    ]
    batch = SimulationBatch(shared_pmtl, settings, devices=jax.devices()[:2])
    _, history = batch.run(batch.init(SEED), 4, eval_every=simulations.SEGMENT, eval_clients=SIZE)
    alone = run(shared_pmtl)[2]
    np.testing.assert_array_equal(history[0].evaluation.clients, alone[0].evaluation.clients)
    for one, many in zip(alone, history, strict=True):
        for name, values in one.evaluation.values.items():
            np.testing.assert_allclose(many.evaluation.values[name][:, 1], values, rtol=1e-5)


# --- what reads it --------------------------------------------------------------------------------


def test_the_end_is_of_all_clients_and_what_comes_before_is_marked(shared_pmtl):
    records = Records()
    _, hparams, history = run(shared_pmtl, [Validation(), records])
    sample = history[0].evaluation.clients
    assert sample.shape == (SIZE,)
    assert history[1].evaluation.clients is None
    assert [row.get("sampled_clients") for row in records.rows] == [SIZE, SIZE, None]
    assert f"of {SIZE} of {SIZE} sampled clients" in repr(history[0].evaluation)
    # The other numbers are those of a run that evaluates all.
    everybody = Records()
    run(shared_pmtl, [Validation(), everybody], eval_clients=None)
    assert records.rows[-1] == everybody.rows[-1]
    start = shared_pmtl.init(SEED, hparams)
    of_sample = shared_pmtl.evaluate(start, hparams, "validation", sample)
    assert records.rows[0]["validation_loss"] == of_sample.mean("loss")
    targets = [shared_pmtl.population.rows(k, "validation")["y"] for k in sample]
    by_hand = np.mean([np.mean(y**2) / 2 for y in targets])  # at w = 0
    assert records.rows[0]["validation_loss"] == pytest.approx(by_hand)


@pytest.mark.thorough
@pytest.mark.parametrize("keep", [None, 0])
def test_a_run_that_stops_early_ends_with_all_clients(shared_pmtl, tmp_path, keep, capsys):
    patience, kept, file = Patience(1), Records(), MetricsFile(tmp_path / "rows.jsonl")

    def stop(state, segment):
        return False

    watching = [Validation(), patience, kept, file, Progress(), stop]
    state, hparams, history = run(shared_pmtl, watching, 6, keep=keep)
    whole = shared_pmtl.evaluate(state, hparams)
    assert [segment.round for segment in history] == ([2] if keep is None else [])
    for segment in history:
        assert segment.evaluation.clients is None
        np.testing.assert_array_equal(segment.evaluation.values["loss"], whole.values["loss"])
    validated = shared_pmtl.evaluate(state, hparams, "validation")
    for rows in (kept.rows, file.rows):
        assert [row["round"] for row in rows] == [0, 2]
        assert rows[-1]["test_loss"] == pytest.approx(whole.mean("loss"), rel=1e-12)
        assert rows[-1]["validation_loss"] == pytest.approx(validated.mean("loss"), rel=1e-12)
        assert "sampled_clients" not in rows[-1]
    sampled, last = [x for x in capsys.readouterr().err.splitlines() if "2/6" in x]
    assert "sampled" in sampled
    assert "sampled" not in last
    assert f"nMSE {whole.summary()['test_nmse']:.4g}" in last


@pytest.mark.thorough
def test_patience_alone_validates_the_end_on_all_clients(shared_pmtl):
    patience, kept = Patience(1), Records()
    state, hparams, _ = run(shared_pmtl, [patience, kept, lambda state, segment: False], 6)
    validated = shared_pmtl.evaluate(state, hparams, "validation")
    assert kept.rows[-1]["validation_loss"] == pytest.approx(validated.mean("loss"), rel=1e-12)
    assert len(patience.memory) == 2


def test_an_interrupted_run_has_the_records_of_one_that_was_not(shared_pmtl, tmp_path):
    kept, file, interrupted = Records(), MetricsFile(tmp_path / "rows.jsonl"), Event()
    interrupted.set()
    state, hparams, history = run(
        shared_pmtl, [Validation(), kept, file, StopOnInterrupt(interrupted)]
    )
    assert [segment.round for segment in history] == [2]
    assert history[0].evaluation.clients is None
    watching = [Validation(), kept, file]
    shared_pmtl.run(state, hparams, 2, callbacks=watching, eval_clients=SIZE)
    whole = Records()
    run(shared_pmtl, [Validation(), whole])
    assert kept.rows == file.rows == whole.rows


@pytest.mark.thorough
def test_released_evaluations_are_of_all_clients(shared_pmtl):
    plan = EvaluationPlan(1.0, "loss", largest=2.0)
    found = [
        [each.private for each in run(shared_pmtl, evaluate_privately=plan, eval_clients=size)[2]]
        for size in (SIZE, None)
    ]
    assert found[0] == found[1]


# --- what it costs --------------------------------------------------------------------------------


def test_a_sample_costs_the_same_of_any_number_of_clients():
    clients, rows = 10_000, 3
    counts = np.full(clients, rows)
    y = np.zeros(clients * rows, np.int32)
    fields = {"x": np.ones((len(y), 4), np.float32), "y": y}
    population = split(Population.from_flat(fields, counts), test=0.4)
    task = softmax(linear((4,), 3), 3)
    sim = simulation_of("pmtl", task, population, poisson(0.001), Minibatches(4, epochs=1))
    hparams = read_by(sim, **VALUES).as_arrays()
    state = jax.eval_shape(sim.program.init, jax.random.key(0), hparams)
    placed, ids = sim.program.place(population)["test"], np.arange(SIZE, dtype=np.int32)
    traced = jax.make_jaxpr(sim.program.evaluate)(state, hparams, placed, ids)
    sizes = [var.aval.size for equation in equations(traced.jaxpr) for var in equation.outvars]
    assert len(sizes) > 20
    assert max(sizes) < clients


def equations(jaxpr):
    """All equations of a program, those of its loops and branches included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize("clients", [[], [2, 1], [1, 1], [-1], [5], [0.5], [[1]]])
def test_clients_to_evaluate_are_increasing_ids(shared_pmtl, clients):
    hparams = read_by(shared_pmtl, **VALUES, sampling_rate=0.6)
    with pytest.raises(ValueError, match=r"clients must be increasing ids below 5"):
        shared_pmtl.evaluate(shared_pmtl.init(0, hparams), hparams, clients=np.array(clients))
