"""Models that do not suit their task are refused by name while JAX traces, before any compute."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import read_by

import fedjaxsim as fjs
from fedjaxsim.data.minibatches import Batch
from fedjaxsim.models import gru, linear
from fedjaxsim.tasks import logistic, one_vs_all, softmax, softmax_sequence, squared

ROWS, FEATURES = 4, 5
wrong: Any = softmax
"""The task, for arguments of wrong types."""


def traced(task, x, y):
    """Trace the loss of a task on rows."""
    batch = Batch({"x": jnp.asarray(x), "y": jnp.asarray(y)}, jnp.ones(len(x)))
    return jax.eval_shape(lambda key: task.loss(task.init(key), batch), jax.random.key(0))


def refused(words, make, *rows):
    with pytest.raises(ValueError, match=r"needs|must|fit") as error:
        traced(make(), *rows)
    assert words in str(error.value)
    assert len(str(error.value)) < 150


TWO = linear((FEATURES,), 2)
X, Y = np.ones((ROWS, FEATURES), np.float32), np.zeros(ROWS, np.int32)
TOKENS = np.zeros((ROWS, 6), np.int32)


@pytest.mark.parametrize(
    ("words", "make", "rows"),
    [
        ("softmax needs a model with outputs (b, 3), got shape (4, 2)",
         lambda: softmax(TWO, 3), (X, Y)),
        ("one_vs_all needs a model with outputs (b, 3)", lambda: one_vs_all(TWO, 3), (X, Y)),
        ("logistic needs a model with outputs (b, 1)", lambda: logistic(TWO), (X, Y)),
        ("squared needs a model with outputs (b, 1)", lambda: squared(TWO), (X, X[:, 0])),
        ("got a tuple", lambda: softmax(TWO._replace(apply=lambda p, x: (x, x)), 2), (X, Y)),
        ("got shape (2,) for 4 rows",
         lambda: softmax(TWO._replace(apply=lambda p, x: TWO.apply(p, x)[0]), 2), (X, Y)),
        ("outputs (b, L, 3), got shape (4, 6, 2)",
         lambda: softmax_sequence(gru((6,), 2, 7, (2,)), 3), (TOKENS, TOKENS)),
        ("outputs of (4, 6, 3) do not fit labels y of (4, 5)",
         lambda: softmax_sequence(gru((6,), 3, 7, (2,)), 3), (TOKENS, TOKENS[:, :5])),
        ("num_classes must be an integer of at least 2, got 3.0",
         lambda: wrong(TWO, 3.0), (X, Y)),
        ("num_classes must be an integer of at least 2, got 1", lambda: softmax(TWO, 1), (X, Y)),
        ("fjs.models.from_flax(module, input_shape)", lambda: wrong(nn.Dense(2), 2), (X, Y)),
    ],
)  # fmt: skip
def test_a_model_that_does_not_suit_its_task_is_refused(words, make, rows):
    refused(words, make, *rows)


def test_a_simulation_refuses_it_before_it_computes():
    clients = fjs.Population.from_clients([{"x": X, "y": Y}] * 2)
    minibatches = fjs.Minibatches(ROWS, steps=1)
    simulation = fjs.Simulation(fjs.fedavg(softmax(TWO, 3)), clients, fjs.poisson(1.0), minibatches)
    with pytest.raises(ValueError, match=r"softmax needs a model with outputs \(b, 3\), got shape"):
        simulation.init(0, read_by(simulation, clip=1.0, noise_multiplier=1.0))
