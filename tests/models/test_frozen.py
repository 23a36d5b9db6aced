"""Models with a frozen part: only the trained part is kept, sent and noised."""

import dataclasses
import functools
import re
from typing import Any

import chex
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.problems import classification

import fedjaxsim as fjs
from fedjaxsim.engine.shape_bytes import bytes_of
from fedjaxsim.models import from_equinox, from_flax, from_nnx, in_bfloat16, linear, trainable
from fedjaxsim.simulation_batch import SimulationBatch
from fedjaxsim.tasks import softmax

FEATURES, WIDTH, CLASSES, RANK = 4, 64, 3, 2
POPULATION, _ = classification([12, 9, 15], FEATURES, CLASSES)
VALUES = {"learning_rate": 0.1, "clip": 1.0, "noise_multiplier": 1.0}
PRETRAINED = np.random.default_rng(0).normal(size=(FEATURES, WIDTH)).astype(np.float32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES, name="out")(nn.relu(nn.Dense(WIDTH, name="hidden")(x)))


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.LoRALinear(FEATURES, WIDTH, lora_rank=RANK, use_bias=False, rngs=rngs)
        self.hidden.kernel[...] = PRETRAINED
        self.out = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


class Equinox(eqx.Module):
    hidden: jax.Array
    out: jax.Array

    def __call__(self, x):
        return jax.nn.relu(x @ self.hidden) @ self.out


@functools.cache
def whole():
    model = from_flax(Net(), (FEATURES,), "out")
    return model, jax.jit(model.init)(jax.random.key(7))


def simulation(model, population=POPULATION, sampling=None, **settings):
    sampling = fjs.full_participation() if sampling is None else sampling
    algorithm, batches = fjs.pmtl(softmax(model, CLASSES)), fjs.Minibatches(5, steps=2)
    return fjs.Simulation(algorithm, population, sampling, batches, **settings)


@functools.cache
def of_head():
    """The frozen hidden layer, and a simulation in which clients train the output layer."""
    model, params = whole()
    part = trainable(model, lambda name: name.startswith("out/"), params)
    sim = simulation(part)
    return sim, sim.hyperparameters(**VALUES)


def test_rows_of_clients_as_frozen_weights_are_refused():
    rows = np.array(POPULATION.rows(1)["x"][:CLASSES])
    params = {"kernel": rows, "bias": np.zeros(CLASSES)}
    part = trainable(linear((FEATURES,), CLASSES), lambda name: name == "bias", params)
    with pytest.raises(ValueError, match="with rows of the clients' 'x'"):
        simulation(part)


def test_the_guarantee_assumes_that_the_first_weights_hold_no_data():
    sim, hparams = of_head()
    state, _ = sim.round(sim.init(0, hparams), hparams)
    assert any("starts from hold nothing" in each for each in sim.guarantee(state).assumed)
    assert not any("starts from" in each for each in simulation(whole()[0]).public)


def test_only_the_trained_part_is_kept_and_sent():
    sim, hparams = of_head()
    hparams, trained = hparams.as_arrays(), CLASSES * (WIDTH + 1)
    message = sim.message_shapes(jax.random.key(0), hparams)
    assert sum(leaf.size for leaf in jax.tree.leaves(message)) == trained
    state, rows = sim.init(0, hparams), sim.placed
    assert bytes_of(state.personal) == 4 * trained * POPULATION.num_clients
    chex.assert_trees_all_close(
        rows["train"].frozen, {f"hidden/{k}": v for k, v in whole()[1]["hidden"].items()}
    )
    for function, given in (("step", "train"), ("evaluate", "test")):
        text = getattr(sim.compiled, function).lower(state, hparams, rows[given]).as_text()
        constants = re.findall(r"constant dense<([^>]*)>", text)
        assert max(map(len, constants)) < FEATURES * WIDTH  # characters


