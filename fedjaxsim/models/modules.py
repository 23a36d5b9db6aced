"""Modules of other libraries as models, with parameters as nested dicts of arrays.

Running statistics of BatchNorm are kept with the parameters, as "statistics".
Random layers, such as dropout, draw by the keys of a minibatch's examples in training, and are off
elsewhere. Modules with other variables are refused. Parameters of float32, which is flax's own
default, are float64 where JAX computes in float64.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import InvalidRngError, ModifyScopeVariableError
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjaxsim.extras import importing
from fedjaxsim.models.model import (
    STATISTICS,
    FrozenWeights,
    Model,
    reader_of,
    refused,
    sizes,
)

if TYPE_CHECKING:
    import equinox
    from flax import nnx

PyTree = Any
_STATISTICS = (
    "running statistics of BatchNorm are the only ones that are moved, so use its layer, or "
    "GroupNorm or LayerNorm, which have none"
)
_OF_BATCHES = "batch_stats"
_TRAINING = {"train": True, "deterministic": False}
"""What the calls of linen modules take for training."""
_OFF = "its call must take train or deterministic, which switches such layers off"


def from_flax(
    module: nn.Module,
    input_shape: Sequence[int],
    output_layer: str | None = None,
    dtype: Any = jnp.float32,
) -> Model:
    """Make the model of a flax.linen module.

    Args:
      module: called with x (b, ...); its only variables are parameters. With BatchNorm it also
        takes `train`, whether statistics are the batch's (its real rows'); `Model.train`
        then gives the running ones. With random layers it takes `train`, or `deterministic`; all
        its streams of random numbers follow from the key of a minibatch's first example.
      input_shape: shape of one example, without the batch axis.
      output_layer: name of the output layer, if there is one, such as "Dense_1".
      dtype: type of the examples, such as `jnp.int32` for tokens.

    Raises:
      ValueError: for other variables, or BatchNorm or random layers that nothing switches off.
    """
    if not isinstance(module, nn.Module):
        wanted = "an instance of a flax.linen module, such as nn.Dense(10)"
        raise refused("from_flax needs", wanted, module)
    input_shape = sizes(input_shape=input_shape)
    taken = inspect.signature(module.__call__).parameters
    training: dict[str, Any] = {k: v for k, v in _TRAINING.items() if k in taken}
    mode: dict[str, Any] = {name: not value for name, value in training.items()}

    def example():
        return jnp.zeros((1, *input_shape), dtype)

    def init(key):
        made: Any = module.init(key, example(), **mode)
        statistics = {STATISTICS: made[_OF_BATCHES]} if _OF_BATCHES in made else {}
        return _precise(made["params"] | statistics)

    def variables(params):
        if not keeps:
            return {"params": params}
        weights = {name: part for name, part in params.items() if name != STATISTICS}
        return {"params": weights, _OF_BATCHES: params[STATISTICS]}

    def apply(params, x):
        outputs = module.apply(variables(params), x, **mode)
        assert isinstance(outputs, jax.Array)
        return outputs

    def train(params, x, weight, keys):
        if not training or (draws and keys is None):  # no call changes its statistics
            return apply(params, x), params.get(STATISTICS)
        real = (weight > 0) | (jnp.sum(weight) == 0)  # of no rows all: a mean over none is NaN

        def masked(call, args, kwargs, context):
            if isinstance(context.module, nn.BatchNorm) and context.method_name == "__call__":
                kwargs = kwargs | {"mask": jnp.expand_dims(real, range(1, args[0].ndim))}
            return call(*args, **kwargs)

        rngs = {"params": keys[0]} if draws else None
        with nn.intercept_methods(masked):
            outputs, changed = module.apply(
                variables(params), x, **training, rngs=rngs, mutable=[_OF_BATCHES]
            )
        return outputs, changed.get(_OF_BATCHES, params.get(STATISTICS))

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
    draws = _draws(
        lambda key: module.apply(variables(init(key)), example(), **training, mutable=[_OF_BATCHES])
    )
    try:  # outside training nothing is random, and running statistics stay
        jax.eval_shape(lambda key: apply(init(key), example()), jax.random.key(0))
    except (InvalidRngError, ModifyScopeVariableError) as error:
        raise _refused(module, f"cannot be evaluated: {error}", _OFF) from error
    used_representation = None if output_layer is None else representation
    trains = train if keeps or draws else None
    return Model(
        init,
        apply,
        output_layer,
        representation=used_representation,
        train=trains,
        keeps_statistics=keeps,
    )


def from_nnx(make: Callable[["nnx.Rngs"], "nnx.Module"], output_layer: str | None = None) -> Model:
    """Make the model of a flax.nnx module.

    Args:
      make: `(rngs) -> module`, such as `lambda rngs: nnx.Linear(64, 10, rngs=rngs)`. The module is
        called with x (b, ...); its only variables are of type `nnx.Param`, and BatchNorm's.
        Random layers and BatchNorm are switched by `module.train()` and `module.eval()`; layers
        draw by the key of a minibatch's first example. With BatchNorm give `steps`, whose batches
        are full: one that is not is filled up with its rows in turn.
      output_layer: name of the output layer, if there is one: an attribute of the module.

    Raises:
      ValueError: if the module has other variables.
    """
    from flax import nnx

    _require_maker("from_nnx", make, "lambda rngs: nnx.Linear(64, 10, rngs=rngs)")
    module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graph, *states, other_states = nnx.split(module, nnx.Param, nnx.BatchStat, nnx.RngState, ...)
    unknown = [type(variable) for _, variable in nnx.to_flat_state(other_states)]
    _refuse_statistics(module, (kind.__name__ for kind in unknown))
    like, batch_states, random = map(nnx.to_flat_state, states)

    def values_of(module, kind):
        leaves = nnx.to_flat_state(nnx.state(module, kind))
        return unflatten_dict({_strings(path): variable[...] for path, variable in leaves})

    def init(key):
        module = make(nnx.Rngs(key))
        statistics = {STATISTICS: values_of(module, nnx.BatchStat)} if batch_states else {}
        return _precise(values_of(module, nnx.Param) | statistics)

    def made(params, key):
        values = flatten_dict(params)
        flat = [(path, param.replace(values[_strings(path)])) for path, param in like]
        for path, statistic in batch_states:
            flat.append((path, statistic.replace(values[STATISTICS, *_strings(path)])))
        for number, (path, state) in enumerate(random):
            of_stream = issubclass(type(state), nnx.RngKey)
            of_call = jax.random.fold_in(key, number) if of_stream else jnp.zeros((), jnp.uint32)
            flat.append((path, state.replace(of_call)))
        return nnx.merge(graph, nnx.from_flat_state(flat))

    def apply(params, x):
        module = made(params, jax.random.key(0))
        if random or batch_states:
            module.eval()  # running statistics normalize, and nothing is random
        return module(x)

    def train(params, x, weight, keys):
        if random and keys is None:
            return apply(params, x), params.get(STATISTICS)
        module = made(params, jax.random.key(0) if keys is None else keys[0])
        module.train()
        outputs = module(_in_turn(x, weight) if batch_states else x)
        return outputs, values_of(module, nnx.BatchStat) if batch_states else None

    trains = train if random or batch_states else None
    return Model(init, apply, output_layer, train=trains, keeps_statistics=bool(batch_states))


def from_equinox(
    make: "Callable[[jax.Array], equinox.Module | tuple[equinox.Module, equinox.nn.State]]",
    output_layer: str | None = None,
) -> Model:
    """Make the model of an equinox module.

    Args:
      make: `(key) -> module`, such as `lambda key: eqx.nn.MLP(64, 10, 32, 1, key=key)`. The module
        is called with one example, without the batch axis, and in training with `key` if it has
        dropout. Its floating arrays are the parameters; everything else must not depend on the key.
        With BatchNorm, `make` returns the module and its state, as `equinox.nn.make_with_state`
        does. Where rows fill half a batch, the batch is filled up with them in turn, so give
        `steps`, whose batches are full.
      output_layer: name of the output layer, if there is one: an attribute of the module.

    Raises:
      ValueError: if the module keeps state that is not given, or has dropout and its call takes no
        `key`.
    """
    with importing("equinox"):
        import equinox as eqx

    _require_maker("from_equinox", make, "lambda key: eqx.nn.MLP(64, 10, 32, 1, key=key)")

    def parts(key):
        made: Any = make(key)
        return made if isinstance(made, tuple) else (made, None)

    def of_state(node):
        return isinstance(node, (eqx.nn.StateIndex, eqx.nn.BatchNorm))

    module, state = parts(jax.random.key(0))
    draws = _drops(module)
    nodes = jax.tree.leaves(module, is_leaf=of_state)
    axis, *other_axes = {node.axis_name for node in nodes if hasattr(node, "axis_name")} or {None}
    nodes_by_path = jax.tree_util.tree_leaves_with_path(
        module, is_leaf=lambda node: isinstance(node, eqx.nn.StateIndex)
    )
    indices = {
        _names(path): node for path, node in nodes_by_path if isinstance(node, eqx.nn.StateIndex)
    }
    if state is None:
        _refuse_statistics(module, (type(index).__name__ for index in indices.values()))
        axis = None
    elif axis is None or other_axes:
        raise _refused(module, "keeps state", "it must be of BatchNorm layers with one axis_name")
    static_part = eqx.filter(module, eqx.is_inexact_array, inverse=True)
    like = jax.eval_shape(lambda: eqx.filter(module, eqx.is_inexact_array))
    leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, state))  # of no weak types

    def fresh():
        return jax.tree.unflatten(structure, leaves)  # a state is used once

    def statistics_of(state):
        statistics = {path: state.get(index) for path, index in indices.items()}
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, float), unflatten_dict(statistics))

    def init(key):
        part = eqx.filter(parts(key)[0], eqx.is_inexact_array)
        leaves = jax.tree_util.tree_leaves_with_path(part)
        params = unflatten_dict({_names(path): leaf for path, leaf in leaves})
        return params if state is None else params | {STATISTICS: statistics_of(fresh())}

    def called(params, x, inference, keys=None):
        values: Any = flatten_dict(params)
        weights = jax.tree_util.tree_map_with_path(lambda path, _: values[_names(path)], like)
        full_module = eqx.combine(weights, static_part)
        if state is not None or (draws and inference):
            full_module = eqx.nn.inference_mode(full_module, inference)
        last: Any = fresh()
        for path, index in indices.items():
            fresh_statistic, saved = last.get(index), values[STATISTICS, *path]
            last = last.set(
                index, jax.tree.map(lambda a, b: b.astype(a.dtype), fresh_statistic, saved)
            )

        def one(row, last, key):
            keyed = {"key": key} if draws else {}
            return (
                (full_module(row, **keyed), None)
                if state is None
                else full_module(row, last, **keyed)
            )

        keys_axis = None if keys is None else 0
        mapped = jax.vmap(one, (0, None, keys_axis), (0, None), axis_name=axis)
        outputs, last = mapped(x, last, keys)
        return outputs, None if state is None else statistics_of(last)

    def apply(params, x):
        return called(params, x, True)[0]

    def train(params, x, weight, keys):
        if draws and keys is None:
            return apply(params, x), params.get(STATISTICS)
        return called(params, x if state is None else _in_turn(x, weight), False, keys)

    keeps = state is not None
    trains = train if draws or keeps else None
    return Model(init, apply, output_layer, train=trains, keeps_statistics=keeps)


def trainable(model: Model, where: Callable[[str], bool], params: PyTree = None) -> Model:
    """Make a model whose clients train one part, such as adapters or the last layers.

    Running statistics (BatchNorm) are part of the frozen part, and batches normalized by them.
    Only the trained part is kept by clients, sent, bounded and noised. The frozen part exists once,
    whatever the number of clients. It must be made without the clients' data: a guarantee states
    that assumption.

    `jax.jit` and `jax.checkpoint` belong around the apply of the whole model, not of the result:
    they would keep the frozen weights of one program for the next, and JAX raises an error.

    Args:
      model: the whole model.
      where: `(name) -> bool`, whether a parameter is trained, by its path, such as "Dense_1/bias".
      params: its parameters, such as pretrained ones, from which both parts start, whatever the
        seed. By default `model.init`'s: the frozen part as it makes them from key 0, so a
        module that loads its weights does so there, and the trained part anew for each seed.

    Raises:
      ValueError: if `where` selects nothing, or the model has a frozen part already.
    """
    if model.frozen is not None:
        raise ValueError("the model has a frozen part already: give the whole model")
    initial = model.init(jax.random.key(0)) if params is None else params
    names, structure = [name for name, _ in _named(initial)], jax.tree.structure(initial)
    trained = [name for name in names if where(name)]
    if not trained:
        raise ValueError(f"at least one parameter must be trained, of {', '.join(names)}")
    # Running statistics are frozen with the rest: batches are normalized by them, not by their own.
    if any(name.split("/")[0] == STATISTICS for name in trained):
        raise ValueError("running statistics (BatchNorm) of a model with a frozen part stay fixed")
    frozen = FrozenWeights({k: jnp.asarray(v) for k, v in _named(initial) if k not in trained})

    def init(key):
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: jnp.array(leaf) if _name(path) in trained else None,
            model.init(key) if params is None else params,
        )

    def whole(part):
        weights = dict(_named(part)) | frozen.argument.get()
        return jax.tree.unflatten(structure, [weights[name] for name in names])

    layer, representation = model.output_layer, model.representation
    train = None if model.keeps_statistics else model.train
    return Model(
        init,
        lambda part, x: model.apply(whole(part), x),
        None if any(name.split("/")[0] == layer for name in frozen.weights) else layer,
        representation=representation and (lambda part, x: representation(whole(part), x)),
        frozen=frozen,
        train=train and (lambda part, *batch: train(whole(part), *batch)),
    )


def _require_maker(name: str, make: Any, example: str) -> None:
    if not callable(make) or (reader_of(make) and not isinstance(make, type)):
        raise refused(f"{name} needs", f"a function that makes the module, such as {example}", make)


def _precise(params: Any) -> Any:
    """Convert float32 to the floats that JAX has, float64 under `jax_enable_x64`."""
    usual = jnp.result_type(float)
    return jax.tree.map(
        lambda leaf: leaf.astype(usual) if leaf.dtype == jnp.float32 else leaf, params
    )


def _in_turn(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Fill up a batch whose last rows are padding with its first ones, for layers without masks."""
    rows = jnp.sum(weight > 0, dtype=jnp.int32)
    return x[jnp.arange(len(x)) % jnp.maximum(rows, 1)]


