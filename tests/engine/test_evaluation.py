"""What evaluation reports: summaries by hand, and folds as each client alone would compute them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score
from support.problems import (
    classification,
    least_squares,
)

from fedjaxsim.algorithms.local import local
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.data.columns import Columns
from fedjaxsim.data.minibatches import PASS_SIZE, Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.engine.evaluation import Evaluation, summary_of
from fedjaxsim.engine.program import ClientMetrics
from fedjaxsim.engine.rows import Rows
from fedjaxsim.gradients.whole_run import mean_metric
from fedjaxsim.metrics import Metric
from fedjaxsim.models.model import linear
from fedjaxsim.privacy.mechanisms import no_release
from fedjaxsim.privacy.samplers import full_participation
from fedjaxsim.simulation import Simulation
from fedjaxsim.simulation_batch import SimulationBatch
from fedjaxsim.tasks import squared
from fedjaxsim.tasks.in_source import TaskInSource
from fedjaxsim.tasks.streaming_metrics import StreamingMetric
from fedjaxsim.tasks.task import logistic, one_vs_all, softmax
from fedjaxsim.tuning.setup import tuned_metric

VALUES = {"learning_rate": 0.3, "lam": 0.1, "clip": 1.0}
NAMES = ("auc", "largest_loss")
TASK = logistic(linear((2,), 1))
LARGEST_LOSS = StreamingMetric(  # a metric of one's own
    start=lambda most_rows: jnp.zeros(()),
    add=lambda carry, params, batch: jnp.maximum(
        carry, jnp.max(jnp.where(batch.weight > 0, TASK.metrics(params, batch)["loss"], 0))
    ),
    value=lambda carry: carry,
)
OWN = TASK._replace(streaming_metrics={**TASK.streaming_metrics, "largest_loss": LARGEST_LOSS})


# --- summaries ------------------------------------------------------------------------------------


def test_an_evaluation_shows_means_and_percentiles_over_clients():
    # Percentiles of 0, 0.5 and 1 lie at 0.1 and 0.9; the third client has no rows.
    values = np.array([0.0, 0.5, np.nan, 1.0])
    evaluation = Evaluation("test", np.array([1, 2, 0, 1]), {"accuracy": values})
    assert repr(evaluation).splitlines() == [
        "Evaluation on test rows of 3 of 4 clients",
        "  accuracy: 0.5, p10 0.1, p90 0.9",
    ]


def test_an_evaluation_of_several_runs_shows_their_range():
    values = np.array([[0.0, 0.5], [1.0, 0.5]])
    shown = repr(Evaluation("train", np.array([1, 1]), {"accuracy": values}))
    assert shown.splitlines() == [
        "Evaluation on train rows of 2 of 2 clients, 2 runs",
        "  accuracy: 0.5 to 0.5, p10 0.1 to 0.5, p90 0.5 to 0.9",
    ]


def test_the_spread_and_the_worst_tenth_by_hand():
    # Of twelve clients with rows the worst tenth are two.
    values = np.array([7.0, *range(12)])
    count = np.array([0, *[1] * 11, 9])
    evaluation = Evaluation("test", count, {"accuracy": values, "loss": values})
    summary = evaluation.summary()
    assert summary["test_accuracy_worst_tenth"] == 0.5  # of 0 and 1
    assert summary["test_loss_worst_tenth"] == 10.5  # of 10 and 11
    assert summary["test_accuracy"] == 5.5
    # Population variance of 0 … n−1: (n² − 1)/12.
    np.testing.assert_allclose(summary["test_loss_std"] ** 2, 143 / 12, rtol=1e-12)
    assert summary["test_loss_weighted"] == (sum(range(11)) + 9 * 11) / 20
    assert "test_loss_undefined" not in summary


def test_clients_without_a_value_are_left_out_and_counted():
    nan, count = np.nan, np.array([3, 1, 2, 0, 4])
    one = np.array([0.5, nan, 1.0, nan, 0.0])
    other = np.array([nan, nan, 0.25, nan, 0.75])  # defined elsewhere
    for columns in ((one, one), (one, other), (other, np.full(5, nan))):
        whole = Evaluation("test", count, {"auc": np.stack(columns, axis=-1)}, ["auc"]).summary()
        for index, column in enumerate(columns):
            alone = Evaluation("test", count, {"auc": column}, ["auc"]).summary()
            assert whole.keys() == alone.keys()
            for name, value in alone.items():
                np.testing.assert_array_equal(whole[name][index], value)
    summary = Evaluation("test", count, {"auc": one}, ["auc"]).summary()
    assert (summary["test_auc"], summary["test_auc_undefined"]) == (0.5, 1)
    assert summary["test_auc_weighted"] == (3 * 0.5 + 2 * 1) / 9
    assert summary["test_auc_worst_tenth"] == 0
    assert summary["test_auc_p50"] == 0.5


def test_a_client_who_failed_is_counted_and_leaves_no_summary():
    """Not left out, as the undefined are, and no worst or best client."""
    nan, count = np.nan, np.array([3, 1, 2, 0, 4])
    values = {"loss": np.array([1.0, nan, 2.0, nan, 3.0]), "auc": np.array([nan, nan, 1, nan, 0.5])}
    evaluation = Evaluation("test", count, values, ["auc"])
    assert evaluation.failed.tolist() == [False, True, False, False, False]
    summary = evaluation.summary()
    assert (summary["test_failed"], summary["test_auc_undefined"]) == (1, 1)
    for name in ("", "_weighted", "_p10", "_p50", "_p90", "_std", "_worst_tenth"):
        assert np.isnan(summary[f"test_loss{name}"])
        assert np.isnan(summary[f"test_auc{name}"])
    assert repr(evaluation).startswith("Evaluation on test rows of 4 of 5 clients, 1 failed\n")
    # Of two runs the other one has no failed client.
    both = {name: np.stack([np.nan_to_num(v, nan=0.25), v], -1) for name, v in values.items()}
    summary = Evaluation("test", count, both, ["auc"]).summary()
    assert summary["test_failed"].tolist() == [0, 1]
    assert summary["test_auc"][0] == (0.25 + 0.25 + 1 + 0.5) / 4
    assert np.isnan(summary["test_auc"][1])


def test_a_metric_without_a_direction_has_no_worst_tenth():
    values = np.array([0.0, *[1.0] * 9])
    ones = np.ones(10, int)
    summary = Evaluation("test", ones, {"hits": values, "accuracy": values}).summary()
    assert summary["test_hits"] == summary["test_accuracy"] == 0.9
    assert summary["test_accuracy_worst_tenth"] == 0
    assert "test_hits_worst_tenth" not in summary
    records = {"hits": Metric("hits", larger_is_better=True)}
    stated = Evaluation("test", ones, {"hits": values}, records=records)
    assert stated.summary()["test_hits_worst_tenth"] == 0
    with pytest.raises(ValueError, match="'hits' must state whether larger is better"):
        Evaluation("test", ones, {"hits": values}).worst_tenth("hits")


MODELS = {
    "softmax": softmax(linear((2,), 2), 2),
    "one_vs_all": one_vs_all(linear((2,), 2), 2),
    "logistic": TASK,
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        "softmax",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("logistic", "one_vs_all")),
    ],
)
def test_a_model_that_is_nan_predicts_nothing(name):
    """Scikit-learn refuses NaN scores; argmax and > 0 would call them class 0."""
    task, rng = MODELS[name], np.random.default_rng(0)
    clients = []
    for share in (2, 5, 8):
        y = np.repeat([0, 1], [share, 10 - share])
        clients.append({"x": rng.normal(size=(10, 2)).astype(np.float32), "y": y.astype(np.int32)})
    rows = {key: np.concatenate([each[key] for each in clients]) for key in ("x", "y")}
    people = Population(rows, np.array([[2, 0, 8]] * 3), np.array(list("abc")))
    sim = Simulation(
        local(task), people, full_participation(), Minibatches(4, steps=1), no_release()
    )
    hparams = sim.hyperparameters(learning_rate=0.1)
    state = with_models(sim.init(0, hparams))
    lost = jax.tree.map(lambda leaf: leaf.at[1].set(jnp.nan), state.personal)
    evaluation = sim.evaluate(dataclasses.replace(state, personal=lost), hparams)
    whole = sim.evaluate(state, hparams)
    for metric, values in evaluation.values.items():
        expected = whole.values[metric].copy()
        expected[1] = np.nan
        np.testing.assert_array_equal(values, expected, err_msg=metric)
    assert {"accuracy", "auc", "loss"} <= evaluation.values.keys()
    assert evaluation.summary()["test_failed"] == 1
    assert "test_failed" not in whole.summary()


# --- folds in a simulation ------------------------------------------------------------------------


def population() -> Population:
    """Clients of unlike sizes: one has rows of one class alone, and one has no test rows."""
    rng = np.random.default_rng(0)
    sizes, train = [70, 5, 3, 8, 33], [10, 2, 3, 4, 6]
    x = (np.round(8 * rng.normal(size=(sum(sizes), 2))) / 8).astype(np.float32)
    y = (x[:, 0] + rng.normal(size=len(x)) > 0.5).astype(int)
    start = np.cumsum([0, *sizes[:-1]])
    y[start[1] : start[1] + 5] = 1
    counts = np.stack([train, [0] * 5, np.array(sizes) - train], axis=1)
    return Population({"x": x, "y": y.astype(np.int32)}, counts, np.array(list("abcde")))


CLIENTS = population()


def simulation(**layout) -> Simulation:
    return Simulation(
        pmtl(OWN), CLIENTS, full_participation(), Minibatches(4, steps=2), chunk_size=2, **layout
    )


def expected(personal):
    """By name, (m,): what scikit-learn and numpy say of each client's own rows."""
    found = {name: np.full(5, np.nan) for name in NAMES}
    for k in (0, 1, 3, 4):
        rows = CLIENTS.rows(k, "test")
        kernel, bias = np.asarray(personal["kernel"][k]), np.asarray(personal["bias"][k])
        score = (rows["x"] @ kernel.T + bias)[:, 0]
        found["largest_loss"][k] = np.max(np.log1p(np.exp(np.where(rows["y"] > 0, -score, score))))
        if len(set(rows["y"])) > 1:
            found["auc"][k] = roc_auc_score(rows["y"], score)
    return found


