"""Normal numbers for protective noise: 64 random bits each, accurate far into the tail.

`jax.random.normal` makes a float32 normal of 23 random bits, which ends at 5.4 standard deviations:
a release beyond them is impossible for one of two neighbouring inputs, and after some thousand
rounds that alone exceeds a δ of 1e-5. Here the normal distribution function is inverted at a
uniform number that keeps its precision at both ends: near 0 as itself, near 1 as its distance from
1. That needs no float64, and one threefry hash a number.

Formal guarantees:
  * A number is a function of 64 bits: a sign, and an integer k of 63 bits with which its size
    rises, up to a few units in the last place. So the probability that it exceeds t is known by
    counting: equal to N(0, 1) within one part in 10⁴ and 2⁻⁶³, for every t.
  * The largest size is 9.16, met with probability 2⁻⁶³.
  * Every number of a key has its own threefry block: they are independent as far as threefry
    is a random function.
  * Numbers lie on the grid of floats, and a sum of floats reveals more than an ideal one (Mironov
    2012): a simulation of the ideal mechanism, not a hardened deployment.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fedjaxsim.kernels import backend, threefry

_BEYOND = 2.0**-20
"""Numbers are in the tail if a larger size has less than this probability."""
_CENTRE = (6.65, (
    3.41322206, 0.270714224, -0.00866247736, 0.000387259024, 1.72588768e-06, -4.11751369e-06,
    6.61595843e-07, -6.76060353e-08, 4.44331257e-09, 3.39559879e-10, -1.37140335e-10,
    8.85562184e-12, 7.16910495e-13, -7.47358508e-14,
))  # fmt: skip
"""√2 erf⁻¹(x)/x by powers of w − 6.65, w = −log(1 − x²) ≤ 13.3; relative error below 1e-7."""
_LOGARITHM = (0.0, (
    0.999999945, -0.500003651, 0.333350585, -0.249699078, 0.199001773, -0.17250859, 0.162224948,
    -0.101066912,
))  # fmt: skip
"""Log(1 + r)/r by powers of r, for 1 + r from √½ to √2; relative error below 2e-7."""
_TAIL = (0.275, (
    1.35064516, -0.273112776, 0.172518307, 0.79101015, 0.793249253, 15.5795837, 32.7697919,
    -168.796718, -840.42275,
))  # fmt: skip
"""√2 erf⁻¹(x)/(x √w) by powers of 1/√w − 0.275, 6.25 ≤ w ≤ 44; relative error below 1e-7."""


def normal(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Draw independent N(0, 1) numbers, fewer than 2³², in float32 or float64."""
    if jnp.dtype(dtype) not in (jnp.float32, jnp.float64):
        raise ValueError(f"noise must be float32 or float64, got {jnp.dtype(dtype)}")
    size = math.prod(shape)
    if size >= 2**32:
        raise ValueError(f"a draw of noise must have fewer than 2**32 numbers, got {size}")
    return _draw(jax.random.key_data(key), size, dtype).reshape(shape)


def radius(key: jax.Array, dimension: int) -> jax.Array:
    """Draw the norm of n + 1 standard normals, (): times n others, noise of density ∝ exp(−‖x‖₂).

    Half its square is V ~ Gamma((n + 1)/2). Normals of variance 2V, mixed over V, have at distance
    r the density ∫ v^(−n/2) v^((n−1)/2) e^(−v − r²/(4v)) dv ∝ e^(−r). A uniform direction times a
    Gamma(n) radius would divide by a norm that may be zero.
    """
    return jnp.linalg.norm(normal(key, (dimension + 1,), jnp.result_type(float)))


def _draw(words: jax.Array, size: int, dtype: DTypeLike) -> jax.Array:
    """Return the normal numbers of the first `size` counters of a key's two words, (size,)."""

    def draw(first: jax.Array | int, count: int, of: Callable[..., jax.Array]) -> jax.Array:
        index = first + jax.lax.iota(jnp.uint32, count)
        return of(*threefry.words(words, jnp.zeros_like(index), index), dtype)

    if backend.platform() != "cpu":
        return draw(0, size, from_words)
    central = threefry.in_halves(functools.partial(draw, of=_central), size, dtype)

    def repair(carry):  # the first index is carried, lest XLA hash before the loop
        first, numbers = carry
        exact = draw(first, len(central), from_words)
        return first + 1, jnp.where(jnp.isinf(numbers), exact, numbers)

    def has_tail(carry):  # a sum is quicker than a search
        total = jnp.dot(carry[1], jnp.ones_like(carry[1]), precision=jax.lax.Precision.HIGHEST)
        return (carry[0] == 0) & ~jnp.isfinite(total)

    return jax.lax.while_loop(has_tail, repair, (jnp.uint32(0), central))[1][:size]


@functools.partial(jax.jit, static_argnames="dtype")  # traced once for each shape, not each draw
def from_words(high: jax.Array, low: jax.Array, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Return the normal numbers of two uint32 words; the last bit of `low` is the sign."""
    centre, above = _central(high, low, dtype), _fraction(~high, ~low, dtype)
    inverse_root = jax.lax.rsqrt(-jnp.log(above * (2 - above)))
    tail = (1 - above) * _polynomial(_TAIL, inverse_root) / inverse_root
    return jnp.where(jnp.isinf(centre), jnp.copysign(tail, centre), centre)


def _central(high: jax.Array, low: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return the normal numbers of two words, ±∞ in the tail."""
    below = _fraction(high, low, dtype)
    above = _fraction(~high, ~low, dtype)  # 1 − below, without cancellation
    value = _polynomial(_CENTRE, -_log(above * (1 + below)))
    # With the sign on the product, XLA would compute the hash behind the words twice.
    signed = jnp.where((low & np.uint32(1)) == 0, below, -below)
    return signed * jnp.where(above < _BEYOND, jnp.inf, value)


def _log(x: jax.Array) -> jax.Array:
    """Return the logarithm of positive normal numbers, in float32 in half the time of XLA's."""
    if x.dtype != jnp.float32:
        return jnp.log(x)
    least = np.float32(np.sqrt(0.5)).view(np.int32)  # of 1 + r, whose exponent is taken off
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) - least
    r = jax.lax.bitcast_convert_type((bits & 0x7FFFFF) + least, jnp.float32) - 1
    return (bits >> 23).astype(jnp.float32) * np.float32(np.log(2)) + r * _polynomial(_LOGARITHM, r)


def _fraction(high: jax.Array, low: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return (2³² high + low, its last bit set)/2⁶⁴: in (0, 1], of full relative precision."""
    odd = low | np.uint32(1)
    return high.astype(dtype) * 2.0**-32 + odd.astype(dtype) * 2.0**-64


def _polynomial(about: tuple[float, Sequence[float]], x: jax.Array) -> jax.Array:
    centre, coefficients = about
    value = jnp.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * (x - centre) + coefficient
    return value
