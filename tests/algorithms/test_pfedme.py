"""pFedMe against Algorithm 1 in numpy."""

from typing import Any

import jax
import numpy as np
import pytest
from support.problems import coefficients, designs, drawn, least_squares, states_of

from fedjaxsim.algorithms.pfedme import pfedme

ETA, RATE, LAM, BETA, K = 0.1, 0.5, 0.8, 0.7, 2


PLAIN = pytest.param(0.0, marks=pytest.mark.thorough)


@pytest.mark.thorough
@pytest.mark.parametrize("beta", [PLAIN, 0.6])
def test_it_is_algorithm_1_in_numpy(beta):
    """With momentum β of the steps of θ; 0 is the paper's SGD."""
    optimizer: Any = "momentum" if beta else "sgd"
    with jax.enable_x64(True):
        population, task = least_squares([4, 6, 5])
        values = {
            "learning_rate": ETA, "envelope_rate": RATE, "lam": LAM, "server_learning_rate": BETA,
        }  # fmt: skip
        values |= {"momentum": beta, "weight_decay": 0.0} if beta else {}
        algorithm = pfedme(task, inner_steps=K, local_optimizer=optimizer)
        states, _ = states_of(algorithm, population, 4, **values)
        rows = list(designs(population))
        w, personal = np.zeros(4), np.zeros((3, 4))
        for client, _, after in drawn(states, population):
            design, targets = rows[client]
            w_i, theta, velocity = w, w, np.zeros(4)
            for _ in range(3):
                for _ in range(K):
                    gradient = design.T @ (design @ theta - targets) / len(targets)
                    velocity = beta * velocity + gradient + LAM * (theta - w_i)
                    theta = theta - ETA * velocity
                w_i = w_i - RATE * LAM * (w_i - theta)
            w, personal[client] = (1 - BETA) * w + BETA * w_i, theta
            np.testing.assert_allclose(coefficients(after.shared.params), w, rtol=1e-11)
            np.testing.assert_allclose(coefficients(after.personal), personal, rtol=1e-11)


def test_inner_steps_must_be_positive():
    with pytest.raises(ValueError, match="inner_steps"):
        pfedme(least_squares([3])[1], inner_steps=0)
