"""JAX's own checkers pass every system: types and ranks that mix by accident, keys used twice."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import compiling
from support.problems import (
    bits,
    classification,
    compilations,
    least_squares,
    read_by,
    simulation_of,
)

from fedjaxsim import tasks
from fedjaxsim.algorithms import SYSTEMS
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.models import linear
from fedjaxsim.privacy.samplers import poisson

VALUES = {"noise_multiplier": 0.7, "clip": 1.0, "learning_rate": 0.05, "sampling_rate": 0.5}
QUICK = ("pmtl",)
NAMES = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.thorough])
    for name, system in SYSTEMS.items()
    if not system.variant_of
]
COUNTS = [5, 9, 6]


def traced(name, population, task):
    """Trace all functions of a run with types and ranks that must agree."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        sim = simulation_of(name, task, population, poisson(), Minibatches(4, epochs=2))
        hparams = read_by(sim, **VALUES)
        key, _ = sim.check_start(0, hparams)
        begun = jax.eval_shape(sim.program.init, key, hparams.as_arrays())
        for split, function in (("train", sim.program.step), ("test", sim.program.evaluate)):
            jax.eval_shape(function, begun, hparams.as_arrays(), sim.rows[split])


@pytest.mark.parametrize("name", NAMES)
def test_a_system_promotes_no_types_and_no_ranks(name):
    problem = classification(COUNTS) if SYSTEMS[name].softmax else least_squares(COUNTS, test=0.25)
    traced(name, *problem)


def test_a_task_promotes_no_types_and_no_ranks():
    (population, _), task = classification(COUNTS), tasks.logistic(linear((4,), 1))
    y = np.random.default_rng(0).integers(0, 2, 20)
    fields = {"x": population.fields["x"], "y": y}
    traced("fedavg", dataclasses.replace(population, fields=fields, columns={}), task)


@pytest.mark.thorough  # the law of all keys is that of test_streams.py
def test_no_key_is_used_twice():
    with jax.debug_key_reuse(True):
        population, task = least_squares(COUNTS, test=0.25)
        sim = simulation_of("pmtl", task, population, poisson(), Minibatches(4, steps=1))
        hparams = read_by(sim, **VALUES)
        state, _ = sim.run(sim.init(0, hparams), hparams, 1)
        sim.round(sim.start_from(state, hparams), hparams)


def test_a_run_and_its_report_pass_all_checkers_and_compile_no_crowd():
    population, task = classification(COUNTS)
    strict = jax.numpy_rank_promotion("raise"), jax.transfer_guard("disallow"), jax.debug_infs(True)
    with contextlib.ExitStack() as stack:
        for checker in strict:
            stack.enter_context(checker)
        with compilations() as begun:
            sim = simulation_of("fedavg", task, population, poisson(), Minibatches(4, steps=1))
            hparams = read_by(sim, **VALUES)
            state, _ = sim.round(sim.init(0, hparams), hparams)
        with compilations() as programs:
            bound = float(sim.epsilon(state))
        epsilon = sim.guarantee(state).guarantees[0].epsilon
    # Two keys, the rate of a sampler and of its trace, the first state, a round, and moves of rows.
    assert len(begun) <= 10
    assert len(programs) <= 1
    assert epsilon is not None
    assert 0 < epsilon <= bound


@pytest.mark.thorough
def test_jax_takes_a_key_in_a_mapped_branch_for_one_that_is_used_twice():
    """So epochs and passes, whose batches hold keys, cannot be checked: see `lax.cond`'s batching.

    It selects between each operand and the operand itself, for derivatives (JAX issue 1052).
    """

    def once(takes, key):
        return jax.lax.cond(takes, jax.random.uniform, lambda key: 0.0, key)

    keys, takes = jax.random.split(jax.random.key(0)), np.array([True, False])
    with jax.debug_key_reuse(True), pytest.raises(jax.errors.KeyReuseError):
        jax.jit(jax.vmap(once))(takes, keys)


MOVES = [
    lambda: jnp.zeros(3),
    lambda: jnp.ones((2, 3), bool),
    lambda: jnp.full((2, 1), 7, jnp.uint32),
    lambda: jnp.full(3, 2.0),
    lambda: jnp.zeros(2, jax.random.key(0).dtype),
    lambda: jnp.asarray(np.linspace(0, 1, 5)),
    lambda: jnp.array(np.arange(6).reshape(2, 3)),
    lambda: jnp.array([1, 2.5]),
    lambda: jnp.array(jnp.arange(3)),
    lambda: jnp.arange(4).astype(float),
    lambda: jnp.int32(-1).astype(jnp.uint32),
    lambda: jnp.arange(3).astype(jnp.bfloat16),
    lambda: jnp.arange(3, dtype=float).astype(int),
    lambda: jnp.arange(12).reshape(3, 4)[1:, 2],
    lambda: jnp.arange(12).reshape(3, 4)[1:, ::2],
    lambda: jnp.broadcast_to(jnp.arange(3), (2, 3)),
    lambda: jnp.broadcast_to(jnp.arange(2)[:, None], (2, 3)),
    lambda: jax.random.split(jax.random.key(0), 3)[1],
    lambda: jax.device_put(jnp.zeros(4), jax.devices()[1])[1],
]


@pytest.mark.thorough
@pytest.mark.parametrize("x64", [False, True])
def test_what_tests_move_by_numpy_is_what_jax_moves(x64, monkeypatch):
    def made():
        arrays = [move() for move in MOVES]
        about = [(each.aval, each.committed, each.sharding) for each in arrays]
        return about, [bits(each) for each in arrays]

    with jax.enable_x64(x64):
        by_numpy = made()
        monkeypatch.setattr(compiling, "moves_by_numpy", False)
        assert made() == by_numpy