@pytest.mark.thorough
def test_a_round_is_that_of_a_model_whose_frozen_part_gets_no_gradient():
    """On features of the frozen layer, a head is a linear model."""
    sim, hparams = of_head()
    _, params = whole()
    hidden = params["hidden"]
    x = np.asarray(jax.nn.relu(POPULATION.fields["x"] @ hidden["kernel"] + hidden["bias"]))
    start = {"kernel": params["out"]["kernel"].T, "bias": params["out"]["bias"]}
    plain = linear((WIDTH,), CLASSES)._replace(init=lambda key: start, features=None)
    fields = POPULATION.fields | {"x": x}
    represented = dataclasses.replace(POPULATION, fields=fields, columns={})
    other = simulation(plain, represented)
    quiet = hparams.replace(noise_multiplier=0.0)
    one, _ = sim.round(sim.init(0, quiet), quiet)
    two, _ = other.round(other.init(0, quiet), quiet)
    kernels = np.asarray(one.personal["out"]["kernel"]).swapaxes(1, 2)
    np.testing.assert_allclose(kernels, two.personal["kernel"], rtol=1e-4, atol=1e-6)
    losses = (s.evaluate(t, quiet).values["loss"] for s, t in ((sim, one), (other, two)))
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.thorough
def test_devices_streams_and_batches_share_the_frozen_part():
    sampling = fjs.poisson(0.7)
    model, results = of_head()[0].task.model, []
    for devices, streamed in ((None, False), (jax.devices()[:2], False), (None, True)):
        sim = simulation(model, sampling=sampling, devices=devices, streamed=streamed)
        hparams = sim.hyperparameters(**VALUES)
        state, history = sim.run(sim.init(3, hparams), hparams, 2)
        results.append((state.personal, history[-1].evaluation.values["loss"]))
    sweep = SimulationBatch(simulation(model, sampling=sampling), [hparams], jax.devices()[:1])
    state, history = sweep.run(sweep.init(3), 2)
    one = jax.tree.map(lambda leaf: leaf[:, 0], state.personal)
    results.append((one, history[-1].evaluation.values["loss"][:, 0]))
    for other in results[1:]:
        chex.assert_trees_all_close(results[0], other, rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
def test_low_rank_adapters_of_nnx_are_trained_alone():
    model = trainable(from_nnx(Adapted, "out"), lambda name: "lora" in name)
    params, again = model.init(jax.random.key(1)), model.init(jax.random.key(2))
    shapes = {"lora_a": (FEATURES, RANK), "lora_b": (RANK, WIDTH)}
    assert jax.tree.map(jnp.shape, params["hidden"]["lora"]) == shapes
    assert len(jax.tree.leaves(params)) == 2
    assert np.any(params["hidden"]["lora"]["lora_a"] != again["hidden"]["lora"]["lora_a"])
    assert model.output_layer is None
    key = jax.random.key(3)
    params = jax.tree.map(lambda leaf: jax.random.normal(key, leaf.shape), params)
    fixed = Adapted(nnx.Rngs(0))
    x = jax.random.normal(key, (5, FEATURES))

    def hand(params, x):
        a, b = params["hidden"]["lora"].values()
        return fixed.out(jax.nn.relu(x @ PRETRAINED + x @ a @ b))

    np.testing.assert_allclose(model.apply(params, x), hand(params, x), rtol=1e-4, atol=1e-4)
    found, expected = (
        jax.grad(lambda params, f=f: jnp.sum(jnp.sin(f(params, x))))(params)
        for f in (model.apply, hand)
    )
    chex.assert_trees_all_close(found, expected, rtol=1e-3, atol=1e-3)


def make_equinox(key):
    return Equinox(jnp.asarray(PRETRAINED), jax.random.normal(key, (WIDTH, CLASSES)))


def test_a_part_of_an_equinox_module_is_trained_from_each_seed():
    model = trainable(from_equinox(make_equinox), lambda name: name == "out")
    params = model.init(jax.random.key(1))
    x = jnp.ones((2, FEATURES))
    assert params["hidden"] is None
    np.testing.assert_array_equal(params["out"], make_equinox(jax.random.key(1)).out)
    expected = jax.nn.relu(x @ PRETRAINED) @ params["out"]
    np.testing.assert_allclose(model.apply(params, x), expected, rtol=1e-5)


def test_all_of_a_frozen_model_is_rounded_to_bfloat16():
    model, params = whole()
    part = trainable(model, lambda name: "out" in name, params)
    x = np.random.default_rng(0).normal(size=(5, FEATURES)).astype(np.float32)
    found = jax.jit(in_bfloat16(part).apply)(part.init(jax.random.key(0)), x)
    np.testing.assert_array_equal(found, jax.jit(in_bfloat16(model).apply)(params, x))
    assert found.dtype == jnp.float32


def test_an_output_layer_is_one_while_all_of_it_is_trained():
    model, params = whole()
    assert trainable(model, lambda name: name[:3] == "out", params).output_layer == "out"
    part = trainable(model, lambda name: name == "out/bias", params)
    assert part.output_layer is None
    x = jnp.ones((2, FEATURES))
    assert part.representation is not None
    assert model.representation is not None
    represented = part.representation(part.init(jax.random.key(0)), x)
    np.testing.assert_allclose(represented, model.representation(params, x), rtol=1e-5)
    for bad, message in ((model, "hidden/kernel"), (part, "already")):
        with pytest.raises(ValueError, match=message):
            trainable(bad, lambda name: False, params)


MEAN, VAR = np.array([[1, -2, 0.5, 3], [4, 1, 0.25, 9]], np.float32)


class LinenBackbone(nn.Module):
    learns: bool | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=not self.learns, epsilon=0, name="bn")(x)
        return nn.Dense(CLASSES, name="out")(x)


