import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjaxsim.privacy.messages import clip_by_global_norm

compiled = jax.jit(clip_by_global_norm)


def norm64(tree):
    return np.sqrt(sum(np.sum(np.square(np.asarray(v, np.float64))) for v in jax.tree.leaves(tree)))


def test_scales_the_whole_tree_to_the_bound():
    # ‖(3, 4)‖ = 5 over two leaves, so C = 1 gives (0.6, 0.8).
    message = {"a": np.array([3.0], np.float32), "b": np.array([[4.0]], np.float32)}
    clipped = compiled(message, np.float32(1))
    np.testing.assert_allclose(clipped.messages["a"], [0.6], rtol=3e-5)
    np.testing.assert_allclose(clipped.messages["b"], [[0.8]], rtol=3e-5)
    assert clipped.clipped
    assert clipped.finite


@pytest.mark.parametrize("clip_norm", [5.1, np.inf])
def test_below_the_bound_nothing_changes(clip_norm):
    message = np.array([3.0, 4.0], np.float32)
    clipped = compiled(message, np.float32(clip_norm))
    np.testing.assert_array_equal(clipped.messages, message)
    assert not clipped.clipped


floats = st.floats(-(2.0**50), 2.0**50, width=32)


# Few shapes, as every new one is compiled.
shapes = st.sampled_from([(1,), (17,), (5, 7), (40, 40)])


@settings(deadline=None, max_examples=200)
@given(
    hnp.arrays(np.float32, shapes, elements=floats),
    st.floats(2.0**-30, 2.0**30, width=32),
)
def test_norm_never_exceeds_the_bound(message, clip_norm):
    clipped = compiled(message, np.float32(clip_norm)).messages
    assert norm64(clipped) <= clip_norm


@pytest.mark.thorough
def test_norm_of_a_million_parameters_never_exceeds_the_bound():
    for seed in range(3):
        message = jax.random.normal(jax.random.key(seed), (1_000_003,))
        clipped = jax.jit(clip_by_global_norm)(message, jnp.float32(0.7)).messages
        assert 0.7 * (1 - 1e-4) < norm64(clipped) <= 0.7


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_a_message_that_is_not_finite_becomes_zero(bad):
    # 3e38 is finite but its norm is not: no bound could be kept.
    clipped = compiled({"a": jnp.array([bad, 1.0]), "b": jnp.ones(2)}, jnp.float32(1))
    assert norm64(clipped.messages) == 0
    assert not clipped.finite


@pytest.mark.parametrize("mode", [pytest.param(jax.jacfwd, marks=pytest.mark.thorough), jax.jacrev])
@pytest.mark.parametrize("clip_norm", [1.0, np.inf])
def test_derivative_at_zero_is_the_identity(mode, clip_norm):
    jacobian = jax.jit(mode(lambda v: clip_by_global_norm(v, jnp.float32(clip_norm)).messages))
    np.testing.assert_array_equal(jacobian(jnp.zeros(3)), np.eye(3))


@pytest.mark.parametrize("mode", [jax.jacfwd, pytest.param(jax.jacrev, marks=pytest.mark.thorough)])
def test_derivative_in_the_clip_norm_is_finite_at_infinity(mode):
    v = jnp.array([3.0, 4.0])
    derivative = jax.jit(mode(lambda c: clip_by_global_norm(v, c).messages))
    np.testing.assert_array_equal(derivative(jnp.float32(np.inf)), [0, 0])


@pytest.mark.parametrize("mode", [pytest.param(jax.jacfwd, marks=pytest.mark.thorough), jax.jacrev])
@pytest.mark.parametrize("clip_norm", [1.0, 20.0])
def test_derivatives_agree_with_finite_differences(mode, clip_norm):
    with jax.enable_x64(True):
        v, c, h = np.array([3.0, -4.0, 1.0]), np.array(clip_norm), 1e-6

        def f(v, c):
            return compiled(v, c).messages

        def change(dv, dc):
            return (np.asarray(f(v + dv, c + dc)) - np.asarray(f(v - dv, c - dc))) / (2 * h)

        by_v, by_c = jax.jit(mode(f, (0, 1)))(v, c)
        numeric_v = np.stack([change(h * direction, 0) for direction in np.eye(3)], axis=1)
        np.testing.assert_allclose(by_v, numeric_v, atol=1e-9)
        np.testing.assert_allclose(by_c, change(0, h), atol=1e-9)
