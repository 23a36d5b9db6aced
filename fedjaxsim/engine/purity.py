"""Checks that the functions of one client, as traced, have no way to other clients.

JAX runs what a trace holds, mapped over clients. A callback keeps numbers on the host, a rule for
batches sees the clients of a chunk, a collective those of all devices, a reference is shared by all
rounds, and an array that a function closes over may hold anybody's rows.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.data.contained_rows import contained_rows
from fedjaxsim.kernels.primitives import ImpureError, equations, inner_jaxprs, line_of, refusal
from fedjaxsim.own_code import own_modules
from fedjaxsim.privacy.mechanisms import Mechanism
from fedjaxsim.privacy.samplers import Sampler

Captured = tuple[np.ndarray, str]
"""An array that a function closes over, and the line that uses it, in words."""


def check_pure(traced: Any) -> list[Captured]:
    """Check the primitives of a traced function of one client; return the arrays it closes over."""
    for equation in equations(traced.jaxpr):
        if reason := refusal(equation):
            raise ImpureError(f"{line_of(equation)} calls {equation.primitive}: {reason}")
    if traced.effects:
        equation = _with_effects(traced.jaxpr)
        raise ImpureError(
            f"{line_of(equation)} reads or writes an array that clients and rounds share "
            f"({equation.primitive}); return what lasts as a state"
        )
    return [(np.asarray(value), line_of(equation)) for value, equation in _constants(traced)]


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


def _with_effects(jaxpr: Any) -> Any:
    """Return the innermost first equation with an effect."""
    equation = next(candidate for candidate in jaxpr.eqns if candidate.effects)
    inside = (inner for inner in inner_jaxprs(equation) if inner.effects)
    deeper = next(inside, None)
    return equation if deeper is None else _with_effects(deeper)


def _constants(traced: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the arrays that a traced function closes over, each with an equation that uses it."""
    variables = traced.jaxpr.constvars if hasattr(traced, "consts") else ()
    held = dict(zip(map(id, variables), getattr(traced, "consts", ()), strict=True))
    for equation in traced.eqns:
        for operand in equation.invars:
            value: Any = getattr(operand, "val", held.get(id(operand)))
            # Keys are no numbers.
            plain = hasattr(value, "dtype") and not isinstance(value, Tracer)
            if plain and not jnp.issubdtype(value.dtype, jax.dtypes.extended):
                yield value, equation
        for inner in inner_jaxprs(equation):
            yield from _constants(inner)


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
    sentences = []
    if sampler.availability is not None:
        sentences.append(
            "Whether a drawn client answers, and how many local steps it takes, does not follow "
            "from data; whoever is drawn is charged, and who answers is as secret as who is drawn."
        )
    for part, sentence in zip((algorithm, mechanism, sampler), _ASSUMED, strict=True):
        if modules := own_modules(part):
            sentences.append(sentence.format(", ".join(modules)))
    return tuple(sentences)
