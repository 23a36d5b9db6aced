"""The keys and bits of `jax.random`, without its loops on a CPU.

On a CPU, JAX compiles every threefry hash into a loop of some eighty small steps through memory,
where a round of small clients would spend most of its time. Unrolled, a hash is one fused loop over
registers. Keys and numbers equal `jax.random`'s (with partitionable threefry, the default).
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.kernels import backend

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def fold_in(key: jax.Array, data: jax.typing.ArrayLike) -> jax.Array:
    """Compute `jax.random.fold_in`."""
    data = np.uint32(data) if isinstance(data, int) else data
    number = jnp.asarray(data).astype(jnp.uint32)
    return wrap(words(jax.random.key_data(key), jnp.zeros_like(number), number))


def split(key: jax.Array, num: int = 2) -> tuple[jax.Array, ...]:
    """Compute the keys of `jax.random.split`.

    A CPU computes them together, which compiles faster. On an accelerator a kernel would have to
    put them together, and others to take them apart.
    """
    if backend.platform() != "cpu":
        return tuple(fold_in(key, i) for i in range(num))
    counts = jnp.arange(num, dtype=jnp.uint32)
    return tuple(wrap(words(jax.random.key_data(key), jnp.zeros_like(counts), counts)))


def bits(key: jax.Array, shape: tuple[int, ...] = ()) -> jax.Array:
    """Compute `jax.random.bits`: fewer than 2³² random uint32."""
    counts = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    first, second = words(jax.random.key_data(key), jnp.zeros_like(counts), counts)
    return first ^ second


def integers(high: jax.Array, low: jax.Array, span: jax.typing.ArrayLike) -> jax.Array:
    """Return random words as `jax.random.randint` does: int32 from 0 to `span` − 1.

    They are uniform up to 2⁻³² times `span`.
    """
    n = jnp.asarray(span).astype(jnp.uint32)
    shift = jnp.uint32(2**16) % n
    return ((high % n * (shift * shift % n) + low % n) % n).astype(jnp.int32)


def in_halves(
    draw: Callable[[jax.Array, int], jax.Array], size: int, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Fill a vector of `size` numbers or up to 15 more by a loop of two calls `draw(first, count)`.

    Without a loop of two steps a CPU computes drawn numbers again in each of their uses. Of few
    numbers it computes those beyond a multiple of 8 one by one.
    """
    half = 8 * -(-size // 16)

    def fill(i, numbers):
        drawn = draw(jnp.uint32(i * half), half)
        return jax.lax.dynamic_update_slice(numbers, drawn, (i * half,))

    return jax.lax.fori_loop(0, 2, fill, jnp.zeros(2 * half, dtype))


def wrap(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return keys of two words each."""
    return jax.random.wrap_key_data(jnp.stack(pair, axis=-1), impl="threefry2x32")


@jax.jit
def words(key: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute Threefry-2×32 with 20 rounds (Salmon et al. 2011) of key (2,) and counters, uint32.

    Under `jax.jit` JAX traces its hundred steps once instead of once per hash; XLA inlines them.
    """
    keys = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    x, y = x + keys[0], y + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = (y << np.uint32(rotation)) | (y >> np.uint32(32 - rotation))
            y = x ^ y
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x, y
