"""APFL against Algorithm 1 and equation 10 in numpy."""

from typing import Any

import jax
import numpy as np
import pytest
from support.problems import coefficients, designs, drawn, least_squares, states_of

from fedjaxsim.algorithms.apfl import apfl

ETA, K = 0.1, 3


PLAIN = pytest.param(False, 0.0, marks=pytest.mark.thorough)


@pytest.mark.thorough
@pytest.mark.parametrize(("adaptive", "beta"), [PLAIN, (True, 0.6)])
def test_it_is_algorithm_1_in_numpy(adaptive, beta):
    """With momentum β of both models' steps; 0 is the paper's SGD."""
    with jax.enable_x64(True):
        population, task = least_squares([4, 6, 5])
        momentum: dict[str, Any] = {"momentum": beta, "weight_decay": 0.0} if beta else {}
        optimizer: Any = "momentum" if beta else "sgd"
        algorithm: Any = apfl(task, adaptive=adaptive, local_optimizer=optimizer)
        states, _ = states_of(algorithm, population, 5, learning_rate=ETA, mixture=0.4, **momentum)
        rows = list(designs(population))
        w, v, alpha = np.zeros(4), np.zeros((3, 4)), np.full(3, 0.4)
        for client, _, after in drawn(states, population):
            design, targets = rows[client]

            def gradient(at, design=design, targets=targets):
                return design.T @ (design @ at - targets) / len(targets)

            w_i, v_i, a = w, v[client], alpha[client]
            of_w = of_v = np.zeros(4)
            for k in range(K):
                of_mixture = gradient(a * v_i + (1 - a) * w_i)
                slope = (v_i - w_i) @ of_mixture
                of_v, of_w = beta * of_v + a * of_mixture, beta * of_w + gradient(w_i)
                v_i, w_i = v_i - ETA * of_v, w_i - ETA * of_w
                if adaptive and k == 0:
                    a = np.clip(a - ETA * slope, 0, 1)
            w, v[client], alpha[client] = w_i, v_i, a
            np.testing.assert_allclose(coefficients(after.shared.params), w, rtol=1e-11)
            np.testing.assert_allclose(coefficients(after.personal.params), v, rtol=1e-11)
            np.testing.assert_allclose(after.personal.mixture, alpha, rtol=1e-11)
            one = jax.tree.map(lambda leaf, k=client: leaf[k], after.personal)
            predicted = coefficients(algorithm.predict(after.shared, one, None, client))
            np.testing.assert_allclose(predicted, a * v_i + (1 - a) * w, rtol=1e-11)
        assert adaptive == bool(np.ptp(alpha))
