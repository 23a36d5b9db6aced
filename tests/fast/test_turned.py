"""Linear models that are worked on turned, (c, d): the same runs as of (d, c)."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import classification, read_by, simulation_of

from fedjaxsim import simulation as simulations
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.engine.layout import default_layout
from fedjaxsim.fast import turned
from fedjaxsim.gradients.whole_run import hypergradient
from fedjaxsim.privacy.mechanisms import gaussian
from fedjaxsim.privacy.messages import Messages
from fedjaxsim.privacy.sampling import full_participation, poisson

THOROUGH = pytest.mark.thorough
ROWS = [4 + k % 5 for k in range(15)]
VALUES = {"learning_rate": 0.01, "lam": 0.3, "clip_norm": 0.2, "noise_multiplier": 0.5}


def test_only_matrices_with_few_columns_are_turned():
    shapes = {"a": (7, 3), "b": (3, 7), "c": (3, 3), "d": (7, 1), "e": (7,), "f": (90, 62)}
    tree = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    tree["g"] = jnp.zeros((7, 3), jnp.int32)
    assert turned.which(tree) == (True, False, False, False, False, False, False)


@pytest.mark.parametrize("clients", [1, 16, 37])
def test_states_are_turned_where_they_lie(clients):
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(clients, 7, 3)).astype(np.float32)
    tree = {"bias": jnp.ones((clients, 3)), "kernel": jnp.asarray(kernel)}
    there = jax.jit(lambda tree: turned.turn_in_place(tree, (False, True)))(tree)
    np.testing.assert_array_equal(there["kernel"], kernel.swapaxes(1, 2))
    back = turned.turn_in_place(there, (False, True))
    np.testing.assert_array_equal(back["kernel"], kernel)
    np.testing.assert_array_equal(back["bias"], tree["bias"])


def test_turned_messages_are_the_messages():
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(4, 7, 3)).astype(np.float32)
    kernel[2] = 0
    plain = Messages({"kernel": jnp.asarray(kernel)})
    lying = Messages({"kernel": jnp.asarray(kernel.swapaxes(1, 2))}, (True,))
    mask, ids = jnp.array([True, True, True, False]), jnp.array([3, 0, 1, 1])
    rows = {"kernel": jnp.zeros((5, 7, 3))}

    def of(messages):
        bounded = messages.bound(jnp.float32(2.0), mask)
        kept = bounded.messages.scale(jnp.arange(1.0, 5.0))
        return (
            bounded.clipped, bounded.finite, kept.total(), kept.dense(), kept.nonzero(),
            kept.add_rows(rows, ids), kept.gram(), kept.gram_diagonal(), kept.squared_norms(),
        )  # fmt: skip

    chex.assert_trees_all_close(of(lying), of(plain), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lying.total()["kernel"], kernel.sum(axis=0), rtol=1e-5, atol=1e-6)


def unturned(*args, **given):
    return dataclasses.replace(default_layout(*args, **given), turns=False)


def pair(monkeypatch, name, sampling, minibatches, **given):
    """A simulation, and the same one that turns nothing; models of 5 kB, in three groups of 5."""
    population, task = classification(ROWS, 400)
    make = functools.partial(simulation_of, name, task, population, sampling, minibatches, **given)
    turning = make()
    monkeypatch.setattr(simulations, "default_layout", unturned)
    return turning, make()


@pytest.mark.parametrize(
    ("name", "rate", "minibatches", "given"),
    [
        ("pmtl", 1.0, Minibatches(3, steps=2), {}),
        pytest.param("pmtl", 1.0, Minibatches(3, steps=1), {"devices": 2}, marks=THOROUGH),
        pytest.param("pmtl", 0.6, Minibatches(3, epochs=1), {}, marks=THOROUGH),
        pytest.param("ditto", 1.0, Minibatches(3, steps=1), {}, marks=THOROUGH),
        pytest.param("fedprox", 1.0, Minibatches(3, steps=9), {}, marks=THOROUGH),
        pytest.param("local", 1.0, Minibatches(3, steps=2), {}, marks=THOROUGH),
        pytest.param("mpmtl", 1.0, Minibatches(3, steps=2), {}, marks=THOROUGH),
        pytest.param("ppsgd", 1.0, Minibatches(3, steps=1, passes=2), {}, marks=THOROUGH),
    ],
)
def test_a_run_with_turned_models_is_the_run(monkeypatch, name, rate, minibatches, given):
    with jax.enable_x64(True):
        sampling = full_participation() if rate == 1 else poisson(rate)
        if "devices" in given:
            given = {"devices": jax.devices()[: given["devices"]]}
        found = []
        turning, plain = pair(monkeypatch, name, sampling, minibatches, **given)
        assert (turning.layout.turns, plain.layout.turns) == (True, False)
        for sim in (turning, plain):
            rows, hparams = sim._placed["train"], read_by(sim, **VALUES, mu=0.2, sampling_rate=rate)
            state, metrics = sim._segment(sim.init(0, hparams), hparams, rows, rounds=4)
            found.append((state.shared, state.personal, state.consumed, metrics))
        chex.assert_trees_all_close(*found, rtol=1e-11, atol=1e-14)


def test_a_mechanism_sees_sums_as_algorithms_send_them():
    seen = []

    def release(accumulator, *rest):
        seen.append(jax.tree.map(jnp.shape, accumulator.total))
        return gaussian().release(accumulator, *rest)

    mechanism = gaussian()._replace(release=release)
    population, task = classification(ROWS, 400)
    sim = simulations.Simulation(
        pmtl(task), population, full_participation(), Minibatches(3, steps=1), mechanism
    )
    hparams = sim.hyperparameters(**VALUES)
    sim._segment(sim.init(0, hparams), hparams, sim._placed["train"], rounds=4)
    assert seen
    assert all(shapes == {"bias": (3,), "kernel": (400, 3)} for shapes in seen)


@THOROUGH
@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_derivatives_of_turned_models_are_those_of_the_run(monkeypatch, mode):
    with jax.enable_x64(True):
        found = []
        for sim in pair(monkeypatch, "pmtl", full_participation(), Minibatches(3, steps=2)):

            def objective(state, hparams):
                return jnp.sum(jnp.square(state.personal["kernel"]))

            names = ("learning_rate", "lam", "clip_norm")
            _, gradient = hypergradient(sim, objective, 4, names, mode=mode)(
                0, sim.hyperparameters(**VALUES)
            )
            found.append([float(gradient[name]) for name in names])
        assert np.all(np.abs(found[1]) > 1e-6)
        np.testing.assert_allclose(*found, rtol=1e-9)
