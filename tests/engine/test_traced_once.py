"""Which functions are refused because a trace of theirs is not the next one."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjaxsim.engine.traced_once import TracedOnce
from fedjaxsim.kernels.primitives import ImpureError

COUNTER = itertools.count()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + next(COUNTER),
        lambda x: x[next(COUNTER) % 2 :],
        lambda x: (x, jnp.float32(next(COUNTER))),
        lambda x: (x, np.float32(next(COUNTER))),
        lambda x: {"x": x, "share": float(next(COUNTER))},
        lambda x: (x, next(COUNTER)),
        lambda x: (x, np.arange(3) + next(COUNTER)),
    ],
    ids=["added", "shape", "array", "numpy", "float", "int", "several"],
)
def test_a_number_that_the_host_changes_is_refused_wherever_it_goes(function):
    with pytest.raises(ImpureError, match="gives other numbers each time"):
        TracedOnce(None).of(function)(jnp.ones(4))


def test_numbers_that_stay_are_returned_as_they_are():
    result = TracedOnce(None).of(lambda x: (2 * x, 0.5, True, np.float32(3)))(jnp.ones(2))
    np.testing.assert_array_equal(result[0], [2, 2])
    assert result[1:] == (0.5, True, 3)


def test_a_trace_is_of_the_types_and_the_precision_that_it_was_made_with():
    function = TracedOnce(None).of(lambda x: (x @ x, jnp.zeros(())))
    single = jax.make_jaxpr(function)(jnp.ones(2, jnp.float32))
    with jax.enable_x64(True):
        wide = jax.make_jaxpr(function)(jnp.ones(2, jnp.float32))
    with jax.default_matmul_precision("highest"):
        exact = jax.make_jaxpr(function)(jnp.ones(2, jnp.float32))
    assert [str(each.out_avals[1].dtype) for each in (single, wide)] == ["float32", "float64"]
    assert "HIGHEST" in str(exact)
    assert "HIGHEST" not in str(single)


def test_a_trace_is_of_the_devices_axes_that_it_was_made_with():
    function = TracedOnce(None).of(lambda x: 2 * x)
    for axis in ("clients", "seeds"):
        mesh = jax.make_mesh((2,), (axis,), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.P(axis)
        placed = {"mesh": mesh, "in_specs": spec, "out_specs": spec, "check_vma": False}
        mapped = jax.shard_map(function, **placed)
        np.testing.assert_array_equal(jax.jit(mapped)(jnp.arange(2.0)), [0, 2])
