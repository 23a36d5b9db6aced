"""Local models."""

import numpy as np
from support.problems import after, classification

from fedjaxsim.algorithms.local import local
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.privacy.mechanisms import no_release
from fedjaxsim.privacy.samplers import full_participation
from fedjaxsim.simulation import Simulation


def test_local_models_see_their_own_data_only():
    population, task = classification([10, 12, 14])
    changed = dict(population.fields)
    theirs = population.splits["train"].start[1]
    changed["x"] = np.array(changed["x"])
    changed["x"][theirs:] = 0.5
    other = Population(changed, population.counts, population.names)
    sim = Simulation(
        local(task), population, full_participation(), Minibatches(4, steps=3), no_release()
    )
    hparams = sim.hyperparameters()
    one = after(sim, hparams, 4)
    two_sim = sim.with_population(other)
    two = after(two_sim, hparams, 4)
    kernels = np.asarray(one.personal["kernel"]), np.asarray(two.personal["kernel"])
    np.testing.assert_array_equal(kernels[0][0], kernels[1][0])
    assert np.any(kernels[0][1] != kernels[1][1])
