"""q-FFL: the message of Algorithm 2 in numpy, its fixed divisor, and FedAvg at q = 0."""

import jax
import numpy as np
import pytest
from support.problems import coefficients, designs, gradient_descent, least_squares, states_of

from fedjaxsim.algorithms.fedavg import qffl

ETA = 0.1


@pytest.mark.thorough
def test_a_message_is_the_update_times_the_loss_to_the_power_q():
    with jax.enable_x64(True):
        population, task = least_squares([4, 6, 5])
        values = {"learning_rate": ETA, "server_learning_rate": 0.1}
        states, sim = states_of(qffl(task), population, 4, **values, fairness=1.5)
        w = np.zeros(4)
        for state in states[1:]:
            new = coefficients(state.shared.params)
            expected = []
            for x, y in designs(population):
                loss = np.mean((x @ w - y) ** 2) / 2
                v = gradient_descent(x, y, w, ETA, 3)
                expected.append(w + 0.1 * loss**1.5 * (v - w))
            assert min(np.abs(new - one).max() for one in expected) < 1e-12
            w = new
        hparams = sim.hyperparameters(**values, fairness=0.0, clip=np.inf)
        state, _ = sim.round(sim.init(0, hparams), hparams)
        w = coefficients(state.shared.params)
        plain = [0.1 * gradient_descent(x, y, np.zeros(4), ETA, 3) for x, y in designs(population)]
        assert min(np.abs(w - one).max() for one in plain) < 1e-12
