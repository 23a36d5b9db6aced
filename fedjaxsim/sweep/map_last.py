"""`jax.vmap` over a last axis, which stays last in memory all the way.

`jax.vmap` moves the mapped axis to the front wherever a mapped and an unmapped operand meet. For a
sweep of linear models that is the slow layout: the products of one minibatch with the models of all
settings need transposed copies, and sums over parameters run along the short axis. Here the
function's jaxpr is evaluated with the mapped axis last in every operand. Where two mapped operands
are multiplied as matrices (the layers of a network), the front is the right place, and
`jax.vmap` does it all.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

PyTree = Any


class _Operand(NamedTuple):
    """A value in the evaluation; with a last axis more than the function knows of if mapped."""

    value: Any
    mapped: bool


class _ProductOfMappedError(Exception):
    """Two mapped operands meet in a matrix product."""


def map_last(
    function: Callable[..., PyTree], in_axes: Sequence[PyTree], size: int
) -> Callable[..., PyTree]:
    """What `jax.vmap(function, in_axes, out_axes=-1, axis_size=size)` computes, up to rounding.

    Args:
      function: of positional pytrees of arrays, without side effects.
      in_axes: one for each argument, as for `jax.vmap`.
      size: of the mapped axis.
    """

    def mapped(*arguments):
        plain = jax.vmap(function, in_axes=tuple(in_axes), out_axes=-1, axis_size=size)
        axes = _axes_of_leaves(in_axes, arguments)
        leaves, structure = jax.tree.flatten(arguments)
        single = [
            leaf if axis is None else jax.ShapeDtypeStruct(_without(leaf.shape, axis), leaf.dtype)
            for leaf, axis in zip(leaves, axes, strict=True)
        ]
        closed, shapes = jax.make_jaxpr(
            lambda *leaves: function(*jax.tree.unflatten(structure, leaves)), return_shape=True
        )(*single)
        operands = [
            _Operand(leaf, False) if axis is None else _Operand(jnp.moveaxis(leaf, axis, -1), True)
            for leaf, axis in zip(leaves, axes, strict=True)
        ]
        try:
            outputs = _evaluate(closed, operands, size)
        except _ProductOfMappedError:
            return plain(*arguments)
        values = [_spread(output, size).value for output in outputs]
        return jax.tree.unflatten(jax.tree.structure(shapes), values)

    return mapped


def _axes_of_leaves(in_axes: Sequence[PyTree], arguments: Sequence[PyTree]) -> list[int | None]:
    """The axis of every leaf; an axis given for a pytree holds for all its leaves."""
    axes = []
    for axis, argument in zip(in_axes, arguments, strict=True):
        if axis is None or isinstance(axis, int):
            axes += [axis] * len(jax.tree.leaves(argument))
        else:
            axes += jax.tree.leaves(axis, is_leaf=lambda node: node is None)
    return axes


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    axis %= len(shape)
    return shape[:axis] + shape[axis + 1 :]


def _evaluate(closed: ClosedJaxpr, operands: Sequence[_Operand], size: int) -> list[_Operand]:
    jaxpr = closed.jaxpr
    environment = dict(
        zip(jaxpr.constvars, [_Operand(c, False) for c in closed.consts], strict=True)
    )
    environment |= dict(zip(jaxpr.invars, operands, strict=True))

    def read(atom):
        return _Operand(atom.val, False) if isinstance(atom, Literal) else environment[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        name = equation.primitive.name
        if name in _CALLS or any(operand.mapped for operand in inputs):
            outputs = _RULES.get(name, _by_vmap)(equation, inputs, size)
        else:
            outputs = [_Operand(value, False) for value in _bind(equation, inputs)]
        environment |= dict(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _bind(equation: Any, inputs: Sequence[_Operand], **changes: Any) -> list[Any]:
    """The primitive itself, on operands as they are."""
    values = [operand.value for operand in inputs]
    result = equation.primitive.bind(*values, **(equation.params | changes))
    return list(result) if equation.primitive.multiple_results else [result]


def _mapped(values: Sequence[Any]) -> list[_Operand]:
    return [_Operand(value, True) for value in values]


def _spread(operand: _Operand, size: int) -> _Operand:
    """The operand as a mapped one."""
    if operand.mapped:
        return operand
    value = jnp.asarray(operand.value)
    return _Operand(jnp.broadcast_to(value[..., None], (*value.shape, size)), True)


def _by_vmap(equation: Any, inputs: Sequence[_Operand], size: int) -> list[_Operand]:
    """Any primitive: as `jax.vmap` does it."""

    def function(*values):
        return tuple(_bind(equation, [_Operand(value, False) for value in values]))

    axes = tuple(-1 if operand.mapped else None for operand in inputs)
    values = [operand.value for operand in inputs]
    return _mapped(jax.vmap(function, in_axes=axes, out_axes=-1, axis_size=size)(*values))


def _elementwise(equation: Any, inputs: Sequence[_Operand], size: int) -> list[_Operand]:
    shape = (*equation.outvars[0].aval.shape, size)

    def fit(operand):
        value = jnp.asarray(operand.value)
        if not operand.mapped:
            value = value[..., None]
        elif value.ndim < len(shape):  # one number per setting, as the predicate of a select
            value = value.reshape((1,) * (len(shape) - 1) + (size,))
        return _Operand(jnp.broadcast_to(value, shape), True)

    return _mapped(_bind(equation, [fit(operand) for operand in inputs]))


def _same_axes(equation: Any, inputs: Sequence[_Operand], size: int) -> list[_Operand]:
    """Primitives of one operand whose parameters name axes from the front: nothing changes."""
    return _mapped(_bind(equation, inputs))


def _broadcast_in_dim(equation: Any, inputs: Sequence[_Operand], size: int) -> list[_Operand]:
    shape, dims = equation.params["shape"], equation.params["broadcast_dimensions"]
    value = jax.lax.broadcast_in_dim(inputs[0].value, (*shape, size), (*dims, len(shape)))
    return _mapped([value])


def _reshape(equation: Any, inputs: Sequence[_Operand], size: int) -> list[_Operand]:
    return _mapped([inputs[0].value.reshape((*equation.outvars[0].aval.shape, size))])


def _transpose(equation: Any, inputs: Sequence[_Operand], size: int) -> list[_Operand]:
    permutation = equation.params["permutation"]
    return _mapped([jax.lax.transpose(inputs[0].value, (*permutation, len(permutation)))])


def _dot_general(equation: Any, inputs: Sequence[_Operand], size: int) -> list[_Operand]:
    """The axis is one more free one of the mapped operand, which goes to the right."""
    left, right = inputs
    if left.mapped and right.mapped:
        raise _ProductOfMappedError
    if right.mapped:
        return _mapped(_bind(equation, inputs, out_sharding=None))
    (left_sum, right_sum), (left_batch, right_batch) = equation.params["dimension_numbers"]
    swapped = ((right_sum, left_sum), (right_batch, left_batch))
    [value] = _bind(equation, [right, left], dimension_numbers=swapped, out_sharding=None)
    # (batch, right free, left free, S) -> (batch, left free, right free, S)
    batch = len(left_batch)
    right_free = jnp.ndim(right.value) - len(right_sum) - batch
    left_free = value.ndim - 1 - right_free - batch
    order = [
        *range(batch),
        *range(batch + right_free, batch + right_free + left_free),
        *range(batch, batch + right_free),
        value.ndim - 1,
    ]
    return _mapped([jax.lax.transpose(value, order)])


def _call(equation: Any, inputs: Sequence[_Operand], size: int) -> list[_Operand]:
    """A function that is called: what it does is done here."""
    name = "call_jaxpr" if "call_jaxpr" in equation.params else "jaxpr"
    closed = equation.params[name]
    if not isinstance(closed, ClosedJaxpr):
        closed = ClosedJaxpr(closed, ())
    return _evaluate(closed, inputs, size)


def _scan(equation: Any, inputs: Sequence[_Operand], size: int) -> list[_Operand]:
    """A loop, with the axis last in all that depends on something mapped."""
    params = equation.params
    constants, carried = params["num_consts"], params["num_carry"]
    held, carry = list(inputs[:constants]), list(inputs[constants : constants + carried])
    # Slices of what is scanned lose their first axis; the mapped one is the last of both.
    scanned = list(inputs[constants + carried :])
    held_values = [operand.value for operand in held]
    scanned_flags = [operand.mapped for operand in scanned]

    def step(flags):
        def body(carry, slices):
            operands = [
                *(
                    _Operand(v, operand.mapped)
                    for v, operand in zip(held_values, held, strict=True)
                ),
                *map(_Operand, carry, flags),
                *map(_Operand, slices, scanned_flags),
            ]
            outputs = _evaluate(params["jaxpr"], operands, size)
            found.extend(output.mapped for output in outputs)
            new = [
                _spread(output, size) if flag else output
                for output, flag in zip(outputs[:carried], flags, strict=True)
            ]
            return [o.value for o in new], [o.value for o in outputs[carried:]]

        return body

    flags = [operand.mapped for operand in carry]
    slices = [jax.eval_shape(lambda value: value[0], operand.value) for operand in scanned]
    while True:  # at most once for every value carried: flags are only ever raised
        start = [
            _spread(operand, size).value if flag else operand.value
            for operand, flag in zip(carry, flags, strict=True)
        ]
        found: list[bool] = []
        jax.eval_shape(step(flags), start, slices)
        raised = [old or new for old, new in zip(flags, found[:carried], strict=True)]
        if raised == flags:
            break
        flags = raised
    stacked_flags = found[carried:]
    last, stacked = jax.lax.scan(
        step(flags),
        start,
        [operand.value for operand in scanned],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*map(_Operand, last, flags), *map(_Operand, stacked, stacked_flags)]


def _cond(equation: Any, inputs: Sequence[_Operand], size: int) -> list[_Operand]:
    """A choice; where settings choose differently, both are computed, as by `jax.vmap`."""
    if inputs[0].mapped:
        return _by_vmap(equation, inputs, size)
    flags = [operand.mapped for operand in inputs[1:]]

    def branch(closed):
        def of(*values):
            outputs = _evaluate(closed, list(map(_Operand, values, flags)), size)
            return tuple(_spread(output, size).value for output in outputs)

        return of

    branches = [branch(closed) for closed in equation.params["branches"]]
    values = [operand.value for operand in inputs[1:]]
    return _mapped(jax.lax.switch(inputs[0].value, branches, *values))


# fmt: off
_ELEMENTWISE = (
    "abs", "add", "add_any", "and", "atan2", "cbrt", "ceil", "clamp", "convert_element_type",
    "copy", "cos", "cosh", "div", "eq", "erf", "erf_inv", "exp", "exp2", "expm1", "floor", "ge",
    "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul",
    "ne", "neg", "nextafter", "not", "or", "pow", "rem", "round", "rsqrt", "select_n", "sign",
    "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
)
_SAME_AXES = (
    "argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod",
    "reduce_sum", "squeeze",
)
_CALLS = (
    "checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit",
    "remat2",
)
# fmt: on
_RULES: dict[str, Callable[..., list[_Operand]]] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_SAME_AXES, _same_axes),
    **dict.fromkeys(_CALLS, _call),
    "broadcast_in_dim": _broadcast_in_dim,
    "cond": _cond,
    "dot_general": _dot_general,
    "reshape": _reshape,
    "scan": _scan,
    "transpose": _transpose,
}
