"""Rows taken from a store and put back: both forms are one function with one derivative."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjaxsim.kernels.in_place import put, take


def work(slots, weights, reverse, piece=False):
    """(store, slope) -> (): rows are read, changed and written back, chunk after chunk."""

    def function(store, slope):
        for chunk in slots:
            rows, store = take(store, chunk, reverse=reverse, piece=piece)
            rows = {"x": jnp.sin(slope * rows["x"]) * rows["x"][:, ::-1], "n": rows["n"] + 1}
            store = put(store, chunk, rows, reverse=reverse, piece=piece)
        return jnp.sum(weights * store["x"] * store["n"][:, None])

    return function


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("slots", "piece"),
    [
        ([[0, 3], [1, 4]], False),  # every row but one
        ([[4, 0], [0, 2], [2, 4]], False),  # some of them twice
        ([[1, 9], [7, 8]], False),  # places outside the store
        ([[0, 1], [3, 4], [2, 3]], True),  # one piece each
    ],
)
def test_all_forms_have_the_same_value_and_derivatives(slots, piece):
    rng = np.random.default_rng(0)
    store = {"x": jnp.asarray(rng.normal(size=(5, 3))), "n": jnp.arange(5)}
    weights = jnp.asarray(rng.normal(size=(5, 3)))
    results = []
    for form in ({"reverse": False}, {"reverse": True}, {"reverse": True, "piece": piece}):
        function = work([jnp.array(chunk) for chunk in slots], weights, **form)
        results.append(
            jax.value_and_grad(function, argnums=(0, 1), allow_int=True)(store, jnp.array(0.7))
        )
    (value, (of_store, of_slope)), *others = results
    for other, (of_its_store, of_its_slope) in others:
        assert value == other
        np.testing.assert_allclose(of_its_store["x"], of_store["x"], rtol=1e-6)
        np.testing.assert_allclose(of_its_slope, of_slope, rtol=1e-6)


@pytest.mark.usefixtures("fully_optimized")
def test_the_derivative_in_place_copies_no_store():
    # But for the argument itself, which it may not write over.
    def run(x, slope):
        def body(store, chunk):
            rows, store = take(store, chunk, reverse=True)
            return put(store, chunk, jnp.sin(slope * rows), reverse=True), None

        return jnp.sum(jax.lax.scan(body, x, jnp.array([[1, 5], [7, 2], [900, 3]]))[0])

    x = jax.ShapeDtypeStruct((1000, 300), jnp.float32)
    text = jax.jit(jax.grad(run, argnums=1)).lower(x, 0.5).compile().as_text()
    assert text
    assert len(re.findall(r"f32\[1000,300\]\S* copy\(", text)) <= 1
