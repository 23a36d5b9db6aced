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
    same(jnp.stack(threefry.split(KEY)), jax.random.split(KEY))
    with planning_for(Backend("gpu", None)):
        same(jnp.stack(threefry.split(KEY, 3)), jax.random.split(KEY, 3))
    same(jnp.stack(threefry.split(KEY, 5)), jax.random.split(KEY, 5))
    keys, numbers = jax.random.split(KEY, 3), jnp.arange(3)
    same(jax.vmap(threefry.fold_in)(keys, numbers), jax.vmap(jax.random.fold_in)(keys, numbers))


@pytest.mark.parametrize("shape", [(), (7,), (3, 5)])
def test_bits(shape):
    np.testing.assert_array_equal(
        threefry.bits(KEY, shape), jax.random.bits(KEY, shape, jnp.uint32)
    )


@pytest.mark.parametrize("span", [1, 2, 10, 2**16 + 3, 2**31 - 1])
def test_randint(span):
    high, low = (threefry.bits(key, (50,)) for key in jax.random.split(KEY))
    np.testing.assert_array_equal(
        threefry.integers(high, low, span), jax.random.randint(KEY, (50,), 0, span)
    )
