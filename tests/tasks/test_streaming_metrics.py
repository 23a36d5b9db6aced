"""Metrics that are no sums over rows: by hand, and as scikit-learn computes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from fedjaxsim.data.minibatches import Batch
from fedjaxsim.models.model import Model
from fedjaxsim.tasks.streaming_metrics import area_under_roc, balanced_accuracy
from fedjaxsim.tasks.task import logistic, one_vs_all, softmax

SIZE = 4  # rows in a batch
AUC = area_under_roc(lambda params, batch: batch.fields["x"], lambda batch: batch.fields["y"] > 0)
THREE = balanced_accuracy(
    lambda params, batch: batch.fields["x"] == batch.fields["y"], lambda batch: batch.fields["y"], 3
)
OUTPUTS = Model(lambda key: jnp.zeros(()), lambda params, x: x)


def value(fold, x, y, padding=0):
    """Of all rows, in batches; the last one is filled up with rows like the first."""
    n, carry, add = len(x), fold.start(16), jax.jit(fold.add)
    for start in range(0, n + padding, SIZE):
        rows = np.arange(start, start + SIZE)
        real = np.where(rows < n, rows, 0)
        batch = Batch(
            {"x": jnp.asarray(np.asarray(x)[real]), "y": jnp.asarray(np.asarray(y)[real])},
            jnp.asarray(rows < n, float),
        )
        carry = add(carry, None, batch)
    return float(jax.jit(fold.value)(carry))


def test_the_area_under_the_curve_by_hand():
    # Pairs (positive, negative): .8 beats both, .4 loses to .6 and ties with .4: (2 + ½)/4.
    assert value(AUC, [0.8, 0.4, 0.6, 0.4], [1, 1, 0, 0]) == 0.625
    assert value(AUC, [0.8, 0.4, 0.6, 0.4], [1, 1, -1, -1], padding=5) == 0.625
    assert value(AUC, [0.0, -0.0], [1, 0]) == 0.5
    assert value(AUC, [np.inf, -np.inf, np.inf], [1, 0, 0]) == 0.75


def test_a_score_or_a_class_that_is_nan_leaves_no_value_but_padding_may_be_nan():
    assert np.isnan(value(AUC, [np.nan, -1.0], [1, 0]))
    assert value(AUC, [0.5, -1.0, np.nan], [1, 0, 0], padding=4) != 0.5
    own = balanced_accuracy(
        lambda params, batch: batch.fields["x"], lambda batch: batch.fields["y"], 2
    )
    assert np.isnan(value(own, [1.0, np.nan, 1.0], [0, 1, 1]))
    unseen = Batch({"x": jnp.array([1.0, np.nan]), "y": jnp.array([1, 0])}, jnp.array([1.0, 0.0]))
    for metric, found in ((own, 1.0), (AUC, np.nan)):  # one class alone has no AUC
        _, _, *_, failed = metric.add(metric.start(16), None, unseen)
        assert not failed
        np.testing.assert_equal(
            float(metric.value(metric.add(metric.start(16), None, unseen))), found
        )


@pytest.mark.parametrize("labels", [[1, 1, 1], [0, 0, 0], []])
def test_rows_of_one_class_have_no_area(labels):
    assert np.isnan(value(AUC, np.zeros(len(labels)), labels))


def test_balanced_accuracy_by_hand():
    # Recall ½ of class 0, 1 of class 2; class 1 does not occur. Padding repeats the first row.
    assert value(THREE, [0, 1, 2, 2, 2], [0, 0, 2, 2, 2], padding=6) == 0.75
    assert np.isnan(value(THREE, [], []))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("x64", [False, True])
def test_both_are_those_of_scikit_learn(seed, x64):
    rng = np.random.default_rng(seed)
    with jax.enable_x64(x64):
        labels = np.array([0, 1, 2, *rng.integers(0, 3, 10)])
        guesses = rng.integers(0, 3, 13)
        expected = balanced_accuracy_score(labels, guesses)
        np.testing.assert_allclose(value(THREE, guesses, labels), expected, rtol=1e-6)
        binary = np.minimum(labels, 1)
        for scores in (np.round(rng.normal(size=13), 1), rng.normal(size=13) * 1e-6 + 1):
            scores = scores.astype(np.float64 if x64 else np.float32)
            expected = roc_auc_score(binary, scores)
            np.testing.assert_allclose(value(AUC, scores, binary), expected, rtol=1e-6)


def test_tasks_know_their_scores_and_classes():
    rng = np.random.default_rng(3)
    outputs, y = np.round(rng.normal(size=(12, 2)), 1), np.array([0, 1, *rng.integers(0, 2, 10)])
    score = roc_auc_score(y, outputs[:, 1] - outputs[:, 0])
    recall = balanced_accuracy_score(y, np.argmax(outputs, axis=1))
    for task in (softmax(OUTPUTS, 2), one_vs_all(OUTPUTS, 2)):
        np.testing.assert_allclose(
            value(task.streaming_metrics["auc"], outputs, y), score, rtol=1e-6
        )
        found = value(task.streaming_metrics["balanced_accuracy"], outputs, y)
        np.testing.assert_allclose(found, recall, rtol=1e-6)
    one = outputs[:, :1]
    for labels in (y, 2 * y - 1):
        streaming_metrics = logistic(OUTPUTS).streaming_metrics
        found = [
            value(streaming_metrics[name], one, labels) for name in ("auc", "balanced_accuracy")
        ]
        expected = [roc_auc_score(y, one[:, 0]), balanced_accuracy_score(y, one[:, 0] > 0)]
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert list(softmax(OUTPUTS, 3).streaming_metrics) == ["balanced_accuracy"]
