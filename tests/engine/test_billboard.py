"""The billboard lemma by construction: releases are all that a client learns of the others."""

import contextlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import (
    classification,
    every_system,
    map_of,
    read_by,
    rows_of_all,
    simulation_of,
)

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.algorithms.local import local
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.data.synthetic import regression_stream
from fedjaxsim.engine.layout import ChunkMap
from fedjaxsim.factories import import_factory
from fedjaxsim.models import linear
from fedjaxsim.privacy.mechanisms import gaussian, no_release
from fedjaxsim.privacy.mechanisms.sums import adaptive_clipping
from fedjaxsim.privacy.samplers import full_participation, poisson
from fedjaxsim.runs.parts import LOSSES
from fedjaxsim.simulation import Simulation
from fedjaxsim.tasks.task import known_regression
from fedjaxsim.testing import check_billboard

pytestmark = pytest.mark.exact_keys
M, VICTIM = 12, 4
VALUES = {
    "lam": 0.2,
    "mu": 0.1,
    "clip": 0.5,
    "noise_multiplier": 0.7,
    "count_noise": 1.0,
}
CLIENTS, TASK = classification([10 + k for k in range(M)])


def check(simulation, clients=(VICTIM, M - 1), sampling_rate=0.5, **settings):
    """Check the law for clients of a simulation."""
    hparams = read_by(simulation, **(VALUES | {"sampling_rate": sampling_rate}))
    check_billboard(simulation, hparams, clients=clients, **settings)


def build(algorithm, mechanism=gaussian(), minibatches=None, population=CLIENTS, **settings):
    minibatches = minibatches or Minibatches(4, steps=1)
    return Simulation(algorithm, population, poisson(1.0), minibatches, mechanism, **settings)


def of_system(name, chunk_map: ChunkMap):
    minibatches = Minibatches(4, epochs=1)
    return simulation_of(
        name, TASK, CLIENTS, poisson(1.0), minibatches, chunk_size=3, chunk_map=chunk_map
    )


@pytest.mark.parametrize("name", every_system("pmtl", sending=True))
def test_with_the_releases_fixed_one_clients_data_reaches_nobody_else(name):
    # Evaluations are the engine's, the same for all systems.
    split = "train" if name == "pmtl" else None
    check(of_system(name, map_of(name)), (VICTIM,), rounds=4, split=split)


@pytest.mark.thorough
@pytest.mark.parametrize("chunk_map", ["scan", "vmap"])
def test_the_law_does_not_depend_on_how_clients_are_mapped(chunk_map):
    check(of_system("pmtl", chunk_map), rounds=4)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "simulation",
    [
        lambda: build(local(TASK), no_release()),
        lambda: build(pmtl(TASK), adaptive_clipping(), Minibatches(4, steps=2, passes=2)),
        lambda: build(pmtl(TASK), devices=jax.devices()[:2]),
        lambda: Simulation(
            pmtl(known_regression(5)),
            regression_stream(M, 5),
            full_participation(),
            Minibatches(4, steps=1),
        ),
    ],
    ids=["nothing sent", "mechanism and minibatches with a state", "two devices", "fresh data"],
)
def test_the_law_holds_behind_every_kind_of_mechanism_and_data(simulation):
    check(simulation())


# --- what breaks it is found ----------------------------------------------------------------------


def with_client(change):
    """PMTL whose client returns what `change(data, personal, message)` makes of its last two."""
    good = pmtl(TASK)

    def client(shared, personal, data, hparams, context):
        kept, message, metrics = good.client(shared, personal, data, hparams, context)
        return *change(data, kept, message), metrics

    return good._replace(client=client)


RNG = np.random.default_rng(0)
COUNTS = np.array([[5, 4, 1]] * 6)
CLASSES = RNG.integers(0, 3, 60)
TARGETS = {
    "cox": RNG.gamma(2.0, size=60) * RNG.choice([-1, 1], 60),
    "gamma": RNG.gamma(2.0, size=60) + 0.1,
    "logistic": CLASSES // 2,
    "multilabel": RNG.integers(0, 2, (60, 3)),
    "negative-binomial": CLASSES,
    "one-vs-all": CLASSES,
    "ordinal": CLASSES,
    "poisson": CLASSES,
    "quantile": RNG.normal(size=60),
    "softmax": CLASSES,
    "squared": RNG.normal(size=60),
    "squared-targets": RNG.normal(size=(60, 3)),
}
"""Targets of six clients for each loss."""


