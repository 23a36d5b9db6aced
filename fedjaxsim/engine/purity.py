"""Checks that the functions of one client, as traced, have no way to other clients.

JAX runs what a trace holds, mapped over clients. A callback keeps numbers on the host, a rule for
batches sees the clients of a chunk, a collective those of all devices, a reference is shared by all
rounds, and an array that a function closes over may hold anybody's rows.
"""

import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Primitive

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.data.contained_rows import contained_rows
from fedjaxsim.privacy.mechanisms import Mechanism
from fedjaxsim.privacy.samplers import Sampler

_FOLDERS = (str(Path(jax.__file__).parent), str(Path(__file__).parents[1]))
"""Folders whose lines are no user's."""
_HOST = ("callback", "debug_print", "infeed", "outfeed")
_BATCHES = ("custom_vmap", "custom_partitioning", "ffi_call", "custom_call")
_DEVICES = ("shard_map", "pmap")  # collectives outside them find no axis
"""Parts of the names of primitives."""
_known: dict[int, Primitive] = {}


class ImpureError(ValueError):
    """A refusal by this module."""


class Captured(NamedTuple):
    """An array that a function closes over, and the line that uses it, in words."""

    array: np.ndarray
    place: str


def check_pure(traced: Any) -> list[Captured]:
    """Check the primitives of a traced function of one client; return the arrays it closes over."""
    for equation in _equations(traced.jaxpr):
        if reason := _reason(equation):
            raise ImpureError(f"{_place(equation)} calls {equation.primitive}: {reason}")
    if traced.effects:
        equation = _with_effects(traced.jaxpr)
        raise ImpureError(
            f"{_place(equation)} reads or writes an array that clients and rounds share "
            f"({equation.primitive}); return what lasts as a state"
        )
    return [Captured(np.asarray(value), _place(each)) for value, each in _constants(traced)]


def check_captured(captured: Iterable[Captured], fields: Mapping[str, np.ndarray]) -> None:
    """Check that no captured array holds rows of clients, `fields` by name, each (N, ...).

    Numbers computed from rows, such as a mean, are like any others.
    """
    for array, place in captured:
        name = contained_rows(array, fields)
        if name is not None:
            raise ImpureError(
                f"{place} uses an array {array.dtype}{list(array.shape)} with rows of the clients' "
                f"{name!r}: a client reads its own by data.fold or data.full_pass"
            )


def _reason(equation: Any) -> str:
    """Return why an equation's primitive is refused, or an empty string."""
    name = str(equation.primitive)
    if any(part in name for part in _HOST):
        return (
            "clients may leave nothing on the host; return a metric instead, or debug with "
            "Simulation(…, unchecked=True) in Python, for which there is no ε"
        )
    if any(part in name for part in _DEVICES):
        return "only a mechanism may combine clients"
    if any(part in name for part in _BATCHES) or not _is_known(equation):
        return "its rule for batches could combine clients"
    return ""


def _is_known(equation: Any) -> bool:
    """Return whether a primitive, and so its rule for batches, belongs to JAX."""
    if "hi_primitive" in str(equation.primitive):  # the rules are those of an object among them
        owners = (type(value).__module__.partition(".")[0] for value in equation.params.values())
        return {*owners} <= {"builtins", "jax", "jaxlib"}
    primitive = equation.primitive
    if id(primitive) not in _known:
        for name, module in list(sys.modules.items()):
            if module is not None and name.partition(".")[0] == "jax":
                found = (value for value in vars(module).values() if isinstance(value, Primitive))
                _known.update((id(value), value) for value in found)
    return id(primitive) in _known


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Yield all equations, those inside others too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in _inner(equation):
            yield from _equations(inner)


def _inner(equation: Any) -> Iterator[Any]:
    """Yield the jaxprs inside an equation, whatever its parameters are called."""
    values = jax.tree.leaves(list(equation.params.values()))
    return (value for value in values if hasattr(value, "eqns"))


def _with_effects(jaxpr: Any) -> Any:
    """Return the innermost first equation with an effect."""
    equation = next(each for each in jaxpr.eqns if each.effects)
    inside = (inner for inner in _inner(equation) if inner.effects)
    deeper = next(inside, None)
    return equation if deeper is None else _with_effects(deeper)


def _constants(traced: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the arrays that a traced function closes over, each with an equation that uses it."""
    variables = traced.jaxpr.constvars if hasattr(traced, "consts") else ()
    held = dict(zip(map(id, variables), getattr(traced, "consts", ()), strict=True))
    for equation in traced.eqns:
        for operand in equation.invars:
            value = getattr(operand, "val", held.get(id(operand)))
            if _is_plain(value):
                yield value, equation
        for inner in _inner(equation):
            yield from _constants(inner)


def _is_plain(value: Any) -> bool:
    """Return whether a value is an array of numbers, not of keys."""
    return (
        hasattr(value, "dtype")
        and not isinstance(value, Tracer)
        and not jnp.issubdtype(value.dtype, jax.dtypes.extended)
    )


def _place(equation: Any) -> str:
    """Return the function and the line of a user's code that made an equation."""
    traceback = getattr(getattr(equation, "source_info", None), "traceback", None)
    for frame in getattr(traceback, "frames", ()):
        if not frame.file_name.startswith(_FOLDERS):
            return f"{frame.function_name} ({frame.file_name}:{frame.line_num})"
    return "a function of the algorithm or the task"


_PACKAGES = {
    *sys.stdlib_module_names,
    "fedjaxsim", "jax", "jaxlib", "numpy", "optax", "flax", "equinox", "haiku",
}  # fmt: skip


_INSIDE = "__closure__", "cell_contents", "__defaults__", "__wrapped__", "__self__"
_OF_PARTIAL = "func", "args", "keywords"
"""Names of what a function, its cells and a `functools.partial` hold."""


def own_modules(part: Any) -> list[str]:
    """Return the modules, no libraries, of a part's functions and of all they close over."""
    found, seen = set(), set()
    left: list[Any] = [part]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (tuple, list)):
            left += value
        elif isinstance(value, dict):
            left += value.values()
        else:
            module = getattr(value, "__module__", None) or type(value).__module__
            if module.partition(".")[0] not in _PACKAGES:
                found.add(module)
            names = _OF_PARTIAL if isinstance(value, functools.partial) else _INSIDE
            with contextlib.suppress(ValueError):  # an empty cell
                left += [getattr(value, name, None) for name in names]
    return sorted(found)


_ASSUMED = (
    "Functions of {} depend on their arguments alone: they read no data but the client's that they "
    "are given, keep nothing between calls, and hold no numbers computed from clients' rows.",
    "The mechanism of {} bounds each message and draws the noise that it charges, as its event "
    "says; no check of a run tests that.",
    "The sampler of {} draws clients as its scheme says, of which single clients, pairs and rounds "
    "were tested.",
)


def assumptions_of(algorithm: Algorithm, mechanism: Mechanism, sampler: Sampler) -> tuple[str, ...]:
    """Return what a guarantee assumes of users' functions; nothing if there are none."""
    found = []
    if sampler.availability is not None:
        found.append(
            "Whether a drawn client answers, and how many local steps it takes, does not follow "
            "from data; whoever is drawn is charged, and who answers is as secret as who is drawn."
        )
    for part, sentence in zip((algorithm, mechanism, sampler), _ASSUMED, strict=True):
        if modules := own_modules(part):
            found.append(sentence.format(", ".join(modules)))
    return tuple(found)
