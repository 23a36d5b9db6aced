"""The objective of a tuning: its gradient for each seed."""

import jax
import numpy as np
import pytest
from support.problems import least_squares

from fedjaxsim import fedavg
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.splitting import split
from fedjaxsim.gradients.modes import Forward, Reverse
from fedjaxsim.privacy.samplers import poisson
from fedjaxsim.simulation import Simulation
from fedjaxsim.tuning.descent import SeedGradient

T = 12
START = {"learning_rate": 0.05, "clip": 0.4}


@pytest.mark.thorough
def test_gradients_are_those_of_finite_differences():
    with jax.enable_x64(True):
        population, task = least_squares([9, 12, 15, 10, 8])
        sim = Simulation(
            fedavg(task),
            split(population, validation=0.3),
            poisson(0.6),
            Minibatches(4, steps=2),
            chunk_size=3,
        )
        hparams = sim.hyperparameters(noise_multiplier=0.5, clip=1.0)
        keys = jax.random.split(jax.random.key(7), 8)
        measure = SeedGradient(sim, hparams, T, tuple(START), keys[:4])
        assert (measure.mode, measure.runs) == (Forward(), 4 * 3)

        here, step = measure(START), 1e-5
        near = [START | {name: START[name] + move} for name in START for move in (-step, step)]
        for index, name in enumerate(START):
            low, high = (measure(point).values for point in near[2 * index : 2 * index + 2])
            slopes = (high - low) / (2 * step)
            np.testing.assert_allclose(here.gradients[name], slopes, rtol=1e-5)
        assert np.ptp(here.values) > 0

        backwards = SeedGradient(sim, hparams, T, tuple(START), keys[4:], mode=Reverse())
        assert (backwards.mode, backwards.runs) == (Reverse(), 4 * 4)
        same, other = backwards(START, keys[:4]), backwards(START)
        for name in START:
            np.testing.assert_allclose(same.gradients[name], here.gradients[name], rtol=1e-9)
        assert not np.any(np.isin(other.values, same.values))
        with pytest.raises(ValueError, match="clip"):
            measure(START | {"clip": -1.0})
        with pytest.raises(ValueError, match="keys"):
            SeedGradient(sim, hparams, T, ("clip",), keys[0])
