import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjaxsim.models.model import linear
from fedjaxsim.models.network import mlp


def test_a_linear_model_without_bias():
    model = linear((2, 2), 3, bias=False)
    params = model.init(jax.random.key(0))
    assert jax.tree.map(jnp.shape, params) == {"kernel": (3, 4)}
    params["kernel"] = jnp.arange(12.0).reshape(4, 3).T
    x = jnp.array([[[1.0, 0.0], [0.0, 2.0]]])
    np.testing.assert_array_equal(model.apply(params, x), [[0 + 18, 1 + 20, 2 + 22]])


@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_integers_are_the_numbers_that_they_are(name):
    model = linear((2,), 3) if name == "linear" else mlp((2,), 3, (4,))
    params = jax.jit(model.init)(jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf + np.arange(leaf.size).reshape(leaf.shape), params)
    pixels = np.array([[0, 255], [200, 100]], np.uint8)
    expected = jax.jit(model.apply)(params, pixels.astype(np.float32))
    np.testing.assert_array_equal(jax.jit(model.apply)(params, pixels), expected)
