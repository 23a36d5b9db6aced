"""Local steps."""

import jax
import numpy as np
import pytest
from support.problems import after, coefficients, designs, gradient_descent, least_squares, read_by

from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.local import local
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.models.model import linear
from fedjaxsim.privacy.mechanisms import gaussian, no_release
from fedjaxsim.privacy.samplers import full_participation
from fedjaxsim.simulation import Simulation
from fedjaxsim.tasks.task import squared

FULL_BATCH = Minibatches(1000, epochs=1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "algorithm", [pmtl, *(pytest.param(a, marks=pytest.mark.thorough) for a in (fedavg, local))]
)
def test_one_client_alone_does_gradient_descent(algorithm):
    # λ = 0 and m = 1; with a clip that does not bind the server adds the whole update.
    with jax.enable_x64(True):
        population, task = least_squares([12])
        mechanism = no_release() if algorithm is local else gaussian()
        sim = Simulation(
            algorithm(task), population, full_participation(), Minibatches(12, epochs=3), mechanism
        )
        hparams = read_by(sim, learning_rate=0.1, lam=0.0)
        state = after(sim, hparams, 5)
        (x, y), *_ = designs(population)
        expected = gradient_descent(x, y, np.zeros(4), 0.1, steps=15)
        models = [] if algorithm is local else [state.shared.params]
        models += [] if algorithm is fedavg else [jax.tree.map(lambda v: v[0], state.personal)]
        for params in models:
            np.testing.assert_allclose(coefficients(params), expected, rtol=1e-10)


@pytest.mark.thorough
def test_minibatch_loss_is_reported_before_the_step():
    # One step on one full batch from zero: the reported loss is that of w = 0.
    population, _ = least_squares([5, 5])
    task = squared(linear((3,), 1))
    sim = Simulation(fedavg(task), population, full_participation(), FULL_BATCH)
    hparams = sim.hyperparameters()
    _, metrics = sim.round(sim.init(0, hparams), hparams)
    expected = np.mean([np.mean(y**2) / 2 for _, y in designs(population)])
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
