import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjaxsim.models.model import linear
from fedjaxsim.models.network import cnn, mlp
from fedjaxsim.tasks.task import softmax


def size(params):
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def test_the_papers_cnn_has_its_parameters():
    model = cnn((784,), 62)
    params = jax.eval_shape(model.init, jax.random.key(0))
    convolutions = (25 * 1 * 32 + 32) + (25 * 32 * 64 + 64)
    assert size(params) == convolutions + 4 * 4 * 64 * 62 + 62
    assert jax.eval_shape(model.apply, params, jnp.zeros((3, 784))).shape == (3, 62)


def test_the_cnn_is_conv_relu_pool_twice_then_linear():
    model = cnn((20, 20, 2), 5)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(np.float32),
        jax.eval_shape(model.init, jax.random.key(0)),
    )
    x = rng.normal(size=(3, 20, 20, 2)).astype(np.float32)

    @jax.jit
    def by_hand(params, h):
        for layer in (params["_Conv_0"], params["_Conv_1"]):
            h = jax.lax.conv_general_dilated(
                h, layer["kernel"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            h = nn.max_pool(nn.relu(h + layer["bias"]), (2, 2), strides=(2, 2))
        return h.reshape(3, -1) @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]

    found, expected = jax.jit(model.apply)(params, x), by_hand(params, x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


def test_sizes_of_linear_and_mlp():
    assert size(jax.eval_shape(linear((8, 8), 10).init, jax.random.key(0))) == 64 * 10 + 10
    params = jax.eval_shape(mlp((5,), 3, hidden=(7, 4)).init, jax.random.key(0))
    assert size(params) == (5 * 7 + 7) + (7 * 4 + 4) + (4 * 3 + 3)


@pytest.mark.parametrize(
    ("make_model", "shape", "width"),
    [
        (lambda: mlp((5,), 3, hidden=(7, 4)), (5,), 4),
        (lambda: mlp((5,), 3, hidden=()), (5,), 5),
        pytest.param(lambda: cnn((16, 16), 3), (16, 16), 64, marks=pytest.mark.thorough),
    ],
)
def test_the_output_layer_is_named(make_model, shape, width):
    model = make_model()
    # With the output layer at zero the outputs are its bias.
    params = jax.jit(model.init)(jax.random.key(0))
    assert params[model.output_layer]["kernel"].shape == (width, 3)
    params[model.output_layer] = {"kernel": np.zeros((width, 3)), "bias": np.arange(3.0)}
    outputs = jax.jit(model.apply)(params, np.ones((2, *shape)))
    np.testing.assert_array_equal(outputs, [[0, 1, 2]] * 2)
    assert softmax(model, 3).output_layer == model.output_layer
    assert linear((5,), 3).output_layer is None


@pytest.mark.parametrize("shape", [(64,), (783,), (28, 27), (30, 30, 1)])
def test_cnn_refuses_other_images(shape):
    with pytest.raises(ValueError, match="cnn"):
        cnn(shape, 10)
