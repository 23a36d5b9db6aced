"""Losses and metrics of the tasks, worked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjaxsim.data.minibatches import Batch
from fedjaxsim.models.model import Model
from fedjaxsim.tasks.task import check_rows, logistic, one_vs_all, softmax, squared

OWN = Model(lambda key: jnp.zeros(()), lambda params, x: params + x)


def batch(x, y, weight):
    return Batch({"x": jnp.asarray(x), "y": jnp.asarray(y)}, jnp.asarray(weight, float))


def loss_and_metrics(task, rows):
    return jax.jit(lambda w: (task.loss(w, rows), task.metrics(w, rows)))(jnp.zeros(()))


def test_softmax_by_hand():
    task = softmax(OWN, 2)
    # Logits (0, 0): loss log 2; logits (log 3, 0) with label 1: loss log 4, wrong. Padding last.
    b = batch([[0.0, 0.0], [np.log(3), 0.0], [9.0, 9.0]], [0, 1, 0], [1, 1, 0])
    loss, values = loss_and_metrics(task, b)
    np.testing.assert_allclose(loss, (np.log(2) + np.log(4)) / 2, rtol=1e-6)
    np.testing.assert_array_equal(values["accuracy"], [1, 0, 1])
    np.testing.assert_allclose(values["loss"][:2], [np.log(2), np.log(4)], rtol=1e-6)


@pytest.mark.parametrize("labels", [[-1, 1, 1], [0, 1, 1]])
def test_logistic_by_hand(labels):
    task = logistic(OWN)
    # Log-odds log 3 means P(positive) = 3/4.
    b = batch([[np.log(3)], [np.log(3)], [0.0]], labels, [1, 1, 0])
    expected = (np.log(4) + np.log(4 / 3)) / 2
    loss, values = loss_and_metrics(task, b)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_array_equal(values["accuracy"][:2], [0, 1])


def test_squared_by_hand():
    task = squared(OWN)
    b = batch([[1.0], [5.0], [7.0]], [3.0, 4.0, 100.0], [1, 1, 0])
    np.testing.assert_allclose(task.loss(jnp.zeros(()), b), (0.5 * 4 + 0.5 * 1) / 2)
    np.testing.assert_allclose(task.metrics(jnp.zeros(()), b)["squared_error"][:2], [4, 1])


def test_one_vs_all_squared_by_hand():
    task = one_vs_all(OWN, 3)
    # Targets (0.9, −0.1, −0.1) and (−0.1, −0.1, 0.9); the last row is padding.
    b = batch([[0.9, -0.1, 0.8], [0.0, 0.2, 0.1], [9.0, 9.0, 9.0]], [0, 2, 0], [1, 1, 0])
    losses = [0.5 * 0.9**2, 0.5 * (0.1**2 + 0.3**2 + 0.8**2)]
    loss, values = loss_and_metrics(task, b)
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-6)
    np.testing.assert_allclose(values["loss"][:2], losses, rtol=1e-6)
    np.testing.assert_array_equal(values["accuracy"][:2], [1, 0])


def test_padding_alone_has_loss_zero():
    b = batch([[1.0]], [3.0], [0])
    assert float(squared(OWN).loss(jnp.zeros(()), b)) == 0


def test_labels_that_do_not_suit_the_task_are_refused():
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"labels .*from 0 to 2"):
        check_rows(softmax(OWN, 2), {"x": x, "y": np.array([0, 2])})
    with pytest.raises(ValueError, match=r"softmax .*labels"):
        check_rows(softmax(OWN, 2), {"x": x, "y": np.array([0.5, 1.0])})
    with pytest.raises(ValueError, match=r"labels .*from -1 to 1"):
        check_rows(one_vs_all(OWN, 2), {"x": x, "y": np.array([-1, 1])})
    with pytest.raises(ValueError, match=r"one_vs_all .*labels"):
        check_rows(one_vs_all(OWN, 2), {"x": x, "y": np.zeros((2, 2), int)})
    with pytest.raises(ValueError, match="labels"):
        check_rows(logistic(OWN), {"x": x, "y": np.array([1, 2])})
    with pytest.raises(ValueError, match="'x' and 'y'"):
        check_rows(squared(OWN), {"x": x})
    with pytest.raises(ValueError, match="target"):
        check_rows(squared(OWN), {"x": x, "y": np.zeros((2, 2))})
