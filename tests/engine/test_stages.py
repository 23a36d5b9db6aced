"""A run in stages: what is carried from one simulation to the next, and what all of them cost."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import simulations
from support.problems import after, compilations, every_system, least_squares, read_by

from fedjaxsim.algorithm import WarmStart
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.local import local
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.algorithms.ppsgd import ppsgd
from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.engine.state import PARTS, SimulationState
from fedjaxsim.factories import import_factory, settings_of
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.mechanisms import gaussian
from fedjaxsim.privacy.mechanisms.sums import pure
from fedjaxsim.privacy.samplers import full_participation
from fedjaxsim.simulation import Simulation

VALUES = {"learning_rate": 0.1, "lam": 0.3, "clip": 0.5, "noise_multiplier": 2.0}
VALUES |= {"mixture": 1.0}  # clients of APFL predict with their own models
OF_SERVER = ("scaffold", "feddyn", "ifca")
"""Systems whose clients keep a state and predict with what the server published."""


def given(sim, **changes):
    """The hyperparameters of a simulation."""
    return read_by(sim, **(VALUES | changes))


def going_on(sim, state, rounds=2, **changes):
    """The state after more rounds."""
    for _ in range(rounds):
        state, _ = sim.round(state, given(sim, **changes))
    return state


def following(sim, state, before):
    """The state before the first round of a stage after one of another simulation."""
    return sim.start_from(state, given(sim), before, given(before))


def simulation(factory, mechanism=gaussian(), population=None):
    shared, task = simulations.problem()
    clients, batches = full_participation(), Minibatches(4, steps=1)
    return Simulation(factory(task), population or shared, clients, batches, mechanism)


@functools.cache
def ended_in(dtype):
    """Simulations by algorithm, each with a state after two rounds; more compile nothing."""
    del dtype
    found = {}
    for factory in (fedavg, local, pmtl, ppsgd):
        sim = simulations.shared(factory.__name__)
        found[factory] = sim, after(sim, given(sim), 2)
    return found


@pytest.fixture
def ended(shared_pmtl):
    del shared_pmtl
    return ended_in("float32")


def epsilon(sim, state):
    found = sim.guarantee(state).find("zero_out", "joint_dp").epsilon
    assert found is not None
    return found


def predictions(sim, state):
    ids = jnp.arange(sim.num_clients)
    predict = jax.vmap(sim.algorithm.predict, (None, 0, None, 0))
    return np.asarray(predict(state.shared, state.personal, given(sim).as_arrays(), ids)["kernel"])


def test_every_part_of_the_state_is_declared():
    assert set(PARTS) == {field.name for field in dataclasses.fields(SimulationState)}


def check_start(name, ended):
    system, new = SYSTEMS[name], simulations.shared(name)
    for sim, state in ended.values():
        nothing = sim.algorithm.warm_start.published(state.shared) is None
        if nothing and new.algorithm.warm_start.required:
            with pytest.raises(ValueError, match="published"):
                following(new, state, sim)
            continue
        begun = following(new, state, sim)
        found = predictions(new, begun)
        # Where a client keeps a head only, which is the bias here, all have the kernel in common.
        whole = "head" not in settings_of(import_factory(system.factory)) and name not in OF_SERVER
        if jax.tree.leaves(begun.personal) and whole:
            np.testing.assert_allclose(found, predictions(sim, state), rtol=1e-6)
        else:  # one model for all: the published one, where there was one
            published = sim.algorithm.warm_start.published(state.shared)
            expected = found[0] if published is None else published["kernel"]
            np.testing.assert_array_equal(found, np.stack([expected] * len(found)))


def test_clients_start_from_the_models_that_they_predicted_with(ended):
    check_start("pmtl", ended)


@pytest.mark.thorough
@pytest.mark.parametrize("shared_system", every_system(), indirect=True)
def test_clients_of_every_system_start_from_the_models_that_they_predicted_with(
    request, shared_system
):
    del shared_system
    check_start(request.node.callspec.params["shared_system"], ended_in("float64"))


def test_the_billboard_starts_from_what_was_published(ended):
    sim, state = ended[fedavg]
    new, _ = ended[pmtl]
    begun = following(new, state, sim)
    np.testing.assert_array_equal(begun.shared.params["kernel"], state.shared.params["kernel"])


def test_models_that_were_never_published_do_not_reach_the_billboard(ended):
    sim, state = ended[local]
    others = dataclasses.replace(state, personal=jax.tree.map(lambda w: w + 1, state.personal))
    new, _ = ended[pmtl]
    one, other = (following(new, each, sim) for each in (state, others))
    assert np.all(one.personal["kernel"] != other.personal["kernel"])
    chex.assert_trees_all_equal(one.shared, other.shared)

    def leaks(key, hparams, published, own):
        del key, hparams, published
        return own, own

    warm_start = WarmStart(leaks, lambda shared: shared)
    bad = dataclasses.replace(new, algorithm=new.algorithm._replace(warm_start=warm_start))
    with pytest.raises(ValueError, match="out_axes"):
        following(bad, state, sim)


def test_stages_of_one_kind_cost_what_one_run_of_all_rounds_does(ended):
    sim, state = ended[fedavg]
    new, _ = ended[pmtl]
    state = going_on(new, following(new, state, sim))
    whole = after(sim, given(sim), 4)
    both = [new.guarantee(state), sim.guarantee(whole)]
    assert both[0].guarantees == both[1].guarantees


@pytest.mark.thorough
def test_a_stage_with_another_mechanism_adds_its_own_charge(ended):
    sim, state = ended[fedavg]
    new = simulation(fedavg, pure())
    begun = new.start_from(state, given(new))
    np.testing.assert_array_equal(begun.shared.params["kernel"], state.shared.params["kernel"])
    ended_again = going_on(new, begun, 1)
    epsilons = [epsilon(sim, state), epsilon(new, ended_again)]
    # Gaussian noise of two rounds, and then 1/z more with δ = 0.
    assert epsilons[0] < epsilons[1] <= epsilons[0] + 0.5 + 1e-6
    free, _ = ended[local]
    done = going_on(free, following(free, ended_again, new))
    assert epsilon(free, done) == epsilons[1]


@pytest.mark.usefixtures("every_program")
def test_later_stages_and_sentences_compile_nothing(ended):
    sim, state = ended[pmtl]
    first = going_on(sim, sim.start_from(state, given(sim)), 1)
    with compilations() as programs:
        second = sim.start_from(first, given(sim))
        second = second.announce(sentences=["a sentence of a callback"])
        second = going_on(sim, second, 1)
    assert not programs
    local_sim, before = ended[local]
    following(sim, before, local_sim)
    with compilations() as programs:
        following(sim, before, local_sim)
    assert not programs  # nor is the start from another algorithm's models compiled again
    assert len(second.privacy.draws) == 3
    assert "a sentence of a callback" in second.privacy.public
    (spend,) = ledger.charged(second.privacy)
    assert [entry.rounds for entry in spend.entries] == [4]
    assert not spend.redrawn


def test_a_stage_draws_noise_of_its_own(ended):
    sim, _ = ended[fedavg]
    quiet = given(sim, learning_rate=0.0)
    first = after(sim, quiet, 2)
    start = sim.init(0, quiet)
    second = going_on(sim, sim.start_from(start, quiet), learning_rate=0.0)
    moved = [
        np.asarray(each.shared.params["kernel"] - start.shared.params["kernel"])
        for each in (first, second)
    ]
    assert np.all(np.abs(moved[0] - moved[1]) > 1e-4)
    # The stage before it released nothing, and drew nothing that counts.
    digests = [[each.digest for each in sim.guarantee(end).draws] for end in (first, second)]
    assert [len(each) for each in digests] == [1, 1]
    assert digests[0] != digests[1]


def test_the_state_that_a_stage_starts_from_stays_usable(ended):
    sim, state = ended[pmtl]
    before = np.array(state.personal["kernel"])
    sim.run(sim.start_from(state, given(sim)), given(sim), 2)
    np.testing.assert_array_equal(state.personal["kernel"], before)


def test_states_of_another_kind_are_refused(ended):
    _, state = ended[fedavg]
    with pytest.raises(ValueError, match="personal"):
        ended[pmtl][0].start_from(state, given(ended[pmtl][0]))
    fewer = simulation(fedavg, population=least_squares([4, 5])[0])
    with pytest.raises(ValueError, match="2 clients"):
        fewer.start_from(state, given(fewer))
    sim, _ = ended[pmtl]
    cold = dataclasses.replace(sim, algorithm=sim.algorithm._replace(warm_start=WarmStart()))
    with pytest.raises(ValueError, match="warm_start"):
        following(cold, state, ended[fedavg][0])