class NnxBackbone(nnx.Module):
    def __init__(self, rngs):
        self.bn = nnx.BatchNorm(FEATURES, epsilon=0, rngs=rngs)
        self.bn.mean[...], self.bn.var[...] = MEAN, VAR
        self.out = nnx.Linear(FEATURES, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.out(self.bn(x))


class EquinoxBackbone(eqx.Module):
    bn: eqx.nn.BatchNorm
    out: eqx.nn.Linear

    def __init__(self, key):
        self.bn = eqx.nn.BatchNorm(FEATURES, "batch", 0.0, mode="batch")
        self.out = eqx.nn.Linear(FEATURES, CLASSES, key=key)

    def __call__(self, x, state):
        x, state = self.bn(x, state)
        return self.out(x), state


def linen_backbone():
    model = from_flax(LinenBackbone(), (FEATURES,), "out")
    params = model.init(jax.random.key(0))
    params["statistics"]["bn"] |= {"mean": MEAN, "var": VAR}
    return trainable(model, lambda name: name.startswith("out"), params)


def nnx_backbone():
    return trainable(from_nnx(NnxBackbone, "out"), lambda name: name.startswith("out"))


def equinox_backbone():
    def make(key):
        module, state = eqx.nn.make_with_state(EquinoxBackbone)(key)
        bn: Any = module.bn
        state = state.set(bn.batch_counter, jnp.array(10**6))  # no correction for its start
        return module, state.set(bn.batch_state_index, (jnp.array(MEAN), jnp.array(VAR)))

    return trainable(from_equinox(make, "out"), lambda name: name.startswith("out"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make",
    [
        linen_backbone,
        pytest.param(nnx_backbone, marks=pytest.mark.thorough),
        pytest.param(equinox_backbone, marks=pytest.mark.thorough),
    ],
)
def test_a_pretrained_backbone_with_batch_norm_stays_fixed_below_a_trained_head(make):
    model = make()
    params = model.init(jax.random.key(1))
    bias, kernel = jax.tree.leaves(params)  # of the head alone
    if kernel.ndim == 1:  # equinox: bias after weight
        bias, kernel = kernel, bias
    kernel = kernel if len(kernel) == FEATURES else kernel.T
    x = np.random.default_rng(1).normal(size=(5, FEATURES)).astype(np.float32)
    expected = (x - MEAN) / np.sqrt(VAR) @ kernel + bias
    np.testing.assert_allclose(model.apply(params, x), expected, rtol=1e-4, atol=1e-5)
    sim = simulation(model)
    hparams = sim.hyperparameters(**VALUES)
    state, _ = sim.round(sim.init(0, hparams), hparams)
    assert {leaf.shape[1:] for leaf in jax.tree.leaves(state.personal)} == {
        leaf.shape for leaf in jax.tree.leaves(params)
    }
    assert model.frozen is not None
    assert any(np.array_equal(leaf, MEAN) for leaf in model.frozen.weights.values())


def test_a_batch_norm_is_frozen_if_no_call_changes_it():
    with pytest.raises(ValueError, match=r"Cannot update variable .*; its call must take train"):
        from_flax(LinenBackbone(learns=True), (FEATURES,), "out")
    model = from_flax(LinenBackbone(), (FEATURES,), "out")
    params = jax.jit(model.init)(jax.random.key(0))
    with pytest.raises(ValueError, match="running statistics"):
        trainable(model, lambda name: True, params)
