"""`jax.vmap` over a last axis, which stays last in memory all the way.

`jax.vmap` moves the mapped axis to the front wherever a mapped and an unmapped operand meet. For a
sweep of linear models that is the slow layout: the products of one minibatch with the models of all
settings need transposed copies, and sums over parameters run along the short axis. Here the
function's jaxpr is evaluated with the mapped axis last in every operand. Where two mapped operands
are multiplied as matrices (the layers of a network), the front is the right place, and
`jax.vmap` does it all.

What equations hold is JAX's own business and changes between versions. So a primitive without a
rule here is mapped by `jax.vmap`, and so is the whole function where an equation does not hold what
its rule looks for, or a result does not have the shape it must have.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PyTree = Any


class _Operand(NamedTuple):
    """A value in the evaluation; with a last axis more than the function knows of if mapped."""

    value: Any
    mapped: bool


class _ProductOfMappedError(Exception):
    """Two mapped operands meet in a matrix product."""


class _OtherEquationError(Exception):
    """An equation means something else than its rule here takes it for."""


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
        axes = _axes_of_leaves(in_axes, arguments)
        leaves, structure = jax.tree.flatten(arguments)
        single = [
            leaf if axis is None else jax.ShapeDtypeStruct(_without(leaf.shape, axis), leaf.dtype)
            for leaf, axis in zip(leaves, axes, strict=True)
        ]
        code, shapes = jax.make_jaxpr(
            lambda *leaves: function(*jax.tree.unflatten(structure, leaves)), return_shape=True
        )(*single)
        operands = [
            _Operand(leaf, False) if axis is None else _Operand(jnp.moveaxis(leaf, axis, -1), True)
            for leaf, axis in zip(leaves, axes, strict=True)
        ]
        try:
            outputs = _evaluate(code, operands, size)
        except Exception:  # the function itself has been traced: this is about its equations
            return _by_front(function, in_axes, size)(*arguments)
        values = [_spread(output, size).value for output in outputs]
        return jax.tree.unflatten(jax.tree.structure(shapes), values)

    return mapped


def _by_front(
    function: Callable[..., PyTree], in_axes: Sequence[PyTree], size: int
) -> Callable[..., PyTree]:
    """The whole function as `jax.vmap` maps it."""
    return jax.vmap(function, in_axes=tuple(in_axes), out_axes=-1, axis_size=size)


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


def _evaluate(code: Any, operands: Sequence[_Operand], size: int) -> list[_Operand]:
    """The outputs of a jaxpr, which may have constants of its own."""
    jaxpr, constants = getattr(code, "jaxpr", code), getattr(code, "consts", ())
    environment = {
        variable: _Operand(value, False)
        for variable, value in zip(jaxpr.constvars, constants, strict=True)
    }
    environment |= dict(zip(jaxpr.invars, operands, strict=True))

    def read(atom):
        return _Operand(atom.val, False) if hasattr(atom, "val") else environment[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        name = equation.primitive.name
        if name in _CALLS or any(operand.mapped for operand in inputs):
            outputs = _RULES.get(name, _by_vmap)(equation, inputs, size)
        else:
            outputs = [_Operand(value, False) for value in _bind(equation, inputs)]
        for variable, output in zip(equation.outvars, outputs, strict=True):
            _check(variable.aval, output, size)
            environment[variable] = output
    return [read(atom) for atom in jaxpr.outvars]


def _check(single: Any, output: _Operand, size: int) -> None:
    """Raises where an output does not have the shape it must have."""
    shape = (*single.shape, size) if output.mapped else single.shape
    if jnp.shape(output.value) != shape:
        raise _OtherEquationError(f"{jnp.shape(output.value)} instead of {shape}")


def _bind(equation: Any, inputs: Sequence[_Operand], **changes: Any) -> list[Any]:
    """The primitive itself, on operands as they are, with other values of its parameters."""
    values = [operand.value for operand in inputs]
    known = {name: value for name, value in changes.items() if name in equation.params}
    result = equation.primitive.bind(*values, **(equation.params | known))
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
    return _evaluate(equation.params[name], inputs, size)


def _constants_and_carried(equation: Any) -> tuple[int, int]:
    """How many values a scan holds and how many it carries: all others have an axis of steps."""
    code = equation.params["jaxpr"]
    jaxpr = getattr(code, "jaxpr", code)

    def without_steps(outer, inner):
        pairs = zip(outer, inner, strict=True)
        return sum(len(many.aval.shape) == len(one.aval.shape) for many, one in pairs)

    carried = without_steps(equation.outvars, jaxpr.outvars)
    return without_steps(equation.invars, jaxpr.invars) - carried, carried


def _scan(equation: Any, inputs: Sequence[_Operand], size: int) -> list[_Operand]:
    """A loop of known length, with the axis last in all that depends on something mapped."""
    params = equation.params
    constants, carried = _constants_and_carried(equation)
    held, carry = inputs[:constants], inputs[constants : constants + carried]
    # Slices of what is scanned lose their first axis; the mapped one is the last of both.
    scanned = inputs[constants + carried :]

    def step(carry, slices):
        of_step = [_Operand(v, whole.mapped) for v, whole in zip(slices, scanned, strict=True)]
        return _evaluate(params["jaxpr"], [*held, *carry, *of_step], size)

    slices = [jax.eval_shape(lambda value: value[0], operand.value) for operand in scanned]
    flags, found = _settled(carry, slices, step, size)

    def body(values, slices):
        outputs = step(list(map(_Operand, values, flags)), slices)
        return _values(outputs[:carried], flags, size), [o.value for o in outputs[carried:]]

    last, stacked = jax.lax.scan(
        body,
        _values(carry, flags, size),
        [operand.value for operand in scanned],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*map(_Operand, last, flags), *map(_Operand, stacked, found[carried:])]


def _while(equation: Any, inputs: Sequence[_Operand], size: int) -> list[_Operand]:
    """A loop whose length the settings share; where each has its own, as by `jax.vmap`."""
    test, body = equation.params["cond_jaxpr"], equation.params["body_jaxpr"]
    carried = len(equation.outvars)
    of_test, of_body = (len(getattr(f, "jaxpr", f).invars) - carried for f in (test, body))
    for_test, for_body = inputs[:of_test], inputs[of_test : of_test + of_body]
    carry = inputs[of_test + of_body :]

    def step(carry, none):
        return _evaluate(body, [*for_body, *carry], size)

    flags, _ = _settled(carry, [], step, size)

    def go_on(values):
        [output] = _evaluate(test, [*for_test, *map(_Operand, values, flags)], size)
        return output

    start = _values(carry, flags, size)
    own_lengths: list[bool] = []
    jax.eval_shape(lambda values: own_lengths.append(go_on(values).mapped), start)
    if own_lengths[0]:
        return _by_vmap(equation, inputs, size)
    last = jax.lax.while_loop(
        lambda values: go_on(values).value,
        lambda values: _values(step(list(map(_Operand, values, flags)), []), flags, size),
        start,
    )
    return list(map(_Operand, last, flags))


def _settled(
    carry: Sequence[_Operand],
    slices: PyTree,
    step: Callable[[list[_Operand], PyTree], list[_Operand]],
    size: int,
) -> tuple[list[bool], list[bool]]:
    """Which values that a loop carries are mapped in some step, and which outputs of a step are."""
    flags = [operand.mapped for operand in carry]
    while True:  # at most once for every value carried: flags are only ever raised
        found: list[bool] = []

        def trace(values, slices, flags=flags, found=found):
            outputs = step(list(map(_Operand, values, flags)), slices)
            found.extend(output.mapped for output in outputs)

        jax.eval_shape(trace, _values(carry, flags, size), slices)
        raised = [old or new for old, new in zip(flags, found[: len(carry)], strict=True)]
        if raised == flags:
            return flags, found
        flags = raised


def _values(operands: Sequence[_Operand], flags: Sequence[bool], size: int) -> list[Any]:
    """The operands' values, as mapped ones where a flag says so."""
    return [
        _spread(operand, size).value if flag else operand.value
        for operand, flag in zip(operands, flags, strict=True)
    ]


def _cond(equation: Any, inputs: Sequence[_Operand], size: int) -> list[_Operand]:
    """A choice; where settings choose differently, both are computed, as by `jax.vmap`."""
    if inputs[0].mapped:
        return _by_vmap(equation, inputs, size)
    flags = [operand.mapped for operand in inputs[1:]]

    def branch(code):
        def of(*values):
            outputs = _evaluate(code, list(map(_Operand, values, flags)), size)
            return tuple(_spread(output, size).value for output in outputs)

        return of

    branches = [branch(code) for code in equation.params["branches"]]
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
    "optimization_barrier": lambda equation, inputs, size: list(inputs),
    "reshape": _reshape,
    "scan": _scan,
    "transpose": _transpose,
    "while": _while,
}