def with_models(state):
    """The state, its personal models drawn at random."""
    rng = np.random.default_rng(1)

    def draw(leaf):
        # In eighths, so that scores are exact and ties are ties on any machine.
        return jnp.asarray(np.round(8 * rng.normal(size=leaf.shape)) / 8, leaf.dtype)

    return dataclasses.replace(state, personal=jax.tree.map(draw, state.personal))


@functools.cache
def drawn():
    sim = simulation(chunk_map="scan")
    return sim, with_models(sim.init(0, sim.hyperparameters(**VALUES)))


@pytest.mark.parametrize(
    "layout",
    [
        {"chunk_map": "scan"},
        pytest.param({"chunk_map": "vmap"}, marks=pytest.mark.thorough),
        pytest.param("devices", marks=pytest.mark.thorough),
    ],
)
def test_folds_are_those_of_each_clients_own_rows(layout):
    layout = {"devices": jax.devices()[:2]} if layout == "devices" else layout
    sim, state = drawn()
    sim = sim if layout == {"chunk_map": "scan"} else simulation(**layout)
    evaluation = sim.evaluate(state, sim.hyperparameters(**VALUES))
    for name, values in expected(state.personal).items():
        np.testing.assert_allclose(evaluation.values[name], values, rtol=1e-5, err_msg=name)
    summary = evaluation.summary()
    assert summary["test_auc_undefined"] == 1
    assert np.isfinite(summary["test_auc"])
    assert summary["test_largest_loss"] == np.mean(evaluation.values["largest_loss"][[0, 1, 3, 4]])


