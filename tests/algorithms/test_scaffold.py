"""SCAFFOLD against Algorithm 1 (option II) in numpy."""

import warnings
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import coefficients, designs, drawn, least_squares, noise_key, states_of

import fedjaxsim as fjs
from fedjaxsim.algorithms.feddyn import feddyn
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.algorithms.scaffold import scaffold
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.privacy.mechanisms import noise_like
from fedjaxsim.privacy.samplers import full_participation, poisson
from fedjaxsim.simulation import Simulation

ETA, SERVER_ETA, K = 0.1, 0.7, 3


@pytest.mark.thorough
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
    ("system", "title", "forgetful", "first"),
    # In units of the noise of a release, at p = 1/4: d has p²T, and with the other message 1/7 (p²/
    # (1 − (1 − p)²)), which two rounds have not; PMTL's w̃ has p²T, and with the other one 1.
    [
        (scaffold, "SCAFFOLD", "steps", 3),
        (feddyn, "FedDyn", "state", 3),
        (pmtl, "PMTL", "offset", 17),
    ],
)
def test_rounds_whose_noise_adds_up_to_more_name_the_message_that_forgets_it(
    system, title, forgetful, first
):
    population, task = least_squares([5, 9, 17])
    for message in ("update", forgetful):
        sim = Simulation(system(task, message=message), population, poisson(0.25))
        said = {}
        for z, rounds in ((1.0, first), (1.0, first - 1), (0.0, 400)):
            hparams = sim.hyperparameters(clip=1.0, noise_multiplier=z)
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                sim.check_rounds(hparams, 0, rounds, None)
            said[z, rounds] = [str(warning.message) for warning in found]
        text = (
            f"{title}'s server state adds up the noise of all {first} rounds; at the same ε, "
            f'message="{forgetful}" forgets it'
        )
        expected = [text] if message == "update" else []
        assert said == {(1.0, first): expected, (1.0, first - 1): [], (0.0, 400): []}


def mine(algorithm):
    return algorithm._replace(client=lambda *args: algorithm.client(*args))


def test_advice_has_the_name_of_an_own_client_and_ends_with_an_own_server():
    _, task = least_squares([5])
    algorithm = scaffold(task)
    hparams: Any = fjs.Hyperparameters(noise_multiplier=1.0, sampling_rate=0.25)
    said = {}
    for name, other in {
        "mine": mine(algorithm),
        "server": algorithm._replace(server=lambda *args: algorithm.server(*args)),
    }.items():
        sim: Any = SimpleNamespace(algorithm=other, sampler=poisson(0.25).sampler(3))
        said[name] = Simulation.advise_on_noise(sim, hparams, 9)
    assert "mine's server state adds up the noise" in str(said["mine"])
    assert said["server"] is None


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
