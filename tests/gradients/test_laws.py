"""What must hold of private runs, seen through their derivatives, where the risk is known."""

import functools
import itertools

import jax
import numpy as np
import pytest

from fedjaxsim import ppsgd
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.synthetic import regression_stream
from fedjaxsim.gradients.whole_run import hypergradient, mean_metric
from fedjaxsim.privacy.samplers import full_participation
from fedjaxsim.simulation import Simulation
from fedjaxsim.simulation_batch import SimulationBatch
from fedjaxsim.tasks.task import known_regression
from fedjaxsim.tuning import SeedGradient, descend

FEATURES, ROUNDS = 20, 30
NAMES = ("learning_rate", "personalization", "clip")
PRIVATE = {"noise_multiplier": 10.0, "clip": 1.0}
POOR = {"learning_rate": 0.02, "personalization": 1.0, "clip": 100.0}


def synthetic(clients):
    """PP-SGD's regression, whose excess risk is known in closed form."""
    population, task = regression_stream(clients, FEATURES), known_regression(FEATURES)
    return Simulation(
        ppsgd(task),
        population,
        full_participation(),
        Minibatches(10, steps=1),
        chunk_size=50,
        chunk_map="vmap",
    )


def gradient(sim, keys):
    return SeedGradient(
        sim,
        sim.hyperparameters(**PRIVATE),
        ROUNDS,
        NAMES,
        keys,
        metric="excess_risk",
        split="test",
    )


@functools.cache
def tuned():
    """A simulation, the seeds of a descent from a poor start, and the descent."""
    sim, keys = synthetic(50), jax.random.split(jax.random.key(0), 4)
    path = descend(gradient(sim, keys), POOR, steps=40)
    return sim, keys, path


@pytest.mark.thorough
def test_more_privacy_costs_more_and_less_so_among_many():
    # The noise on the mean of m messages has the standard deviation zC/m.
    keys = jax.random.split(jax.random.key(1), 16)
    values = {"learning_rate": 0.5, "personalization": 1.0, "clip": 10.0}
    prices = []
    for clients in (50, 200):
        sim = synthetic(clients)
        objective = mean_metric(sim, "excess_risk", "test")
        price = hypergradient(sim, objective, ROUNDS, "epsilon", delta=1e-4)
        hparams = sim.hyperparameters(**values)
        found = np.array([price(key, hparams, 0.5)[1]["epsilon"] for key in keys])
        mean, error = found.mean(), found.std(ddof=1) / np.sqrt(len(keys))
        assert mean < -5 * error
        prices.append(-mean)
    assert prices[0] > 4 * prices[1]


@pytest.mark.thorough
def test_descent_meets_the_best_of_a_grid_with_a_tenth_of_its_runs():
    sim, keys, path = tuned()
    axes = (
        (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.2, 1.5, 1.8),
        (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, np.inf),
        (1.0, 3.0, 10.0, 30.0, 100.0),
    )
    points = [
        {name: float(value) for name, value in zip(NAMES, values, strict=True)}
        for values in itertools.product(*axes)
    ]
    batch = SimulationBatch(sim, [sim.hyperparameters(**PRIVATE | point) for point in points])
    seeds = []
    for key in keys:
        state, _ = batch.run(batch.init(key), ROUNDS)
        seeds.append(batch.evaluate(state, "test").mean("excess_risk"))
    means = np.mean(seeds, axis=0)
    best = np.min(means[np.isfinite(means)])
    assert path.steps[0].value > 10 * best
    cost = 1 + len(NAMES)
    within = [s for s in path.steps[: len(points) // 10 // cost] if s.accepted]
    assert min(step.value for step in within) <= best


@pytest.mark.thorough
def test_at_the_optimum_the_gradient_vanishes_within_its_error():
    # On other seeds than those that found it.
    sim, _, path = tuned()
    fresh = gradient(sim, jax.random.split(jax.random.key(2), 4))

    def in_errors(step):
        measured = fresh(step.point)
        slopes = np.array([measured.gradients[name] for name in NAMES])
        slopes *= np.array([step.point[name] for name in NAMES])[:, None]
        error = np.std(slopes, axis=1, ddof=1) / 2
        found = np.array([step.gradient_error[name] for name in NAMES])
        return np.abs(np.mean(slopes, axis=1)) / np.hypot(error, found)

    assert np.all(in_errors(path.best) < 3)
    on_the_way = path.steps[2]
    assert np.max(in_errors(on_the_way)) > 10
