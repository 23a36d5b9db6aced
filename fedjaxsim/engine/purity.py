"""Checks that the functions of one client, as traced, have no way to other clients.

JAX runs what a trace holds, mapped over clients. A callback keeps numbers on the host, a rule for
batches sees the clients of a chunk, a collective all devices' clients, a reference is shared by all
rounds, and an array that a function closes over may hold anybody's rows.
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr

from fedjaxsim.algorithm import Algorithm
from fedjaxsim.data.contained_rows import FieldHashes, contained_rows
from fedjaxsim.data.minibatches import Generate
from fedjaxsim.kernels.primitives import ImpureError, equations, inner_jaxprs, line_of, refusal
from fedjaxsim.own_code import defined_at, is_stamped, own_modules
from fedjaxsim.privacy.assumptions import OWN_EXAMPLES, OWN_MECHANISM
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


def check_repeats(function: Any, first: Any, again: Any, returned: tuple[Any, Any]) -> None:
    """Check that two traces of a function are one, and the Python numbers that both `returned`.

    A number that the host drew, counted or read from a clock is a constant of a trace, and so the
    same in all rounds and of all clients.
    """
    pairs = itertools.zip_longest(equations(first.jaxpr), equations(again.jaxpr))
    for equation, repeated in pairs:
        if equation is None or repeated is None or _settings_of(equation) != _settings_of(repeated):
            raise _changing(equation or repeated, function)
    constants = itertools.zip_longest(_constants(first), _constants(again))
    for constant, repeated in constants:
        if constant is None or repeated is None or _bytes(constant[0]) != _bytes(repeated[0]):
            either = constant or repeated
            raise _changing(either and either[1], function)
    if repr(returned[0]) != repr(returned[1]):
        raise _changing(None, function)


def digest_of(traced: Any) -> str:
    """Return a hash of a trace and its constants, the same in every process that traces alike."""
    digest = hashlib.sha256(re.sub(r"0x[0-9a-f]+", "", str(traced)).encode())
    for value, _ in _constants(traced):
        digest.update(repr(_bytes(value)).encode())
    return digest.hexdigest()


def _changing(equation: Any, function: Any) -> ImpureError:
    """Return the error of an equation or, without one, of the function that returns the number."""
    where = defined_at(function) if equation is None else None
    return ImpureError(
        f"{where or line_of(equation)} gives other numbers each time it is traced, and one of them "
        "in all rounds when it runs: draw random numbers with jax.random from context.key, and "
        "count in a state; numpy.random, clocks and counters are read while a function is traced"
    )


def _settings_of(equation: Any) -> tuple[Any, ...]:
    """Return an equation's primitive, and the plain values among its parameters."""
    plain = bool, int, float, str, tuple
    values = {k: v for k, v in equation.params.items() if isinstance(v, plain)}
    return equation.primitive, repr(values) if "<" not in repr(values) else None


def _bytes(value: Any) -> tuple[tuple[int, ...], bytes]:
    return np.shape(value), np.asarray(value).tobytes()


_RULES = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk")
"""Parameters of `jax.custom_jvp` and `jax.custom_vjp` with the rule that computes values."""


class _CheckedRule:
    """A user's rule of a derivative, which JAX traces when the engine differentiates."""

    def __init__(self, rule: Any, checked: Callable[[Any], Any]):
        self._rule, self._checked = rule, checked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def call_wrapped(self, *zeros: Any) -> Any:
        """Trace the rule, check the trace, and return it with copies of its constants."""
        jaxpr, constants, *extras = self._rule.call_wrapped(*zeros)
        closed = self._checked(ClosedJaxpr(jaxpr, constants))
        return closed.jaxpr, closed.consts, *extras


