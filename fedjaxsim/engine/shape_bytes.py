"""Bytes and operations of a client's work, from shapes alone: also while a program is traced."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from fedjaxsim.kernels.read_rows import READ_ROWS

PyTree = Any
_ROW_COPIES = 4
"""A client's personal state: gathered, in the loop, updated, and scattered back."""
_MESSAGE_COPIES = 2
"""A client's message: scaled to its bound, and added to the sum."""


def bytes_of_work(jaxpr: Any, row: PyTree, message: PyTree = ()) -> int:
    """Estimate from above the bytes that one client of a batch needs at once.

    It counts every intermediate value of the jaxpr of its work as if all of them lived at the same
    time, and copies of the client's personal state, `row`, and message.
    """
    copies = _ROW_COPIES * bytes_of(row) + _MESSAGE_COPIES * bytes_of(message)
    return intermediate_bytes(jaxpr) + copies


def intermediate_bytes(jaxpr: Any) -> int:
    """Compute the bytes of all intermediate values of a jaxpr, counting a loop once."""
    total = 0
    for equation in jaxpr.eqns:
        total += bytes_of([variable.aval for variable in equation.outvars])
        total += sum(map(intermediate_bytes, jaxprs_in_params(equation.params)))
    return total


def products_in(jaxpr: Any) -> int:
    """Count the multiplications of a jaxpr's matrix products and convolutions, loops included."""
    total = 0
    for equation in jaxpr.eqns:
        inside = sum(map(products_in, jaxprs_in_params(equation.params)))
        total += _products_of(equation)
        total += inside * (equation.params["length"] if equation.primitive.name == "scan" else 1)
    return total


def multiplications_in(jaxpr: Any, most_rows: int) -> int:
    """Count the multiplications of real numbers in a jaxpr, loops included.

    A loop that ends with a client's rows, which it reads b at a time, has ⌈`most_rows`/b⌉ turns;
    another loop of unknown length has one. Of a condition the larger branch counts.
    """
    total = 0
    for equation in jaxpr.eqns:
        name, results = equation.primitive.name, [v.aval for v in equation.outvars]
        if name == "mul" and jnp.issubdtype(results[0].dtype, jnp.floating):
            total += results[0].size
        inside = [multiplications_in(i, most_rows) for i in jaxprs_in_params(equation.params)]
        turns = equation.params["length"] if name == "scan" else 1
        if name == "while" and (rows_read := _rows_read(equation)):
            turns = -(-most_rows // rows_read)
        total += _products_of(equation)
        total += turns * (max(inside) if name == "cond" else sum(inside))
    return total


def _products_of(equation: Any) -> int:
    """Count the multiplications of a matrix product or a convolution; 0 of anything else."""
    name, values = equation.primitive.name, [v.aval for v in equation.invars]
    if name == "dot_general":
        contracted, _ = equation.params["dimension_numbers"]
        inner = math.prod(values[0].shape[axis] for axis in contracted[0])
    elif name == "conv_general_dilated":
        features = equation.params["dimension_numbers"].rhs_spec[0]
        inner = math.prod(values[1].shape) // values[1].shape[features]
    else:
        return 0
    return inner * math.prod(equation.outvars[0].aval.shape)


def _rows_read(equation: Any) -> int:
    """Return how many rows a turn of a loop reads at first, outside of loops in it; or 0."""
    for inner in jaxprs_in_params(equation.params):
        for step in inner.eqns:
            if step.primitive is READ_ROWS:
                position: Any = step.invars[0].aval
                return position.size
            if step.primitive.name not in ("while", "scan") and (size := _rows_read(step)):
                return size
    return 0


def bytes_of(arrays: PyTree) -> int:
    """Compute the bytes of a pytree of arrays, or of their shapes."""
    leaves = jax.tree.leaves(arrays)
    return sum(leaf.size * getattr(leaf.dtype, "itemsize", 4) for leaf in leaves)
