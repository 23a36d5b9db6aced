"""IFCA against Algorithm 1 in numpy, the norm of its messages, and its predictions."""

import jax
import numpy as np
import pytest
from support.problems import (
    coefficients,
    designs,
    gradient_descent,
    least_squares,
    numbers,
    states_of,
)

from fedjaxsim.algorithms.ifca import ifca
from fedjaxsim.engine.trained import first_states
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.keys import seed_key

pytestmark = pytest.mark.exact_keys
ETA, K = 0.1, 3


def losses(models, x, y):
    return [np.mean((x @ w - y) ** 2) / 2 for w in models]


@pytest.mark.thorough
def test_it_is_algorithm_1_in_numpy_and_clients_choose_on_their_training_rows():
    with jax.enable_x64(True):
        population, task = least_squares([9, 12, 11], test=0.3)
        values = {"learning_rate": ETA, "separation": 1.0}
        states, sim = states_of(ifca(task, clusters=K), population, 5, **values)
        train = list(designs(population, "train"))
        models = coefficients(states[0].shared.params)
        np.testing.assert_array_equal(models[0], np.zeros(4))
        assert np.linalg.matrix_rank(models) == 2
        moved = set()
        for state in states[1:]:
            expected = []
            for x, y in train:
                j = int(np.argmin(losses(models, x, y)))
                step = gradient_descent(x, y, models[j], ETA, 3)
                expected.append((j, np.where(np.arange(K)[:, None] == j, step, models)))
            models = coefficients(state.shared.params)
            errors = [np.abs(models - each).max() for _, each in expected]
            moved.add(expected[int(np.argmin(errors))][0])
            assert min(errors) < 1e-12
        assert len(moved) > 1
        hparams = sim.hyperparameters(**values, clip=np.inf, noise_multiplier=0.0)
        found = sim.evaluate(states[-1], hparams).values["squared_error"]
        for error, (x, y), (x_test, y_test) in zip(
            found, train, designs(population, "test"), strict=True
        ):
            w = models[np.argmin(losses(models, x, y))]
            np.testing.assert_allclose(error, np.mean((x_test @ w - y_test) ** 2), rtol=1e-11)

        # One client of expected cohort 1 moves one model, by a message of norm C.
        small = hparams.replace(clip=0.01)
        before = sim.init(0, small)
        after, _ = sim.round(before, small)
        steps = coefficients(after.shared.params) - coefficients(before.shared.params)
        assert np.sum(steps.any(axis=1)) == 1
        np.testing.assert_allclose(np.linalg.norm(numbers(steps)), 0.01, rtol=1e-9)


def test_clusters_must_be_positive():
    with pytest.raises(ValueError, match="clusters"):
        ifca(least_squares([3])[1], clusters=0)


@pytest.mark.thorough
def test_models_that_start_from_a_published_one_are_apart_by_the_seed():
    population, task = least_squares([5, 6])
    algorithm = ifca(task, clusters=K)
    hparams = Hyperparameters(separation=1.0, server_learning_rate=1.0)
    published = jax.tree.map(lambda leaf: leaf + 1, task.init(seed_key(0)))

    def models(seed):
        shared, _ = first_states(
            algorithm, population.num_clients, seed_key(seed), hparams, published
        )
        return coefficients(shared.params)

    first, again, other = models(0), models(0), models(1)
    np.testing.assert_array_equal(first, again)
    assert np.all(first[1:] != other[1:])
    for found in (first, other):
        np.testing.assert_array_equal(found[0], coefficients(published))
