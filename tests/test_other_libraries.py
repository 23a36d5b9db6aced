"""A claim of the page on other libraries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjaxsim as fjs
from fedjaxsim.models import linear
from fedjaxsim.tasks import squared


@pytest.mark.thorough  # that one client runs DP-SGD is quick
def test_fedavg_with_a_client_for_each_example_is_dp_sgd():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 2)).astype(np.float32), rng.normal(size=6).astype(np.float32)
    people = fjs.Population.from_flat({"x": x, "y": y}, counts=[1] * 6)
    task = squared(linear((2,), 1))
    sim = fjs.Simulation(
        fjs.fedavg(task), people, fjs.full_participation(), fjs.Minibatches(1, steps=1)
    )
    eta, largest = 0.05, 1.0
    hparams = sim.hyperparameters(learning_rate=eta, clip=eta * largest, noise_multiplier=0.0)
    begin = sim.init(0, hparams)
    w = jax.tree.map(jnp.array, begin.shared.params)

    def gradient(k):
        batch = fjs.Batch(
            {"x": jnp.asarray(x[k : k + 1]), "y": jnp.asarray(y[k : k + 1])}, jnp.ones(1)
        )
        found = jax.grad(task.loss)(w, batch)
        norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(found)))
        return jax.tree.map(lambda leaf: leaf * min(1, largest / norm) / 6, found), norm

    gradients, norms = zip(*map(gradient, range(6)), strict=True)
    assert min(norms) < largest < max(norms)  # some are clipped
    expected = jax.tree.map(lambda a, *g: a - eta * sum(g), w, *gradients)
    after, _ = sim.round(begin, hparams)
    for found, wanted in zip(*map(jax.tree.leaves, (after.shared.params, expected)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
