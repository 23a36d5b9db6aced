"""Sums of clipped messages as integers: exact in any order, and never above the bound."""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import classification, numbers

import fedjaxsim as fjs
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.kernels import integer_sums
from fedjaxsim.privacy.messages import Messages

BOUND = 0.3
add, plus = jax.jit(integer_sums.add), jax.jit(integer_sums.plus)


def value_of(total, bound=BOUND):
    nothing = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), total.shapes)
    return plus(total, nothing, np.float32(bound))


def summed(vectors, most, order=None, chunk=3):
    vectors = vectors if order is None else vectors[order]
    total = integer_sums.zero(jax.ShapeDtypeStruct(vectors.shape[1:], jnp.float32), most)
    for begin in range(0, len(vectors), chunk):
        total = add(total, vectors[begin : begin + chunk], jnp.float32(BOUND))
    return total


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from([7, 4096, 4097, 2**20, 10**7]))
def test_any_order_gives_the_exact_sum_of_the_truncated_numbers(seed, most):
    rng = np.random.default_rng(seed)
    vectors = (BOUND * rng.uniform(-1, 1, (7, 5))).astype(np.float32)
    total, other = summed(vectors, most), summed(vectors, most, rng.permutation(7), chunk=1)
    for one, two in zip(total.words, other.words, strict=True):
        np.testing.assert_array_equal(one, two)
    # Python's integers, of the numbers truncated towards zero in float32.
    scaled = vectors * (np.float32(2.0**total.bits) / np.float32(BOUND))
    expected = [sum(int(v) for v in column) for column in scaled.T]
    high, low = (*total.words, np.zeros(5, int))[:2]
    found = [int(h) * 2**total.shift + int(x) for h, x in zip(high, low, strict=True)]
    assert found == expected
    value = value_of(total)
    np.testing.assert_allclose(value, np.array(expected) * BOUND / 2**total.bits, rtol=3e-7)
    np.testing.assert_allclose(value, vectors.sum(axis=0), atol=7 * BOUND * 2.0**-total.bits + 1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_a_sum_of_halves_and_their_negatives_is_small_and_exact(dtype):
    # 0.5 - 0.5 + 2^-7: the two words are then large and of opposite sign.
    vectors = np.array([[0.5], [-0.5], [2.0**-7]], dtype)
    total = integer_sums.zero(jax.ShapeDtypeStruct((1,), dtype), 2**20)
    value = value_of(add(total, vectors, jnp.float32(0.5)), 0.5)
    assert value.dtype == dtype
    assert float(value[0]) == 2.0**-7


@pytest.mark.parametrize(
    ("most", "bits", "words"), [(1, 22, 1), (4096, 18, 1), (4097, 34, 2), (2**29, 2, 2)]
)
def test_the_largest_sum_fits_its_words(most, bits, words):
    ends = jnp.full((1, 1), BOUND)
    total = integer_sums.add(
        integer_sums.zero(jax.ShapeDtypeStruct((1,), jnp.float32), most), ends, jnp.float32(BOUND)
    )
    assert (total.bits, len(total.words)) == (bits, words)
    assert max(most * abs(int(word[0])) for word in total.words) < 2**31
    with pytest.raises(ValueError, match="at most 2²⁹ clients"):
        integer_sums.zero(ends, 2**29 + 1)


@settings(max_examples=50)
@given(st.data())
def test_what_is_released_follows_from_the_sum_plus_noise_alone(data):
    # All in units of the grid, where the law holds to the bit: a client that moves the sum by
    # d is covered by noise that is smaller by d, whatever the size of the sum.
    most, apart = data.draw(st.sampled_from([(4096, 0), (2**20, 8), (2**29, 0)]))
    total = integer_sums.zero(jax.ShapeDtypeStruct((1,), jnp.float32), most)
    step, limit = 2**apart, 2 ** min(total.bits, 20)
    clients = data.draw(st.integers(-most + 1, most - 1))
    rest, noise, moved = (
        step * data.draw(st.integers(-limit // step, limit // step)) for _ in range(3)
    )

    def released(units, noise):
        high, low = divmod(units, 2**total.shift) if total.shift else (units, 0)
        words = [np.array([word], np.int32) for word in (high, low)][: len(total.words)]
        exact = dataclasses.replace(total, words=tuple(words))
        added = np.array([noise * 2.0**-total.bits], np.float32)
        return float(plus(exact, added, np.float32(1))[0])

    units = clients * 2**total.bits + rest
    assert released(units, noise) == released(units + moved, noise - moved)
    assert released(units, noise) == np.float32((units + noise) * 2.0**-total.bits)


def test_leaves_with_bounds_of_their_own_keep_their_precision():
    vectors = {
        "update": np.full((3, 1000), 1e-4, np.float32),
        "steps": np.array([90.0, -20.0, 7.0], np.float32),
    }
    shapes = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf[0], vectors))
    bounds = {"update": np.float32(4e-3), "steps": np.float32(100)}
    nothing = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    worst = []
    for bound in (bounds, np.float32(100)):
        total = add(integer_sums.zero(shapes, 4096), vectors, bound)
        value = jax.device_get(plus(total, nothing, bound))
        worst.append(np.max(np.abs(value["update"] / 3e-4 - 1)))
        np.testing.assert_allclose(value["steps"], 77.0, rtol=1e-4)
    # Units are C·2⁻¹⁸: 1.5e-8 of the update's own bound, and 3.8e-4 of the steps' bound.
    assert worst[0] < 2e-4
    assert worst[1] == 1.0


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_noise_meets_the_low_bits_alone_and_one_rounding_follows(data):
    # The release is one rounding of A + high, where A, of noise and low bits, differs from their
    # sum by at most 2⁻²³ of both. So the rounding of a large sum cannot tell a client's part.
    most = data.draw(st.sampled_from([256, 4096, 2**20, 2**29]))
    total = integer_sums.zero(jax.ShapeDtypeStruct((1,), jnp.float32), most)
    scale = 2**total.shift
    noise = np.float32(data.draw(st.integers(-(2**35), 2**35)) * 2.0**-30)  # up to 32 C
    low = data.draw(st.integers(0, 256 * scale - 1))
    high = 256 * scale * data.draw(st.integers(-(2**22), 2**22 - 1))

    def released(units):
        words = divmod(units, scale) if total.shift else (units,)
        exact = [np.array([word], np.int32) for word in words]
        one = dataclasses.replace(total, words=tuple(exact))
        return float(plus(one, np.array([noise]), np.float32(1))[0])

    alone = Fraction(released(low)) * 2**total.bits
    ideal = Fraction(float(noise)) * 2**total.bits + low
    assert abs(alone - ideal) <= (abs(Fraction(float(noise))) * 2**total.bits + low) / 2**23
    together = Fraction(released(low + high)) * 2**total.bits
    assert abs(together - alone - high) <= abs(alone + high) / (2**24 - 1)


def test_one_client_moves_an_exact_sum_by_its_message_and_a_float_sum_by_many_clip_norms():
    # Casacuberta et al. 2022: halves up to 2^k, then pairs that round up or down together.
    k, pairs = 10, 1024
    unit = 2.0 ** (k - 23)
    others = [0.5] * (2 ** (k + 1) - 1), [0.51 * unit, -0.49 * unit] * pairs
    hparams = Hyperparameters(clip=1.0, noise_multiplier=0.0).as_arrays()

    def moved(mechanism):
        @jax.jit
        def total(messages):
            zero = mechanism.zero(jax.ShapeDtypeStruct((1,), jnp.float32), len(messages))
            every = jnp.ones(1, bool)

            def add(accumulator, message):
                return mechanism.add(
                    accumulator, Messages(message[None]), every, jnp.zeros(1, int), (), hparams
                ), None

            accumulator, _ = jax.lax.scan(add, zero, messages)
            out = mechanism.release(accumulator, 1.0, jax.random.key(0), (), hparams, 0)
            return out.value[0]

        present, absent = (
            float(total(np.array([*others[0], victim, *others[1]], np.float32)[:, None]))
            for victim in (0.75, 0.0)
        )
        return abs(present - absent)

    assert moved(fjs.gaussian()) > 0.75 + 0.1
    assert moved(fjs.gaussian(exact_sums=True)) <= 0.75


@pytest.mark.thorough
def test_the_server_state_is_the_same_to_the_bit_on_two_devices():
    population, task = classification([6, 9, 11, 4, 8])

    def released(devices, mechanism):
        sim = fjs.Simulation(
            fjs.fedavg(task),
            population,
            fjs.full_participation(),
            mechanism=mechanism,
            chunk_size=2,
            chunk_map="scan",
            devices=devices,
        )
        hparams = sim.hyperparameters(learning_rate=0.1, clip=0.2, noise_multiplier=0.5)
        return numbers(sim.run(sim.init(3, hparams), hparams, 3)[0].shared)

    exact = fjs.gaussian(exact_sums=True)
    one, two = released(None, exact), released(jax.devices()[:2], exact)
    np.testing.assert_array_equal(one, two)
    np.testing.assert_allclose(one, released(None, fjs.gaussian()), atol=1e-5)


def test_exact_sums_need_a_clip_norm_and_have_no_derivative():
    mechanism = fjs.gaussian(exact_sums=True)
    with pytest.raises(ValueError, match="clip"):
        mechanism.check(Hyperparameters(clip=np.inf, noise_multiplier=0.0))
    zero = integer_sums.zero(jax.ShapeDtypeStruct((2,), jnp.float32), 1)

    def value(v):
        total = integer_sums.add(zero, v, jnp.float32(1.0))
        return jnp.sum(value_of(total, 1.0))

    with pytest.raises(ValueError, match="exact_sums"):
        jax.grad(value)(jnp.ones((1, 2)))
