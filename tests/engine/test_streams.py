"""Random streams by name: every key of a run is derived once, and a client's is its own."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import classification, every_system, read_by, simulation_of
from support.traced_keys import Keys, Step, mark

from fedjaxsim import keys
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.local import finetune, local
from fedjaxsim.audit.canaries import with_canaries
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.engine import evaluation, trained
from fedjaxsim.kernels.backend import Backend, planning_for
from fedjaxsim.keys import Stream
from fedjaxsim.privacy.mechanisms import no_release
from fedjaxsim.privacy.mechanisms.sums import banded, correlated
from fedjaxsim.privacy.noise import normal
from fedjaxsim.privacy.private_examples import private_examples
from fedjaxsim.privacy.samplers import (
    available,
    cyclic,
    fixed_groups,
    fixed_size,
    intermittent,
    poisson,
    random_allocation,
)  # fmt: skip
from fedjaxsim.simulation import Simulation

VALUES = {"noise_multiplier": 1.0, "clip": 1.0, "learning_rate": 0.1, "sampling_rate": 0.5}
VALUES |= {"example_clip": 1.0, "example_noise_multiplier": 1.0}
POPULATION, TASK = classification([6, 5, 7, 4])
BELOW_CLIENTS = {
    0, Stream.DRAWN, Stream.PASS, Stream.GENERATED, Stream.EXAMPLES, Stream.PROTECTED,
    Stream.EXAMPLE_COINS, Stream.GRADIENT_NOISE, Stream.EXAMPLE_NOISE,
}  # fmt: skip
"""Streams of the keys that a client's functions see; 0 is `jax.random`."""
NUMBERED_BY_CLIENTS = {
    Stream.MINIBATCHES, Stream.CONTEXT, Stream.ORDERS, Stream.AVAILABILITY, Stream.PREDICTION,
    Stream.EVALUATION,
}  # fmt: skip
"""Streams whose numbers are ids, of the clients of a cohort or of a part of it."""


def watched(program):
    """The program with functions of clients that note the keys which they see."""
    algorithm = program.algorithm

    def client(shared, personal, data, hparams, context):
        mark("minibatches", data._key)
        mark("orders", data._orders)
        mark("context", context.key)
        return algorithm.client(shared, personal, data, hparams, context)

    def predict_with_data(shared, personal, data, hparams, client_id):
        mark("prediction", data._key)
        data.fold(lambda carry, batch: carry + jnp.sum(batch.weight), 0.0)  # as FedBABU does
        if algorithm.predict_with_data is None:
            return algorithm.predict(shared, personal, hparams, client_id)
        return algorithm.predict_with_data(shared, personal, data, hparams, client_id)

    def measure(params, data):
        mark("evaluation", data._key)
        return program.measure(params, data)

    watching = algorithm._replace(client=client, predict_with_data=predict_with_data)
    return dataclasses.replace(program, algorithm=watching, measure=measure)


def whole_run(simulation, key, round_):
    """A round, an evaluation, a release of metrics, and the next stage, of new clients, too."""
    program, rows = watched(simulation.program), simulation.rows
    hparams = read_by(simulation, **VALUES).as_arrays()

    def stage(key):
        state = dataclasses.replace(program.init(key, hparams), round=round_)
        after, _ = program.step(state, hparams, rows["train"])
        measured = program.evaluate(state, hparams, rows["test"])
        released = normal(evaluation.noise_key(state, round_), (2,))
        sample = normal(keys.stream(state.key, Stream.EVALUATED), (2,))
        return state, (after.shared, measured, released, sample)

    state, first = stage(key)
    next_key = trained.stage_key(state.key, round_)
    newcomers = program.init(keys.stream(next_key, Stream.NEW_CLIENTS), hparams)
    return first, stage(next_key)[1], newcomers.shared


def check_law(function, public=False):
    """Check every key of a function of a key and a round; of `public` ones, constants are."""
    traced = Keys(function, keys.seed_key(0), jnp.int32(3))
    numbers, names = {}, {}
    for use in traced.uses:
        path = traced.path(use.key)
        if public and path is None:
            continue
        assert path is not None, f"a stream {use.name:#x} is of no key of the run"
        names.setdefault(path, set()).add(use.name)
        # A name is used with one number, or one array of numbers: else two might meet. The examples
        # of a minibatch have the same keys in each model that a client trains on it, as in Ditto.
        if use.name and use.name not in {*NUMBERED_BY_CLIENTS, Stream.EXAMPLES}:
            step = Step(use.name, use.numbers)
            assert numbers.setdefault((path, use.name), step) == step, hex(use.name)
    for path, below in names.items():
        if 0 in below and not {step.name for step in path} & {Stream.INIT, Stream.CONTEXT}:
            assert below == {0}, "streams are derived from a key whose bits are drawn"
    seen = {}
    for role, key in traced.seen:
        path = traced.path(key)
        assert path, "a client sees the run's key, or a constant"
        assert seen.setdefault(path, role) == role, "a key has two roles"
    assert seen
    for path in seen:
        # The last number is the client's, which neither a constant nor the round is.
        assert {term.name for term in traced.sources(path[-1].numbers)} != {"input"}
        for derived in names:
            if derived[: len(path)] == path:
                assert {step.name for step in derived[len(path) :]} <= BELOW_CLIENTS
                assert names[derived] <= BELOW_CLIENTS
    for first, second in itertools.permutations(seen, 2):
        assert second[: len(first)] != first
    return traced