def with_own_constants(closed: Any, checked: Callable[[Any], Any]) -> Any:
    """Return a closed jaxpr whose constants, those inside it too, are copies.

    Rules of derivatives pass through `checked` when they are traced.
    """
    jaxpr, changed = closed.jaxpr, []
    for equation in jaxpr.eqns:
        params = {
            name: _CheckedRule(value, checked) if name in _RULES else _with_copies(value, checked)
            for name, value in equation.params.items()
        }
        same = all(params[name] is value for name, value in equation.params.items())
        changed.append(equation if same else equation.replace(params=params))
    if any(copied is not equation for copied, equation in zip(changed, jaxpr.eqns, strict=True)):
        jaxpr = jaxpr.replace(eqns=changed)
    if jaxpr is closed.jaxpr and not closed.consts:
        return closed
    return ClosedJaxpr(jaxpr, [_copied(value) for value in closed.consts])


def _with_copies(value: Any, checked: Callable[[Any], Any]) -> Any:
    if isinstance(value, ClosedJaxpr):
        return with_own_constants(value, checked)
    if isinstance(value, tuple) and any(isinstance(part, ClosedJaxpr) for part in value):
        copies = [_with_copies(part, checked) for part in value]
        return type(value)(*copies) if hasattr(value, "_fields") else tuple(copies)
    return value


def _copied(value: Any) -> Any:
    """Return a constant that nobody else can change."""
    if isinstance(value, Tracer):
        raise ImpureError(
            f"a function closes over {value.aval}, a value of another trace: give it as a state or "
            "a hyperparameter"
        )
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return value
    with jax.ensure_compile_time_eval():
        return jax.device_put(np.array(value))  # `jnp.array` compiles a program for each shape


def check_captured(
    captured: Iterable[Captured], fields: Mapping[str, np.ndarray], hashes: FieldHashes
) -> None:
    """Check that no captured array holds rows of clients, a dict `fields`, each (N, ...).

    Numbers computed from rows, such as a mean, are like any others. `hashes` are the fields' own
    so far; see `contained_rows`.
    """
    for array, place in captured:
        name = contained_rows(array, fields, hashes)
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


def _is_plain(value: Any) -> bool:
    """Return whether a value is an array of numbers; keys are none."""
    if not hasattr(value, "dtype") or isinstance(value, Tracer):
        return False
    return not jnp.issubdtype(value.dtype, jax.dtypes.extended)


def _constants(traced: Any) -> Iterator[tuple[Any, Any]]:
    """Yield arrays that a traced function closes over, with an equation that uses each, or None."""
    variables = traced.jaxpr.constvars if hasattr(traced, "consts") else ()
    held = dict(zip(map(id, variables), getattr(traced, "consts", ()), strict=True))
    for equation in traced.eqns:
        for operand in equation.invars:
            value: Any = getattr(operand, "val", held.get(id(operand)))
            if _is_plain(value):
                yield value, equation
        for inner in inner_jaxprs(equation):
            yield from _constants(inner)
    for result in getattr(traced, "jaxpr", traced).outvars:
        value = getattr(result, "val", held.get(id(result)))
        if _is_plain(value):
            yield value, None


_ASSUMED = (
    "Functions of {} depend on their arguments alone: they read no data but the client's that they "
    "are given, keep nothing between calls, and hold no numbers computed from clients' rows.",
    OWN_MECHANISM,
    "The sampler of {} draws clients as its scheme says; single clients, pairs and rounds were "
    "tested.",
)


def assumptions_of(
    algorithm: Algorithm, mechanism: Mechanism, sampler: Sampler, generate: Generate | None = None
) -> tuple[str, ...]:
    """Return what a guarantee assumes of users' functions; nothing if there are none.

    A population's `generate` is a function of a client, too.
    """
    sentences = []
    if sampler.availability is not None:
        sentences.append(
            "Whether a drawn client answers, and how many local steps it takes, does not follow "
            "from data; whoever is drawn is charged, and who answers is as secret as who is drawn."
        )
    if algorithm.example_epsilon is not None and not is_stamped(algorithm):
        sentences.append(OWN_EXAMPLES)
    for part, sentence in zip(((algorithm, generate), mechanism, sampler), _ASSUMED, strict=True):
        if modules := own_modules(part):
            sentences.append(sentence.format(", ".join(modules)))
    return tuple(sentences)
