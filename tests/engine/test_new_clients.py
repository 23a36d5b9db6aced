"""Clients who come after a run: they start from what it published, and cost nobody anything."""

import dataclasses

import jax
import numpy as np
import pytest
from support.problems import after, classification, least_squares, read_by

from fedjaxsim.algorithms.knnper import knnper, with_neighbours
from fedjaxsim.algorithms.local import finetune, local
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import with_other_rows
from fedjaxsim.data.splitting import hold_out
from fedjaxsim.privacy.mechanisms import gaussian, no_release
from fedjaxsim.privacy.private_examples import private_examples
from fedjaxsim.privacy.samplers import full_participation
from fedjaxsim.simulation import Simulation

VALUES = {"learning_rate": 0.1, "lam": 0.3, "clip": 0.5, "noise_multiplier": 2.0}
WHOLE, TASK = least_squares([4, 5, 6, 4, 5, 6, 7], features=2)
THERE, NEW = hold_out(WHOLE, 0.4, seed=0)


def simulation(algorithm, population, mechanism=gaussian()):
    batches = Minibatches(2, steps=2)
    return Simulation(algorithm, population, full_participation(), batches, mechanism)


@pytest.fixture(scope="module")
def ended():
    """A private run, its state, and a simulation of the new clients."""
    sim = simulation(pmtl(TASK), THERE)
    new = simulation(finetune(TASK, penalty="mean", origin="global"), NEW, no_release())
    return sim, after(sim, read_by(sim, **VALUES), 2), new


def test_a_new_client_s_rows_reach_nobody(ended):
    sim, state, new = ended
    hparams = read_by(new, **VALUES)
    states = []
    for rows in (NEW, with_other_rows(NEW, [1], seed=0)):
        there = new.with_population(rows)
        states.append(there.round(there.start_new_clients(state, hparams, sim), hparams)[0])
    one, other = states
    for parts in ((one.shared, other.shared), (one.privacy, other.privacy)):
        jax.tree.map(np.testing.assert_array_equal, *parts)
    moved = np.asarray(one.personal["kernel"] != other.personal["kernel"]).any(axis=(1, 2))
    np.testing.assert_array_equal(moved, [False, True, False])
    np.testing.assert_array_equal(one.shared["kernel"], state.shared.params["kernel"])


def test_new_clients_start_from_what_was_published_and_from_nobody_s_model(ended):
    sim, state, new = ended
    others = dataclasses.replace(state, personal=jax.tree.map(lambda w: w + 1, state.personal))
    for before in (state, others):
        start = new.start_new_clients(before, read_by(new, **VALUES), sim)
        published = np.broadcast_to(state.shared.params["kernel"], (NEW.num_clients, 1, 2))
        np.testing.assert_array_equal(start.personal["kernel"], published)


def test_the_report_is_that_of_those_who_were_there(ended):
    sim, state, new = ended
    hparams = read_by(new, **VALUES)
    begun, _ = new.round(new.start_new_clients(state, hparams, sim), hparams)
    before, later = sim.guarantee(state), new.guarantee(begun)
    assert later.delta == before.delta == 1 / (10 * THERE.num_clients)
    for one, other in zip(before.guarantees, later.guarantees, strict=True):
        assert one.epsilon == other.epsilon is not None
    assert any(each.startswith(f"{NEW.num_clients} clients came later") for each in later.assumed)


def test_new_clients_who_would_send_or_find_nothing_published_are_refused(ended):
    sim, state, new = ended
    sending = simulation(pmtl(TASK), NEW, gaussian())
    with pytest.raises(ValueError, match="send nothing"):
        sending.start_new_clients(state, read_by(sending, **VALUES), sim)
    protecting = simulation(finetune(private_examples(TASK), origin="global"), NEW, no_release())
    with pytest.raises(ValueError, match="protect none"):
        protecting.start_new_clients(state, read_by(new, **VALUES), sim)
    alone = dataclasses.replace(new, algorithm=local(TASK))
    nothing = dataclasses.replace(state, shared=())
    with pytest.raises(ValueError, match="published"):
        new.start_new_clients(nothing, read_by(new, **VALUES), alone)


@pytest.mark.thorough
def test_nearest_neighbours_on_a_published_model_are_knn_per():
    population, task = classification([12, 9, 15, 11])
    there, new = hold_out(population, 0.5, seed=0)
    sim = simulation(pmtl(task), there)
    state = after(sim, read_by(sim, **VALUES), 1)
    tuned = with_neighbours(finetune(task, penalty="vanilla", origin="global"), neighbours=3)
    late = simulation(tuned, new, no_release())
    knn = simulation(knnper(task, neighbours=3), new)
    hparams = read_by(late, **VALUES)
    found = late.evaluate(late.start_new_clients(state, hparams, sim), hparams)
    same = knn.init(0, read_by(knn, **VALUES))
    same = dataclasses.replace(same, shared=same.shared._replace(params=state.shared.params))
    expected = knn.evaluate(same, read_by(knn, **VALUES))
    np.testing.assert_allclose(found.values["loss"], expected.values["loss"], rtol=1e-5)
    with pytest.raises(ValueError, match="already"):
        with_neighbours(tuned)
