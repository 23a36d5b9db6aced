"""The objective of a tuning: gradients for each seed, and a grid of the same runs."""

from typing import Any

import jax
import numpy as np
import pytest
from problems import least_squares
from scipy import stats

from fedjaxsim import fedavg
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.splitting import split
from fedjaxsim.privacy.samplers import poisson
from fedjaxsim.simulation import Simulation
from fedjaxsim.tune.objective import SeedGradient, grid_around, paired_test

T = 12
START = {"learning_rate": 0.05, "clip_norm": 0.4}


@pytest.mark.thorough
def test_gradients_are_those_of_finite_differences_on_a_grid():
    with jax.enable_x64(True):
        population, task = least_squares([9, 12, 15, 10, 8])
        sim = Simulation(
            fedavg(task),
            split(population, validation=0.3),
            poisson(0.6),
            Minibatches(4, steps=2),
            chunk_size=3,
        )
        hparams = sim.hyperparameters(noise_multiplier=0.5, clip_norm=1.0)
        keys = jax.random.split(jax.random.key(7), 8)
        measure = SeedGradient(sim, hparams, T, tuple(START), keys[:4])
        assert (measure.mode, measure.runs) == ("forward", 4 * 3)

        here, step = measure(START), 1e-5
        near = [START | {name: START[name] + move} for name in START for move in (-step, step)]
        grid = measure.on_grid([START, *near])
        assert grid is not None
        assert grid.values.shape == (5, 4)
        assert grid.runs == 20
        np.testing.assert_allclose(grid.values[0], here.values, rtol=1e-9)
        for index, name in enumerate(START):
            low, high = grid.values[1 + 2 * index : 3 + 2 * index]
            slopes = (high - low) / (2 * step)
            np.testing.assert_allclose(here.gradients[name], slopes, rtol=1e-5)
        assert np.ptp(here.values) > 0

        backwards = SeedGradient(sim, hparams, T, tuple(START), keys[4:], mode="reverse")
        assert (backwards.mode, backwards.runs) == ("reverse", 4 * 4)
        same, other = backwards(START, keys[:4]), backwards(START)
        for name in START:
            np.testing.assert_allclose(same.gradients[name], here.gradients[name], rtol=1e-9)
        assert not np.any(np.isin(other.values, same.values))
        with pytest.raises(ValueError, match="clip_norm"):
            measure(START | {"clip_norm": -1.0})
        with pytest.raises(ValueError, match="keys"):
            SeedGradient(sim, hparams, T, ("clip_norm",), keys[0])


def test_a_paired_test_is_that_of_scipy():
    before, after = np.array([3.0, 5.0, 4.0, 7.0]), np.array([2.5, 3.0, 4.1, 5.0])
    found = paired_test(before, after)
    expected: Any = stats.ttest_1samp(before - after, 0.0)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-12)
    assert found.gain / found.standard_error == pytest.approx(expected.statistic, rel=1e-12)
    # By hand: falls of 3 and 5 have a mean of 4, and a standard error of √2/√2.
    assert paired_test(np.array([4.0, 6.0]), np.ones(2))[:2] == pytest.approx((4.0, 1.0))
    assert np.isnan(paired_test(before, before).p)
    assert np.isnan(paired_test(np.array([np.inf, 1.0, 2.0, 3.0]), after).p)


def test_a_grid_is_a_product_of_powers_around_the_start():
    points = grid_around({"a": 2.0, "b": 0.1}, 3)
    values = [(0.2, 0.01), (0.2, 0.1), (0.2, 1), (2, 0.01), (2, 0.1), (2, 1), (20, 0.01),
              (20, 0.1), (20, 1)]  # fmt: skip
    np.testing.assert_allclose([list(point.values()) for point in points], values)
    with pytest.raises(ValueError, match="grid"):
        grid_around({"a": 1.0}, 1)
