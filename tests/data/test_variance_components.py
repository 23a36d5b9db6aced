"""Ratios of variances, and clients that shrink by them as a mixed model does."""

import numpy as np
import pytest
from support.problems import coefficients, designs

import fedjaxsim as fjs
from fedjaxsim.algorithms.ditto import ditto
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.data import variance_ratios
from fedjaxsim.models import linear
from fedjaxsim.tasks import squared


def population_of(counts, intercepts, slopes, noise, seed=0):
    """Return clients of a linear regression with these standard deviations between clients."""
    rng, clients = np.random.default_rng(seed), []
    for n in counts:
        x = rng.uniform(-1, 1, size=(n, 3)).astype(np.float32)
        own = np.array([0.3, -0.2, 0.1]) + slopes * rng.normal(size=3)
        y = x @ own + intercepts * rng.normal() + noise * rng.normal(size=n)
        clients.append({"x": x, "y": y.astype(np.float32)})
    return fjs.Population.from_clients(clients)


def test_ratios_are_those_of_the_variances_that_rows_are_drawn_from():
    counts = np.random.default_rng(1).integers(1, 9, 4000)
    both = variance_ratios(population_of(counts, 0.5, 0.3, 0.4))
    assert both["lam_intercept"] == pytest.approx((0.4 / 0.5) ** 2, rel=0.1)
    assert both["lam"] == pytest.approx((0.4 / 0.3) ** 2, rel=0.15)
    alone = variance_ratios(population_of(counts, 0.5, 0.0, 0.4, seed=2))
    assert alone["lam"] > 100
    with pytest.raises(ValueError, match="two training rows"):
        variance_ratios(population_of([1, 1, 1], 1, 1, 1))


@pytest.mark.parametrize("system", [ditto, pytest.param(pmtl, marks=pytest.mark.thorough)])
def test_a_pull_by_rows_shrinks_each_client_as_a_mixed_model_does(system):
    population = population_of([2, 2, 5, 9], 0.5, 0.0, 0.2)
    task = squared(linear((3,), 1))
    sim = fjs.Simulation(
        system(task, pull="rows"),
        population,
        fjs.full_participation(),
        fjs.Minibatches(9, epochs=1),  # one step on all rows
    )
    with pytest.raises(ValueError, match=r"must be given: fjs\.data\.variance_ratios"):
        sim.hyperparameters()
    assert sim.hyperparameters(lam=3.0).lam_intercept == 3
    # A step of 1/2 suits the loss; the λ of slopes, 300/2, is no bound on it.
    hparams = sim.hyperparameters(lam=300.0, lam_intercept=0.5, learning_rate=0.5)
    state, _ = sim.run(sim.init(0, hparams), hparams, 300)
    w = coefficients(state.shared.params)
    of_clients = coefficients(state.personal)
    for (x, y), v in zip(designs(population), of_clients, strict=True):
        penalty = np.diag([300.0, 300.0, 300.0, 0.5])  # the intercept is last
        best = w + np.linalg.solve(x.T @ x + penalty, x.T @ (y - x @ w))
        np.testing.assert_allclose(v, best, atol=2e-3)


def test_pulls_by_rows_need_plain_steps():
    task = squared(linear((3,), 1))
    for system in (ditto, pmtl):
        with pytest.raises(ValueError, match="'sgd' with a constant learning rate"):
            system(task, pull="rows", local_optimizer="adam")
