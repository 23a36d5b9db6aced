"""A client with most of the rows, at any place among the clients, on every placement."""

import jax
import numpy as np
import pytest
from support.problems import classification, numbers, read_by, simulation_of

from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.privacy.samplers import poisson

CLIENTS, SMALL, GIANT = 9, 5, 300
VALUES = {"learning_rate": 0.3, "lam": 0.5, "clip": 1.0, "noise_multiplier": 0.5}
PLACES = {"first": 0, "middle": CLIENTS // 2, "last": CLIENTS - 1}
PLACEMENTS = {
    "in a batch": {"chunk_map": "vmap"},
    "on two devices": {"devices": jax.devices()[:2]},
    "streamed": {"streamed": True},
}


def problem(place):
    counts = np.full(CLIENTS, SMALL)
    counts[PLACES[place]] = GIANT
    return classification(counts.tolist())


def simulation(**placement):
    population, task = problem("first")
    batches = Minibatches(4, epochs=1)
    return simulation_of("pmtl", task, population, poisson(0.5), batches, chunk_size=4, **placement)


def ends(sim, place):
    """The models and the last evaluation of a run on the population with the giant there."""
    sim = sim.with_population(problem(place)[0])
    hparams = read_by(sim, **VALUES, sampling_rate=0.5)
    state, history = sim.run(sim.init(4, hparams), hparams, 6)
    return numbers(state.personal), numbers(state.shared), history[-1].evaluation.values["loss"]


@pytest.fixture(scope="module")
def one_by_one():
    sim = simulation(chunk_map="scan")
    return {place: ends(sim, place) for place in PLACES}


@pytest.mark.thorough
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_giant_client_computes_the_same_wherever_it_is(one_by_one, placement):
    sim = simulation(**PLACEMENTS[placement])
    for place, expected in one_by_one.items():
        for ours, theirs in zip(ends(sim, place), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=place)
