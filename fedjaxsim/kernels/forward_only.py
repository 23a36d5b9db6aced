"""An identity with derivatives in forward mode; in reverse mode it says what has them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from fedjaxsim.kernels.primitives import register

PyTree = Any
FORWARD_ONLY = Primitive("forward_only")
register(FORWARD_ONLY)


def forward_only(tree: PyTree, remedy: str) -> PyTree:
    """Return the tree; reverse mode raises a ValueError with the remedy.

    JAX's own error for loops of unknown length tells nothing of what the loop is.
    """

    def marked(leaf):
        inexact = jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        return FORWARD_ONLY.bind(leaf, remedy=remedy) if inexact else leaf

    return jax.tree.map(marked, tree)


def _refuse(cotangent, operand, *, remedy):
    raise ValueError(remedy)


FORWARD_ONLY.def_impl(lambda leaf, **_: leaf)
FORWARD_ONLY.def_abstract_eval(lambda leaf, **_: leaf)
ad.deflinear2(FORWARD_ONLY, _refuse)
batching.defvectorized(FORWARD_ONLY)
mlir.register_lowering(FORWARD_ONLY, lambda context, leaf, **_: [leaf])
