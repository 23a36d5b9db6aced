"""Factorizations in batches on a CPU, one after another: with jaxlib 0.10 they may wait for ever.

There a batched LAPACK call spreads over XLA's pool of as many threads as cores and blocks one of
them, so two such calls at once block all. Mapped by `jax.vmap` in a program of this package, over
clients, settings or anything else, each matrix is factorized alone here; elsewhere JAX's own rules
hold. This file goes with JAX 0.10.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching

from fedjaxsim.kernels import backend

_FIXED = (0, 11)
"""The first version of JAX, and of jaxlib, whose calls end."""
_NAMES = (
    "cholesky", "eig", "eigh", "hessenberg", "householder_product", "lu", "qr", "schur", "svd",
    "triangular_solve", "tridiagonal",
)  # fmt: skip


@functools.cache
def factorize_one_by_one() -> None:
    """Let `jax.vmap` map LAPACK's factorizations one by one in programs that a CPU runs."""
    if jax.__version_info__[:2] >= _FIXED:
        return
    for name in _NAMES:
        primitive = getattr(jax.lax.linalg, f"{name}_p", None)
        if primitive is not None:
            rules = batching.fancy_primitive_batchers
            rules[primitive] = functools.partial(_mapped, primitive, rules[primitive])


def _mapped(
    primitive: Any,
    rule: Callable[..., Any],
    axis_data: Any,
    operands: Any,
    axes: Any,
    **settings: Any,
) -> tuple[Any, Any]:
    """Apply a primitive of matrices (..., n, k) along an axis of its operands.

    JAX's own `rule` does it outside of programs, and in accelerators' programs.
    """
    mapped = any(axis is not None for axis in axes)
    if not (mapped and backend.is_bound() and backend.platform() == "cpu"):
        return rule(axis_data, operands, axes, **settings)
    both = list(zip(operands, axes, strict=True))
    size = next(operand.shape[axis] for operand, axis in both if axis is not None)
    stacked = [
        jnp.broadcast_to(operand, (size, *operand.shape))
        if axis is None
        else jnp.moveaxis(operand, axis, 0)
        for operand, axis in both
    ]

    def one(operands: Any) -> Any:
        return primitive.bind(*operands, **settings)

    outputs = jax.lax.map(one, stacked)
    return outputs, [0] * len(outputs) if primitive.multiple_results else 0
