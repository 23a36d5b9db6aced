"""The primitive by which a client's rows enter a trace.

A trace of a client's function has the arrays of all clients' rows among its inputs, and reads them
by `READ_ROWS` alone, which clamps every position to the client's rows; `check_reads` refuses any
other use.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from fedjaxsim.kernels.primitives import ImpureError, inner_jaxprs, line_of, register

READ_ROWS = Primitive("read_rows")
READ_ROWS.multiple_results = True
register(READ_ROWS)


def read_rows(
    position: jax.Array, fields: Sequence[jax.Array], start: jax.Array, count: jax.Array
) -> list[jax.Array]:
    """Read the rows at positions (b,) among `start : start + count` of fields (N, ...).

    Positions are clamped. Without rows, row `start` stands in for padding.
    """
    return READ_ROWS.bind(position, *fields, start, count)


def _rows(position, *operands):
    *fields, start, count = operands
    row = start + jnp.maximum(jnp.minimum(position, count - 1), 0)
    return [field[row] for field in fields]


def _shapes(position, *operands):
    *fields, _, _ = operands
    return [ShapedArray((*position.shape, *f.shape[1:]), f.dtype) for f in fields]


def _batched(operands, axes):
    position, *fields = operands
    if axes[0] is not None and all(axis is None for axis in axes[1:]):
        moved = jnp.moveaxis(position, axes[0], 0)
        read = READ_ROWS.bind(moved, *fields)
    else:  # the engine's own mapping, of a trace that was checked
        read = jax.vmap(_rows, axes)(*operands)
    return read, [0] * len(read)


def _tangents(primals, tangents):
    return jax.jvp(_rows, tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


READ_ROWS.def_impl(jax.jit(_rows))
READ_ROWS.def_abstract_eval(_shapes)
ad.primitive_jvps[READ_ROWS] = _tangents
batching.primitive_batchers[READ_ROWS] = _batched
mlir.register_lowering(READ_ROWS, mlir.lower_fun(_rows, multiple_results=True))

_Role = tuple[int, int]
"""A view, and the place of an array among the operands of its reads."""


def check_reads(jaxpr: Any, views: Sequence[Sequence[int]]) -> None:
    """Check that the inputs of views serve `READ_ROWS` alone, all inputs of one view together.

    `views` have the places among the jaxpr's inputs of each view's fields, start and count. The
    count may be used otherwise, too: it is the client's own.
    """
    roles = {
        jaxpr.invars[place]: (number, rank)
        for number, view in enumerate(views)
        for rank, place in enumerate(view)
    }
    _check(jaxpr, roles, [len(view) for view in views])


def _check(jaxpr: Any, roles: dict[Any, _Role], sizes: list[int]) -> None:
    def role_of(operand: Any) -> _Role | None:
        return None if operand is None or hasattr(operand, "val") else roles.get(operand)

    def is_kept(operand: Any) -> bool:
        role = role_of(operand)
        return role is not None and role[1] < sizes[role[0]] - 1

    for equation in jaxpr.eqns:
        if equation.primitive is READ_ROWS:
            position, *operands = equation.invars
            roles_read = [role_of(operand) for operand in operands]
            number = roles_read[0][0] if roles_read[0] else -1
            complete = number >= 0 and roles_read == [(number, k) for k in range(sizes[number])]
            if complete and not is_kept(position):
                continue
            raise _refused(equation)
        inside = list(_entered(equation))
        used = equation.invars if not inside else [o for _, _, inputs in inside for o in inputs]
        if "num_consts" in equation.params and equation.primitive.name.startswith("custom_"):
            # Rules of derivatives, which are traced later, read what is no constant.
            used = [*used, *equation.invars[equation.params["num_consts"] :]]
        if any(map(is_kept, used)):
            raise _refused(equation)
        for inner, constants, _ in inside:
            constant_inputs = zip(inner.invars, constants, strict=False)
            _check(
                inner, {v: r for v, o in constant_inputs if (r := role_of(o)) is not None}, sizes
            )
    if any(map(is_kept, jaxpr.outvars)):
        raise ImpureError("a function returns rows of all clients")


def _refused(equation: Any) -> ImpureError:
    return ImpureError(
        f"{line_of(equation)} uses the arrays behind a client's view ({equation.primitive}): a "
        "client reads its own rows by data.fold or data.full_pass"
    )


def _entered(equation: Any) -> Iterator[tuple[Any, list[Any], list[Any]]]:
    """Yield an equation's jaxprs, the operands that are its first inputs, and the other ones.

    The first inputs stay what they are; the others change in a loop, or are not known.
    """
    name, operands = equation.primitive.name, list(equation.invars)
    carried = len(equation.outvars)
    for key, value in equation.params.items():
        for inside in inner_jaxprs({key: value}):
            inner = getattr(inside, "jaxpr", inside)
            count = len(inner.invars)
            if name == "while":
                constant = count - carried
                first = len(operands) - count if key == "body_jaxpr" else 0
                yield inner, operands[first : first + constant], operands[-carried:]
            elif name == "cond":
                yield inner, operands[-count:] if count else [], operands[:1]
            elif count != len(operands):
                yield inner, [], operands
            elif name == "scan":
                constant = count - _varying_in_scan(equation, inner)
                yield inner, operands[:constant], operands[constant:]
            else:
                yield inner, operands, []


def _varying_in_scan(equation: Any, inner: Any) -> int:
    """Return the number of inputs of a scan's body that are no constants, which come first.

    Others are the carry, and slices of what is scanned over, whose shapes have an axis less, as
    the shapes of outputs before they are stacked.
    """

    def loses_axis(outer: Any, inner_variable: Any) -> bool:
        return len(outer.aval.shape) == len(inner_variable.aval.shape) + 1

    scanned = sum(map(loses_axis, equation.invars, inner.invars))
    stacked = sum(map(loses_axis, equation.outvars, inner.outvars))
    return scanned + len(equation.outvars) - stacked
