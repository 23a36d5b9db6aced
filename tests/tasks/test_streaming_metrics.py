"""The area under the ROC curve: by hand, and as scikit-learn computes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from fedjaxsim.data.minibatches import Batch
from fedjaxsim.models.model import Model
from fedjaxsim.tasks.streaming_metrics import area_under_roc
from fedjaxsim.tasks.task import logistic, one_vs_all, softmax

SIZE = 4  # rows in a batch
AUC = area_under_roc(lambda params, batch: batch.fields["x"], lambda batch: batch.fields["y"] > 0)
OUTPUTS = Model(lambda key: jnp.zeros(()), lambda params, x: x)


def value(fold, x, y, padding=0):
    """Of all rows, in batches; the last one is filled up with rows like the first."""
    n, carry, add = len(x), jax.jit(fold.start, static_argnums=0)(16), jax.jit(fold.add)
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
    fields = {"x": jnp.array([1.0, 0.0, np.nan]), "y": jnp.array([1, 0, 0])}
    padded = Batch(fields, jnp.array([1.0, 1.0, 0.0]))
    assert jax.jit(lambda: AUC.value(AUC.add(AUC.start(16), None, padded)))() == 1


@pytest.mark.parametrize("labels", [[1, 1, 1], [0, 0, 0], []])
def test_rows_of_one_class_have_no_area(labels):
    assert np.isnan(value(AUC, np.zeros(len(labels)), labels))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("x64", [False, True])
def test_it_is_that_of_scikit_learn(seed, x64):
    rng = np.random.default_rng(seed)
    with jax.enable_x64(x64):
        binary = np.array([0, 1, *rng.integers(0, 2, 11)])
        for scores in (np.round(rng.normal(size=13), 1), rng.normal(size=13) * 1e-6 + 1):
            scores = scores.astype(np.float64 if x64 else np.float32)
            expected = roc_auc_score(binary, scores)
            np.testing.assert_allclose(value(AUC, scores, binary), expected, rtol=1e-6)


def test_tasks_know_their_scores():
    rng = np.random.default_rng(3)
    outputs, y = np.round(rng.normal(size=(12, 2)), 1), np.array([0, 1, *rng.integers(0, 2, 10)])
    score = roc_auc_score(y, outputs[:, 1] - outputs[:, 0])
    for task in (softmax(OUTPUTS, 2), one_vs_all(OUTPUTS, 2)):
        np.testing.assert_allclose(
            value(task.streaming_metrics["auc"], outputs, y), score, rtol=1e-6
        )
    one = outputs[:, :1]
    for labels in (y, 2 * y - 1):
        found = value(logistic(OUTPUTS).streaming_metrics["auc"], one, labels)
        np.testing.assert_allclose(found, roc_auc_score(y, one[:, 0]), rtol=1e-6)
    assert not softmax(OUTPUTS, 3).streaming_metrics
