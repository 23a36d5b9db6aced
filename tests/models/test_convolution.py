from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjaxsim.kernels import winograd
from fedjaxsim.kernels.backend import Backend, planning_for
from fedjaxsim.models import network
from fedjaxsim.models.network import cnn, conv2d, max_pool2d

# What conv2d chooses from: by the backend, for one input channel, and by size.
IN_CACHE, WIDE = network._conv_in_cache, network._conv_wide
ONE_CHANNEL = network._conv_one_channel
WINOGRAD = partial(winograd.conv2d, tile=(2, 3))
# The second layer of the papers' CNN: ten images, 32 channels, 64 features.
SECOND_LAYER = (10, 12, 12, 32), (5, 5, 32, 64)
FEW = settings(max_examples=10, deadline=None)
# Compiling is all the cost here.
quick_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def lax_conv(x, kernel):
    dimensions = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=dimensions)


@pytest.mark.parametrize("taps", range(1, 8))
def test_the_matrices_of_winograd_correlate_in_one_dimension(taps):
    for outputs in range(1, 10 - taps):
        a, g, d = winograd._matrices(outputs, taps)
        signal, filter_ = np.random.default_rng(0).normal(size=(2, outputs + taps - 1))
        got = a.T @ ((g @ filter_[:taps]) * (d @ signal))
        np.testing.assert_allclose(
            got, np.correlate(signal, filter_[:taps]), rtol=1e-12, atol=1e-12
        )


def test_tiles_are_taken_where_they_save_multiplications():
    # 10·8²·5²·32·64 = 32,768,000 in the direct form. With tiles of 4×4 outputs, 64 points and 40
    # tiles: 64·(40·32·64 + 64·40·32 + 25·32·64 + 16·40·64) = 16,384,000.
    assert winograd.best_tile(*SECOND_LAYER) == (4, 4)
    # One image: the kernel's transformation alone, 64·25·32·64 for 4×4, is as much as the product.
    assert winograd.best_tile((1, 12, 12, 32), (5, 5, 32, 64)) is None
    # A 1×1 kernel has nothing to save, and with few channels the transformations outweigh it.
    assert winograd.best_tile((10, 12, 12, 32), (1, 1, 32, 64)) is None
    assert winograd.best_tile((10, 28, 28, 3), (5, 5, 3, 16)) is None
    # A flat kernel has tiles of one row.
    assert winograd.best_tile((10, 12, 12, 32), (1, 5, 32, 64)) == (1, 4)


def test_every_form_is_the_plain_convolution():
    x, kernel = draw(7, (1, 6, 5, 1), (3, 2, 1, 2))
    with jax.enable_x64(True):
        x, kernel = (np.round(4 * np.asarray(value, np.float64)) for value in (x, kernel))
        expected = jax.jit(lax_conv)(x, kernel)
        for form in network.FORMS.values():
            assert_close(jax.jit(form)(x, kernel), expected)


@pytest.mark.thorough
def test_conv2d_takes_tiles_for_the_second_layer_of_the_cnn_on_a_cpu_only():
    x, kernel = (value.astype(jnp.float32) for value in draw(5, *SECOND_LAYER))
    tiled = winograd.conv2d(x, kernel, (4, 4))
    np.testing.assert_array_equal(conv2d(x, kernel), tiled)
    for dtype in (jnp.bfloat16, jnp.int32):
        others = x.astype(dtype), kernel.astype(dtype)
        np.testing.assert_array_equal(conv2d(*others), IN_CACHE(*others))
    pixels = jnp.round(3 * x)
    np.testing.assert_array_equal(conv2d(pixels.astype(jnp.int32), kernel), conv2d(pixels, kernel))
    with planning_for(Backend("gpu", None)):
        np.testing.assert_array_equal(conv2d(x, kernel), WIDE(x, kernel))
    with planning_for(Backend("tpu", None)):
        assert_close(conv2d(pixels.astype(jnp.int32), kernel), lax_conv(pixels, kernel))


@pytest.mark.thorough
def test_tiles_round_at_most_ten_times_as_much_as_the_direct_form():
    x, kernel = (value.astype(jnp.float32) for value in draw(6, *SECOND_LAYER))
    with jax.enable_x64(True):
        exact = np.asarray(lax_conv(x.astype(jnp.float64), kernel.astype(jnp.float64)))

    def error(y):
        return np.linalg.norm(np.asarray(y, np.float64) - exact) / np.linalg.norm(exact)

    assert error(winograd.conv2d(x, kernel, (4, 4))) < 10 * error(lax_conv(x, kernel))


def flax_pool(x):
    return nn.max_pool(x, (2, 2), strides=(2, 2))


def draw(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape)) for shape in shapes]


def assert_close(got, want):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-11), got, want)


@partial(quick_jit, static_argnums=0)
def derivatives(function, primals, tangents):
    """Value, jvp, gradient, and the gradient's jvp of a loss that is not linear."""

    def loss(*primals):
        return jnp.sum(jnp.sin(function(*primals)))

    grad = jax.grad(loss, argnums=tuple(range(len(primals))))
    return jax.jvp(function, primals, tangents), jax.jvp(grad, primals, tangents)


