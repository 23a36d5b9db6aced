"""FedALA against equation 5 and Algorithm 1 in numpy."""

import jax
import numpy as np
import pytest
from support.problems import (
    coefficients,
    designs,
    drawn,
    gradient_descent,
    least_squares,
    states_of,
)

from fedjaxsim.algorithms.fedala import fedala

ETA, RATE = 0.1, 0.5


@pytest.mark.thorough
def test_it_is_algorithm_1_in_numpy():
    with jax.enable_x64(True):
        population, task = least_squares([4, 6, 5])
        values = {"learning_rate": ETA, "aggregation_rate": RATE}
        states, _ = states_of(fedala(task), population, 6, **values)
        rows = list(designs(population))
        w, theta, weights = np.zeros(4), np.zeros((3, 4)), np.ones((3, 4))
        for client, _, after in drawn(states, population):
            design, targets = rows[client]
            towards = w - theta[client]
            for _ in range(3):
                at = theta[client] + towards * weights[client]
                gradient = design.T @ (design @ at - targets) / len(targets)
                weights[client] = np.clip(weights[client] - RATE * gradient * towards, 0, 1)
            at = theta[client] + towards * weights[client]
            w = theta[client] = gradient_descent(design, targets, at, ETA, 3)
            for found, expected in [
                (after.shared.params, w),
                (after.personal.params, theta),
                (after.personal.weights, weights),
            ]:
                np.testing.assert_allclose(coefficients(found), expected, rtol=1e-11, atol=1e-15)
        assert np.sum((weights > 0) & (weights < 1)) > 0
