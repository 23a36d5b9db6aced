"""Modules of other libraries as models, with parameters as nested dicts of arrays, by name.

Running statistics of BatchNorm (linen, equinox) are kept beside the parameters, as "statistics".
Modules with other variables or with random numbers in calls are refused.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import InvalidRngError
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjaxsim.extras import importing
from fedjaxsim.models.check_kinds import require_maker, require_module
from fedjaxsim.models.frozen import with_frozen
from fedjaxsim.models.model import STATISTICS, Model, require_shape

if TYPE_CHECKING:
    import equinox
    from flax import nnx

_STATISTICS = (
    "use GroupNorm or LayerNorm in place of BatchNorm, or BatchNorm by from_flax or from_equinox: "
    "others would be neither bounded nor noised"
)
_OF_BATCHES = "batch_stats"
_DROPOUT = (
    "leave dropout out, or make it deterministic: a loss here is a function of parameters and data "
    "alone"
)


def from_flax(
    module: nn.Module,
    input_shape: Sequence[int],
    output_layer: str | None = None,
    dtype: Any = jnp.float32,
) -> Model:
    """Make the model of a flax.linen module.

    Args:
      module: called with x (b, ...); its only variables are parameters. With BatchNorm it also
        takes `train`, whether statistics are those of the batch (of its real rows); `Model.train`
        then gives the running ones.
      input_shape: shape of one example, without the batch axis.
      output_layer: name of the output layer, if there is one, such as "Dense_1".
      dtype: type of the examples, such as `jnp.int32` for tokens.

    Raises:
      ValueError: if it is no such module, has other variables, uses dropout, or has BatchNorm
        without `train`.
    """
    require_module("from_flax", module)
    input_shape = require_shape(input_shape)
    takes_train = "train" in inspect.signature(module.__call__).parameters
    mode: dict[str, Any] = {"train": False} if takes_train else {}

    def example():
        return jnp.zeros((1, *input_shape), dtype)

    def init(key):
        made: Any = module.init(key, example(), **mode)
        return made["params"] | ({STATISTICS: made[_OF_BATCHES]} if _OF_BATCHES in made else {})

    def variables(params):
        if not keeps:
            return {"params": params}
        others = {name: part for name, part in params.items() if name != STATISTICS}
        return {"params": others, _OF_BATCHES: params[STATISTICS]}

    def apply(params, x):
        outputs = module.apply(variables(params), x, **mode)
        assert isinstance(outputs, jax.Array)
        return outputs

    def train(params, x, weight):
        real = (weight > 0) | (jnp.sum(weight) == 0)  # of no rows all: a mean over none is NaN

        def masked(call, args, kwargs, context):
            if isinstance(context.module, nn.BatchNorm) and context.method_name == "__call__":
                kwargs = kwargs | {"mask": jnp.expand_dims(real, range(1, args[0].ndim))}
            return call(*args, **kwargs)

        if not takes_train:  # no call changes its statistics
            return apply(params, x), params[STATISTICS]
        with nn.intercept_methods(masked):
            outputs, changed = module.apply(variables(params), x, train=True, mutable=[_OF_BATCHES])
        return outputs, changed[_OF_BATCHES]

    def representation(params, x):
        seen = []

        def note(call, args, kwargs, context):
            if context.module.name == output_layer and context.method_name == "__call__":
                seen.append(args[0])
            return call(*args, **kwargs)

        with nn.intercept_methods(note):
            apply(params, x)
        return seen[0].reshape(x.shape[0], -1)

    kinds = jax.eval_shape(lambda key: module.init(key, example(), **mode), jax.random.key(0))
    keeps = _OF_BATCHES in kinds
    _refuse_statistics(module, (kind for kind in kinds if kind not in ("params", _OF_BATCHES)))
    if keeps and not takes_train and _changes(module, example(), kinds):
        raise _refused(module, "has BatchNorm", "its call must take train, as nn.BatchNorm needs")

    def called(key):
        params = init(key)
        if not takes_train:
            return apply(params, example())
        return module.apply(variables(params), example(), train=True, mutable=[_OF_BATCHES])

    try:
        jax.eval_shape(called, jax.random.key(0))
    except InvalidRngError as error:
        raise _refused(module, "draws random numbers when it is called", _DROPOUT) from error
    known = None if output_layer is None else representation
    of_batches = train if keeps else None
    return Model(init, apply, output_layer, representation=known, train=of_batches)


def from_nnx(
    make: Callable[["nnx.Rngs"], "nnx.Module"], output_layer: str | None = None, wrt: Any = None
) -> Model:
    """Make the model of a flax.nnx module.

    Args:
      make: `(rngs) -> module`, such as `lambda rngs: nnx.Linear(64, 10, rngs=rngs)`. The module is
        called with x (b, ...); its only variables are of type `nnx.Param`.
      output_layer: name of the output layer, if there is one: an attribute of the module.
      wrt: filter of the trained parameters, such as `nnx.LoRAParam`; by default all are trained.
        The others are frozen as `make(nnx.Rngs(0))` returns them, so it loads their values; see
        `trainable`.

    Raises:
      ValueError: if `make` is no such function, or the module has other variables, such as batch
        statistics or the random state of dropout; as `trainable`.
    """
    from flax import nnx

    require_maker("from_nnx", make, "lambda rngs: nnx.Linear(64, 10, rngs=rngs)")
    module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    read = nnx.Param if wrt is None else (nnx.Param, nnx.BatchStat)
    graph, like, others = nnx.split(module, read, ...)
    kinds = [type(variable) for _, variable in nnx.to_flat_state(others)]
    if any(issubclass(kind, nnx.RngState) for kind in kinds):
        raise _refused(module, "keeps random state", _DROPOUT)
    _refuse_statistics(module, (kind.__name__ for kind in kinds))
    like = nnx.to_flat_state(like)

    def init(key):
        params = nnx.to_flat_state(nnx.state(make(nnx.Rngs(key)), read))
        return unflatten_dict({_strings(path): variable[...] for path, variable in params})

    def apply(params, x):
        values = flatten_dict(params)
        flat = [(path, param.replace(values[_strings(path)])) for path, param in like]
        module = nnx.merge(graph, nnx.from_flat_state(flat))
        if wrt is not None:
            module.eval()  # frozen statistics normalize
        return module(x)

    model = Model(init, apply, output_layer)
    if wrt is None:
        return model

    def trained(key):
        part = nnx.to_flat_state(nnx.state(make(nnx.Rngs(key)), wrt))
        return unflatten_dict({_strings(path): variable[...] for path, variable in part})

    return _partly(model, trained)


def from_equinox(
    make: "Callable[[jax.Array], equinox.Module | tuple[equinox.Module, equinox.nn.State]]",
    output_layer: str | None = None,
    wrt: Any = None,
) -> Model:
    """Make the model of an equinox module.

    Args:
      make: `(key) -> module`, such as `lambda key: eqx.nn.MLP(64, 10, 32, 1, key=key)`. The module
        is called with one example, without the batch axis. Its floating arrays are the parameters;
        everything else must not depend on the key. With BatchNorm, `make` returns the module and
        its state, as `equinox.nn.make_with_state` does. Where rows fill half a batch, the batch is
        filled up with them in turn, so give `steps`, whose batches are full.
      output_layer: name of the output layer, if there is one: an attribute of the module.
      wrt: filter of the trained parameters for `equinox.filter`, a function of a leaf or a pytree
        of booleans; by default all are trained. The others are frozen as `make(jax.random.key(0))`
        returns them, so it loads their values; see `trainable`.

    Raises:
      ValueError: if `make` is no such function, or the module keeps state that is not given or
        uses dropout; as `trainable`.
    """
    with importing("equinox"):
        import equinox as eqx

    def trained(module):
        part = eqx.filter(eqx.filter(module, wrt), eqx.is_inexact_array)
        leaves = jax.tree_util.tree_leaves_with_path(part)
        return unflatten_dict({_names(path): leaf for path, leaf in leaves})

    require_maker("from_equinox", make, "lambda key: eqx.nn.MLP(64, 10, 32, 1, key=key)")
    made: Any = make(jax.random.key(0))
    if isinstance(made, tuple):
        both: Any = make
        model = _equinox_with_state(make, output_layer)
        return model if wrt is None else _partly(model, lambda key: trained(both(key)[0]))
    module = made
    special = (eqx.nn.StateIndex, eqx.nn.Dropout)
    parts = jax.tree.leaves(module, is_leaf=lambda node: isinstance(node, special))
    if any(
        isinstance(part, eqx.nn.Dropout) and part.p > 0 and not part.inference for part in parts
    ):
        raise _refused(module, "draws random numbers when it is called", _DROPOUT)
    _refuse_statistics(
        module, (type(part).__name__ for part in parts if isinstance(part, eqx.nn.StateIndex))
    )
    rest = eqx.filter(module, eqx.is_inexact_array, inverse=True)
    like = jax.eval_shape(lambda: eqx.filter(module, eqx.is_inexact_array))

    def init(key):
        params = eqx.filter(make(key), eqx.is_inexact_array)
        leaves = jax.tree_util.tree_leaves_with_path(params)
        return unflatten_dict({_names(path): leaf for path, leaf in leaves})

    def apply(params, x):
        values = flatten_dict(params)
        given = jax.tree_util.tree_map_with_path(lambda path, _: values[_names(path)], like)
        return jax.vmap(eqx.combine(given, rest))(x)

    model = Model(init, apply, output_layer)
    return model if wrt is None else _partly(model, lambda key: trained(make(key)))


def _equinox_with_state(make: Callable[[jax.Array], Any], output_layer: str | None) -> Model:
    """Make the model of `make(key) -> (module, state)`; its statistics are the state's arrays."""
    import equinox as eqx

    def at(node):
        return isinstance(node, (eqx.nn.StateIndex, eqx.nn.BatchNorm))

    module, state = make(jax.random.key(0))
    axes = {n.axis_name for n in jax.tree.leaves(module, is_leaf=at) if hasattr(n, "axis_name")}
    if len(axes) != 1:
        raise _refused(module, "keeps state", "it must be of BatchNorm layers with one axis_name")
    indices = {
        _names(path): index
        for path, index in jax.tree_util.tree_leaves_with_path(
            module, is_leaf=lambda node: isinstance(node, eqx.nn.StateIndex)
        )
        if isinstance(index, eqx.nn.StateIndex)
    }
    rest = eqx.filter(module, eqx.is_inexact_array, inverse=True)
    like = jax.eval_shape(lambda: eqx.filter(module, eqx.is_inexact_array))
    leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, state))  # of no weak types

    def fresh():
        return jax.tree.unflatten(structure, leaves)  # a state is used once

    def statistics_of(state):
        found = {
            (*path[:-1], f"{path[-1]}_{number}"): jnp.asarray(leaf, float)
            for path, index in indices.items()
            for number, leaf in enumerate(jax.tree.leaves(state.get(index)))
        }
        return unflatten_dict(found)

    def init(key):
        params = eqx.filter(make(key)[0], eqx.is_inexact_array)
        named = jax.tree_util.tree_leaves_with_path(params)
        made = unflatten_dict({_names(path): leaf for path, leaf in named})
        return made | {STATISTICS: statistics_of(fresh())}

    def called(params, x, inference):
        values: Any = flatten_dict(params)
        state = fresh()
        for path, index in indices.items():
            old, shape = jax.tree.flatten(state.get(index))
            names = [(STATISTICS, *path[:-1], f"{path[-1]}_{n}") for n in range(len(old))]
            new = [values[name].astype(leaf.dtype) for name, leaf in zip(names, old, strict=True)]
            state = state.set(index, jax.tree.unflatten(shape, new))
        given = jax.tree_util.tree_map_with_path(lambda path, _: values[_names(path)], like)
        whole = eqx.nn.inference_mode(eqx.combine(given, rest), inference)
        (axis,) = axes
        return jax.vmap(whole, axis_name=axis, in_axes=(0, None), out_axes=(0, None))(x, state)

    def train(params, x, weight):
        rows = jnp.sum(weight > 0, dtype=jnp.int32)
        outputs, state = called(params, x[jnp.arange(len(x)) % jnp.maximum(rows, 1)], False)
        return outputs, statistics_of(state)

    return Model(init, lambda params, x: called(params, x, True)[0], output_layer, train=train)


