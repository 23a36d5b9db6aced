"""Per-FedAvg against Algorithm 1 in numpy, and its predictions from a client's training rows."""

from typing import Any

import jax
import numpy as np
import pytest
from support.problems import FixedData, coefficients, designs, first_context, least_squares

from fedjaxsim.algorithms.perfedavg import Derivative, perfedavg
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy.samplers import full_participation
from fedjaxsim.simulation import Simulation

ETA, ALPHA = 0.1, 0.2


def gradient(design, targets, w):
    return design.T @ (design @ w - targets) / len(targets)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "derivative", [pytest.param("first-order", marks=pytest.mark.thorough), "hessian"]
)
def test_local_steps_are_those_of_algorithm_1_in_numpy(derivative: Derivative):
    with jax.enable_x64(True):
        population, task = least_squares([5])
        algorithm = perfedavg(task, derivative=derivative)
        hparams = Hyperparameters(
            learning_rate=ETA, adaptation_rate=ALPHA, server_learning_rate=1.0
        )
        shared, _ = algorithm.init(jax.random.key(0), hparams)

        data: Any = FixedData(population.rows(0))
        _, update, _ = algorithm.client(shared, (), data, hparams, first_context())
        [(x, y)] = designs(population)
        (first, second), w = ((x[:3], y[:3]), (x[3:], y[3:])), np.zeros(4)
        hessian = first[0].T @ first[0] / 3 if derivative == "hessian" else 0
        for _ in range(2):
            adapted = w - ALPHA * gradient(*first, w)
            w = w - ETA * (np.eye(4) - ALPHA * hessian) @ gradient(*second, adapted)
        np.testing.assert_allclose(coefficients(update), w, rtol=1e-11)


@pytest.mark.thorough
def test_clients_predict_one_step_from_w_on_their_training_rows():
    with jax.enable_x64(True):
        population, task = least_squares([5, 40, 9], test=0.3)
        sim = Simulation(perfedavg(task), population, full_participation(), Minibatches(4, steps=1))
        hparams = sim.hyperparameters(adaptation_rate=ALPHA)
        found = sim.evaluate(sim.init(0, hparams), hparams).values["squared_error"]
        splits = zip(designs(population, "train"), designs(population, "test"), strict=True)
        for error, (train, (x, y)) in zip(found, splits, strict=True):
            w = -ALPHA * gradient(*train, np.zeros(4))
            np.testing.assert_allclose(error, np.mean((x @ w - y) ** 2), rtol=1e-11)
