"""Messages that are products of thin matrices agree with the matrices they stand for."""

import functools

import chex
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjaxsim.hyperparameters import compose, fill
from fedjaxsim.kernels import products
from fedjaxsim.kernels.products import Product, dense
from fedjaxsim.privacy.mechanisms import gaussian
from fedjaxsim.privacy.mechanisms.sums import adaptive_clipping, client_noise, plain_mean, pure
from fedjaxsim.privacy.messages import Messages, clip_by_global_norm

K, R, D, C = 4, 3, 6, 2
IDS = jnp.arange(K)
clip = jax.jit(clip_by_global_norm)


def norm64(product):
    left, right = (np.asarray(factor, np.float64) for factor in (product.left, product.right))
    return np.linalg.norm(np.swapaxes(left, -1, -2) @ right)


def random_messages(seed, scale=1.0, dtype: type = np.float64):
    """Messages of K clients, with a bias, in the form of factors."""
    rng = np.random.default_rng(seed)
    left, right, bias = (scale * rng.normal(size=s) for s in [(K, R, C), (K, R, D), (K, C)])
    return {"kernel": Product(jnp.asarray(left, dtype), jnp.asarray(right, dtype)), "bias": bias}


def test_a_product_by_hand():
    # (1, 2)ᵀ(3, 4) = ((3, 4), (6, 8)), of norm √(9 + 16 + 36 + 64) = √125; C = √5 is a fifth of it.
    @jax.jit
    def forms(product, bias):
        one, both = clip(product, np.sqrt(5)), clip({"w": product, "b": bias}, 7.0).messages
        norm = products.squared_norm(product)
        return dense(product), norm, dense(one.messages), one.clipped, dense(both["w"]), both["b"]

    product = Product(jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 4.0]]))
    matrix, norm, one, clipped, whole, bias = forms(product, jnp.array([np.sqrt(71.0)]))
    np.testing.assert_array_equal(matrix, [[3, 4], [6, 8]])
    np.testing.assert_allclose(norm, 125, rtol=1e-5)
    np.testing.assert_allclose(one, [[0.6, 0.8], [1.2, 1.6]], rtol=3e-5)
    assert clipped
    # With a second leaf of norm √(196 − 125) the whole has norm 14, and C = 7 halves both.
    np.testing.assert_allclose(whole, [[1.5, 2], [3, 4]], rtol=3e-5)
    np.testing.assert_allclose(bias, [np.sqrt(71.0) / 2], rtol=3e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("clip_norm", [0.3, 4.0, 1e3, np.inf])
def test_a_chunk_sums_to_what_its_matrices_sum_to(clip_norm):
    with jax.enable_x64(True):
        mask = jnp.array([True, True, False, True])
        for seed in range(5):
            messages = random_messages(seed)
            ours, reference = (
                Messages(tree).bound(jnp.asarray(clip_norm), mask)
                for tree in (messages, dense(messages))
            )
            np.testing.assert_array_equal(ours.clipped, reference.clipped)
            for total, expected in zip(
                jax.tree.leaves(ours.messages.total()),
                jax.tree.leaves(reference.messages.total()),
                strict=True,
            ):
                np.testing.assert_allclose(total, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("mode", [jax.jacfwd, pytest.param(jax.jacrev, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("clip_norm", [2.0, pytest.param(1e3, marks=pytest.mark.thorough)])
def test_derivatives_agree_with_those_of_the_matrices(mode, clip_norm):
    with jax.enable_x64(True):
        messages, mask = random_messages(7), jnp.ones(K, bool)

        def total(form, messages, c):
            return Messages(form(messages)).bound(c, mask).messages.total()

        ours, expected = (
            jax.jit(mode(functools.partial(total, form), (0, 1)))(messages, jnp.asarray(clip_norm))
            for form in (lambda message: message, dense)
        )
        chex.assert_trees_all_close(ours, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("mode", [pytest.param(jax.jacfwd, marks=pytest.mark.thorough), jax.jacrev])
def test_a_derivative_at_zero_and_at_infinity_is_that_of_the_identity(mode):
    # The bilinear leftᵀ·right at right = 0 moves by leftᵀ·d(right), and a factor 1 changes nothing.
    left, right = jnp.ones((1, 2)), jnp.zeros((1, 1))

    def clipped(right, clip_norm):
        return dense(clip(Product(left, right), clip_norm).messages)

    derivative = jax.jit(mode(clipped))
    for clip_norm in (1.0, np.inf):
        np.testing.assert_array_equal(
            derivative(right, np.float32(clip_norm)), np.ones((2, 1, 1, 1))
        )


compiled, cleared = jax.jit(clip), jax.jit(products._cleared)
elements = st.floats(-(2.0**30), 2.0**30, width=32)
thin = st.tuples(
    hnp.arrays(np.float32, (3, 5), elements=elements),
    hnp.arrays(np.float32, (3, 2), elements=elements),
)


@settings(deadline=None, max_examples=300)
@given(thin, st.floats(2.0**-30, 2.0**30, width=32), st.sampled_from([0.0, 1e-7, 1e-3]))
def test_the_true_norm_never_exceeds_the_bound_where_terms_cancel(factors, clip_norm, apart):
    # The second term is the first one's opposite, up to a few ulp.
    left, right = (factor.copy() for factor in factors)
    left[1] = left[0] * np.float32(1 + apart)
    right[1] = -right[0]
    clipped = compiled(Product(left, right), np.float32(clip_norm))
    assert norm64(clipped.messages) <= clip_norm


@settings(deadline=None, max_examples=300)
@given(thin, st.integers(-126, 126), st.floats(2.0**-30, 2.0**30, width=32))
def test_the_true_norm_never_exceeds_the_bound_at_any_scale(factors, exponent, clip_norm):
    # Small times large: the squares of one factor underflow where the product does not.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        left = np.ldexp(factors[0], exponent).astype(np.float32)
        right = np.ldexp(factors[1], -exponent).astype(np.float32)
    clipped = compiled(Product(left, right), np.float32(clip_norm)).messages
    assert norm64(Product(clipped.left, cleared(clipped))) <= clip_norm


def test_no_more_room_is_left_for_rounding_than_documented():
    # The features of images are positive, so terms of both signs cancel; and 10,000 alike ones are
    # as bad for a sum as any. r = c = 10.
    key, d = jax.random.key(0), 10_000
    right = jax.random.normal(key, (10, 10))
    for left in (jax.random.uniform(key, (10, d)), jnp.full((10, d), 0.1)):
        norm = norm64(clip(Product(left, right), jnp.float32(0.7)).messages)
        sizes = np.linalg.norm(np.asarray(left, np.float64), axis=1)
        sizes *= np.linalg.norm(np.asarray(right, np.float64), axis=1)
        share = (
            2 * (d + 10 + 10**2 + 16) * 2.0**-24 * (sizes.sum() / norm64(Product(left, right))) ** 2
        )
        assert share < 0.02
        assert 0.7 * (1 - share / 2 - 256 * 2.0**-24 - 1e-5) < norm <= 0.7


@pytest.mark.thorough
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("factor", ["left", "right"])
def test_a_client_that_is_not_finite_adds_nothing(bad, factor):
    # 1e30 is finite, but its square is not.
    messages = random_messages(1, dtype=np.float32)
    product = messages["kernel"]
    broken = {
        name: value.at[2, 1, 0].set(bad) if name == factor else value
        for name, value in (("left", product.left), ("right", product.right))
    }
    broken = messages | {"kernel": Product(**broken)}
    everyone, others = jnp.ones(K, bool), jnp.arange(K) != 2

    def total(messages, mask):
        bounded = Messages(messages).bound(jnp.float32(1.0), mask)
        return bounded.finite, bounded.messages.total()

    finite, with_broken = jax.jit(total)(broken, everyone)
    _, without = jax.jit(total)(messages, others)
    np.testing.assert_array_equal(finite, others)
    chex.assert_trees_all_equal(with_broken, without)

    def of_scale(scale):  # what a hypergradient goes through
        scaled = products.rescale(lambda leaf: scale * leaf, broken)
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(total(scaled, everyone)[1]))

    assert np.isfinite(jax.jit(jax.jacfwd(of_scale))(1.0))
    if np.isfinite(bad):  # reverse mode gives NaN for messages that are not finite
        assert np.isfinite(jax.jit(jax.jacrev(of_scale))(1.0))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mechanism",
    [
        gaussian(weights=[1.0, 2, 3, 4]),
        plain_mean(),
        *(
            pytest.param(mechanism, marks=pytest.mark.thorough)
            for mechanism in (adaptive_clipping(), client_noise(), pure())
        ),
    ],
)
def test_mechanisms_release_the_same_of_products_and_of_matrices(mechanism):
    with jax.enable_x64(True):
        records = compose([mechanism.hyperparameters])
        values = {"clip": 2.0, "noise_multiplier": 0.5}
        values |= {"count_noise": 1.0, "target_quantile": 0.4}
        values = {name: value for name, value in values.items() if name in records}
        hparams = fill(records, values).as_arrays()
        messages = random_messages(3)
        # One client sends nothing, which adaptive clipping does not count.
        product = messages["kernel"]
        messages["kernel"] = Product(product.left, product.right.at[0].set(0))
        messages["bias"] = jnp.asarray(messages["bias"]).at[0].set(0)
        mask, state = jnp.array([True, True, True, False]), mechanism.init(hparams)

        @jax.jit
        def release(messages):
            one = products.shapes(jax.tree.map(lambda v: v[0], messages))
            accumulator = mechanism.add(
                mechanism.zero(one, K), Messages(messages), mask, IDS, state, hparams
            )
            out = mechanism.release(
                accumulator, 4.0, jax.random.key(0), state, hparams, jnp.int32(0)
            )
            return out._replace(noise_multiplier=0), accumulator

        ours, expected = release(messages), release(dense(messages))
        chex.assert_trees_all_close(ours, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.thorough
def test_products_map_over_a_further_axis():
    messages = random_messages(5, dtype=np.float32)
    bounds = jnp.array([0.5, 2.0, np.inf])

    def total(clip_norm):
        return Messages(messages).bound(clip_norm, jnp.ones(K, bool)).messages.total()["kernel"]

    mapped = jax.jit(jax.vmap(total))(bounds)
    assert mapped.shape == (3, C, D)
    for one, clip_norm in zip(mapped, bounds, strict=True):
        np.testing.assert_allclose(one, total(clip_norm), rtol=1e-5, atol=1e-6)
