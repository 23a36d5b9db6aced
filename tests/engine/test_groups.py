"""Clients with linear models of their own run in groups: the same run as one after another."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import classification, least_squares, read_by, simulation_of

from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.engine.layout import Layout
from fedjaxsim.gradients.whole_run import hypergradient
from fedjaxsim.privacy.sampling import full_participation, poisson

THOROUGH = pytest.mark.thorough
VALUES = {"learning_rate": 0.01, "lam": 0.3, "clip_norm": 0.2, "noise_multiplier": 0.5}
ROWS = [4 + k % 5 for k in range(15)]
CONSUMED = Minibatches(3, steps=1, passes=2)


def simulation(problem, name, rate, minibatches, **layout):
    """Models of 5 kB, above which clients run one after another; 15 places are 3 groups of 5."""
    population, task = problem(ROWS, 600 if problem is least_squares else 200)
    sampling = full_participation() if rate == 1 else poisson(rate)
    return simulation_of(name, task, population, sampling, minibatches, **layout)


@pytest.mark.parametrize(
    ("problem", "name", "rate", "minibatches", "devices"),
    [
        (classification, "pmtl", 1.0, Minibatches(3, steps=2), 1),
        pytest.param(classification, "pmtl", 0.6, Minibatches(3, steps=2), 2, marks=THOROUGH),
        pytest.param(classification, "ppsgd", 0.6, CONSUMED, 1, marks=THOROUGH),
        pytest.param(classification, "local", 1.0, CONSUMED, 1, marks=THOROUGH),
        pytest.param(least_squares, "pmtl", 1.0, Minibatches(3, steps=1), 2, marks=THOROUGH),
        pytest.param(least_squares, "ditto", 0.6, Minibatches(3, steps=1), 1, marks=THOROUGH),
    ],
)
def test_groups_are_clients_one_after_another(problem, name, rate, minibatches, devices):
    with jax.enable_x64(True):
        found = []
        for layout in ({}, {"chunk_map": "scan"}):
            own = {} if devices == 1 else {"devices": jax.devices()[:devices]}
            sim = simulation(problem, name, rate, minibatches, **layout, **own)
            assert (sim.layout.group(15) == 5) == (not layout)
            hparams = read_by(sim, **VALUES, sampling_rate=rate)
            state, metrics = sim._segment(
                sim.init(0, hparams), hparams, sim._placed["train"], rounds=3
            )
            found.append((state.shared, state.personal, state.consumed, metrics))
        chex.assert_trees_all_close(*found, rtol=1e-11, atol=1e-14)


def test_places_stay_empty_rather_than_batches_small():
    batch, one_by_one = Layout(64, "vmap"), Layout(16, "scan")
    sizes = {5: 5, 15: 15, 100: 50, 640: 64}
    assert {places: batch.even_size(places) for places in sizes} == sizes
    few = 31_623  # 3 · 83 · 127
    assert (batch.even_size(few), one_by_one.even_size(few)) == (64, 3)


@THOROUGH
@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_groups_have_the_derivatives_of_clients_one_after_another(mode):
    with jax.enable_x64(True):
        found = []
        for layout in ({}, {"chunk_map": "scan"}):
            sim = simulation(classification, "pmtl", 1.0, Minibatches(3, steps=2), **layout)

            def objective(state, hparams):
                return jnp.sum(jnp.square(state.personal["kernel"]))

            names = ("learning_rate", "lam", "clip_norm")
            _, gradient = hypergradient(sim, objective, 3, names, mode=mode)(
                0, sim.hyperparameters(**VALUES)
            )
            found.append([float(gradient[name]) for name in names])
        assert np.all(np.abs(found[1]) > 1e-6)
        np.testing.assert_allclose(*found, rtol=1e-9)


@THOROUGH
@pytest.mark.usefixtures("fully_optimized")
@pytest.mark.parametrize(
    ("layout", "rounds"),
    [({}, 2), ({"chunk_map": "scan"}, 2), ({}, 4), ({"chunk_map": "scan"}, 4)],
    ids=str,
)
def test_rounds_of_everyone_copy_no_states(layout, rounds):
    # A piece that several uses read, one of which writes it back, would take two copies of all.
    population, task = classification(ROWS * 10, 400)
    sim = simulation_of(
        "pmtl", task, population, full_participation(), Minibatches(3, steps=2), **layout
    )
    hparams = sim.hyperparameters(**VALUES).as_arrays()
    state = jax.eval_shape(sim.program.init, jax.random.key(0), hparams)
    several = functools.partial(sim.program.rounds, rounds=rounds)
    compiled = jax.jit(several, donate_argnums=0).lower(state, hparams, sim.rows["train"])
    text = compiled.compile().as_text()
    assert text
    # In four rounds the states lie turned, as which one client's are one row.
    states = r"f32\[150,(400,3|3,400|1200)\]"
    assert re.search(states + r"\S* (fusion|while)\(", text)
    assert not re.search(states + r"\S* (copy|transpose)\(", text)
    assert ("f32[150,3,400]" in text) == (rounds == 4)