@pytest.mark.thorough
@FEW
@given(
    batch=st.integers(1, 2),
    windows=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    size=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    channels=st.integers(1, 3),
    features=st.integers(1, 3),
    tile=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_conv2d_is_the_convolution_of_lax_with_its_derivatives(
    batch, windows, size, channels, features, tile
):
    (height, width), (kh, kw) = windows, size
    shapes = (batch, height + kh - 1, width + kw - 1, channels), (kh, kw, channels, features)
    with jax.enable_x64(True):
        values = draw(0, *shapes, *shapes)
        primals, tangents = tuple(values[:2]), tuple(values[2:])
        expected = derivatives(lax_conv, primals, tangents)
        tiled = partial(winograd.conv2d, tile=tile)
        forms = network.FORMS | {"tiles": tiled}
        del forms["grouped"]  # is lax_conv
        if channels > 1:
            del forms["one channel"]
        for form in forms.values():
            assert_close(derivatives(form, primals, tangents), expected)


@pytest.mark.parametrize(
    ("form", "channels"), [(IN_CACHE, 2), (WIDE, 2), (WINOGRAD, 2), (ONE_CHANNEL, 1)]
)
def test_conv2d_can_be_mapped_and_scanned(form, channels):
    clients = 3
    with jax.enable_x64(True):
        x, kernels = draw(1, (clients, 2, 5, 6, channels), (clients, 3, 2, channels, 2))

        @quick_jit
        def run(x, kernels):
            def of(function):
                return jax.grad(lambda x, kernel: jnp.sum(jnp.sin(function(x, kernel))), (0, 1))

            each = [of(lax_conv)(x[i], kernels[i]) for i in range(clients)]
            shared = [of(lax_conv)(x[0], kernels[i]) for i in range(clients)]
            got = [
                jax.vmap(of(form))(x, kernels),
                jax.lax.scan(lambda carry, client: (carry, of(form)(*client)), 0, (x, kernels))[1],
                jax.vmap(of(form), (None, 0))(x[0], kernels),
            ]
            stacked = [jax.tree.map(lambda *g: jnp.stack(g), *list_) for list_ in (each, shared)]
            return got, [stacked[0], stacked[0], stacked[1]]

        assert_close(*run(x, kernels))


@pytest.mark.thorough
@FEW
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    levels=st.sampled_from([1, 2, 1000]),
    seed=st.integers(0, 99),
)
def test_max_pool2d_is_flax_pooling_with_its_derivatives_also_at_ties(shape, levels, seed):
    batch, height, width, channels = shape
    with jax.enable_x64(True):
        (x, tangent, weights) = draw(seed, *[(batch, 2 * height, 2 * width, channels)] * 3)
        x = jnp.round(x * levels) / levels
        weights = weights[:, ::2, ::2]

        def both(pool):
            # Weights that differ, so that the place a derivative goes to shows.
            return lambda x: weights * pool(x)

        got, expected = (
            derivatives(both(pool), (x,), (tangent,)) for pool in (max_pool2d, flax_pool)
        )
        assert_close(got, expected)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_the_first_of_equal_values_has_the_derivative(platform):
    x = jnp.array([[1.0, 2.0, 0.0, 0.0], [2.0, 2.0, 0.0, 0.0]])[None, :, :, None]
    with planning_for(Backend(platform, None)):
        slope = jax.grad(lambda x: jnp.sum(max_pool2d(x) * jnp.array([5.0, 7.0])[:, None]))
        got = jax.jit(slope)(x)
    np.testing.assert_array_equal(got[0, :, :, 0], [[0, 5, 7, 0], [0, 0, 0, 0]])


@pytest.mark.thorough
def test_max_pool2d_can_be_mapped_and_lets_nan_through():
    (x,) = draw(2, (3, 1, 4, 4, 2))
    x = x.at[1, 0, 2, 3, 1].set(jnp.nan)
    got = jax.vmap(max_pool2d)(x)
    np.testing.assert_array_equal(got, flax_pool(x[:, 0])[:, None])
    assert np.isnan(got).sum() == 1


def plain_cnn(params, x):
    h = x
    for layer in ("_Conv_0", "_Conv_1"):
        h = flax_pool(nn.relu(lax_conv(h, params[layer]["kernel"]) + params[layer]["bias"]))
    return h.reshape(x.shape[0], -1) @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]


@pytest.mark.thorough
def test_the_cnn_of_many_clients_is_the_plain_one_without_convolutions(monkeypatch):
    with jax.enable_x64(True):
        model = cnn((16, 16, 1), 3)
        leaves, structure = jax.tree.flatten(jax.eval_shape(model.init, jax.random.key(0)))
        leaves = [value / 4 for value in draw(3, *[(2, *leaf.shape) for leaf in leaves])]
        params = jax.tree.unflatten(structure, leaves)
        (x,) = draw(4, (2, 2, 16, 16, 1))
        x = x.at[:, :, :6].set(1.0)  # Background, where the values of a window are equal.

        def gradients(apply):
            loss = jax.value_and_grad(lambda params, x: jnp.mean(jnp.square(apply(params, x))))
            return quick_jit(jax.vmap(loss)).lower(params, x)

        plain = gradients(plain_cnn)
        assert "stablehlo.convolution" in plain.as_text()
        expected = plain.compile()(params, x)
        for platform in ("cpu", "gpu"):
            with planning_for(Backend(platform, None)):
                fast = gradients(model.apply)
            assert "stablehlo.convolution" not in fast.as_text()
            assert_close(fast.compile()(params, x), expected)


def test_shapes_that_do_not_suit_are_refused():
    x = jnp.zeros((2, 5, 6, 3))
    for kernel in [(3, 3, 2, 4), (6, 3, 3, 4), (3, 7, 3, 4), (3, 3, 3)]:
        with pytest.raises(ValueError, match="conv2d"):
            conv2d(x, jnp.zeros(kernel))
    for shape in [(2, 5, 6, 3), (2, 6, 5, 3), (6, 6, 3)]:
        with pytest.raises(ValueError, match="max_pool2d"):
            max_pool2d(jnp.zeros(shape))
