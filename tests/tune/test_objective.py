"""What is tuned: gradients for each seed, and a grid of the same runs."""

import jax
import numpy as np
import pytest
from problems import least_squares

from fedjaxsim import fedavg
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import split
from fedjaxsim.privacy.sampling import poisson
from fedjaxsim.simulation import Simulation
from fedjaxsim.tune.objective import SeedGradient, grid_around, measure_grid, mode_for

T = 12
START = {"learning_rate": 0.05, "clip_norm": 0.4}


@pytest.mark.thorough
def test_descent_and_grid_measure_the_same_runs():
    with jax.enable_x64(True):
        population, task = least_squares([9, 12, 15, 10, 8])
        population = split(population, validation=0.3)
        sim = Simulation(
            fedavg(task),
            population,
            poisson(0.6),
            Minibatches(4, steps=2),
            chunk_size=3,
        )
        hparams = sim.hyperparameters(noise_multiplier=0.5, clip_norm=1.0)
        keys = jax.random.split(jax.random.key(7), 4)
        measure = SeedGradient(sim, hparams, T, tuple(START), keys)
        assert (measure.mode, measure.runs) == ("forward", 4 * 3)

        here = measure(START)
        step = 1e-5
        near = [START | {"clip_norm": START["clip_norm"] + move} for move in (-step, step)]
        grid = measure_grid(sim, hparams, T, [START, *near], keys)
        assert grid is not None
        assert grid.values.shape == (3, 4)
        assert grid.runs == 12
        np.testing.assert_allclose(grid.values[0], here.values, rtol=1e-9)
        slopes = (grid.values[2] - grid.values[1]) / (2 * step)
        np.testing.assert_allclose(here.gradients["clip_norm"], slopes, rtol=1e-5)
        assert np.ptp(here.values) > 0
        with pytest.raises(ValueError, match="clip_norm must be positive"):
            measure(START | {"clip_norm": -1.0})
        with pytest.raises(ValueError, match=r"keys must have shape \(S,\), got \(\)"):
            SeedGradient(sim, hparams, T, ("clip_norm",), keys[0])


def test_a_grid_is_a_product_of_powers_around_the_start():
    points = grid_around({"a": 2.0, "b": 0.1}, 3)
    values = [(0.2, 0.01), (0.2, 0.1), (0.2, 1), (2, 0.01), (2, 0.1), (2, 1), (20, 0.01),
              (20, 0.1), (20, 1)]  # fmt: skip
    np.testing.assert_allclose([list(point.values()) for point in points], values)
    with pytest.raises(ValueError, match="at least 2 values"):
        grid_around({"a": 1.0}, 1)


def test_few_hyperparameters_go_forward_and_many_backward():
    assert [mode_for(count) for count in (1, 5, 6)] == ["forward", "forward", "reverse"]