LONG = {77: 700, 140: 300, 5: 40}
"""Clients with many test rows, of 160."""


@functools.cache
def long_tailed() -> tuple[Population, Any]:
    rng = np.random.default_rng(2)
    test = np.array([LONG.get(k, 1 + k % 3) for k in range(160)])
    x = (np.round(8 * rng.normal(size=(160 + test.sum(), 2))) / 8).astype(np.float32)
    y = (x[:, 0] + rng.normal(size=len(x)) > 0).astype(np.int32)
    clients = Population.from_flat({"x": x, "y": y}, np.stack([1 + 0 * test, 0 * test, test], 1))
    sim = Simulation(pmtl(OWN), clients, full_participation(), Minibatches(4, steps=2))
    return clients, with_models(sim.init(0, sim.hyperparameters(**VALUES)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "layout",
    [
        {"chunk_map": "vmap"},
        pytest.param({"chunk_map": "scan"}, marks=pytest.mark.thorough),
        pytest.param({"devices": jax.devices()[:2]}, marks=pytest.mark.thorough),
    ],
)
def test_every_client_beside_long_ones_has_its_own_values(layout):
    clients, state = long_tailed()
    sim = Simulation(pmtl(OWN), clients, full_participation(), Minibatches(4, steps=2), **layout)
    found = sim.evaluate(state, sim.hyperparameters(**VALUES)).values
    for k in (*LONG, 0, 1, 2, 80, 159):
        rows = clients.rows(k, "test")
        kernel, bias = (
            np.asarray(state.personal["kernel"][k]),
            np.asarray(state.personal["bias"][k]),
        )
        score = (rows["x"] @ kernel.T + bias)[:, 0]
        loss = np.mean(np.log1p(np.exp(np.where(rows["y"] > 0, -score, score))))
        np.testing.assert_allclose(found["loss"][k], loss, rtol=1e-5, err_msg=str(k))
        if len(set(rows["y"])) > 1:
            np.testing.assert_allclose(found["auc"][k], roc_auc_score(rows["y"], score), rtol=1e-6)


def test_whole_passes_fit_the_bound_of_rows_that_share_a_program():
    placed = {largest: with_lengths({0: largest}) for largest in range(1, 70)}
    for first in placed.values():
        for largest, each in placed.items():
            rows = each.bounded_as(first)
            size = min(PASS_SIZE, rows.most_rows)
            assert -(-largest // size) * size <= rows.most_rows


def with_lengths(lengths: dict[int, int]) -> Rows:
    count = np.array([lengths.get(k, 1) for k in range(160)])
    fields = {"x": np.zeros((count.sum(), 1), np.float32)}
    clients = Population.from_flat(fields, np.stack([count, 0 * count, 0 * count], 1))
    return Rows.place(clients, "train", fields)


@pytest.mark.thorough
def test_folds_of_many_runs_are_those_of_each_alone():
    sim, _ = drawn()
    hparams = sim.hyperparameters(**VALUES)
    many = SimulationBatch(sim, [hparams.replace(learning_rate=rate) for rate in (0.1, 1.0)])
    state = with_models(many.init(1))
    evaluation = many.evaluate(state)
    for index in range(2):
        personal = {name: leaf[:, index] for name, leaf in state.personal.items()}
        for name, values in expected(personal).items():
            found = evaluation.values[name][:, index]
            np.testing.assert_allclose(found, values, rtol=1e-5, err_msg=name)


@pytest.mark.thorough
def test_the_model_is_asked_once_for_a_batch(fully_optimized):
    del fully_optimized

    def products(task):
        sim = Simulation(pmtl(task), CLIENTS, full_participation(), Minibatches(4, steps=2))
        hparams = sim.hyperparameters(**VALUES).as_arrays()
        state = sim.init(0, hparams)
        evaluate: Any = sim.compiled.evaluate
        compiled = evaluate.lower(state, hparams, sim.placed["test"]).compile()
        return str(compiled.as_text()).count(" dot(")

    assert products(OWN) == products(TASK._replace(streaming_metrics={})) > 0


def test_folds_have_no_derivative():
    sim, state = drawn()
    with pytest.raises(ValueError, match="auc"):
        mean_metric(sim, "auc", "test")(state, sim.hyperparameters(**VALUES))
    with pytest.raises(ValueError, match="auc"):
        tuned_metric(OWN, CLIENTS, "auc")


@pytest.mark.parametrize(
    "fold",
    [
        LARGEST_LOSS._replace(value=lambda carry: carry[None]),
        LARGEST_LOSS._replace(add=lambda carry, params, batch: batch.weight),
    ],
)
def test_a_fold_that_gives_something_else(fold):
    task = TASK._replace(streaming_metrics={"own": fold})
    sim = Simulation(pmtl(task), CLIENTS, full_participation(), Minibatches(4, steps=2))
    with pytest.raises(ValueError, match="'own'"):
        sim.init(0, sim.hyperparameters(**VALUES))


def test_a_fold_needs_a_name_of_its_own():
    task = TASK._replace(streaming_metrics={"loss": LARGEST_LOSS})
    sim = Simulation(pmtl(task), CLIENTS, full_participation(), Minibatches(4, steps=2))
    with pytest.raises(ValueError, match="'loss'"):
        sim.init(0, sim.hyperparameters(**VALUES))


# --- metrics in a simulation ----------------------------------------------------------------------


def test_metrics_are_those_of_numpy_on_each_clients_own_rows():
    clients, task = classification([10, 23, 40, 5, 17])
    sim = Simulation(pmtl(task), clients, full_participation(), Minibatches(4, epochs=1))
    hparams = sim.hyperparameters(**VALUES)
    state = with_models(sim.init(0, hparams))
    for split in ("train", "test"):
        evaluation = sim.evaluate(state, hparams, split)
        accuracies, counts = [], []
        for k in range(5):
            rows = clients.rows(k, split)
            kernel, bias = np.asarray(state.personal["kernel"][k]), state.personal["bias"][k]
            predicted = np.argmax(rows["x"] @ kernel.T + np.asarray(bias), axis=1)
            accuracies.append(np.mean(predicted == rows["y"]))
            counts.append(len(rows["y"]))
        np.testing.assert_allclose(evaluation.values["accuracy"], accuracies, rtol=1e-6)
        wanted = {"": np.mean(accuracies), "_weighted": np.average(accuracies, weights=counts)}
        wanted |= {f"_p{q}": np.percentile(accuracies, q) for q in (10, 90)}
        summary = evaluation.summary()
        for suffix, value in wanted.items():
            np.testing.assert_allclose(summary[f"{split}_accuracy{suffix}"], value, rtol=1e-6)


def test_nmse_is_pooled_squared_error_over_the_variance_of_targets():
    clients, task = least_squares([10, 20, 30], test=0.3)
    sim = Simulation(local(task), clients, full_participation(), mechanism=no_release())
    hparams = sim.hyperparameters()
    state = with_models(sim.init(0, hparams))
    errors, targets = [], []
    for k in range(3):
        rows = clients.rows(k, "test")
        kernel = np.asarray(state.personal["kernel"][k, 0])
        errors.append(rows["x"] @ kernel + np.asarray(state.personal["bias"][k]) - rows["y"])
        targets.append(rows["y"])
    variance = np.var(np.concatenate(targets))
    summary = sim.evaluate(state, hparams).summary()
    pooled = np.mean(np.concatenate(errors) ** 2) / variance
    np.testing.assert_allclose(summary["test_nmse"], pooled, rtol=1e-5)
    unweighted = np.mean([np.mean(e**2) for e in errors]) / variance
    np.testing.assert_allclose(summary["test_nmse_unweighted"], unweighted, rtol=1e-5)


def test_clients_without_rows_do_not_count():
    clients, task = classification([10, 2, 30])  # two rows leave none for the test
    assert clients.splits["test"].count[1] == 0
    sim = Simulation(pmtl(task), clients, full_participation())
    hparams = sim.hyperparameters(**VALUES)
    state = sim.init(0, hparams)
    evaluation = sim.evaluate(state, hparams)
    assert np.isnan(evaluation.values["loss"][1])
    # At w = 0 every loss is log 3.
    np.testing.assert_allclose(evaluation.summary()["test_loss"], np.log(3), rtol=1e-6)
    assert np.isnan(sim.evaluate(state, hparams, "validation").summary()["validation_loss"])


@pytest.mark.thorough
def test_a_population_without_test_rows_is_told_of_once():
    rows = {"x": np.ones((3, 2), np.float32), "y": np.array([0, 1, 1])}
    population = Population.from_clients([rows])
    simulation = Simulation(
        local(TASK), population, full_participation(), Minibatches(2, steps=1), no_release()
    )
    hparams = simulation.hyperparameters()
    state = simulation.init(0, hparams)
    with pytest.warns(UserWarning, match=r"no client has test rows.*data\.split") as told:
        simulation.run(state, hparams, 2, eval_every=1)
    assert len(told) == 1


def test_a_pooled_metric_is_in_the_units_of_the_source_as_its_clients_values_are():
    rows = {"x": np.zeros((3, 1), np.float32), "y": np.array([-1.0, 0.0, 1.0], np.float32)}
    columns = {"y": Columns(("y",), half_range=(10.0,))}  # stored 1 is 10 in the source
    population = Population.from_flat(rows, [1, 2], columns=columns)
    largest: Any = StreamingMetric(
        lambda most: jnp.zeros(()), lambda c, p, b: c, lambda c: c, lambda c: c[None], np.max
    )
    record = Metric("largest error", larger_is_better=False, pooled=True, power=1)
    task = squared(linear((1,), 1))
    task = task._replace(streaming_metrics={"largest": largest}, records={"largest": record})
    of_clients: Any = np.array([0.2, 0.5])
    measured: Any = ClientMetrics({}, {"largest": of_clients}, {"largest": of_clients[:, None]})
    summarize = summary_of(population, "train", TaskInSource.of(task, population), [])
    found = summarize(measured, None).summary()
    assert found["train_largest"] == 5.0
    assert found["train_largest_unweighted"] == pytest.approx(3.5)
