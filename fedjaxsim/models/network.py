"""The networks of the papers, as flax modules."""

import math
from collections.abc import Sequence

import flax.linen as nn

from fedjaxsim.models.convolution import conv2d, max_pool2d
from fedjaxsim.models.model import Dense, Model, as_floats, require_shape, require_widths
from fedjaxsim.models.modules import from_flax


class _MLP(nn.Module):
    hidden: tuple[int, ...]
    num_outputs: int
    layer_norm: bool

    @nn.compact
    def __call__(self, x):
        x = as_floats(x.reshape((x.shape[0], -1)))
        for width in self.hidden:
            x = nn.Dense(width)(x)
            x = nn.relu(nn.LayerNorm()(x) if self.layer_norm else x)
        return nn.Dense(self.num_outputs)(x)


class _Conv(nn.Module):
    """A 5×5 convolution without padding, 2×2 max pooling, bias and relu.

    Max commutes with a bias per channel and with relu; after pooling these cost a quarter.
    """

    features: int

    @nn.compact
    def __call__(self, x):
        shape = (5, 5, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,))
        return nn.relu(max_pool2d(conv2d(x, kernel)) + bias)


class _CNN(nn.Module):
    side: int
    num_outputs: int

    @nn.compact
    def __call__(self, x):
        x = as_floats(x.reshape((x.shape[0], self.side, self.side, -1)))
        for features in (32, 64):
            x = _Conv(features)(x)
        return nn.Dense(self.num_outputs)(x.reshape((x.shape[0], -1)))


def mlp(
    input_shape: Sequence[int],
    num_outputs: int,
    hidden: Sequence[int] = (64,),
    layer_norm: bool = False,
) -> Model:
    """Make a multi-layer perceptron with relu.

    Args:
      input_shape: the shape of one example; flattened.
      num_outputs: c.
      hidden: Widths of the hidden layers.
      layer_norm: Whether hidden layers are normalized before relu, as FedBN needs.
    """
    hidden = require_widths(hidden)
    module = _MLP(hidden, num_outputs, layer_norm)
    model = from_flax(module, input_shape, output_layer=f"Dense_{len(hidden)}")
    if layer_norm:
        return model
    widths = (*hidden, num_outputs)
    names = tuple(f"Dense_{place}" for place in range(len(widths)))

    def shifted(params, x, shifts):
        outputs, inputs = as_floats(x.reshape((x.shape[0], -1))), []
        for name, shift in zip(names, shifts, strict=True):
            inputs.append(nn.relu(outputs) if inputs else outputs)
            outputs = inputs[-1] @ params[name]["kernel"] + params[name]["bias"] + shift
        return outputs, inputs

    return model._replace(dense=Dense(model.apply, widths, shifted, names))


def cnn(input_shape: Sequence[int], num_outputs: int) -> Model:
    """Make the papers' network for 28×28 images: conv 5×5 32, pool, conv 5×5 64, pool, linear.

    No padding, 2×2 max pooling; 28×28×1 inputs and 62 classes give 832 + 51,264 + 63,550 = 115,646
    parameters. Flat inputs are read as square grey images.

    Args:
      input_shape: (d,) with d a square number, (side, side) or (side, side, channels).
      num_outputs: c.

    Raises:
      ValueError: if the images are not square with sides 16, 20, 24, 28, ….
    """
    input_shape = require_shape(input_shape)
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
