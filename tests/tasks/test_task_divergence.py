"""The divergence of predictions, against the definition of the Kullback–Leibler divergence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjaxsim.data.minibatches import Batch
from fedjaxsim.models.model import linear
from fedjaxsim.tasks.task import known_regression, logistic, one_vs_all, softmax, squared

B, D, C = 5, 4, 3


def categories(a, b):
    p, q = (jnp.exp(z) / jnp.exp(z).sum(-1, keepdims=True) for z in (a, b))
    return (p * jnp.log(p / q)).sum(-1)


def coins(a, b):
    p, q = (1 / (1 + jnp.exp(-z)) for z in (a, b))
    return (p * jnp.log(p / q) + (1 - p) * jnp.log((1 - p) / (1 - q))).sum(-1)


def normals(a, b):
    """E log(p/q) of normal variables of variance 1 is half the square of their distance."""
    return 0.5 * ((a - b) ** 2).sum(-1)


TASKS = {
    "softmax": (lambda model: softmax(model, C), C, categories),
    "logistic": (logistic, 1, coins),
    "one-vs-all": (lambda model: one_vs_all(model, C), C, normals),
    "squared": (squared, 1, normals),
    "known regression": (lambda model: known_regression(D), 1, normals),
}


def problem(name):
    make, outputs, kl = TASKS[name]
    model = linear((D,), outputs, bias=False)
    x, w, other = (
        jax.random.normal(key, shape)
        for key, shape in zip(
            jax.random.split(jax.random.key(0), 3),
            [(B, D), (outputs, D), (outputs, D)],
            strict=True,
        )
    )
    return make(model), kl, x, {"kernel": w}, {"kernel": other}


@pytest.mark.parametrize("name", TASKS)
def test_it_and_its_gradient_are_those_of_the_definition(name):
    with jax.enable_x64(True):
        task, kl, x, w, other = problem(name)
        batch = Batch({"x": x}, jnp.ones(B))

        def divergence(w, other):
            return task.divergence(w, other, batch)

        def defined(w, other):
            a, b = x @ w["kernel"].T, x @ other["kernel"].T
            return kl(a, b) + kl(b, a)

        def mean_of(function):
            return lambda w: function(w, other).mean()

        found, expected = (
            jax.jit(lambda w, f=function: (f(w, other), jax.grad(mean_of(f))(w)))(w)
            for function in (divergence, defined)
        )
        assert found[0].shape == (B,)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-12)
        np.testing.assert_allclose(found[1]["kernel"], expected[1]["kernel"], rtol=1e-10)
        np.testing.assert_array_equal(jax.jit(divergence)(w, w), np.zeros(B))


@pytest.mark.parametrize("name", ["softmax", "logistic"])
def test_certain_predictions_have_a_finite_one(name):
    task, _, x, w, _ = problem(name)
    sure, surer = (jax.tree.map(lambda leaf, f=f: f * leaf, w) for f in (1e4, -2e4))
    batch = Batch({"x": x}, jnp.ones(B))
    value, slope = jax.jit(jax.value_and_grad(lambda w: task.divergence(w, surer, batch).sum()))(
        sure
    )
    assert 1e3 < value < np.inf
    assert np.all(np.isfinite(slope["kernel"]))
