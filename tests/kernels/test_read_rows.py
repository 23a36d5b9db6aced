"""The primitive by which a client's rows enter a trace."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.kernels.read_rows import read_rows

FIELD = jnp.arange(12.0).reshape(6, 2)


def test_derivatives_in_rows_are_those_of_the_rows_that_are_read():
    def read(field):  # positions are clamped to rows 2 and 3
        return read_rows(jnp.arange(3), [field], jnp.int32(2), jnp.int32(2))[0]

    rows, tangents = jax.jit(lambda field: jax.jvp(read, (field,), (10 * field,)))(FIELD)
    np.testing.assert_array_equal(rows, FIELD[jnp.array([2, 3, 3])])
    np.testing.assert_array_equal(tangents, 10 * rows)
    times = jax.jit(jax.grad(lambda field: read(field).sum()))(FIELD)
    np.testing.assert_array_equal(times[:, 0], [0, 0, 1, 2, 0, 0])
