"""The outputs of a linear layer have the derivatives of a matrix product in every mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from fedjaxsim.kernels.linear_outputs import MOST_ROWS, linear_outputs


@pytest.mark.parametrize("rows", [0, 1, 3, MOST_ROWS, MOST_ROWS + 1])
def test_derivatives_are_those_of_the_product(rows):
    rng = np.random.default_rng(rows)
    x, kernel, weight = (
        rng.integers(-4, 5, shape).astype(np.float32) for shape in ((rows, 5), (3, 5), (rows, 3))
    )

    def loss(kernel, x):
        return jnp.sum(weight * linear_outputs(x, kernel))

    @jax.jit
    def forms(kernel, x):
        mapped = jax.vmap(jax.grad(loss), (0, None))(jnp.stack([kernel, 2 * kernel]), x)
        return linear_outputs(x, kernel), *jax.grad(loss, (0, 1))(kernel, x), mapped

    # Products of small integers are exact.
    outputs, of_kernel, of_x, mapped = forms(kernel, x)
    np.testing.assert_array_equal(outputs, x @ kernel.T)
    np.testing.assert_array_equal(of_kernel, weight.T @ x)
    np.testing.assert_array_equal(of_x, weight @ kernel)
    np.testing.assert_array_equal(mapped, [weight.T @ x] * 2)


def test_second_derivatives_in_both_modes():
    x, kernel = jnp.arange(6.0).reshape(2, 3) / 7, jnp.arange(12.0).reshape(4, 3) / 11
    outputs = jax.jit(lambda x, kernel: jnp.sin(linear_outputs(x, kernel)))
    check_grads(outputs, (x, kernel), order=2)
