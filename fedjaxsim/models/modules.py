"""Modules of other libraries as models, with parameters as nested dicts of arrays, by name.

A model has only parameters: modules with statistics of batches or with random numbers in calls are
refused.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.errors import InvalidRngError
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjaxsim.extras import importing
from fedjaxsim.models.frozen import with_frozen
from fedjaxsim.models.model import Model

if TYPE_CHECKING:
    import equinox
    from flax import nnx

_STATISTICS = (
    "variables besides parameters would be neither bounded nor noised: use GroupNorm or LayerNorm "
    "in place of BatchNorm"
)
_DROPOUT = (
    "a loss here is a function of parameters and data alone: leave dropout out, or make it "
    "deterministic"
)


def from_flax(
    module: nn.Module,
    input_shape: Sequence[int],
    output_layer: str | None = None,
    dtype: Any = jnp.float32,
) -> Model:
    """Make the model of a flax.linen module.

    Args:
      module: called with x (b, ...); its only variables are parameters.
      input_shape: shape of one example, without the batch axis.
      output_layer: name of the output layer, if there is one, such as "Dense_1".
      dtype: type of the examples, such as `jnp.int32` for tokens.

    Raises:
      ValueError: if the module has other variables, such as batch statistics, or uses dropout.
    """

    def example():
        return jnp.zeros((1, *input_shape), dtype)

    def init(key):
        return module.init(key, example())["params"]

    def apply(params, x):
        outputs = module.apply({"params": params}, x)
        assert isinstance(outputs, jax.Array)
        return outputs

    def representation(params, x):
        seen = []

        def note(call, args, kwargs, context):
            if context.module.name == output_layer and context.method_name == "__call__":
                seen.append(args[0])
            return call(*args, **kwargs)

        with nn.intercept_methods(note):
            apply(params, x)
        return seen[0].reshape(x.shape[0], -1)

    kinds = jax.eval_shape(lambda key: module.init(key, example()), jax.random.key(0))
    _refuse_statistics(module, (kind for kind in kinds if kind != "params"))
    try:
        jax.eval_shape(lambda params: apply(params, example()), kinds["params"])
    except InvalidRngError as error:
        raise _refused(module, "draws random numbers when it is called", _DROPOUT) from error
    known = None if output_layer is None else representation
    return Model(init, apply, output_layer, representation=known)


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
      ValueError: if the module has other variables, such as batch statistics or the random state of
        dropout; as `trainable`.
    """
    from flax import nnx

    module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graph, like, others = nnx.split(module, nnx.Param, ...)
    kinds = [type(variable) for _, variable in nnx.to_flat_state(others)]
    if any(issubclass(kind, nnx.RngState) for kind in kinds):
        raise _refused(module, "keeps random state", _DROPOUT)
    _refuse_statistics(module, (kind.__name__ for kind in kinds))
    like = nnx.to_flat_state(like)

    def init(key):
        params = nnx.to_flat_state(nnx.state(make(nnx.Rngs(key)), nnx.Param))
        return unflatten_dict({_strings(path): variable[...] for path, variable in params})

    def apply(params, x):
        values = flatten_dict(params)
        flat = [(path, param.replace(values[_strings(path)])) for path, param in like]
        return nnx.merge(graph, nnx.from_flat_state(flat))(x)

    model = Model(init, apply, output_layer)
    if wrt is None:
        return model

    def trained(key):
        part = nnx.to_flat_state(nnx.state(make(nnx.Rngs(key)), wrt))
        return unflatten_dict({_strings(path): variable[...] for path, variable in part})

    return _partly(model, trained)


def from_equinox(
    make: Callable[[jax.Array], "equinox.Module"], output_layer: str | None = None, wrt: Any = None
) -> Model:
    """Make the model of an equinox module.

    Args:
      make: `(key) -> module`, such as `lambda key: eqx.nn.MLP(64, 10, 32, 1, key=key)`. The module
        is called with one example, without the batch axis. Its floating arrays are the parameters;
        everything else must not depend on the key.
      output_layer: name of the output layer, if there is one: an attribute of the module.
      wrt: filter of the trained parameters for `equinox.filter`, a function of a leaf or a pytree
        of booleans; by default all are trained. The others are frozen as `make(jax.random.key(0))`
        returns them, so it loads their values; see `trainable`.

    Raises:
      ValueError: if the module keeps state, like `BatchNorm`, or uses dropout; as `trainable`.
    """
    with importing("equinox"):
        import equinox as eqx

    module = make(jax.random.key(0))
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
    if wrt is None:
        return model

    def trained(key):
        part = eqx.filter(eqx.filter(make(key), wrt), eqx.is_inexact_array)
        leaves = jax.tree_util.tree_leaves_with_path(part)
        return unflatten_dict({_names(path): leaf for path, leaf in leaves})

    return _partly(model, trained)


def _partly(model: Model, init: Callable[[jax.Array], Any]) -> Model:
    """Freeze the parameters that `init` does not return, at the values that key 0 gives them."""
    key = jax.random.key(0)
    names = flatten_dict(jax.eval_shape(init, key), sep="/")
    return with_frozen(model, model.init(key), names, init)


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
