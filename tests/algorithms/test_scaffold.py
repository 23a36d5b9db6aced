"""SCAFFOLD against Algorithm 1 (option II) in numpy, whose update rule is also PFLlib's."""

import jax
import numpy as np
from problems import coefficients, designs, drawn, least_squares, numbers, states_of

from fedjaxsim.algorithms.scaffold import scaffold
from fedjaxsim.hyperparameters import Hyperparameters

ETA, SERVER_ETA, K = 0.1, 0.7, 3


def test_it_is_algorithm_1_in_numpy():
    with jax.enable_x64(True):
        population, task = least_squares([4, 6, 5, 7])
        rates = {"learning_rate": ETA, "server_learning_rate": SERVER_ETA}
        states, sim = states_of(scaffold(task), population, 6, **rates)
        rows = list(designs(population))
        x, c, c_i = np.zeros(4), np.zeros(4), np.zeros((4, 4))
        for client, _, after in drawn(states, population):
            design, targets = rows[client]
            y = x
            for _ in range(K):
                gradient = design.T @ (design @ y - targets) / len(targets)
                y = y - ETA * (gradient - c_i[client] + c)
            new = c_i[client] - c + (x - y) / (K * ETA)  # line 12, option II
            x, c = x + SERVER_ETA * (y - x), c + (new - c_i[client]) / 4
            c_i[client] = new
            for found, expected in [
                (after.shared.model.params, x),
                (after.shared.drift, -K * ETA * c),
                (after.personal, -K * ETA * c_i),
            ]:
                np.testing.assert_allclose(coefficients(found), expected, rtol=1e-11, atol=1e-14)
        # With full participation the server remembers the noise of the last release alone.
        hparams = Hyperparameters(server_learning_rate=1.0, sampling_rate=1.0)
        release, last = sim.algorithm.init(jax.random.key(0), hparams)[1], states[-1].shared
        server = sim.algorithm.server(last, release, hparams, states[-1].round)
        np.testing.assert_array_equal(numbers(server.drift), numbers(release))
        assert len(np.flatnonzero(c_i.any(axis=1))) > 1
