"""Models as pairs of pure functions, and the linear one.

A flax module is one way to get such a pair; a user's own functions are another.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

PyTree = Any


class Model(NamedTuple):
    """A model.

    Attributes:
      init: `(key) -> params`.
      apply: `(params, x (b, ...)) -> outputs (b, c)`.
      output_layer: the top-level name in `params` of the output layer, where the layers before it
        are a representation; None where there is none, as in a linear model.
      features: `(x (b, ...)) -> (b, d)` where the outputs are linear, features @ kernel (+ bias),
        and the params {"kernel": (d, c)}, with or without {"bias": (c,)}; else None.
    """

    init: Callable[[jax.Array], PyTree]
    apply: Callable[[PyTree, jax.Array], jax.Array]
    output_layer: str | None = None
    features: Callable[[jax.Array], jax.Array] | None = None


def as_floats(x: jax.Array) -> jax.Array:
    """The features as numbers to calculate with: integers of any kind as floats."""
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(float)


def from_flax(
    module: nn.Module, input_shape: Sequence[int], output_layer: str | None = None
) -> Model:
    """The pure pair of a flax module without mutable state.

    Args:
      module: a flax.linen module whose only variables are parameters.
      input_shape: the shape of one example, without the batch axis.
      output_layer: the name of its output layer, where there is one, such as "Dense_1".
    """
    example = jnp.zeros((1, *input_shape))

    def apply(params, x):
        outputs = module.apply({"params": params}, x)
        assert isinstance(outputs, jax.Array)
        return outputs

    return Model(lambda key: module.init(key, example)["params"], apply, output_layer)


def linear(input_shape: Sequence[int], num_outputs: int, bias: bool = True) -> Model:
    """Softmax or linear regression: outputs = x·W + b, started at zero.

    Args:
      input_shape: the shape of one example; flattened to d features.
      num_outputs: c, columns of W, the "kernel": (d, c) float32.
      bias: whether there is a b, the "bias": (c,).
    """
    num_features = math.prod(input_shape)

    def features(x):
        return as_floats(x.reshape((x.shape[0], num_features)))

    def init(key):
        del key
        params = {"kernel": jnp.zeros((num_features, num_outputs))}
        return params | {"bias": jnp.zeros(num_outputs)} if bias else params

    def apply(params, x):
        outputs = features(x) @ params["kernel"]
        return outputs + params["bias"] if bias else outputs

    return Model(init, apply, features=features)
