"""Bytes of arrays and of a client's work, from shapes alone, so also while a program is traced."""

import math
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

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
        name, values = equation.primitive.name, [v.aval for v in equation.invars]
        if name == "dot_general":
            contracted, _ = equation.params["dimension_numbers"]
            inner = math.prod(values[0].shape[axis] for axis in contracted[0])
            total += inner * math.prod(equation.outvars[0].aval.shape)
        elif name == "conv_general_dilated":
            features = equation.params["dimension_numbers"].rhs_spec[0]
            inner = math.prod(values[1].shape) // values[1].shape[features]
            total += inner * math.prod(equation.outvars[0].aval.shape)
        inside = sum(map(products_in, jaxprs_in_params(equation.params)))
        total += inside * (equation.params["length"] if name == "scan" else 1)
    return total


def bytes_of(arrays: PyTree) -> int:
    """Compute the bytes of a pytree of arrays, or of their shapes."""
    leaves = jax.tree.leaves(arrays)
    return sum(leaf.size * getattr(leaf.dtype, "itemsize", 4) for leaf in leaves)
