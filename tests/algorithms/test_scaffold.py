"""SCAFFOLD against Algorithm 1 (option II) in numpy."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import coefficients, designs, drawn, least_squares, noise_key, states_of

from fedjaxsim.algorithms.feddyn import feddyn
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.algorithms.scaffold import scaffold
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.privacy.mechanisms import noise_like
from fedjaxsim.privacy.samplers import full_participation
from fedjaxsim.simulation import Simulation

ETA, SERVER_ETA, K = 0.1, 0.7, 3


@pytest.mark.parametrize("message", ["update", pytest.param("steps", marks=pytest.mark.thorough)])
def test_it_is_algorithm_1_in_numpy(message):
    with jax.enable_x64(True):
        population, task = least_squares([4, 6, 5, 7])
        rates = {"learning_rate": ETA, "server_learning_rate": SERVER_ETA, "typical_batches": 1.0}
        states, _ = states_of(scaffold(task, message=message), population, 6, **rates)
        rows = list(designs(population))
        x, c, c_i = np.zeros(4), np.zeros(4), np.zeros((4, 4))
        for client, _, after in drawn(states, population):
            design, targets = rows[client]
            y = x
            for _ in range(K):
                gradient = design.T @ (design @ y - targets) / len(targets)
                y = y - ETA * (gradient - c_i[client] + c)
            new = c_i[client] - c + (x - y) / (K * ETA)  # line 12, option II
            if message == "steps":
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


@pytest.mark.parametrize(
    ("system", "forgetful"), [(scaffold, "steps"), (feddyn, "state"), (pmtl, "offset")]
)
def test_many_rounds_of_noise_name_the_message_that_forgets_it(system, forgetful):
    population, task = least_squares([5, 9, 17])
    for message, said in (("update", 1), (forgetful, 0)):
        sim = Simulation(system(task, message=message), population, full_participation())
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for z, rounds in ((1.0, 400), (1.0, 100), (0.0, 400)):
                hparams = sim.hyperparameters(clip=1.0, noise_multiplier=z)
                sim.check_rounds(hparams, 0, rounds, None)
        assert [f'message="{forgetful}" forgets it' in str(each.message) for each in found] == [
            True
        ] * said


@pytest.mark.thorough
@pytest.mark.parametrize("system", [scaffold, pytest.param(feddyn, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("sums_up", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_the_server_may_forget_earlier_noise(system, sums_up):
    # With everyone and no clip binding, d − (mean of d_i) is the noise of this round; with the
    # paper's message it is the sum of all noise so far.
    with jax.enable_x64(True):
        population, task = least_squares([5, 9, 17])
        forgetful = "steps" if system is scaffold else "state"
        algorithm = system(task) if sums_up else system(task, message=forgetful)
        sim = Simulation(algorithm, population, full_participation(), Minibatches(4, epochs=2))
        hparams = sim.hyperparameters(learning_rate=0.05, clip=100.0, noise_multiplier=0.01)
        state, noise = sim.init(0, hparams), np.zeros(4)
        for t in range(4):
            key = noise_key(state, t)
            message = state.shared.drift  # SCAFFOLD's update has two parts, the drift's is last
            message = (message, message) if sums_up and system is scaffold else (message,)
            draw = coefficients(noise_like(key, message, jnp.asarray(1.0 / 3))[-1])
            noise = noise + draw if sums_up else draw
            state, _ = sim.round(state, hparams)
            gap = coefficients(state.shared.drift) - coefficients(state.personal).mean(axis=0)
            np.testing.assert_allclose(gap, noise, rtol=1e-9, atol=1e-14)
