"""Metrics by name against scikit-learn on the rows of all clients, and on those of each."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import metrics

import fedjaxsim as fjs
from fedjaxsim.models import linear
from fedjaxsim.tasks import logistic, one_vs_all, softmax, squared, with_metrics, with_own_metric

COUNTS = (9, 4, 13, 1)
NAMES = {
    2: ("f1", "balanced-accuracy", "precision", "recall", "ece", "log-loss", "auc-pooled"),
    4: ("f1", "balanced-accuracy", "precision", "recall", "top-2", "ece", "log-loss"),
}


def probabilities_of(task, params, batch):
    return jax.nn.softmax(task.classes.scores(params, batch.fields))


def brier(task):
    def of_rows(params, batch):
        wanted = jax.nn.one_hot(batch.fields["y"], task.classes.number)
        return jnp.sum((probabilities_of(task, params, batch) - wanted) ** 2, axis=1)

    return of_rows, fjs.tasks.Metric("Brier score", "points", False)


def worst(task):
    def add(least, params, batch):
        right = probabilities_of(task, params, batch)[
            jnp.arange(len(batch.weight)), batch.fields["y"]
        ]
        return jnp.minimum(least, jnp.min(jnp.where(batch.weight > 0, right, 1.0)))

    start = jnp.ones(())
    metric = fjs.tasks.StreamingMetric(lambda most_rows: start, add, lambda least: least)
    return metric, fjs.tasks.Metric("least probability", larger_is_better=True)


@functools.cache
def evaluated(classes):
    """Labels, clients and probabilities of all rows, and their evaluation by one random model."""
    rng = np.random.default_rng(classes)
    rows = [
        {"x": rng.normal(size=(n, 3)).astype(np.float32), "y": rng.integers(0, classes, n)}
        for n in COUNTS
    ]
    population = fjs.Population.from_clients(rows)
    outputs = 1 if classes == 2 else classes
    model = linear((3,), outputs)
    task = logistic(model) if classes == 2 else softmax(model, classes)
    task = with_metrics(task, NAMES[classes])
    task = with_own_metric(with_own_metric(task, "brier", brier), "worst", worst)
    sim = fjs.Simulation(fjs.fedavg(task), population, fjs.full_participation())
    hparams = sim.hyperparameters(learning_rate=0.1, clip=1.0, noise_multiplier=0.0)
    kernel = rng.normal(size=(outputs, 3)).astype(np.float32)
    state = sim.init(0, hparams)
    params = {"kernel": jnp.asarray(kernel), "bias": jnp.zeros(outputs)}
    state = dataclasses.replace(state, shared=state.shared._replace(params=params))
    x, y = (np.concatenate([each[name] for each in rows]) for name in "xy")
    scores = x.astype(np.float64) @ kernel.T
    scores = np.concatenate([0 * scores, scores], axis=1) if classes == 2 else scores
    probabilities = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    return y, np.repeat(range(4), COUNTS), probabilities, sim.evaluate(state, hparams, "train")


def by_sklearn(y, p):
    """The same metrics by scikit-learn; the calibration error bin by bin."""
    classes, said, confidence = p.shape[1], p.argmax(axis=1), p.max(axis=1)
    how: dict[str, Any] = {
        "average": "binary" if classes == 2 else "macro",
        "zero_division": np.nan,
    }
    error = 0.0
    for low in np.arange(15) / 15:
        inside = (confidence > low) & (confidence <= low + 1 / 15)
        if inside.any():
            gap = np.mean((said == y)[inside]) - confidence[inside].mean()
            error += inside.mean() * abs(gap)
    both = len(np.unique(y)) == 2
    return {
        "f1": metrics.f1_score(y, said, **how),
        "precision": metrics.precision_score(y, said, **how),
        "recall": metrics.recall_score(y, said, **how),
        "balanced_accuracy": metrics.recall_score(y, said, labels=np.unique(y), average="macro"),
        "log_loss": metrics.log_loss(y, p, labels=range(classes)),
        "ece": error,
        "auc_pooled": metrics.roc_auc_score(y, p[:, 1]) if both and classes == 2 else np.nan,
        "top_2": metrics.top_k_accuracy_score(y, p, k=2, labels=range(classes))
        if classes > 2
        else np.nan,
    }


@pytest.mark.parametrize("classes", [2, 4])
def test_pooled_metrics_are_those_of_scikit_learn_on_all_rows(classes):
    y, _, probabilities, evaluation = evaluated(classes)
    wanted, summary = by_sklearn(y, probabilities), evaluation.summary()
    if classes > 2:  # a class that does not occur among predictions has a precision of 0 there
        said = probabilities.argmax(axis=1)
        wanted["precision"] = metrics.precision_score(y, said, average="macro")
    for name in NAMES[classes]:
        name = name.replace("-", "_")
        assert summary[f"train_{name}"] == pytest.approx(wanted[name], abs=2e-6), name
        assert evaluation.records[name].pooled
    assert np.mean(y == probabilities.argmax(axis=1)) == pytest.approx(
        summary["train_accuracy_weighted"]
    )


def test_the_metric_of_a_client_is_that_of_its_rows():
    y, owner, probabilities, evaluation = evaluated(2)
    for client in range(4):
        mine = owner == client
        wanted = by_sklearn(y[mine], probabilities[mine])
        for name in NAMES[2]:
            name = name.replace("-", "_")
            found = evaluation.values[name][client]
            np.testing.assert_allclose(found, wanted[name], atol=2e-6, err_msg=name)
        p = probabilities[mine]
        score = np.mean(np.sum((p - np.eye(2)[y[mine]]) ** 2, axis=1))
        assert evaluation.values["brier"][client] == pytest.approx(score, rel=1e-5)
        least = np.min(p[np.arange(len(p)), y[mine]])
        assert evaluation.values["worst"][client] == pytest.approx(least, rel=1e-5)
    assert evaluation.records["brier"] == fjs.tasks.Metric("Brier score", "points", False)
    defined = np.isfinite(evaluation.values["auc_pooled"])
    mean = evaluation.values["auc_pooled"][defined].mean()
    assert evaluation.summary()["train_auc_pooled_unweighted"] == pytest.approx(mean)
    groups = evaluation.by_group(["a", "b", "a", "b"])
    inside = np.isin(owner, [0, 2])
    wanted = by_sklearn(y[inside], probabilities[inside])["f1"]
    assert groups["a"].summary()["train_f1"] == pytest.approx(wanted)


def test_names_that_a_task_does_not_have_are_refused():
    two, four = logistic(linear((3,), 1)), softmax(linear((3,), 4), 4)
    for task, name, words in (
        (four, "f2", "must be f1, .*top-5 or your own, MODULE:FACTORY, got 'f2'"),
        (four, "top-4", "from 1 to 3"),
        (four, "top-x", "metrics must be f1"),
        (four, "auc-pooled", "two classes, got 4"),
        (one_vs_all(linear((3,), 4), 4), "log-loss", "needs probabilities"),
        (squared(linear((3,), 1)), "f1", "are for classifications"),
    ):
        with pytest.raises(ValueError, match=words):
            with_metrics(task, [name])
    fields = {"x": jnp.ones((1, 3)), "y": jnp.ones(1, int)}
    params, batch = two.init(jax.random.key(0)), fjs.Batch(fields, jnp.ones(1))
    factories: list[tuple[str, Any, str]] = [
        ("loss", brier, "has a metric 'loss' already"),
        ("auc", worst, "has a metric 'auc' already"),
        ("mine", lambda task: worst, "must return a StreamingMetric or a function"),
    ]
    for name, factory, words in factories:
        with pytest.raises(ValueError, match=words):
            with_own_metric(two, name, factory).metrics(params, batch)
    assert [*with_metrics(two, ["f1", "f1"]).streaming_metrics] == ["auc", "f1"]
