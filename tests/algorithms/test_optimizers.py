"""Optimizers of clients and of the server, from optax."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.problems import after, coefficients, designs, gradient_descent, least_squares

from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.local import local
from fedjaxsim.algorithms.shared_model import (
    predict_with_shared,
    publish,
    published,
    server_step,
)
from fedjaxsim.algorithms.systems import SYSTEMS
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.own_code import own_modules
from fedjaxsim.privacy.mechanisms import no_release
from fedjaxsim.privacy.samplers import full_participation
from fedjaxsim.runs.parts import part_of
from fedjaxsim.runs.settings import run_config
from fedjaxsim.simulation import Simulation

FULL_BATCH = Minibatches(1000, epochs=1)


def test_every_system_takes_a_local_optimizer_or_says_why_not():
    for name, system in SYSTEMS.items():
        takes = "local_optimizer" in part_of("algorithm", name).settings
        assert takes == (not system.fixed_steps), name
    with pytest.raises(ValueError, match="mean gradients for SGD with one η"):
        run_config(algorithm="scaffold", schedule="cosine")


def test_schedules_come_from_optax():
    schedule = optax.cosine_decay_schedule(1.0, 10)
    built = optimizers.local(optax.sgd, schedule)(
        Hyperparameters(learning_rate=0.5).as_arrays(), jnp.int32(5)
    )
    update, _ = built.update(jnp.ones(1), built.init(jnp.ones(1)))
    np.testing.assert_allclose(jnp.asarray(update), [-0.25], rtol=1e-6)  # 0.5 · ½(1 + cos(π/2))


def test_the_server_optimizer_steps_along_minus_the_release():
    # With every client's update in hand, FedAdam is optax.adam on minus their mean.
    with jax.enable_x64(True):
        population, task = least_squares([6, 9])
        algorithm = fedavg(task, server_optimizer=optimizers.server(optax.adam))
        sim = Simulation(algorithm, population, full_participation(), FULL_BATCH)
        hparams = sim.hyperparameters(learning_rate=0.1, server_learning_rate=0.01)
        state = after(sim, hparams, 5)
        adam, w = optax.adam(0.01), jnp.zeros(4)
        adam_state, update = jax.jit(adam.init)(w), jax.jit(adam.update)
        for _ in range(5):
            updates = [
                gradient_descent(x, y, np.asarray(w), 0.1, 1) - np.asarray(w)
                for x, y in designs(population)
            ]
            step, adam_state = update(-np.mean(updates, axis=0), adam_state, w)
            w = np.asarray(w) + np.asarray(step)
        np.testing.assert_allclose(coefficients(state.shared.params), w, rtol=1e-10)


def test_a_learning_rate_schedule_counts_rounds():
    # η_t = 0.1 · max(0, 1 − t/4): after four rounds nothing moves.
    with jax.enable_x64(True):
        population, task = least_squares([8])
        schedule = optax.linear_schedule(1.0, 0.0, 4)
        algorithm = local(task, local_optimizer=optimizers.local(optax.sgd, schedule))
        sim = Simulation(algorithm, population, full_participation(), FULL_BATCH, no_release())
        hparams = sim.hyperparameters(learning_rate=0.1)
        state = after(sim, hparams, 6)
        (x, y), *_ = designs(population)
        w = np.zeros(4)
        for t in range(6):
            w = gradient_descent(x, y, w, 0.1 * max(0, 1 - t / 4), 1)
        np.testing.assert_allclose(coefficients(state.personal)[0], w, rtol=1e-10)


@pytest.mark.thorough
def test_the_local_optimizer_is_any_optax_transformation_and_starts_afresh():
    with jax.enable_x64(True):
        population, task = least_squares([8])
        algorithm = local(task, local_optimizer=optimizers.local(optax.adam))
        sim = Simulation(
            algorithm, population, full_participation(), Minibatches(8, epochs=2), no_release()
        )
        hparams = sim.hyperparameters(learning_rate=0.05)
        state = after(sim, hparams, 3)
        (x, y), *_ = designs(population)
        w, adam = jnp.zeros(4), optax.adam(0.05)
        for _ in range(3):
            adam_state = adam.init(w)
            for _ in range(2):
                step, adam_state = adam.update(jnp.asarray(x.T @ (x @ w - y) / 8), adam_state, w)
                w = w + jnp.asarray(step)
        np.testing.assert_allclose(coefficients(state.personal)[0], w, rtol=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param("momentum", marks=pytest.mark.thorough), "adam"])
def test_momentum_and_weight_decay_are_those_of_pytorch(name):
    # torch.optim.SGD and Adam: the decay joins the gradient, before the moments.
    with jax.enable_x64(True):
        population, task = least_squares([8])
        algorithm = local(task, local_optimizer=name)
        batches = Minibatches(8, epochs=3)
        sim = Simulation(algorithm, population, full_participation(), batches, no_release())
        own = {"momentum": 0.6} if name == "momentum" else {}
        hparams = sim.hyperparameters(learning_rate=0.05, weight_decay=0.3, **own)
        (x, y), *_ = designs(population)
        w, m, v = np.zeros(4), np.zeros(4), np.zeros(4)
        for t in range(1, 4):
            g = x.T @ (x @ w - y) / 8 + 0.3 * w
            if name == "momentum":
                m = 0.6 * m + g
                w = w - 0.05 * m
                continue
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            w = w - 0.05 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        found = coefficients(after(sim, hparams, 1).personal)[0]
        np.testing.assert_allclose(found, w, rtol=1e-9)


SCHEDULES: list[Any] = [
    optax.constant_schedule(1.0),
    optax.cosine_decay_schedule(1.0, 10),
    optax.exponential_decay(1.0, 10, 0.5),
    optax.linear_schedule(1.0, 0.0, 10),
    optax.piecewise_constant_schedule(1.0, {3: 0.5}),
    optax.polynomial_schedule(1.0, 0.0, 2, 10),
    optax.warmup_cosine_decay_schedule(0.0, 1.0, 2, 10),
    optax.warmup_exponential_decay_schedule(0.0, 1.0, 2, 10, 0.5),
    optax.join_schedules([optax.exponential_decay(1.0, 2, 0.5), optax.constant_schedule(0.1)], [4]),
]
OPTIMIZERS: list[Any] = [
    optax.adamw, optax.lamb, optax.lion, optax.nadam, optax.novograd, optax.radam, optax.rmsprop,
    functools.partial(optax.sgd, momentum=0.9, nesterov=True),
    lambda learning_rate: optax.chain(optax.clip(1.0), optax.adam(learning_rate)),
]  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_schedule_of_optax_makes_an_optimizer_without_code_of_ones_own(schedule):
    assert own_modules(optimizers.local(optax.sgd, schedule)) == []
    rate = optimizers.local(optax.sgd, schedule)(Hyperparameters(learning_rate=2.0), jnp.array(1))
    update, _ = rate.update(jnp.ones(()), rate.init(jnp.ones(())))
    np.testing.assert_allclose(np.asarray(update), -2.0 * schedule(1), rtol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer_of_optax_is_searched_for_code_of_ones_own(optimizer):
    made = optimizers.local(optimizer, optax.exponential_decay(1.0, 10, 0.5))
    assert own_modules(made) in ([], [__name__])  # the lambda is this file's
    assert made(Hyperparameters(learning_rate=0.1), jnp.array(1)).init(jnp.ones(2)) is not None


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make",
    [optax.adam, optax.adamw, optax.rmsprop, optax.adabelief, optax.adagrad, optimizers.fedadam],
)
def test_derivatives_exist_where_a_coordinate_never_moves(make):
    """Of steps along (w₀ − 1, 0), whose second moment stays 0, beside central differences."""

    def last(rate):
        optimizer = make(rate)

        def step(carry, _):
            w, state = carry
            gradient = jnp.stack([w[0] - 1, 0 * w[1]])
            update, state = optimizers.step_with(optimizer, gradient, state, w)
            return (optax.apply_updates(w, update), state), None

        w = jnp.array([0.3, 2.0])
        (w, _), _ = jax.lax.scan(step, (w, optimizer.init(w)), length=3)
        return jnp.sum(jnp.asarray(w) ** 2)

    with jax.enable_x64(True):
        expected = (last(0.1 + 1e-5) - last(0.1 - 1e-5)) / 2e-5
        np.testing.assert_allclose(jax.grad(last)(0.1), expected, rtol=1e-6)
        np.testing.assert_allclose(jax.jvp(last, (0.1,), (1.0,))[1], expected, rtol=1e-6)


MADE: Any = optax.adam(1e-3)


@pytest.mark.parametrize("side", ["local", "server"])
@pytest.mark.parametrize(
    ("optimizer", "got"),
    [(MADE, "whose learning rate is fixed"), (optax.adam, "factory adam"), (3, "got 3")],
)
def test_an_optimizer_without_a_hyperparameter_for_its_rate_is_refused(side, optimizer, got):
    _, task = least_squares([2])
    with pytest.raises(ValueError, match=rf"{side}_optimizer must be.*optimizers\.{side}.*{got}"):
        fedavg(task, **{f"{side}_optimizer": optimizer})


def free(learning_rate):
    """Schedule-free SGD; its average is between the points where gradients are taken."""
    return optax.contrib.schedule_free_sgd(learning_rate, b1=0.8)


def test_a_schedule_free_server_publishes_its_average():
    build = optimizers.server(free)
    hparams = Hyperparameters(server_learning_rate=0.5).as_arrays()
    shared, step = publish({"w": jnp.zeros(2)}, build, hparams), jax.jit(server_step(build))
    y: Any = {"w": jnp.zeros(2)}
    optimizer: Any = optax.contrib.schedule_free_sgd(0.5, b1=0.8)

    @jax.jit
    def expected(release, state, y):
        update, state = optimizer.update({"w": -release}, state, y)
        y = optax.apply_updates(y, update)
        return state, y, optax.contrib.schedule_free_eval_params(state, y)

    state, x = jax.jit(optimizer.init)(y), y
    for release in ([1.0, 0.0], [0.0, 2.0], [1.0, 1.0]):
        shared = step(shared, {"w": jnp.array(release)}, hparams, jnp.int32(0))
        state, y, x = expected(jnp.array(release), state, y)
    np.testing.assert_allclose(shared.params["w"], y["w"], rtol=1e-6)  # where clients start
    for model in (published(shared), predict_with_shared(shared, (), hparams, jnp.int32(0))):
        np.testing.assert_allclose(model["w"], x["w"], rtol=1e-6)
    assert not np.allclose(x["w"], y["w"], rtol=1e-2)
