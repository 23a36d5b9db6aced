"""Primitives of a trace that could combine what it is mapped over, and the lines that call them."""

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

_FOLDERS = (str(Path(jax.__file__).parent), str(Path(__file__).parents[1]))
"""Folders whose lines are no user's."""
_HOST = ("callback", "debug_print", "infeed", "outfeed")
_BATCHES = (
    "custom_vmap", "custom_partitioning", "ffi_call", "custom_call",
    "pallas_call",  # its scratch memory outlasts a client
    "rng_bit_generator",  # the first client's key draws for all
)  # fmt: skip
_DEVICES = ("shard_map", "pmap")  # collectives outside them find no axis
"""Parts of the names of primitives."""
_MIXES = "its rule for batches could combine clients or examples; use threefry keys and plain JAX"
_WITHOUT_JAXPRS = {bool, int, float, str, type(None)}
"""Types of most parameters of equations."""
_known: dict[int, Primitive] = {}
_OURS: set[Primitive] = set()
"""Primitives of the package."""


class ImpureError(ValueError):
    """A refusal of what a function calls or closes over."""


def register(primitive: Primitive) -> None:
    """Let functions of clients use a primitive of the package."""
    _OURS.add(primitive)


def check_alone(of_example: Callable[..., Any], *args: Any) -> None:
    """Check a function of one example, whose rules for batches vanish once it is mapped."""
    for equation in equations(jax.make_jaxpr(of_example)(*args).jaxpr):
        if _mixes(equation):
            raise ImpureError(f"{line_of(equation)} calls {equation.primitive}: {_MIXES}")


def refusal(equation: Any) -> str:
    """Return why an equation's primitive is refused, or an empty string."""
    return _refusal_of_name(str(equation.primitive)) or (_MIXES if _mixes(equation) else "")


@functools.cache
def _refusal_of_name(name: str) -> str:
    if any(part in name for part in _HOST):
        return (
            "clients may leave nothing on the host; return a metric instead, or debug with "
            "Simulation(…, unchecked=True) in Python, which has no ε"
        )
    if any(part in name for part in _DEVICES):
        return "only a mechanism may combine clients"
    return ""


def _mixes(equation: Any) -> bool:
    """Return whether a primitive that is mapped may combine what it is mapped over."""
    name = str(equation.primitive)
    return _is_listed(name) or _has_other_keys(equation) or not _is_known(equation, name)


@functools.cache
def _is_listed(name: str) -> bool:
    return any(part in name for part in _BATCHES)


def _has_other_keys(equation: Any) -> bool:
    """Return whether keys are of another kind than threefry, such as rbg."""
    avals = [value.aval for value in (*equation.invars, *equation.outvars)]
    dtypes = {aval.dtype for aval in avals if hasattr(aval, "dtype")}
    if not any(map(_is_other_key, dtypes)):
        return False
    return not any(True for _ in inner_jaxprs(equation))  # blame the equation inside


@functools.cache
def _is_other_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key) and str(dtype) != "key<fry>"


def _is_known(equation: Any, name: str) -> bool:
    """Return whether a primitive, and so its rule for batches, belongs to JAX."""
    if "hi_primitive" in name:  # the rules are those of an object among them
        owners = (type(value).__module__.partition(".")[0] for value in equation.params.values())
        return {*owners} <= {"builtins", "jax", "jaxlib"}
    primitive = equation.primitive
    if primitive in _OURS:
        return True
    if id(primitive) not in _known:
        for module_name, module in list(sys.modules.items()):
            if module is not None and module_name.partition(".")[0] == "jax":
                primitives = (
                    value for value in vars(module).values() if isinstance(value, Primitive)
                )
                _known.update((id(value), value) for value in primitives)
    return id(primitive) in _known


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield all equations, those inside others too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from equations(inner)


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """Yield the jaxprs inside an equation, or in its params, whatever these are called."""
    params = equation if isinstance(equation, dict) else equation.params
    values = [value for value in params.values() if type(value) not in _WITHOUT_JAXPRS]
    leaves = jax.tree.leaves(values) if values else []
    return (leaf for leaf in leaves if hasattr(leaf, "eqns"))


def line_of(equation: Any) -> str:
    """Return the function and the line of a user's code that made an equation."""
    traceback = getattr(getattr(equation, "source_info", None), "traceback", None)
    for frame in getattr(traceback, "frames", ()):
        if not frame.file_name.startswith(_FOLDERS):
            return f"{frame.function_name} ({frame.file_name}:{frame.line_num})"
    return "a function of the algorithm or the task"
