"""SCAFFOLD against Algorithm 1 (option II) in numpy."""

import jax
import numpy as np
import pytest
from problems import coefficients, designs, drawn, least_squares, states_of

from fedjaxsim.algorithms.scaffold import scaffold

ETA, SERVER_ETA, K = 0.1, 0.7, 3


@pytest.mark.parametrize("forgets", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_it_is_algorithm_1_in_numpy(forgets):
    with jax.enable_x64(True):
        population, task = least_squares([4, 6, 5, 7])
        rates = {"learning_rate": ETA, "server_learning_rate": SERVER_ETA}
        states, _ = states_of(scaffold(task, forgets=forgets), population, 6, **rates)
        rows = list(designs(population))
        x, c, c_i = np.zeros(4), np.zeros(4), np.zeros((4, 4))
        for client, _, after in drawn(states, population):
            design, targets = rows[client]
            y = x
            for _ in range(K):
                gradient = design.T @ (design @ y - targets) / len(targets)
                y = y - ETA * (gradient - c_i[client] + c)
            new = c_i[client] - c + (x - y) / (K * ETA)  # line 12, option II
            if forgets:
                x, c = x - SERVER_ETA * K * ETA * new, c + (new - c) / 4
            else:
                x, c = x + SERVER_ETA * (y - x), c + (new - c_i[client]) / 4
            c_i[client] = new
            for found, expected in [
                (after.shared.model.params, x),
                (after.shared.drift, -K * ETA * c),
                (after.personal, -K * ETA * c_i),
            ]:
                np.testing.assert_allclose(coefficients(found), expected, rtol=1e-11, atol=1e-14)
        assert len(np.flatnonzero(c_i.any(axis=1))) > 1
