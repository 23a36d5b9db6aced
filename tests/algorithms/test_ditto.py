"""Ditto: by hand, and its two halves."""

import chex
import jax
import numpy as np
import pytest
from support.problems import after, classification, read_by

from fedjaxsim.algorithms.ditto import ditto
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.local import local
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.models.model import linear
from fedjaxsim.privacy.ledger import charged
from fedjaxsim.privacy.mechanisms import gaussian, no_release
from fedjaxsim.privacy.samplers import full_participation, poisson
from fedjaxsim.simulation import Simulation
from fedjaxsim.tasks.task import squared


@pytest.mark.thorough
def test_ditto_is_its_formula_worked_by_hand():
    # One weight and one row per client, (x, y) = (1, 2) and (1, 6); E = 2, η = 1/2, λ = 1, so that
    # w moves by (y − w)/2 a step and v by (y − v)/2 + (w − v)/2.
    with jax.enable_x64(True):
        population = Population.from_clients(
            [{"x": np.ones((1, 1)), "y": np.array([y])} for y in (2.0, 6.0)]
        )
        task = squared(linear((1,), 1, bias=False))
        sim = Simulation(ditto(task), population, full_participation(), Minibatches(1, epochs=2))
        hparams = sim.hyperparameters(learning_rate=0.5, lam=1.0)
        state = sim.init(0, hparams)
        expected = [
            # From 0 the w of the clients is 1, 1.5 and 3, 4.5; their mean is 3. v is 1, 1 and 3, 3.
            (3.0, [1.0, 3.0]),
            # From 3: 2.5, 2.25 and 4.5, 5.25, their mean 3.75. v = (y + 3)/2 after every step.
            (3.75, [2.5, 4.5]),
        ]
        for w, v in expected:
            state, _ = sim.round(state, hparams)
            np.testing.assert_allclose(state.shared.params["kernel"], [[w]], rtol=1e-12)
            np.testing.assert_allclose(np.ravel(state.personal["kernel"]), v, rtol=1e-12)


@pytest.mark.thorough
def test_personal_models_have_their_own_rate_and_epochs():
    # As above, but v alone: from 0 four steps of 1/4 a round, so that the rest of the way to
    # (y + w)/2 is halved by each, and it is 1/16 of the way after a round.
    with jax.enable_x64(True):
        population = Population.from_clients(
            [{"x": np.ones((1, 1)), "y": np.array([y])} for y in (2.0, 6.0)]
        )
        task, batches = squared(linear((1,), 1, bias=False)), Minibatches(1, epochs=2)
        algorithm = ditto(task, personal_optimizer="sgd", personal_epochs=4)
        sim = Simulation(algorithm, population, full_participation(), batches)
        hparams = sim.hyperparameters(learning_rate=0.5, lam=1.0, personal_learning_rate=0.25)
        state = sim.init(0, hparams)
        v = np.zeros(2)
        for centre, w in ((0.0, 3.0), (3.0, 3.75)):
            state, _ = sim.round(state, hparams)
            goal = (np.array([2.0, 6.0]) + centre) / 2
            v = goal + (v - goal) / 16
            np.testing.assert_allclose(state.shared.params["kernel"], [[w]], rtol=1e-12)
            np.testing.assert_allclose(np.ravel(state.personal["kernel"]), v, rtol=1e-12)


@pytest.mark.thorough
def test_the_releases_of_ditto_are_those_of_fedavg_and_without_lam_its_models_those_of_local():
    # FedAvg's own functions compute w, in Ditto's programs too, so that not a bit differs.
    population, task = classification([10, 12, 14, 9])
    values = {"lam": 0.0, "clip": 0.2, "noise_multiplier": 0.5, "sampling_rate": 0.6}
    states = {}
    for algorithm in (fedavg, ditto, local):
        mechanism = no_release() if algorithm is local else gaussian()
        sim = Simulation(
            algorithm(task), population, poisson(1.0), Minibatches(4, steps=3), mechanism
        )
        states[algorithm] = after(sim, read_by(sim, **values), 5)
    chex.assert_trees_all_equal(*(states[a].shared for a in (fedavg, ditto)))
    charges = [charged(states[algorithm].privacy) for algorithm in (fedavg, ditto)]
    assert charges[0] == charges[1]
    assert charges[0][0].entries[0].rounds == 5
    v, alone = (jax.tree.leaves(states[a].personal) for a in (ditto, local))
    assert np.std(np.asarray(v[1]), axis=0).max() > 0.01
    for one, other in zip(v, alone, strict=True):
        np.testing.assert_array_equal(one, other)
