"""Models as pairs of pure functions, and the small ones of the papers.

A flax module is one way to get such a pair; a user's own functions are another.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjaxsim.models.convolution import conv2d, max_pool2d

PyTree = Any


class Model(NamedTuple):
    """A model.

    Attributes:
      init: `(key) -> params`.
      apply: `(params, x (b, ...)) -> outputs (b, c)`.
      output_layer: the top-level name in `params` of the output layer, where the layers before it
        are a representation; None where there is none, as in a linear model.
    """

    init: Callable[[jax.Array], PyTree]
    apply: Callable[[PyTree, jax.Array], jax.Array]
    output_layer: str | None = None


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


class _MLP(nn.Module):
    hidden: tuple[int, ...]
    num_outputs: int

    @nn.compact
    def __call__(self, x):
        x = x.reshape((x.shape[0], -1))
        for width in self.hidden:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.num_outputs)(x)


class _Conv(nn.Module):
    """A 5×5 convolution without padding, with bias, as a matrix product over patches."""

    features: int

    @nn.compact
    def __call__(self, x):
        shape = (5, 5, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,))
        return conv2d(x, kernel) + bias


class _CNN(nn.Module):
    side: int
    num_outputs: int

    @nn.compact
    def __call__(self, x):
        x = x.reshape((x.shape[0], self.side, self.side, -1))
        for features in (32, 64):
            # Pooling first: max commutes with a bias per channel and with relu, at a quarter of
            # the elementwise work.
            x = nn.relu(max_pool2d(_Conv(features)(x)))
        return nn.Dense(self.num_outputs)(x.reshape((x.shape[0], -1)))


def linear(input_shape: Sequence[int], num_outputs: int, bias: bool = True) -> Model:
    """Softmax or linear regression: outputs = x·W + b, started at zero.

    Args:
      input_shape: the shape of one example; flattened to d features.
      num_outputs: c, columns of W, the "kernel": (d, c) float32.
      bias: whether there is a b, the "bias": (c,).
    """
    features = math.prod(input_shape)

    def init(key):
        del key
        params = {"kernel": jnp.zeros((features, num_outputs))}
        return params | {"bias": jnp.zeros(num_outputs)} if bias else params

    def apply(params, x):
        outputs = x.reshape((x.shape[0], features)) @ params["kernel"]
        return outputs + params["bias"] if bias else outputs

    return Model(init, apply)


def mlp(input_shape: Sequence[int], num_outputs: int, hidden: Sequence[int] = (128,)) -> Model:
    """A multi-layer perceptron with relu.

    Args:
      input_shape: the shape of one example; flattened.
      num_outputs: c.
      hidden: the widths of the hidden layers.
    """
    module = _MLP(tuple(hidden), num_outputs)
    return from_flax(module, input_shape, output_layer=f"Dense_{len(module.hidden)}")


def cnn(input_shape: Sequence[int], num_outputs: int) -> Model:
    """The papers' network for 28×28 images: conv 5×5 32, pool, conv 5×5 64, pool, linear.

    No padding, 2×2 max pooling; 28×28×1 inputs and 62 classes give 832 + 51,264 + 63,550 = 115,646
    parameters. Flat inputs are read as square grey images.

    Args:
      input_shape: (d,) with d a square number, (side, side) or (side, side, channels).
      num_outputs: c.

    Raises:
      ValueError: if the images are not square, or their sides not 16, 20, 24, 28, …, which the two
        convolutions and poolings need.
    """
    if len(input_shape) == 1:
        side = math.isqrt(input_shape[0])
        square = side * side == input_shape[0]
    else:
        side = input_shape[0]
        square = input_shape[1] == side
    if not square or side < 16 or side % 4:
        raise ValueError(
            "cnn needs square images with sides 16, 20, 24, 28, …, got examples of shape "
            f"{tuple(input_shape)}"
        )
    return from_flax(_CNN(side, num_outputs), input_shape, output_layer="Dense_0")
