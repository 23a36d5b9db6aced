"""The keys and bits are those of `jax.random`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjaxsim.kernels import threefry
from fedjaxsim.kernels.backend import Backend, planning_for

pytestmark = pytest.mark.usefixtures("unrolled")
KEY = jax.random.key(2**40 + 7, impl="threefry2x32")


def same(key, expected):
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(expected))


@pytest.mark.parametrize("number", [0, 1, 2**31 - 1, 2**32 - 1, np.int32(5), jnp.int32(-3)])
def test_fold_in(number):
    same(threefry.fold_in(KEY, number), jax.random.fold_in(KEY, number))


def test_split_and_maps():
    def split(number):
        return jax.jit(lambda: jnp.stack(threefry.split(KEY, number)))()

    same(jax.jit(lambda: jnp.stack(threefry.split(KEY)))(), jax.random.split(KEY))
    with planning_for(Backend("gpu", None)):
        same(split(3), jax.random.split(KEY, 3))
    same(split(5), jax.random.split(KEY, 5))
    keys, numbers = jax.random.split(KEY, 3), np.arange(3)
    ours, expected = (
        jax.jit(jax.vmap(fold_in))(keys, numbers)
        for fold_in in (threefry.fold_in, jax.random.fold_in)
    )
    same(ours, expected)


@pytest.mark.parametrize("shape", [(), (7,), (3, 5)])
def test_bits(shape):
    np.testing.assert_array_equal(
        threefry.bits(KEY, shape), jax.random.bits(KEY, shape, jnp.uint32)
    )


@pytest.mark.parametrize("span", [1, 2, 10, 2**16 + 3, 2**31 - 1])
def test_randint(span):
    @jax.jit
    def ours():
        high, low = (threefry.bits(key, (50,)) for key in jax.random.split(KEY))
        return threefry.integers(high, low, span)

    np.testing.assert_array_equal(ours(), jax.random.randint(KEY, (50,), 0, span))
