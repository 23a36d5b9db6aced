"""Primitives by their owner; `tests/attacks/test_own_code.py` has those of whole functions."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from fedjaxsim.engine.purity import check_pure
from fedjaxsim.kernels.primitives import ImpureError


class Mine:
    """Rules of a user's own."""


@pytest.mark.parametrize(
    ("rules", "refused"), [(jax.ShapeDtypeStruct((), jnp.float32), False), (Mine(), True)]
)
def test_a_primitive_made_of_an_object_belongs_to_the_owner_of_its_rules(rules, refused):
    # JAX from 0.12 on makes `jnp.searchsorted` of one; a user may make others.
    equation = SimpleNamespace(
        primitive="call_hi_primitive", params={"_prim": rules}, invars=(), outvars=()
    )
    jaxpr = SimpleNamespace(eqns=[equation], outvars=[])
    traced = SimpleNamespace(jaxpr=jaxpr, eqns=[equation], effects=set())
    if refused:
        with pytest.raises(ImpureError, match="call_hi_primitive"):
            check_pure(traced)
    else:
        assert check_pure(traced) == []
