"""Models as pairs of pure functions, and the linear one.

A pair comes from a library's module (`modules.py`) or from a user's own functions.
"""

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjaxsim import checks
from fedjaxsim.kernels.linear_outputs import linear_outputs

PyTree = Any
STATISTICS = "statistics"
"""The top-level name in the params of a model for its running statistics, if it keeps any."""


_READERS = {
    "flax.linen": "from_flax(module, input_shape)",
    "flax.nnx": "from_nnx(lambda rngs: …)",
    "equinox": "from_equinox(lambda key: …)",
}
"""The function that makes a model of a library's modules."""


class FrozenWeights:
    """Weights that nobody trains; a program reads them from its arguments.

    JAX compiles an array that a function closes over into every program that calls the function.
    The engine therefore keeps these weights with the rows, and binds its argument while it traces
    the functions of a client. Elsewhere a model reads the weights themselves.
    """

    def __init__(self, weights: dict[str, jax.Array]):
        self.weights = weights
        self.argument = ContextVar("frozen weights", default=weights)


@contextlib.contextmanager
def bind_weights(frozen: FrozenWeights | None, weights: Any) -> Iterator[None]:
    """Bind an argument of a program, if a model has frozen weights and the program the argument."""
    if frozen is None or weights is None:
        yield
        return
    token = frozen.argument.set(weights)
    try:
        yield
    finally:
        frozen.argument.reset(token)


class Dense(NamedTuple):
    """A model whose parameters belong to dense layers, for gradients of single examples.

    Attributes:
      of: `Model.apply`, in another form.
      widths: outputs of each layer.
      apply: `(params, x (b, ...), shifts) -> outputs (b, c), inputs`: each layer's outputs are
        shifted, (b, width); its inputs are (b, size).
      names: the layers' names in the params, each {"kernel": (size, width), "bias": (width,)}; ()
        if the params belong to one layer, with the kernel (width, size). These are names, not a
        function, since a function could stretch clipped gradients.
      biased: whether layers have a bias.
    """

    of: Callable[[PyTree, jax.Array], jax.Array]
    widths: tuple[int, ...]
    apply: Callable[[PyTree, jax.Array, list[jax.Array]], tuple[jax.Array, list[jax.Array]]]
    names: tuple[str, ...] = ()
    biased: bool = True


class Model(NamedTuple):
    """A model.

    Attributes:
      init: `(key) -> params`, arrays of floating numbers.
      apply: `(params, x (b, ...)) -> outputs (b, c)`.
      output_layer: the top-level name in `params` of the output layer, if the layers before it are
        a representation; None for a linear model.
      features: `(x (b, ...)) -> (b, d)` if the outputs are features @ kernel.T (+ bias) and the
        params {"kernel": (c, d)}, with or without {"bias": (c,)}; else None.
      representation: `(params, x (b, ...)) -> (b, r)`: the input of the output layer, or of a
        linear model; None if unknown.
      frozen: the weights that are no part of `params`, see `trainable`; or None.
      train: `(params, x (b, ...), weight (b,), keys (b,)) -> (outputs (b, c), statistics)` in
        training: outputs of random layers, by the keys of the examples (None: nothing is random),
        and by the statistics of the rows with weight > 0, with the next `params["statistics"]`,
        which `apply` reads; None for a model whose training differs in nothing.
      keeps_statistics: whether `train` returns statistics, not None.
      dense: its dense layers, for speed only, if it has no other parameters; else None.

    Example:
      >>> model = fjs.models.linear((3,), 2)
      >>> model.apply(model.init(jax.random.key(0)), jnp.ones((5, 3))).shape
      (5, 2)
    """

    init: Callable[[jax.Array], PyTree]
    apply: Callable[[PyTree, jax.Array], jax.Array]
    output_layer: str | None = None
    features: Callable[[jax.Array], jax.Array] | None = None
    representation: Callable[[PyTree, jax.Array], jax.Array] | None = None
    frozen: FrozenWeights | None = None
    train: Callable[..., tuple[jax.Array, PyTree]] | None = None
    keeps_statistics: bool = False
    dense: Dense | None = None


