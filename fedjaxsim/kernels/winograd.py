"""Convolutions with fewer multiplications: Winograd's minimal filtering.

A correlation y_i = Σ_j g_j d_{i+j} with r taps needs n = m + r − 1 multiplications for m outputs
instead of m·r (Toom and Cook): y = Aᵀ((G g) ∘ (B d)), where A and G evaluate polynomials at n
points and Bᵀ interpolates. In two dimensions the matrices are Kronecker products, and over channels
the multiplications are one matrix product for each pair of points (Winograd, Arithmetic Complexity
of Computations, 1980; Lavin and Gray, arXiv:1509.09308).

A 5×5 kernel takes 64 multiplications for 4×4 outputs instead of 400, plus the transformations.
Rounding is about nine times as large (for 8 points; Barabasz et al., arXiv:1803.10986, choose
similar points).
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

# Points of few bits, reciprocals and opposites of one another, keep rounding small.
_POINTS = np.array([0, 1, -1, 1 / 2, -2, 2, -1 / 2])
_MOST = len(_POINTS) + 1


def conv2d(x: jax.Array, kernel: jax.Array, tile: tuple[int, int]) -> jax.Array:
    """Compute `convolution.conv2d` in tiles of outputs, of height and width ≤ 9 − kh and 9 − kw.

    `x` is (b, height, width, channels), `kernel` (kh, kw, channels, features), and the result
    (b, height − kh + 1, width − kw + 1, features).
    """
    kh, kw, channels, features = kernel.shape
    b, height, width = x.shape[0], x.shape[1] - kh + 1, x.shape[2] - kw + 1
    (mh, mw), (th, tw) = tile, _tiles(x.shape, kernel.shape, tile)
    nh, nw = mh + kh - 1, mw + kw - 1
    points, tiles = nh * nw, th * tw * b
    pairs = zip(_matrices(mh, kh), _matrices(mw, kw), strict=True)
    dtype = jnp.result_type(x, kernel)
    a, g, d = (jnp.asarray(np.kron(*pair), dtype) for pair in pairs)

    padded = jnp.pad(x, ((0, 0), (0, th * mh - height), (0, tw * mw - width), (0, 0)))
    image = padded.transpose(1, 2, 0, 3)
    rows = jnp.stack([image[t * mh : t * mh + nh] for t in range(th)], axis=2)
    inputs = jnp.stack([rows[:, t * mw : t * mw + nw] for t in range(tw)], axis=3)
    inputs = (d @ inputs.reshape(points, tiles * channels)).reshape(points, tiles, channels)
    weights = (g @ kernel.reshape(kh * kw, channels * features)).reshape(points, channels, features)
    outputs = a.T @ (inputs @ weights).reshape(points, tiles * features)
    outputs = outputs.reshape(mh, mw, th, tw, b, features).transpose(4, 2, 0, 3, 1, 5)
    return outputs.reshape(b, th * mh, tw * mw, features)[:, :height, :width]


def best_tile(x: tuple[int, ...], kernel: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the tile with the fewest multiplications, given shapes; None if none saves a tenth.

    Forward and reverse on one core, the nine shapes with a tile were 1.2 to 2.7 times as fast with
    it; the count, transformations included, predicts this up to a factor of 1.5. The margin of a
    tenth accounts for many small products being slower than a large one.
    """
    (kh, kw, channels, features), b = kernel, x[0]
    out = x[1] - kh + 1, x[2] - kw + 1
    heights, widths = (
        range(1, min(_MOST - k + 1, size) + 1) for k, size in zip((kh, kw), out, strict=True)
    )
    best, fewest = None, 0.9 * b * math.prod(out) * math.prod(kernel)
    for tile in itertools.product(heights, widths):
        points = (tile[0] + kh - 1) * (tile[1] + kw - 1)
        tiles = b * math.prod(_tiles(x, kernel, tile))
        products = tiles * channels * features
        transformed = points * tiles * channels + kh * kw * channels * features
        transformed += math.prod(tile) * tiles * features
        if points * (products + transformed) < fewest:
            best, fewest = tile, points * (products + transformed)
    return best


def _tiles(x: tuple[int, ...], kernel: tuple[int, ...], tile: tuple[int, int]) -> tuple[int, int]:
    return -(-(x[1] - kernel[0] + 1) // tile[0]), -(-(x[2] - kernel[1] + 1) // tile[1])


def _matrices(outputs: int, taps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return A (n, outputs), G (n, taps) and B (n, n) for n = outputs + taps − 1 points.

    The last point is infinity, where a polynomial's value is its highest coefficient.
    """
    n = outputs + taps - 1

    def at_points(coefficients: int) -> np.ndarray:
        finite = np.vander(_POINTS[: n - 1], coefficients, increasing=True)
        return np.vstack([finite, np.eye(coefficients)[-1]])

    return at_points(outputs), at_points(taps), np.linalg.inv(at_points(n)).T
