import jax
import numpy as np
import pytest
import scipy.stats

from fedjaxsim.data.synthetic import _sine_of_right_angles, normal
from fedjaxsim.kernels import threefry
from fedjaxsim.kernels.linear_outputs import linear_outputs


def test_numbers_are_normal_and_independent():
    draws = np.asarray(jax.jit(lambda key: normal(key, (1000, 1000)))(jax.random.key(0)), float)
    assert scipy.stats.kstest(draws.ravel(), "norm").pvalue > 1e-6
    # Tails: the number beyond 4 is Poisson with mean 63.3.
    beyond = np.sum(np.abs(draws) > 4)
    mean = draws.size * 2 * scipy.stats.norm.sf(4)
    law = scipy.stats.poisson(mean)
    assert min(law.cdf(beyond), law.sf(beyond - 1)) > 1e-6
    # Neighbours in a row, in a column, and their squares are uncorrelated.
    for values in (draws, draws**2):
        centred = (values - values.mean()) / values.std()
        for one, other in (
            (centred[:, 1:], centred[:, :-1]),
            (centred[1:], centred[:-1]),
            (centred[:, 500:], centred[:, :500]),
        ):
            assert abs(np.mean(one * other)) * np.sqrt(one.size) < 5


def test_keys_and_shapes_give_numbers_of_their_own():
    first, second = (normal(jax.random.key(seed), (10, 100)) for seed in (0, 1))
    assert not np.any(np.asarray(first) == np.asarray(second))
    assert normal(jax.random.key(0), ()).shape == ()
    keys = jax.random.split(jax.random.key(5), 3)
    mapped = jax.vmap(lambda key: normal(key, (6,)))(keys)
    for key, numbers in zip(keys, mapped, strict=True):
        np.testing.assert_allclose(numbers, normal(key, (6,)), rtol=1e-6)


@pytest.mark.usefixtures("unrolled")
def test_numbers_are_computed_once_however_many_products_read_them():
    def hashes(function):
        compiled = jax.jit(function).lower(jax.random.key(0), jax.numpy.zeros((1, 12))).compile()
        return str(compiled.as_text()).count(" xor(")

    def loss(w, x):
        return jax.numpy.sum(linear_outputs(x, w) ** 2)

    drawn = hashes(lambda key, w: normal(key, (4, 12)) + w)
    assert 20 <= drawn == hashes(lambda key, w: jax.grad(loss)(w, normal(key, (4, 12))))


def test_the_sine_is_right_to_three_ten_millionths():
    v = np.linspace(-1, 1, 100_001, dtype=np.float32)
    exact = np.sin(np.pi / 2 * v.astype(np.float64))
    ours = np.asarray(_sine_of_right_angles(jax.numpy.asarray(v)), np.float64)
    assert np.abs(ours - exact).max() < 3e-7


def test_numbers_are_those_of_jax_in_float64():
    with jax.enable_x64(True):
        key = jax.random.key(1)
        ours = normal(key, (9,))
        assert ours.dtype == np.float64
        np.testing.assert_array_equal(ours, jax.random.normal(key, (9,)))


@pytest.mark.usefixtures("unrolled")
@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        # Known answers of Random123 (Salmon et al. 2011), threefry2x32 with 20 rounds.
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_published_answers(key, counter, expected):
    key, (x, y) = np.array(key, np.uint32), (np.array([c], np.uint32) for c in counter)
    first, second = threefry.words(
        jax.numpy.asarray(key), jax.numpy.asarray(x), jax.numpy.asarray(y)
    )
    assert (int(first[0]), int(second[0])) == expected