def require_model(who: str, model: Any) -> Model:
    """Return the model that a function got or returned, such as who "softmax needs"."""
    if isinstance(model, Model):
        return model
    raise refused(who, "a Model, such as fjs.Model(init, apply)", model)


def refused(who: str, wanted: str, argument: Any) -> ValueError:
    """Return the error of an argument; it names the function that makes a model of a module."""
    reader = reader_of(argument)
    hint = f"; fjs.models.{reader} makes a model" if reader else ""
    return ValueError(f"{who} {wanted}, got {checks.described(argument)}{hint}")


def reader_of(module: Any) -> str | None:
    """Return how to make a model of a module, or of a class of modules."""
    for base in (module if isinstance(module, type) else type(module)).__mro__:
        for library, reader in _READERS.items():
            if f"{base.__module__}.".startswith(f"{library}."):
                return reader
    return None


def plus_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Add a bias per channel, in at least float32.

    The bias's derivative is a sum over all places. In bfloat16, where 256 + 1 is 256, a CNN's
    over 10 · 144 places is off by 7 % on a CPU.
    """
    return (wide(x) + wide(bias)).astype(x.dtype)


def wide(x: jax.Array) -> jax.Array:
    """Return floats in at least float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def as_floats(x: jax.Array) -> jax.Array:
    """Convert integers to floats, of weak type: products take the type of the parameters."""
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x * 1.0


def sizes(**values: Any) -> tuple[int, ...]:
    """Return a named shape or widths of layers; raise ValueError if they are no integers."""
    ((name, widths),) = values.items()
    try:
        return tuple(map(operator.index, widths))
    except TypeError:
        raise ValueError(f"{name} must be integers, such as (64,), got {widths!r}") from None


def in_bfloat16(model: Model) -> Model:
    """Return the model computed in bfloat16, with parameters, outputs and gradients in float32.

    Losses, optimizers, messages and noise see only float32. The fast path of linear models is off.
    """

    def rounded(tree):
        def of(leaf):
            floats = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
            return leaf.astype(jnp.bfloat16) if floats else leaf

        return jax.tree.map(of, tree)

    def apply(params, x):
        frozen = model.frozen
        with bind_weights(frozen, frozen and rounded(frozen.argument.get())):
            return model.apply(rounded(params), rounded(x)).astype(jnp.float32)

    def train(params, x, weight, keys):
        assert model.train is not None
        statistics_before = {STATISTICS: params[STATISTICS]} if model.keeps_statistics else {}
        outputs, statistics = model.train(
            rounded(params) | statistics_before, rounded(x), weight, keys
        )
        return outputs.astype(jnp.float32), statistics

    return model._replace(apply=apply, features=None, train=None if model.train is None else train)


def linear(input_shape: Sequence[int], num_outputs: int, bias: bool = True) -> Model:
    """Softmax or linear regression: outputs = x·Wᵀ + b, started at zero.

    Rows of W hold d numbers, so products with many clients' or settings' models have long rows.

    Args:
      input_shape: the shape of one example; flattened to d features.
      num_outputs: c, rows of W, the "kernel": (c, d) float32.
      bias: Whether there is an intercept b, the "bias": (c,).
    """
    num_features = math.prod(sizes(input_shape=input_shape))

    def features(x):
        if math.prod(x.shape[1:]) != num_features:
            raise ValueError(
                f"the linear model takes examples of {num_features} numbers, got x of {x.shape}"
            )
        return as_floats(x.reshape((x.shape[0], num_features)))

    def init(key):
        params = {"kernel": jnp.zeros((num_outputs, num_features))}
        return params | {"bias": jnp.zeros(num_outputs)} if bias else params

    def apply(params, x):
        outputs = linear_outputs(features(x), params["kernel"])
        return outputs + params["bias"][None] if bias else outputs

    def shifted(params, x, shifts):
        inputs = features(x)  # in this order, which needs no transpose, unlike `linear_outputs`
        outputs = inputs @ params["kernel"].T + (params["bias"] if bias else 0)
        return outputs + shifts[0], [inputs]

    dense = Dense(apply, (num_outputs,), shifted, biased=bias)
    return Model(init, apply, None, features, lambda params, x: features(x), dense=dense)
