import jax
import numpy as np
import pytest

from fedjaxsim.data.normal import _threefry, normal


@pytest.mark.parametrize("shape", [(), (7,), (10, 100), (3, 5, 8)])
def test_numbers_are_those_of_jax(shape):
    for seed in range(3):
        key = jax.random.key(seed)
        ours = jax.jit(lambda key: normal(key, shape))(key)
        np.testing.assert_array_equal(ours, jax.jit(lambda key: jax.random.normal(key, shape))(key))


def test_numbers_are_those_of_jax_under_vmap():
    keys = jax.random.split(jax.random.key(5), 4)
    theirs = jax.jit(jax.vmap(lambda key: jax.random.normal(key, (6,))))(keys)
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda key: normal(key, (6,))))(keys), theirs)


def test_numbers_are_those_of_jax_in_float64():
    with jax.enable_x64(True):
        key = jax.random.key(1)
        ours = normal(key, (9,))
        assert ours.dtype == np.float64
        np.testing.assert_array_equal(ours, jax.random.normal(key, (9,)))


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
    first, second = _threefry(jax.numpy.asarray(key), jax.numpy.asarray(x), jax.numpy.asarray(y))
    assert (int(first[0]), int(second[0])) == expected
