"""Systems by name that are other systems with fixed settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import algorithm_of

from fedjaxsim.algorithms.dpfedmtl import fedbn
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.layers import paths_of
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.models.model import linear
from fedjaxsim.models.network import mlp
from fedjaxsim.tasks.task import softmax, squared

BETA_1, BETA_2, TAU = 0.9, 0.99, 1e-3


def by_hand(name, releases, rate):
    """w after these releases: momentum, or Reddi et al. (2021), Algorithm 2, from m = 0, v = τ²."""
    w, m, v, beta_1 = 0.0, 0.0, TAU**2, 0.0 if name == "fedadagrad" else BETA_1
    for release in releases:
        if name == "fedavgm":
            m = 0.7 * m + release
            w += rate * m
            continue
        m = beta_1 * m + (1 - beta_1) * release
        if name == "fedadagrad":
            v += release**2
        elif name == "fedadam":
            v = BETA_2 * v + (1 - BETA_2) * release**2
        else:
            v -= (1 - BETA_2) * release**2 * np.sign(v - release**2)
        w += rate * m / (np.sqrt(v) + TAU)
    return w


@pytest.mark.parametrize("name", ["fedavgm", "fedadagrad", "fedadam", "fedyogi"])
def test_the_server_steps_as_the_paper_says(name):
    """And it leaves a coordinate where nobody moves it."""
    task, releases = squared(linear((2,), 1, bias=False)), [0.5, -0.2, 0.3, 1e-4]
    if name == "fedadagrad":
        algorithm = fedavg(task, server_optimizer="adagrad")
    else:
        algorithm = algorithm_of(name, task, 3)
    hparams = Hyperparameters(server_learning_rate=0.1, server_momentum=0.7)
    shared, _ = algorithm.init(jax.random.key(0), hparams)
    server = jax.jit(lambda shared, kernel: algorithm.server(shared, kernel, hparams, jnp.int32(0)))
    for release in releases:
        shared = server(shared, {"kernel": jnp.array([[release, 0.0]])})
    moved, still = shared.params["kernel"][0]
    np.testing.assert_allclose(moved, by_hand(name, releases, 0.1), rtol=1e-5)
    assert still == 0


def test_normalization_layers_are_personal():
    model = mlp((4,), 3, hidden=(5,), layer_norm=True)
    algorithm = fedbn(softmax(model, 3))
    hparams = Hyperparameters(server_learning_rate=1.0)
    shared, personal = jax.jit(lambda key: algorithm.init(key, hparams))(jax.random.key(0))
    assert paths_of(personal) == ["LayerNorm_0/bias", "LayerNorm_0/scale"]
    assert not set(paths_of(shared.trunk.params)) & set(paths_of(personal))
    with pytest.raises(ValueError, match="layer_norm"):
        fedbn(softmax(mlp((4,), 3), 3))