def _drops(module: Any) -> bool:
    """Return whether an equinox module has dropout; its call must then take a key."""
    import equinox as eqx

    parts = jax.tree.leaves(module, is_leaf=lambda node: isinstance(node, eqx.nn.Dropout))
    drops = any(isinstance(d, eqx.nn.Dropout) and d.p > 0 and not d.inference for d in parts)
    if drops and "key" not in inspect.signature(module).parameters:
        raise _refused(module, "has dropout", "its call must take key, which it draws by")
    return drops


def _draws(call: Callable[[jax.Array], Any]) -> bool:
    """Return whether a call of a linen module needs a stream of random numbers."""
    try:
        jax.eval_shape(call, jax.random.key(0))
    except InvalidRngError:
        return True
    return False


def _refused(module: Any, what: str, instead: str) -> ValueError:
    return ValueError(f"{type(module).__name__} {what}; {instead}")


def _refuse_statistics(module: Any, kinds: Iterable[str]) -> None:
    names = ", ".join(dict.fromkeys(kinds))
    if names:
        raise _refused(module, f"has variables that are no parameters ({names})", _STATISTICS)


def _strings(path: Iterable[Any]) -> tuple[str, ...]:
    return tuple(map(str, path))


def _named(tree: PyTree) -> list[tuple[str, Any]]:
    return [(_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _names(path: Any) -> tuple[str, ...]:
    return tuple(_name(path).split("/"))
