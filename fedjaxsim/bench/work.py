"""What a round must compute and move, counted by hand.

Counted are the multiplications and additions of matrix products, on examples that exist (not on the
padding of a client's last batch), and the bytes that must pass through memory at least once. All
else (elementwise work, random numbers, gathers, batches of padding) is overhead, which a measured
fraction of a ceiling is there to show. Convolutions count as in their direct form, whatever form
is taken.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

FLOAT = 4
"""Bytes of a float32."""


class Work(NamedTuple):
    """The work of one round, as expected where cohorts are random.

    Attributes:
      flops: floating-point operations of its matrix products.
      bytes: that must be read or written.
      updates: client updates, over all runs of a sweep.
    """

    flops: float
    bytes: float
    updates: float


def dense_flops(widths: Sequence[int]) -> int:
    """Forward and backward pass of dense layers, for one example.

    A layer from a to b features takes 2ab for its outputs, 2ab for the gradient of its weights and,
    unless it is the first one, 2ab for the gradient of its inputs.

    Args:
      widths: features of the input and of each layer's output, e.g. (d, c).
    """
    products = [a * b for a, b in itertools.pairwise(widths)]
    return 4 * products[0] + 6 * sum(products[1:])


def cnn_flops(side: int, num_outputs: int) -> int:
    """Forward and backward pass of `models.cnn` on one grey image, for one example.

    A convolution from a to b channels with k×k kernels and s×s outputs is a product of s² rows:
    2s²k²ab. As in `dense_flops` it counts twice in the first layer and three times after it.

    Args:
      side: of the image, e.g. 28.
      num_outputs: c.
    """
    first, second = side - 4, (side - 4) // 2 - 4
    flat = (second // 2) ** 2 * 64
    products = (first**2 * 25 * 1 * 32, second**2 * 25 * 32 * 64, flat * num_outputs)
    return 4 * products[0] + 6 * (products[1] + products[2])


def gru_flops(length: int, hidden: Sequence[int], num_outputs: int) -> int:
    """Forward and backward pass of `models.gru` with outputs at every token, for one example.

    A layer from a to h units multiplies a token by (a, 3h) and the state by (h, 3h). Tokens are
    embedded, so that all products count three times, as those after the first in `dense_flops`.

    Args:
      length: L, the tokens of an example.
      hidden: units of each layer; tokens are embedded in as many as the first has.
      num_outputs: c.
    """
    inputs = (hidden[0], *hidden[:-1])
    layers = sum(3 * h * (a + h) for a, h in zip(inputs, hidden, strict=True))
    return 6 * length * (layers + hidden[-1] * num_outputs)


def transformer_flops(length: int, hidden: Sequence[int], num_outputs: int) -> int:
    """As `gru_flops`, of `models.transformer`.

    A block of width w multiplies a token by (w, 3w), (w, w), (w, 4w) and (4w, w), and attention
    takes two products of w numbers for each pair of a token and one that is not behind it.

    Args:
      length: L.
      hidden: the width of each block.
      num_outputs: c.
    """
    pairs = length * (length + 1) // 2
    blocks = sum(12 * w * w * length + 2 * w * pairs for w in hidden)
    return 6 * (blocks + hidden[-1] * num_outputs * length)


def round_bytes(
    updates: float, personal: int, examples: float, features: int, shared: int
) -> float:
    """The least traffic of a round.

    Args:
      updates: clients that take part.
      personal: parameters of a client's own, read and written once.
      examples: that all of them read.
      features: numbers in an example.
      shared: parameters of the billboard, read and written once.
    """
    return FLOAT * (2 * updates * personal + examples * features + 2 * shared)
