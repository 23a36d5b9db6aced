"""Dropout through every adapter: its law in training, and nothing random anywhere else."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.data.minibatches import Batch, ClientData, Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.models import from_equinox, from_flax, from_nnx, linear
from fedjaxsim.privacy.private_examples import GradientNoise
from fedjaxsim.privacy.samplers import full_participation
from fedjaxsim.simulation import Simulation
from fedjaxsim.tasks import augmented, softmax, squared

RATE, WIDTH = 0.3, 50


class OfLinen(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dropout(RATE, deterministic=not train)(x) + nn.Dense(WIDTH)(x)


class Deterministic(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic):
        x = nn.BatchNorm(use_running_average=deterministic)(x)
        return nn.Dropout(RATE)(x, deterministic=deterministic) + 0 * nn.Dense(WIDTH)(x)


class OfNnx(nnx.Module):
    def __init__(self, rngs):
        self.drop = nnx.Dropout(RATE, rngs=rngs)
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.drop(x) + self.dense(x)


class OfEquinox(eqx.Module):
    drop: eqx.nn.Dropout
    dense: eqx.nn.Linear

    def __init__(self, key):
        self.drop = eqx.nn.Dropout(RATE)
        self.dense = eqx.nn.Linear(WIDTH, WIDTH, key=key)

    def __call__(self, x, key):
        return self.drop(x, key=key) + self.dense(x)


MODELS = {
    "linen": lambda: from_flax(OfLinen(), (WIDTH,)),
    "nnx": lambda: from_nnx(OfNnx),
    "equinox": lambda: from_equinox(OfEquinox),
}


@pytest.mark.thorough
@pytest.mark.parametrize("library", MODELS)
def test_dropout_keeps_the_mean_and_is_off_in_evaluation(library):
    model = MODELS[library]()
    params = jax.tree.map(jnp.zeros_like, model.init(jax.random.key(0)))  # what is left is dropout
    x, weight = jnp.ones((100, WIDTH)), jnp.ones(100)
    assert model.train is not None
    assert not model.keeps_statistics
    np.testing.assert_array_equal(model.apply(params, x), x)
    np.testing.assert_array_equal(model.train(params, x, weight, None)[0], x)
    outputs = [
        np.asarray(model.train(params, x, weight, jax.random.split(jax.random.key(seed), 100))[0])
        for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    np.testing.assert_allclose(np.unique(outputs[0]), [0, 1 / (1 - RATE)], rtol=1e-6)
    # 5000 coins: five standard deviations of their mean.
    assert abs(np.mean(outputs[0] > 0) - (1 - RATE)) < 5 * np.sqrt(RATE * (1 - RATE) / 5000)
    kept = [np.mean((a > 0) & (b > 0)) for a, b in [outputs[1:], (outputs[0][1:], outputs[0][:-1])]]
    # Independent over keys, and over the rows of a batch.
    np.testing.assert_allclose(kept, (1 - RATE) ** 2, atol=5 * 0.5 / np.sqrt(4950))


@pytest.mark.thorough
def test_dropout_and_running_statistics_together():
    model = from_flax(Deterministic(), (WIDTH,))
    assert model.keeps_statistics
    assert model.train is not None
    params = model.init(jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(40, WIDTH)))
    keys = jax.random.split(jax.random.key(1), 40)
    outputs, statistics = model.train(params, x, jnp.ones(40), keys)
    normal = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)
    kept = np.asarray(outputs) != 0
    np.testing.assert_allclose(np.asarray(outputs)[kept], (normal / (1 - RATE))[kept], rtol=1e-4)
    assert 0.6 < kept.mean() < 0.8
    mean = statistics["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(mean, 0.01 * x.mean(0), rtol=1e-3, atol=1e-6)


def test_each_example_of_a_round_has_its_own_key():
    count, seen = jnp.int32(5), []
    for key in jax.random.split(jax.random.key(0), 2):  # two clients, or two rounds of one
        data = ClientData(lambda position: {"x": position}, count, key, Minibatches(2, epochs=2))

        def step(carry, batch):
            keys, at = carry
            new = jax.random.key_data(batch.keys)
            return jax.lax.dynamic_update_slice(keys, new, (at, 0)), at + 2

        keys, end = data.fold(step, (jnp.zeros((12, 2), jnp.uint32), jnp.int32(0)))
        assert end == 12  # the last minibatch of an epoch has one row and one place
        seen.extend(map(tuple, np.asarray(keys)))
        assert data.full_pass(lambda carry, batch: carry + (batch.keys is not None), 0) == 0
    assert len(set(seen)) == 24


@pytest.mark.thorough
def test_a_run_with_dropout_is_the_same_on_every_layout():
    rng = np.random.default_rng(0)
    fields = {"x": rng.normal(size=(12, WIDTH)), "y": rng.integers(0, WIDTH, 12)}
    population, ends = Population.from_flat(fields, [4, 2, 6]), []
    layouts: list[Any] = [{"chunk_map": "vmap", "chunk_size": 2}, {"chunk_map": "scan"}]
    for layout in layouts:
        algorithm = fedavg(softmax(MODELS["linen"](), WIDTH))
        sim = Simulation(
            algorithm, population, full_participation(), Minibatches(2, epochs=1), **layout
        )
        hparams = sim.hyperparameters(learning_rate=0.1)
        for seed in (0, 1):
            state, _ = sim.run(sim.init(seed, hparams), hparams, 2)
            ends.append(np.asarray(jax.tree.leaves(state.shared)[0]))
    np.testing.assert_allclose(ends[0], ends[2], rtol=1e-4, atol=1e-6)
    assert np.abs(ends[0] - ends[1]).max() > 1e-4


@pytest.mark.thorough
def test_protected_examples_draw_each_for_itself():
    drop = nn.Dropout(RATE, deterministic=False)

    def loss(w, batch):  # an example's gradient is its mask
        x = drop.apply({}, batch.fields["x"], rngs={"dropout": batch.keys[0]})
        return batch.mean(x @ w)

    task = squared(linear((WIDTH,), 1))._replace(loss=loss)
    noise = GradientNoise(16, 4, jnp.float32(100.0), jnp.float32(0.0))

    @jax.jit
    def gradients(key):
        sampled = noise.sample(key, 16, jnp.int32(16), 16)  # each row with probability 1

        def read(places):
            return {"x": jnp.ones((len(places), WIDTH))}

        rows = read, noise.read(sampled, read)
        return [noise.gradient(task, jnp.zeros(WIDTH), sampled, each, 0)[1] for each in rows]

    one, other = gradients(jax.random.key(0))
    np.testing.assert_allclose(one, other, rtol=1e-5)
    kept = np.asarray(one) * 16 * (1 - RATE)
    np.testing.assert_allclose(kept, np.round(kept), atol=1e-3)
    # 50 numbers of 16 coins: variance 16·0.21 = 3.4, with a relative deviation of 0.2; of a common
    # mask it would be 16²·0.21 = 54.
    assert 1 < np.var(kept) < 7
    assert not np.array_equal(one, gradients(jax.random.key(1))[0])


def test_examples_are_augmented_in_training_alone():
    def shifted(key, fields):
        return fields | {"x": fields["x"] + jax.random.normal(key, fields["x"].shape)}

    plain = squared(linear((1,), 1, bias=False))
    task = augmented(plain, shifted)
    x = jnp.zeros((4000, 1))
    batch = Batch({"x": x, "y": jnp.zeros(4000)}, jnp.ones(4000))
    params = {"kernel": jnp.ones((1, 1))}
    loss = jax.jit(task.loss)
    assert loss(params, batch) == 0
    assert not np.any(jax.jit(task.metrics)(params, batch)["loss"])
    keys = jax.random.split(jax.random.key(0), 4000)
    # The mean of ½N² is ½, with standard deviation 1/√2/√4000 = 0.011.
    np.testing.assert_allclose(loss(params, batch._replace(keys=keys)), 0.5, atol=0.05)
    assert task.linear is None  # the factored form reads rows
    assert plain.linear is not None
