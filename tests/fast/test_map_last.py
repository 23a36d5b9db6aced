"""`map_last` is `jax.vmap` with another layout: the same numbers for every kind of function."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import classification, least_squares, read_by

from fedjaxsim import fedavg, pmtl, ppsgd
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.engine.settings_axis import over_settings, stack, varying
from fedjaxsim.fast import map_last as module
from fedjaxsim.fast.map_last import map_last
from fedjaxsim.privacy.sampling import poisson
from fedjaxsim.simulation import Simulation

S = 5


def loop(m, u, s):
    """Two numbers are carried, of which one depends on a mapped value only after a step."""

    def body(carry, row):
        a, b = carry
        return (a * 0.5 + b.sum(), b + m[0] * row), (a, row)

    (a, b), (history, rows) = jax.lax.scan(body, (0.0, u[0]), u)
    return a, b, history, rows, s


def choice(m, u, s):
    by_all = jax.lax.cond(u[0, 0] > 0, lambda x: (x * s, u), lambda x: (x, u + 1.0), m)
    by_one = jax.lax.cond(s > 0, lambda x: x + 1.0, lambda x: x * 2.0, m)
    return by_all, by_one


FUNCTIONS = {
    "elementwise": lambda m, u, s: jnp.tanh(m * s + u.sum()) / (1 + jnp.square(m)) - jnp.exp(s) * m,
    "select by one number": lambda m, u, s: (
        jnp.where(s > 0, m, -m) + jnp.where(u[0, 0] > 0, s, 1.0)
    ),
    "clamp": lambda m, u, s: jnp.clip(m, -(s**2), 0.3),
    "reductions": lambda m, u, s: (m.sum(0), m.max(1), jnp.argmin(m), jnp.mean(m * u[:4].T)),
    "unmapped times mapped": lambda m, u, s: u @ m,
    "mapped times unmapped": lambda m, u, s: m.T @ u.T,
    "with batch axes": lambda m, u, s: jnp.einsum("bij,bj->bi", jnp.stack([u, -u]), m.T[:2]),
    "mapped first, with batch axes": lambda m, u, s: jnp.einsum(
        "bj,bij->bi", m.T[:2] * s, jnp.stack([u, -u])
    ),
    "shapes": lambda m, u, s: (m.reshape(-1).T, m[None, 1], m.transpose(), jnp.stack([m, m])),
    "gradient": lambda m, u, s: jax.grad(lambda w: jnp.sum(jax.nn.softplus(u @ w) ** 2))(m),
    "loop": loop,
    "dynamic loop": lambda m, u, s: jax.lax.fori_loop(
        0, jnp.argmax(u[0]) + 2, lambda i, x: x * 0.5 + s, m
    ),
    "choice": choice,
    "other primitives": lambda m, u, s: (jnp.cumsum(m, 0), jnp.sort(m, 1), m[jnp.argmax(m[:, 0])]),
    "custom derivatives": lambda m, u, s: (jax.nn.relu(m - s), jax.nn.logsumexp(m, axis=0)),
    "constant": lambda m, u, s: (jnp.ones(3), u, 2.0 * u),
    "product of mapped": lambda m, u, s: (m @ m.T + s, u),
}


def own_lengths(m, u, s):
    """The settings go through a loop a different number of times."""
    steps = jnp.int32(3 * jnp.abs(s))
    return jax.lax.fori_loop(0, steps, lambda i, x: x * 0.5 + u[0, 0], m)


FUNCTIONS["own lengths"] = own_lengths


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_are_those_of_vmap(name, monkeypatch):
    if name != "product of mapped":
        monkeypatch.setattr(module, "_by_front", None)  # calling None is an error
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        m, u, s = rng.normal(size=(3, 4, S)), rng.normal(size=(6, 3)), rng.normal(size=S)
        axes = (-1, None, 0)
        u = {"loop": rng.normal(size=(6, 4))}.get(name, u)
        ours = jax.jit(map_last(FUNCTIONS[name], axes, S))(m, u, s)
        theirs = jax.jit(jax.vmap(FUNCTIONS[name], in_axes=axes, out_axes=-1))(m, u, s)
        chex.assert_trees_all_equal_dtypes(ours, theirs)
        chex.assert_trees_all_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_axes_may_be_given_leaf_by_leaf_and_keys_are_not_mapped():
    def function(tree, key):
        return tree["a"] * jax.random.normal(key, (3,)) + tree["b"]

    tree, key = {"a": jnp.ones((3,)), "b": jnp.arange(float(S))}, jax.random.key(0)
    axes = ({"a": None, "b": 0}, None)
    ours = map_last(function, axes, S)(tree, key)
    np.testing.assert_allclose(
        ours, jax.vmap(function, in_axes=axes, out_axes=-1)(tree, key), rtol=1e-6
    )
    assert ours.shape == (3, S)


def test_the_axis_stays_last_in_products_and_sums(monkeypatch):
    # Nothing of a linear model's step may fall back to `jax.vmap`.
    def refuse(*arguments):
        raise AssertionError(f"fell back to vmap for {arguments[0].primitive}")

    monkeypatch.setattr(module, "_by_vmap", refuse)

    def step(w, x, rate):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.square(x @ w)))(w)
        norm = jnp.sqrt(jnp.sum(gradient**2))
        return w - rate * gradient * jnp.minimum(1.0, 1.0 / norm), loss

    x, w, rate = jnp.ones((4, 3)), jnp.ones((3, 2, S)), jnp.linspace(0.1, 1.0, S)
    jaxpr: Any = jax.make_jaxpr(map_last(step, (-1, None, 0), S))(w, x, rate)
    products = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert [eqn.outvars[0].aval.shape for eqn in products] == [(4, 2, S), (3, 2, S)]


@pytest.mark.parametrize(
    ("algorithm", "minibatches"),
    [
        (pmtl, Minibatches(4, epochs=2)),
        (ppsgd, Minibatches(4, steps=1)),
        (fedavg, Minibatches(4, steps=2, passes=2)),
    ],
)
def test_sweeps_of_linear_models_are_not_left_to_vmap(algorithm, minibatches, monkeypatch):
    # Whatever this version of JAX writes into its equations: loops, branches and all products have
    # rules that understand it. (The picks of labels are gathers, which have none.)
    left = []
    by_vmap = module._by_vmap

    def note(equation, inputs, size):
        left.append(equation.primitive.name)
        return by_vmap(equation, inputs, size)

    monkeypatch.setattr(module, "_by_vmap", note)
    monkeypatch.setattr(module, "_by_front", None)  # calling None is an error
    population, task = (least_squares if algorithm is ppsgd else classification)([5, 9, 17])
    sim = Simulation(algorithm(task), population, poisson(0.6), minibatches)
    settings = [
        read_by(sim, learning_rate=eta, lam=lam, clip_norm=c, personalization=a)
        for eta, lam, c, a in [(0.1, 0.0, 1.0, 0.0), (0.2, 0.3, 2.0, 1.0)]
    ]
    axes = varying(settings)
    hparams, program = stack(settings, axes).as_arrays(), over_settings(sim.program, axes, 2)

    def run(key, hparams, rows):
        state, metrics = program.rounds(program.init(key, hparams), hparams, rows, rounds=2)
        return metrics, program.evaluate(state, hparams, rows)

    metrics, _ = jax.eval_shape(run, jax.random.key(0), hparams, sim.rows["train"])
    assert metrics["loss"].shape == (2, 2)
    assert set(left) <= {"gather"}


def lost_parameter(equation, inputs, size):
    return [equation.params["no such parameter"]]


def unmapped_result(equation, inputs, size):
    return [module._Operand(operand.value[..., 0], True) for operand in inputs[:1]]


@pytest.mark.parametrize("rule", [lost_parameter, unmapped_result])
def test_vmap_does_what_a_rule_does_not_understand(rule, monkeypatch):
    used = []
    by_front = module._by_front
    monkeypatch.setattr(module, "_by_front", lambda *given: used.append(1) or by_front(*given))
    monkeypatch.setitem(module._RULES, "reduce_sum", rule)
    m = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    np.testing.assert_array_equal(map_last(jnp.sum, (-1,), 3)(m), m.sum(axis=0))
    assert used == [1]


def test_a_primitive_without_a_rule_is_mapped_alone(monkeypatch):
    monkeypatch.setattr(module, "_by_front", None)
    monkeypatch.delitem(module._RULES, "reduce_sum")
    m = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    np.testing.assert_array_equal(map_last(jnp.sum, (-1,), 3)(m), m.sum(axis=0))


def test_errors_of_the_function_are_its_own():
    def wrong(m):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        map_last(wrong, (-1,), 3)(jnp.zeros((4, 3)))
