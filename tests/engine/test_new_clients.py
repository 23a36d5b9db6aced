"""Clients who come after a run: they start from what it published, and cost nobody anything."""

import dataclasses

import dp_accounting
import jax
import numpy as np
import pytest
from support.problems import after, classification, least_squares, read_by

from fedjaxsim.algorithms.knnper import knnper, with_neighbours
from fedjaxsim.algorithms.local import finetune, local
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import with_other_rows
from fedjaxsim.data.splitting import hold_out, with_held_out
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


GROWN = with_held_out(dataclasses.replace(THERE, held_out=NEW))


def test_clients_who_join_start_from_what_was_published_and_the_others_from_their_models(ended):
    sim, state, _ = ended
    sizes = (THERE.num_clients, NEW.num_clients)
    turned = GROWN.of_clients(np.r_[sizes[0] : sum(sizes), : sizes[0]])  # known by their names
    grown = simulation(pmtl(TASK), turned)
    hparams = read_by(grown, **VALUES)
    begun = grown.start_from(state, hparams, sim, read_by(sim, **VALUES))
    published = np.broadcast_to(state.shared.params["kernel"], (sizes[1], 1, 2))
    expected = np.concatenate([published, sim.models(state, hparams)["kernel"]])
    np.testing.assert_array_equal(begun.personal["kernel"], expected)
    np.testing.assert_array_equal(begun.shared.params["kernel"], published[0])
    for _ in range(3):
        begun, _ = grown.round(begun, hparams)
    report = grown.guarantee(begun)
    # The rounds of both stages, all of them full, are Gaussian releases at z.
    spent = dp_accounting.get_epsilon_gaussian(VALUES["noise_multiplier"] / 5**0.5, report.delta)
    assert report.delta == 1 / (10 * sum(sizes))
    assert report.find("zero_out").epsilon == pytest.approx(spent, rel=1e-3)
    assert any(each.startswith(f"{sizes[1]} of {sum(sizes)} clients") for each in report.assumed)


def test_clients_may_not_join_where_costs_are_of_given_clients(ended):
    sim, state, _ = ended
    hparams = read_by(sim, **VALUES)

    def join(message, population=GROWN, task=TASK, of=state):
        grown = simulation(pmtl(task), population)
        given = read_by(grown, **VALUES, example_noise_multiplier=1.0, example_clip=1.0)
        with pytest.raises(ValueError, match=message):
            grown.start_from(of, given, sim, hparams)
        assert not grown._traced, "names and charges are looked at first"

    join("all 4 clients of the stage before must be here", GROWN.of_clients(np.arange(3, 7)))
    join("none may join", task=private_examples(TASK))
    join("none may join", of=dataclasses.replace(state, consumed=np.zeros(4, np.int32)))
    grown = simulation(pmtl(TASK), GROWN)
    with pytest.raises(ValueError, match="if clients join, give `earlier`"):
        grown.start_from(state, read_by(grown, **VALUES))
    alone = simulation(local(TASK), THERE, no_release())
    nothing = after(alone, read_by(alone, **VALUES), 1)
    grown = simulation(local(TASK), GROWN, no_release())
    with pytest.raises(ValueError, match="clients who join start from the model"):
        grown.start_from(nothing, read_by(grown, **VALUES), alone, read_by(alone, **VALUES))


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