@pytest.mark.parametrize("name", every_system("mpmtl"))
def test_all_keys_of_a_run_are_distinct_and_a_clients_are_its_own(name):
    minibatches = Minibatches(2, epochs=1)
    simulation = simulation_of(name, TASK, POPULATION, poisson(0.5), minibatches)
    check_law(functools.partial(whole_run, simulation))


VARIANTS = {
    "consumed minibatches, groups and correlated noise": lambda: Simulation(
        fedavg(TASK), POPULATION, fixed_groups(groups=2),
        Minibatches(2, steps=2, passes=2), correlated(bands=2),
    ),
    "protected examples of clients that answer at times": lambda: Simulation(
        local(private_examples(TASK)), POPULATION, available(fixed_size(cohort=2), intermittent()),
        Minibatches(2, steps=2), no_release(),
    ),
    "cyclic turns and banded noise": lambda: Simulation(
        fedavg(TASK), POPULATION, cyclic(groups=2), Minibatches(2, steps=1), banded(bands=2)
    ),
    "turns of random allocation": lambda: Simulation(
        fedavg(TASK), POPULATION, random_allocation(every=2), Minibatches(2, steps=1)
    ),
    "fresh minibatches, and new clients": lambda: Simulation(
        finetune(TASK), POPULATION, fixed_size(cohort=2), Minibatches(2, steps=3), no_release()
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_keys_are_distinct_whatever_is_random(variant):
    check_law(functools.partial(whole_run, VARIANTS[variant]()))


def test_keys_of_canaries_are_none_of_the_run():
    sim = simulation_of("fedavg", TASK, POPULATION, poisson(0.5), Minibatches(2, epochs=1))
    audited = with_canaries(sim, read_by(sim, **VALUES), 2)
    traced = check_law(functools.partial(whole_run, audited), public=True)
    assert any(use.name == Stream.CANARIES for use in traced.uses)


@pytest.mark.thorough
def test_a_client_that_draws_minibatches_to_predict_gets_none_of_the_runs_keys():
    """Not the key of which the first fold is the sampler's, nor that of another client."""
    seen = {}

    def predict_with_data(shared, personal, data, hparams, client_id):
        jax.debug.callback(lambda k, words: seen.setdefault(int(k), words.tobytes()),
                           client_id, jax.random.key_data(data._key))  # fmt: skip
        return algorithm.predict(shared, personal, hparams, client_id)

    algorithm = fedavg(TASK)
    sim = Simulation(
        algorithm._replace(predict_with_data=predict_with_data), POPULATION,
        fixed_size(cohort=2), Minibatches(2, epochs=1), unchecked=True,
    )  # fmt: skip
    hparams = read_by(sim, **VALUES)
    state = sim.init(0, hparams)
    sim.models(state, hparams)
    jax.effects_barrier()
    drawn = jax.jit(sim.program.draw)(state, hparams.as_arrays())
    others = [state.key, keys.stream(state.key, Stream.SAMPLING), drawn.clients, drawn.noise]
    views = [jax.random.wrap_key_data(jnp.asarray(np.frombuffer(words, np.uint32)))
             for words in seen.values()]  # fmt: skip
    # What a client reaches of a key in one step, with any number.
    reached = [k for key in (*views, *others) for k in (key, *jax.random.split(key, 4))]
    assert len(seen) == POPULATION.num_clients
    assert len({jax.random.key_data(key).tobytes() for key in reached}) == len(reached)


def test_streams_of_one_key_never_meet():
    """Names and numbers are counters of a cipher, which maps no two to one block."""
    key = keys.seed_key(7)
    numbers = jnp.arange(500)
    derived = [keys.stream(key, name, numbers) for name in Stream]
    derived += [jax.random.split(key, 500), key[None]]
    words = np.concatenate([jax.random.key_data(each) for each in derived])
    assert len(np.unique(words, axis=0)) == len(words) == 500 * (len(Stream) + 1) + 1


def test_streams_are_those_of_each_name():
    key, named = keys.seed_key(7), ((Stream.CLIENTS, 3), (Stream.SAMPLING, 0))
    expected = [jax.random.key_data(keys.stream(key, *pair)).tolist() for pair in named]
    assert [jax.random.key_data(k).tolist() for k in keys.streams(key, *named)] == expected
    with planning_for(Backend("gpu", None)):
        assert [jax.random.key_data(k).tolist() for k in keys.streams(key, *named)] == expected
    twice = keys.stream(keys.stream(key, Stream.STAGE, 1), Stream.STAGE, 2)
    assert keys.stream(key, Stream.STAGE, 1, 2) == twice
