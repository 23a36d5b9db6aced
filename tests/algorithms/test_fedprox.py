"""FedProx: its formula, and FedAvg without a proximal term."""

import jax
import numpy as np
import pytest
from support.linear_tasks import ETA, POPULATION, TASK, D, M, N, X, Y
from support.problems import after, coefficients, designs, gradient_descent, least_squares, read_by

from fedjaxsim.algorithms.fedavg import fedavg, fedprox
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.privacy.samplers import full_participation
from fedjaxsim.simulation import Simulation


@pytest.mark.thorough
def test_fedprox_is_its_formula_and_without_mu_fedavg():
    with jax.enable_x64(True):
        population, task = least_squares([6, 9])
        minibatches = Minibatches(9, epochs=3)
        results = {}
        plain, proximal = (
            Simulation(algorithm(task), population, full_participation(), minibatches)
            for algorithm in (fedavg, fedprox)
        )
        for name, sim, mu in [
            ("fedavg", plain, 0.0),
            ("prox 0", proximal, 0.0),
            ("prox 2", proximal, 2.0),
        ]:
            hparams = read_by(sim, learning_rate=0.1, mu=mu)
            state = after(sim, hparams, 4)
            results[name] = coefficients(state.shared.params)
        np.testing.assert_array_equal(results["fedavg"], results["prox 0"])
        w = np.zeros(4)
        for _ in range(4):
            w = np.mean(
                [gradient_descent(x, y, w, 0.1, 3, w, 2.0) for x, y in designs(population)], axis=0
            )
        np.testing.assert_allclose(results["prox 2"], w, rtol=1e-10)
        assert np.abs(results["prox 2"] - results["fedavg"]).max() > 1e-3


@pytest.mark.thorough
def test_one_round_of_fedprox_is_the_average_of_ridge_regressions():
    # DP-AGGR: from w = 0 the pull towards w is a ridge. A batch is all rows of a client.
    with jax.enable_x64(True):
        mu = 0.5
        steps = Minibatches(N, epochs=1000)
        sim = Simulation(fedprox(TASK), POPULATION, full_participation(), steps)
        hparams = sim.hyperparameters(learning_rate=ETA, mu=mu)
        state, _ = sim.run(sim.init(0, hparams), hparams, 1)
        alone = [
            np.linalg.solve(X[i].T @ X[i] / N + mu * np.eye(D), X[i].T @ Y[i] / N) for i in range(M)
        ]
        found = np.asarray(state.shared.params["kernel"])[0]
        np.testing.assert_allclose(found, np.mean(alone, axis=0), rtol=1e-6)
