import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjaxsim.data.minibatches import Batch
from fedjaxsim.models.model import Model, linear
from fedjaxsim.models.network import cnn, mlp
from fedjaxsim.tasks.task import logistic, one_vs_all, softmax, squared


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
    params = model.init(jax.random.key(0))
    params = jax.tree.map(
        lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape), params
    )
    x = jax.random.normal(jax.random.key(1), (3, 20, 20, 2))
    layers = [params["_Conv_0"], params["_Conv_1"], params["Dense_0"]]
    h = x
    for layer in layers[:2]:
        h = jax.lax.conv_general_dilated(
            h, layer["kernel"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        h = nn.max_pool(nn.relu(h + layer["bias"]), (2, 2), strides=(2, 2))
    expected = h.reshape(3, -1) @ layers[2]["kernel"] + layers[2]["bias"]
    np.testing.assert_allclose(model.apply(params, x), expected, rtol=1e-4, atol=1e-3)


def test_sizes_of_linear_and_mlp():
    assert size(linear((8, 8), 10).init(jax.random.key(0))) == 64 * 10 + 10
    params = mlp((5,), 3, hidden=(7, 4)).init(jax.random.key(0))
    assert size(params) == (5 * 7 + 7) + (7 * 4 + 4) + (4 * 3 + 3)


def test_a_linear_model_without_bias():
    model = linear((2, 2), 3, bias=False)
    params = model.init(jax.random.key(0))
    assert jax.tree.map(jnp.shape, params) == {"kernel": (3, 4)}
    params["kernel"] = jnp.arange(12.0).reshape(4, 3).T
    x = jnp.array([[[1.0, 0.0], [0.0, 2.0]]])
    np.testing.assert_array_equal(model.apply(params, x), [[0 + 18, 1 + 20, 2 + 22]])


@pytest.mark.parametrize("model", [linear((2,), 3), mlp((2,), 3, (4,))], ids=["linear", "mlp"])
def test_integers_are_the_numbers_that_they_are(model):
    params = model.init(jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf + jnp.arange(leaf.size).reshape(leaf.shape), params)
    pixels = np.array([[0, 255], [200, 100]], np.uint8)
    expected = model.apply(params, jnp.asarray(pixels, jnp.float32))
    np.testing.assert_array_equal(model.apply(params, jnp.asarray(pixels)), expected)


@pytest.mark.parametrize(
    ("model", "shape", "width"),
    [
        (mlp((5,), 3, hidden=(7, 4)), (5,), 4),
        (mlp((5,), 3, hidden=()), (5,), 5),
        (cnn((16, 16), 3), (16, 16), 64),
    ],
)
def test_the_output_layer_is_named(model, shape, width):
    # With the output layer at zero the outputs are its bias.
    params = model.init(jax.random.key(0))
    assert params[model.output_layer]["kernel"].shape == (width, 3)
    params[model.output_layer] = {"kernel": jnp.zeros((width, 3)), "bias": jnp.arange(3.0)}
    np.testing.assert_array_equal(model.apply(params, jnp.ones((2, *shape))), [[0, 1, 2]] * 2)
    assert softmax(model, 3).output_layer == model.output_layer
    assert linear((5,), 3).output_layer is None


@pytest.mark.parametrize("shape", [(64,), (783,), (28, 27), (30, 30, 1)])
def test_cnn_refuses_other_images(shape):
    with pytest.raises(ValueError, match="cnn needs square images"):
        cnn(shape, 10)


# --- tasks; a user's own pair of functions is a model ------------------------------------------

OWN = Model(lambda key: jnp.zeros(()), lambda params, x: params + x)


def batch(x, y, weight):
    return Batch({"x": jnp.asarray(x), "y": jnp.asarray(y)}, jnp.asarray(weight, float))


def test_softmax_by_hand():
    task = softmax(OWN, 2)
    # Logits (0, 0): loss log 2; logits (log 3, 0) with label 1: loss log 4, wrong. Padding last.
    b = batch([[0.0, 0.0], [np.log(3), 0.0], [9.0, 9.0]], [0, 1, 0], [1, 1, 0])
    params = jnp.zeros(())
    np.testing.assert_allclose(task.loss(params, b), (np.log(2) + np.log(4)) / 2, rtol=1e-6)
    values = task.metrics(params, b)
    np.testing.assert_array_equal(values["accuracy"], [1, 0, 1])
    np.testing.assert_allclose(values["loss"][:2], [np.log(2), np.log(4)], rtol=1e-6)


@pytest.mark.parametrize("labels", [[-1, 1, 1], [0, 1, 1]])
def test_logistic_by_hand(labels):
    task = logistic(OWN)
    # Log-odds log 3 means P(positive) = 3/4.
    b = batch([[np.log(3)], [np.log(3)], [0.0]], labels, [1, 1, 0])
    expected = (np.log(4) + np.log(4 / 3)) / 2
    np.testing.assert_allclose(task.loss(jnp.zeros(()), b), expected, rtol=1e-6)
    np.testing.assert_array_equal(task.metrics(jnp.zeros(()), b)["accuracy"][:2], [0, 1])


def test_squared_by_hand():
    task = squared(OWN)
    b = batch([[1.0], [5.0], [7.0]], [3.0, 4.0, 100.0], [1, 1, 0])
    np.testing.assert_allclose(task.loss(jnp.zeros(()), b), (0.5 * 4 + 0.5 * 1) / 2)
    np.testing.assert_allclose(task.metrics(jnp.zeros(()), b)["squared_error"][:2], [4, 1])


def test_one_vs_all_squared_by_hand():
    task = one_vs_all(OWN, 3)
    # Targets (0.9, −0.1, −0.1) and (−0.1, −0.1, 0.9); the last row is padding.
    b = batch([[0.9, -0.1, 0.8], [0.0, 0.2, 0.1], [9.0, 9.0, 9.0]], [0, 2, 0], [1, 1, 0])
    losses = [0.5 * 0.9**2, 0.5 * (0.1**2 + 0.3**2 + 0.8**2)]
    params = jnp.zeros(())
    np.testing.assert_allclose(task.loss(params, b), np.mean(losses), rtol=1e-6)
    values = task.metrics(params, b)
    np.testing.assert_allclose(values["loss"][:2], losses, rtol=1e-6)
    np.testing.assert_array_equal(values["accuracy"][:2], [1, 0])


def test_one_vs_all_logistic_by_hand():
    task = one_vs_all(OWN, 2, loss="logistic")
    # Log-odds log 3 and 0: probabilities 3/4 and 1/2 of each class on its own.
    b = batch([[np.log(3), 0.0]] * 2, [0, 1], [1, 1])
    losses = [np.log(4 / 3) + np.log(2), np.log(4) + np.log(2)]
    values = task.metrics(jnp.zeros(()), b)
    np.testing.assert_allclose(values["loss"], losses, rtol=1e-6)
    np.testing.assert_array_equal(values["accuracy"], [1, 0])
    np.testing.assert_allclose(task.loss(jnp.zeros(()), b), np.mean(losses), rtol=1e-6)
    with pytest.raises(ValueError, match="'squared' or 'logistic', got 'hinge'"):
        one_vs_all(OWN, 2, loss="hinge")  # pyright: ignore[reportArgumentType]


def test_padding_alone_has_loss_zero():
    b = batch([[1.0]], [3.0], [0])
    assert float(squared(OWN).loss(jnp.zeros(()), b)) == 0


def test_labels_that_do_not_suit_the_task_are_refused():
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 2\).*from 0 to 2"):
        softmax(OWN, 2).check({"x": x, "y": np.array([0, 2])})
    with pytest.raises(ValueError, match="softmax needs integer labels"):
        softmax(OWN, 2).check({"x": x, "y": np.array([0.5, 1.0])})
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 2\).*from -1 to 1"):
        one_vs_all(OWN, 2).check({"x": x, "y": np.array([-1, 1])})
    with pytest.raises(ValueError, match="one_vs_all needs integer labels"):
        one_vs_all(OWN, 2).check({"x": x, "y": np.zeros((2, 2), int)})
    with pytest.raises(ValueError, match="labels -1 and 1, or 0 and 1"):
        logistic(OWN).check({"x": x, "y": np.array([1, 2])})
    with pytest.raises(ValueError, match="needs the fields 'x' and 'y'"):
        squared(OWN).check({"x": x})
    with pytest.raises(ValueError, match="one target per row"):
        squared(OWN).check({"x": x, "y": np.zeros((2, 2))})
