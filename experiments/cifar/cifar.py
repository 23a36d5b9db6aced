"""CIFAR-10, or generated images of its shape, and ResNet-8 with GroupNorm.

    python experiments/cifar/cifar.py runs/cifar.npz

writes all rows as one file, which commands divide among clients. CIFAR-10 is read from
`$FEDJAXSIM_DATA/cifar-10-batches-py`, the python version of cs.toronto.edu/~kriz/cifar.html.
`--generated 4000` writes that many rows of a public generator instead.
"""

import argparse
import functools
import os
import pickle
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.models import Model, conv2d, from_flax

CLASSES, SIDE, PATTERNS = 10, 32, 4
BATCHES = (*(f"data_batch_{place}" for place in range(1, 6)), "test_batch")
GROUPS = 8


# --- rows -----------------------------------------------------------------------------------------


def read(folder: Path) -> dict[str, np.ndarray]:
    """Read the 60,000 rows of CIFAR-10, x (N, 32, 32, 3) uint8 and y (N,) int32."""
    images, labels = [], []
    for name in BATCHES:
        with (folder / name).open("rb") as file:
            batch = pickle.load(file, encoding="bytes")
        images.append(batch[b"data"].reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1))
        labels.append(batch[b"labels"])
    return {"x": np.concatenate(images), "y": np.concatenate(labels).astype(np.int32)}


def generated(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Generate images in ten classes, x (N, 32, 32, 3) uint8 and y (N,) int32.

    A class has four smooth random patterns. An image is one of them, moved by up to four pixels,
    mirrored half of the time, at a contrast between 0.3 and 1 of either sign, plus a pattern of no
    class of the same size and noise in each pixel.
    """
    rng = np.random.default_rng(seed)
    y = np.arange(rows) % CLASSES
    x = _patterns(CLASSES * PATTERNS, rng)[y * PATTERNS + rng.integers(PATTERNS, size=rows)]
    for place, shift in enumerate(rng.integers(-4, 5, (rows, 2))):
        x[place] = np.roll(x[place], shift, (0, 1))
    mirrored = rng.random(rows) < 0.5
    x[mirrored] = x[mirrored, :, ::-1]
    x *= (rng.uniform(0.3, 1, rows) * rng.choice([-1, 1], rows))[:, None, None, None]
    x += _patterns(rows, rng) + 0.3 * rng.normal(size=x.shape)
    return {
        "x": np.clip(128 + 40 * x, 0, 255).astype(np.uint8),
        "y": y.astype(np.int32),
    }


def _patterns(count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw images of waves with at most three periods, (count, 32, 32, 3), of variance 1."""
    waves = np.arange(-3, 4)[:, None] * np.arange(SIDE) * 2 * np.pi / SIDE
    basis = np.exp(1j * waves)
    shape = (count, len(waves), len(waves), 3)
    weights = rng.normal(size=shape) + 1j * rng.normal(size=shape)
    images = np.einsum("nijc,ih,jw->nhwc", weights, basis, basis, optimize=True).real
    return (images - images.mean((1, 2, 3), keepdims=True)) / images.std((1, 2, 3), keepdims=True)


# --- the model ------------------------------------------------------------------------------------


class _Convolution(nn.Module):
    """A convolution without bias, 3 × 3 with a border of zeros or 1 × 1, and GroupNorm."""

    width: int
    size: int = 3
    stride: int = 1
    native: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (self.size, self.size, x.shape[-1], self.width)
        kernel = self.param("kernel", nn.initializers.he_normal(), shape)
        border = self.size // 2
        if self.size == 1:
            x = x[:, :: self.stride, :: self.stride] @ kernel[0, 0]
        elif self.native:
            strides, borders = (self.stride, self.stride), [(border, border)] * 2
            layout = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(x, kernel, strides, borders, dimension_numbers=layout)
        else:
            x = jnp.pad(x, ((0, 0), (border, border), (border, border), (0, 0)))
            x = conv2d(x, kernel)[:, :: self.stride, :: self.stride]
        return nn.GroupNorm(GROUPS)(x)


class _ResNet(nn.Module):
    outputs: int
    width: int
    native: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        convolution = functools.partial(_Convolution, native=self.native)
        x = nn.relu(convolution(self.width)(2 * x - 1))
        for place in range(3):
            width, stride = self.width * 2**place, 1 if place == 0 else 2
            y = nn.relu(convolution(width, stride=stride)(x))
            y = convolution(width)(y)
            x = nn.relu(y + (x if place == 0 else convolution(width, 1, stride)(x)))
        return nn.Dense(self.outputs)(x.mean(axis=(1, 2)))


def resnet8(
    input_shape: tuple[int, ...], num_outputs: int, *, width: int = 16, native: bool = False
) -> Model:
    """Make ResNet-8 of He et al. (2016), n = 1, with GroupNorm of 8 groups for BatchNorm.

    One convolution and three blocks of two, of 16, 32 and 64 channels; the skips of the last two
    blocks are 1 × 1 convolutions. 32 × 32 × 3 inputs and ten classes give 78,042 parameters.

    Args:
      input_shape: height, width and channels of an image.
      num_outputs: number of classes.
      width: channels of the first block.
      native: Convolutions by XLA, which compile faster. On a CPU they suit single runs, whose
        clients train one by one, and no sweep, whose settings train at once.
    """
    return from_flax(_ResNet(num_outputs, width, native), input_shape, output_layer="Dense_0")


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description="Write rows of CIFAR-10, or generated ones.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--generated", type=int, metavar="ROWS")
    parser.add_argument("--seed", type=int, default=0, help="of generated rows")
    args = parser.parse_args()
    if args.generated is None:
        rows = read(Path(os.environ["FEDJAXSIM_DATA"]) / "cifar-10-batches-py")
    else:
        rows = generated(args.generated, args.seed)
    np.savez_compressed(args.out, x=rows["x"], y=rows["y"])


if __name__ == "__main__":
    main()
