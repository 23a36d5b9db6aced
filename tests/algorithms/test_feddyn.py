"""FedDyn against Algorithm 1 in numpy, with g_k and h as the paper has them."""

from typing import Any

import jax
import numpy as np
import pytest
from support.problems import coefficients, designs, drawn, least_squares, states_of

from fedjaxsim.algorithms.feddyn import feddyn

ETA, ALPHA, K = 0.1, 0.6, 3


@pytest.mark.thorough
@pytest.mark.parametrize("message", ["update", pytest.param("state", marks=pytest.mark.thorough)])
def test_it_is_algorithm_1_in_numpy(message):
    with jax.enable_x64(True):
        population, task = least_squares([4, 6, 5, 7])
        states, sim = states_of(
            feddyn(task, message=message), population, 5, learning_rate=ETA, lam=ALPHA
        )
        rows = list(designs(population))
        theta, h, g = np.zeros(4), np.zeros(4), np.zeros((4, 4))
        for client, _, after in drawn(states, population):
            design, targets = rows[client]
            v = theta
            for _ in range(K):
                gradient = design.T @ (design @ v - targets) / len(targets)
                v = v - ETA * (gradient - g[client] + ALPHA * (v - theta))
            g[client] = g[client] - ALPHA * (v - theta)
            if message == "state":  # the server has g_k, and h in place of the one before
                v = theta - (g[client] - h) / ALPHA
                h = h + (g[client] - h) / 4
            else:
                h = h - ALPHA / 4 * (v - theta)
            theta = v - h / ALPHA
            np.testing.assert_allclose(coefficients(after.shared.params), theta, rtol=1e-11)
            np.testing.assert_allclose(-ALPHA * coefficients(after.personal), g, rtol=1e-11)
            algorithm: Any = sim.algorithm
            predicted = algorithm.predict(after.shared, (), None, 0)
            np.testing.assert_allclose(coefficients(predicted), v, rtol=1e-11)
