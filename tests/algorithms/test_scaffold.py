"""SCAFFOLD against Algorithm 1 (option II) in numpy, whose update rule is also PFLlib's."""

import jax
import numpy as np
from problems import coefficients, designs, drawn, least_squares, numbers, states_of

from fedjaxsim.algorithms.scaffold import scaffold

ETA, SERVER_ETA, K = 0.1, 0.7, 3


def test_it_is_algorithm_1_in_numpy_and_both_parts_of_a_message_share_a_clip():
    with jax.enable_x64(True):
        population, task = least_squares([4, 6, 5, 7])
        rates = {"learning_rate": ETA, "server_learning_rate": SERVER_ETA}
        states, sim = states_of(scaffold(task), population, 5, **rates)
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
                (after.shared.control, c),
                (after.personal, c_i),
            ]:
                np.testing.assert_allclose(coefficients(found), expected, rtol=1e-11, atol=1e-14)
        assert len(np.flatnonzero(c_i.any(axis=1))) > 1

        hparams = sim.hyperparameters(**rates, clip_norm=0.01, noise_multiplier=0.0)
        state = sim.init(0, hparams)
        after, _ = sim.round(state, hparams)
        parts = after.shared.model.params, after.shared.control
        steps = [numbers(part) for part in parts]  # both start at 0
        message = np.concatenate([steps[0] / SERVER_ETA, steps[1] * 4])
        np.testing.assert_allclose(np.linalg.norm(message), 0.01, rtol=1e-9)