def _partly(model: Model, init: Callable[[jax.Array], Any]) -> Model:
    """Freeze the parameters that `init` does not return, at the values that key 0 gives them."""
    key = jax.random.key(0)
    names = flatten_dict(jax.eval_shape(init, key), sep="/")
    return with_frozen(model, model.init(key), names, init)


def _changes(module: Any, x: jax.Array, kinds: Any) -> bool:
    """Return whether a call of a linen module may change its running statistics."""

    def called(statistics, params):
        variables = {"params": params, _OF_BATCHES: statistics}
        return module.apply(variables, x, mutable=[_OF_BATCHES])[1][_OF_BATCHES]

    traced = jax.make_jaxpr(called)(kinds[_OF_BATCHES], kinds.get("params", {})).jaxpr
    return any(one is not two for one, two in zip(traced.outvars, traced.invars, strict=False))


def _refused(module: Any, what: str, instead: str) -> ValueError:
    return ValueError(f"{type(module).__name__} {what}; {instead}")


def _refuse_statistics(module: Any, kinds: Iterable[str]) -> None:
    names = ", ".join(dict.fromkeys(kinds))
    if names:
        raise _refused(module, f"has variables that are no parameters ({names})", _STATISTICS)


def _strings(path: Iterable[Any]) -> tuple[str, ...]:
    return tuple(map(str, path))


def _names(path: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr(path, simple=True, separator="/").split("/"))
