"""The networks of the papers, as flax modules, with convolution and pooling as matrix products.

Under `jax.vmap` over clients XLA turns `lax.conv` with weights per client into a grouped
convolution (inside a CPU loop, a naive one), 5 to 20 times slower than a matrix product. The forms
here are copies and matrix products, batched under `jax.vmap`, made of JAX's own operations, so that
every derivative and transformation works; operations are also chosen for fast transposes. A TPU has
grouped convolutions and windows; there copies waste memory, as the 32 channels of a window take the
place of 128.
"""

import math
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjaxsim.kernels import backend, winograd
from fedjaxsim.models.model import Dense, Model, as_floats, plus_bias, sizes
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
        return nn.relu(plus_bias(max_pool2d(conv2d(x, kernel)), bias))


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
    hidden = sizes(hidden=hidden)
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
      input_shape: (d,) with d a square number, (side, side) or (side, side, channels), with a side
        of 16, 20, 24, 28, ….
      num_outputs: c.
    """
    input_shape = sizes(input_shape=input_shape)
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


def conv2d(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Compute a 2-D convolution without padding and with stride 1.

    x is (b, height, width, channels), the kernel (kh, kw, channels, features), and the result
    (b, height − kh + 1, width − kw + 1, features).
    """
    fits = x.ndim == kernel.ndim == 4 and x.shape[3] == kernel.shape[2]
    if not fits or x.shape[1] < kernel.shape[0] or x.shape[2] < kernel.shape[1]:
        raise ValueError(
            "conv2d needs x (b, height, width, channels) and a kernel (kh, kw, channels, features) "
            f"not larger than the image, got {x.shape} and {kernel.shape}"
        )
    return FORMS[form_of(x, kernel)](x, kernel)


def form_of(x: jax.Array, kernel: jax.Array) -> str:
    """Return the name in `FORMS` of the form of a convolution that suits the devices."""
    if x.shape[3] == 1:
        return "one channel"
    if backend.platform() != "cpu":
        return "grouped" if backend.platform() == "tpu" else "windows"
    precise = jnp.result_type(x, kernel) in (jnp.float32, jnp.float64)
    tile = winograd.best_tile(x.shape, kernel.shape) if precise else None
    return "windows in cache" if tile is None else "tiles"


def max_pool2d(x: jax.Array) -> jax.Array:
    """Compute 2×2 max pooling of x (b, height, width, channels), both even, with stride 2.

    With ties in a window the first value in row order gets the derivative, as in
    `flax.linen.max_pool`.
    """
    if x.ndim != 4 or x.shape[1] % 2 or x.shape[2] % 2:
        raise ValueError(
            "max_pool2d needs x (b, height, width, channels) with even height and width, "
            f"got {x.shape}"
        )
    if backend.platform() == "tpu":
        window = (1, 2, 2, 1)
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")
    return _max_pool(x)


def _conv_one_channel(x, kernel):
    """Put the patch axis first: rows are as long as the image instead of 25 numbers."""
    kh, kw, _, features = kernel.shape
    b, height, width = x.shape[0], x.shape[1] - kh + 1, x.shape[2] - kw + 1
    windows = [x[:, i : i + height, j : j + width, 0] for i in range(kh) for j in range(kw)]
    patches = jnp.stack(windows).reshape(kh * kw, b * height * width)
    out = jnp.einsum("kn,kf->nf", patches, kernel.reshape(kh * kw, features))
    return out.reshape(b, height, width, features)


def _conv_wide(x, kernel):
    """Concatenate all windows: one GPU kernel, and another for the transpose."""
    kh, kw, channels, features = kernel.shape
    height, width = x.shape[1] - kh + 1, x.shape[2] - kw + 1
    windows = [x[:, i : i + height, j : j + width] for i in range(kh) for j in range(kw)]
    patches = jnp.concatenate(windows, axis=-1)
    return patches @ kernel.reshape(kh * kw * channels, features)


def _conv_in_tiles(x, kernel):
    tile = winograd.best_tile(x.shape, kernel.shape)
    return winograd.conv2d(x, kernel, tile or (1, 1))


def _conv_grouped(x, kernel):
    """Leave the convolution whole: under `jax.vmap` it has a group of channels for each client."""
    dtype = jnp.result_type(x, kernel)
    x, kernel = x.astype(dtype), kernel.astype(dtype)
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _conv_in_cache(x, kernel):
    """Take windows along the height, then along the width: kh + kw copies and, in reverse, sums.

    The transpose of `lax.split` is `concatenate`; the transpose of a slice is a padding, which
    XLA:CPU tests element by element.
    """
    kh, kw, channels, features = kernel.shape
    b, height, width = x.shape[0], x.shape[1] - kh + 1, x.shape[2] - kw + 1
    rows = jax.lax.split(x, (1,) * x.shape[1], axis=1)
    tall = jnp.concatenate(
        [jnp.concatenate(rows[i : i + height], axis=1) for i in range(kh)], axis=-1
    )
    # The columns of a window are consecutive in `tall`: a patch is one piece of memory.
    columns = jax.lax.split(tall, (1,) * x.shape[2], axis=2)
    patches = jnp.stack(
        [
            jnp.concatenate(columns[j : j + kw], axis=2).reshape(b, height, kw * kh * channels)
            for j in range(width)
        ],
        axis=2,
    ).reshape(b * height * width, kw * kh * channels)
    # With features first the kernel's derivative is dyᵀ·patches, 1.6 times faster on XLA:CPU than
    # patchesᵀ·dy.
    weights = kernel.transpose(3, 1, 0, 2).reshape(features, kw * kh * channels)
    return jnp.einsum("nk,fk->nf", patches, weights).reshape(b, height, width, features)


FORMS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "one channel": _conv_one_channel,
    "windows": _conv_wide,
    "windows in cache": _conv_in_cache,
    "tiles": _conv_in_tiles,
    "grouped": _conv_grouped,
}
"""Forms of a convolution: all compute the same, but the first, which takes one channel."""


def _windows(x):
    b, height, width, channels = x.shape
    return x.reshape(b, height // 2, 2, width // 2, 2, channels)


@jax.custom_jvp
def _max_pool(x):
    return _windows(x).max(axis=(2, 4))


@_max_pool.defjvp
def _max_pool_jvp(primals, tangents):
    """Multiply by a mask, made of one small index instead of all compared values."""
    x, tangent = _windows(primals[0]), _windows(tangents[0])
    b, height, _, width, _, channels = x.shape
    last = x.transpose(0, 1, 3, 5, 2, 4).reshape(b, height, width, channels, 4)
    first = jnp.argmax(last, axis=-1)[:, :, None, :, None]
    mask = first == jnp.arange(4).reshape(2, 1, 2, 1)
    return _max_pool(primals[0]), jnp.where(mask, tangent, 0).sum(axis=(2, 4))