@pytest.mark.thorough
@pytest.mark.parametrize("loss", LOSSES)
def test_the_law_holds_for_the_metrics_of_every_loss(loss):
    """Rows, labels and numbers of rows of a client change; others' validation metrics do not."""
    factory, several = import_factory(LOSSES[loss].factory), ("softmax", "one-vs-all", "multilabel")
    outputs = 3 if loss in (*several, "squared-targets") else 1
    taken = inspect.signature(factory).parameters
    sizes = {"num_classes": 3, "num_outputs": outputs}
    task = factory(linear((3,), outputs), **{k: v for k, v in sizes.items() if k in taken})
    x = np.random.default_rng(1).normal(size=(60, 3))
    fields = {"x": x, "y": TARGETS[loss]}
    population = Population.from_flat(fields, COUNTS, max_rows=12)
    simulation = Simulation(
        local(task), population, full_participation(), Minibatches(2, steps=1), no_release()
    )
    hparams = simulation.hyperparameters(learning_rate=0.01)
    check_billboard(simulation, hparams, rounds=1, clients=[0], split="validation")


def test_a_client_that_reads_the_rows_of_all_is_found():
    def peek(data, personal, message):
        mean = rows_of_all(data)["x"].mean()
        return personal | {"bias": personal["bias"] + mean}, message

    with pytest.raises(AssertionError, match=r"round 1: `personal` at \['bias'\]"):
        check(build(with_client(peek), unchecked=True))


def made_of_data(function):
    """(population) -> a simulation one of whose functions is made of the mean of all rows."""

    def make(population):
        mean = float(population.fields["x"].mean())
        good = pmtl(TASK)

        def init(key, hparams):
            shared, personal = good.init(key, hparams)
            return shared, jax.tree.map(lambda leaf: leaf + mean, personal)

        def server(shared, release, hparams, round_):
            shared = good.server(shared, release, hparams, round_)
            return shared._replace(params=jax.tree.map(lambda leaf: leaf + mean, shared.params))

        def predict(shared, personal, hparams, client_id):
            return jax.tree.map(lambda leaf: leaf + mean, personal)

        changed = {"init": init, "server": server, "predict": predict, "none": None}[function]
        algorithm = good._replace(**{function: changed}) if changed else good
        return build(algorithm, population=population)

    return make


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("none", None),
        ("init", "init: `personal`"),
        ("server", "round 1: `shared`"),
        ("predict", "predict: `params`"),
    ],
)
def test_what_a_factory_makes_of_data_is_found_where_it_is_given(function, message):
    make = made_of_data(function)
    found = pytest.raises(AssertionError, match=message) if message else contextlib.nullcontext()
    with found:
        check(make(CLIENTS), rounds=1, build=make)


@pytest.mark.thorough
def test_a_noise_multiplier_made_of_messages_is_found():
    # The noise that the ledger is charged would itself tell of the data.
    mechanism = gaussian()

    def release(accumulator, *arguments):
        out = mechanism.release(accumulator, *arguments)
        size = jnp.abs(accumulator.total["bias"]).sum()
        return out._replace(noise_multiplier=out.noise_multiplier + size)

    with pytest.raises(AssertionError, match=r"`privacy` at \.charges\[0\]"):
        check(build(pmtl(TASK), mechanism._replace(release=release)))


@pytest.mark.thorough
def test_a_check_that_tried_nothing_says_so():
    with pytest.raises(ValueError, match="client 4"):
        check(build(pmtl(TASK)), sampling_rate=1e-6, rounds=1)
    with pytest.raises(ValueError, match="client"):
        check(build(pmtl(TASK)), clients=[12])


@pytest.mark.thorough
def test_a_client_that_learns_nothing_is_told_from_one_that_leaks_nothing():
    constant = Algorithm(
        init=lambda key, hparams: (jnp.zeros(2), ()),
        client=lambda shared, personal, data, hparams, context: ((), jnp.ones(2), {}),
        server=lambda shared, release, hparams, round_: shared + release,
        predict=lambda shared, personal, hparams, client_id: TASK.init(jax.random.key(0)),
        task=TASK,
    )
    with pytest.raises(ValueError, match="client 4"):
        check(build(constant))
