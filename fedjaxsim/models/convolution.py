"""Convolution and pooling as slices and matrix products.

Under a map over clients XLA turns `lax.conv` with weights of one's own into a grouped convolution
(and inside a CPU loop into a naive one), 5 to 20 times slower than the matrix product it is. The
forms here are matrix products already, so mapping them gives batched matrix products. The tests
compare them with `lax.conv_general_dilated` and `flax.linen.max_pool`.
"""

import jax
import jax.numpy as jnp


def conv2d(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A 2-D convolution without padding, as patches times a matrix.

    Args:
      x: (b, height, width, channels).
      kernel: (kh, kw, channels, features).

    Returns:
      (b, height − kh + 1, width − kw + 1, features).
    """
    kh, kw, channels, features = kernel.shape
    height, width = x.shape[1] - kh + 1, x.shape[2] - kw + 1
    patches = jnp.concatenate(
        [x[:, i : i + height, j : j + width] for i in range(kh) for j in range(kw)], axis=-1
    )
    return patches @ kernel.reshape(kh * kw * channels, features)


def max_pool2d(x: jax.Array) -> jax.Array:
    """2×2 max pooling with stride 2; height and width must be even.

    Args:
      x: (b, height, width, channels).

    Returns:
      (b, height/2, width/2, channels).
    """
    b, height, width, channels = x.shape
    return x.reshape(b, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))
