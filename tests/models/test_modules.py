"""Modules of flax and equinox: the functions that one would write by hand, or refused."""

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
from fedjaxsim.models import from_equinox, from_flax, from_nnx, linear, mlp
from fedjaxsim.tasks import softmax

FEATURES, WIDTH, CLASSES = 4, 5, 3


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES, name="out")(nn.relu(nn.Dense(WIDTH, name="hidden")(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(FEATURES, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


class Equinox(eqx.Module):
    hidden: eqx.nn.Linear
    out: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.hidden = eqx.nn.Linear(FEATURES, WIDTH, key=first)
        self.out = eqx.nn.Linear(WIDTH, CLASSES, key=second)

    def __call__(self, x):
        return self.out(jax.nn.relu(self.hidden(x)))


def by_hand(params, x):
    h = jax.nn.relu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return h @ params["out"]["kernel"] + params["out"]["bias"]


def same(params):
    return params


def transposed(params):
    """Equinox's layers hold (outputs, inputs), under another name."""
    return {k: {"kernel": v["weight"].T, "bias": v["bias"]} for k, v in params.items()}


MODELS = {
    "flax": (lambda: from_flax(Linen(), (FEATURES,), "out"), same),
    "nnx": (lambda: from_nnx(Nnx, "out"), same),
    "equinox": (lambda: from_equinox(Equinox, "out"), transposed),
}


def linear_model():
    return linear((FEATURES,), CLASSES)


def mlp_model():
    return mlp((FEATURES,), CLASSES, (WIDTH,))


@pytest.fixture(params=MODELS, scope="module")
def library(request):
    make, names = MODELS[request.param]
    model = make()
    return model._replace(init=jax.jit(model.init)), names


def test_a_module_is_the_model_written_by_hand(library):
    model, names = library
    params = model.init(jax.random.key(1))
    ours = names(params)
    shapes = {"kernel": (FEATURES, WIDTH), "bias": (WIDTH,)}
    assert jax.tree.map(jnp.shape, ours)["hidden"] == shapes
    assert jax.tree.map(jnp.shape, ours)["out"] == {"kernel": (WIDTH, CLASSES), "bias": (CLASSES,)}
    assert len(jax.tree.leaves(params)) == 4
    x = np.random.default_rng(0).normal(size=(6, FEATURES)).astype(np.float32)

    def outputs_and_gradient(apply, params):
        gradient = jax.grad(lambda w: jnp.sum(jnp.sin(apply(w, x))))
        return jax.jit(lambda params: (apply(params, x), gradient(params)))(params)

    found, gradient = outputs_and_gradient(model.apply, params)
    expected, by_rule = outputs_and_gradient(by_hand, ours)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(names(gradient), by_rule, rtol=1e-4, atol=1e-6)


def test_a_module_starts_from_the_key_that_it_is_given(library):
    model, _ = library
    one, other = (model.init(jax.random.key(seed))["out"] for seed in (0, 1))
    again = model.init(jax.random.key(0))["out"]
    name = "kernel" if "kernel" in one else "weight"
    np.testing.assert_array_equal(one[name], again[name])
    assert np.any(one[name] != other[name])


@pytest.mark.parametrize("make", [*(make for make, _ in MODELS.values()), linear_model, mlp_model])
def test_parameters_and_gradients_have_the_precision_that_jax_has(make):
    x = np.ones((2, FEATURES))
    for enabled, kind in ((False, "float32"), (True, "float64")):
        with jax.enable_x64(enabled):
            model = make()
            params = jax.eval_shape(model.init, jax.random.key(0))
            slope = jax.eval_shape(jax.grad(lambda w, m=model: jnp.sum(m.apply(w, x))), params)
        assert {leaf.dtype for leaf in jax.tree.leaves((params, slope))} == {jnp.dtype(kind)}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "library",
    [*(pytest.param(name, marks=pytest.mark.thorough) for name in ("flax", "equinox")), "nnx"],
    indirect=True,
)
def test_a_module_trains_under_noise_and_keeps_its_head(library):
    model, _ = library
    population, _ = classification([12, 9, 15], FEATURES, CLASSES)
    task = softmax(model, CLASSES)
    sim = fjs.Simulation(
        fjs.dpfedmtl(task), population, fjs.full_participation(), fjs.Minibatches(5, steps=4)
    )
    hparams = sim.hyperparameters(learning_rate=0.5, clip=1.0, noise_multiplier=0.1)
    state = sim.init(0, hparams)
    start = np.mean(sim.evaluate(state, hparams, "train").values["loss"])
    for _ in range(8):
        state, _ = sim.round(state, hparams)
    end = np.mean(sim.evaluate(state, hparams, "train").values["loss"])
    assert end < 0.8 * start
    # The output layer is the clients' own; what is published lacks it.
    assert "out" in state.personal
    assert "hidden" in state.shared.trunk.params


class Statistics(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(nn.Dense(2)(x))


class DropsInTraining(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(2)(x))


class Drops(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(nn.Dense(2)(x))


class Counts(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.calls = nnx.Linear(2, 2, rngs=rngs), nnx.Variable(jnp.zeros(()))


def dropping(rngs):
    return nnx.Sequential(nnx.Linear(2, 2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))


class NoKey(eqx.Module):
    drop: eqx.nn.Dropout

    def __init__(self, key):
        self.drop = eqx.nn.Dropout(0.5)

    def __call__(self, x):
        return self.drop(x)


def in_equinox(*layers):
    return lambda key: eqx.nn.Sequential([eqx.nn.Linear(2, 2, key=key), *layers])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_flax(Statistics(), (2,)), "Statistics .*BatchNorm.*train"),
        (lambda: from_flax(Drops(), (2,)), "Drops cannot be evaluated: .*train or deterministic"),
        (lambda: from_nnx(Counts), "Counts .*Variable.*GroupNorm"),
        (
            lambda: from_equinox(in_equinox(eqx.nn.BatchNorm(2, "b", mode="batch"))),
            "Sequential .*StateIndex.*GroupNorm",
        ),
        (lambda: from_equinox(NoKey), "NoKey has dropout; its call must take key"),
    ],
)
def test_what_is_more_than_parameters_is_refused_with_what_to_use_instead(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_dropout_that_is_switched_off_is_none():
    model = from_equinox(in_equinox(eqx.nn.Dropout(0.5, inference=True)))
    params = model.init(jax.random.key(0))
    layer = params["layers"]["0"]
    x = jnp.ones((1, 2))
    np.testing.assert_allclose(model.apply(params, x), x @ layer["weight"].T + layer["bias"])


def test_a_module_of_tokens_is_made_with_integers():
    model = from_flax(nn.Embed(7, 2), (3,), dtype=jnp.int32)
    params = model.init(jax.random.key(0))
    np.testing.assert_array_equal(
        model.apply(params, jnp.array([[1, 0, 6]])), params["embedding"][jnp.array([[1, 0, 6]])]
    )
