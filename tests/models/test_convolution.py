from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjaxsim.models import convolution
from fedjaxsim.models.convolution import conv2d, max_pool2d
from fedjaxsim.models.network import cnn

# What conv2d chooses from: by the backend, and for one input channel.
IN_CACHE, WIDE = convolution._conv_in_cache, convolution._conv_wide
ONE_CHANNEL = convolution._conv_one_channel
FEW = settings(max_examples=10, deadline=None)
# Compiling is all the cost here.
quick_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def lax_conv(x, kernel):
    dimensions = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=dimensions)


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


@FEW
@given(
    batch=st.integers(1, 2),
    windows=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    size=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    channels=st.integers(1, 3),
    features=st.integers(1, 3),
)
def test_conv2d_is_the_convolution_of_lax_with_its_derivatives(
    batch, windows, size, channels, features
):
    (height, width), (kh, kw) = windows, size
    shapes = (batch, height + kh - 1, width + kw - 1, channels), (kh, kw, channels, features)
    with jax.enable_x64(True):
        values = draw(0, *shapes, *shapes)
        primals, tangents = tuple(values[:2]), tuple(values[2:])
        expected = derivatives(lax_conv, primals, tangents)
        for form in (IN_CACHE, WIDE) + ((ONE_CHANNEL,) if channels == 1 else ()):
            assert_close(derivatives(form, primals, tangents), expected)


@pytest.mark.parametrize(("form", "channels"), [(IN_CACHE, 2), (WIDE, 2), (ONE_CHANNEL, 1)])
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


def test_the_first_of_equal_values_has_the_derivative():
    x = jnp.array([[1.0, 2.0, 0.0, 0.0], [2.0, 2.0, 0.0, 0.0]])[None, :, :, None]
    got = jax.grad(lambda x: jnp.sum(max_pool2d(x) * jnp.array([5.0, 7.0])[:, None]))(x)
    np.testing.assert_array_equal(got[0, :, :, 0], [[0, 5, 7, 0], [0, 0, 0, 0]])


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
        for backend in ("cpu", "gpu"):
            monkeypatch.setattr(jax, "default_backend", lambda name=backend: name)
            fast = gradients(model.apply)
            assert "stablehlo.convolution" not in fast.as_text()
            assert_close(fast.compile()(params, x), expected)


def test_shapes_that_do_not_suit_are_refused():
    x = jnp.zeros((2, 5, 6, 3))
    for kernel in [(3, 3, 2, 4), (6, 3, 3, 4), (3, 7, 3, 4), (3, 3, 3)]:
        with pytest.raises(ValueError, match="conv2d needs x"):
            conv2d(x, jnp.zeros(kernel))
    for shape in [(2, 5, 6, 3), (2, 6, 5, 3), (6, 6, 3)]:
        with pytest.raises(ValueError, match="max_pool2d needs x"):
            max_pool2d(jnp.zeros(shape))
