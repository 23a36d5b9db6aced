"""Poisson sampling in time proportional to the cohort, with exact inclusion probabilities.

A coin per client is exact but takes time proportional to the population. Here a block of B ids,
with at most four drawn on average, costs one small number, and a drawn client two more:

1. Points fall on ids as a Poisson process: a block gets a Poisson(Bλ) number of them, each on a
   uniformly random id of the block (log₂ B random bits). By Poisson splitting each id is hit at
   least once with probability 1 − e^(−λ), independently of every other id.
2. λ makes this a power of two, ρ = 2^(−j), the smallest above p.
3. A hit id stays with probability p/ρ, in [1/2, 1): if 32 random bits, as an integer, are below
   2³² p/ρ. For a float32 p in the range of the tables that is a whole number.

So a client is in with probability exactly ρ · p/ρ = p, independently of all others. Only step 1
approximates: numbers are drawn by comparing 128 random bits with a table of the distribution
function, computed with 80 decimal digits and rounded to 128 bits, within 1e-36 of the Poisson
distribution in total variation.
"""

import decimal
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.kernels import threefry

LARGEST_RATE = 2.0**-5
"""Largest rate at which blocks are cheaper than a coin per client."""

_LARGEST_BLOCK = 22  # in bits of an id
_LAST = 32  # hit rates go down to 2^(−32)
_WORDS = 4  # of 32 bits, in a number that is compared with the distribution function
_TAIL = -math.log(1e-34)  # of the probability, per round, that points outnumber their slots


def _first_row(largest_rate: float) -> int:
    """Return the j of the smallest power of two 2^(−j) above a rate."""
    return -math.frexp(largest_rate)[1]


def _block_bits(first: int) -> int:
    """Return log₂ B, for about four points at most. Random bits belong to these blocks of ids."""
    return min(first + 2, _LARGEST_BLOCK)


def _places(num_clients: int, first: int) -> int:
    """Return a number of slots for all points, exceeded with probability 1e-34 (Bernstein)."""
    mean = -num_clients * math.log1p(-(2.0**-first))
    return math.ceil(mean + _TAIL / 3 + math.sqrt(_TAIL**2 / 9 + 2 * _TAIL * mean))


@functools.lru_cache(maxsize=8)
def _distribution_functions(first: int) -> np.ndarray:
    """Compute P(N ≤ k) of the points in a block for hit rates 2^(−j), j = first … 32.

    It is (rows, k, words) uint32, the most significant word first; 2¹²⁸ − 1 where it rounds to 1.
    """
    unit = 2 ** (32 * _WORDS)
    rows = []
    with decimal.localcontext() as context:
        context.prec = 80
        for j in range(first, _LAST + 1):
            mean = -(2 ** _block_bits(first)) * (1 - decimal.Decimal(2) ** -j).ln()
            mass = total = (-mean).exp()
            row = []
            while (scaled := round(total * unit)) < unit:
                row.append(scaled)
                mass *= mean / len(row)
                total += mass
            rows.append(row)
    longest = max(map(len, rows))
    words = [
        [[k >> 32 * w & 0xFFFFFFFF for w in reversed(range(_WORDS))] for k in row]
        for row in (row + [unit - 1] * (longest - len(row)) for row in rows)
    ]
    return np.array(words, np.uint32)


def _at_least(number: jax.Array, bound: jax.Array) -> jax.Array:
    """Return whether number ≥ bound, for integers of several words, on the last axis."""
    result = jnp.bool_(True)
    for w in reversed(range(_WORDS)):
        above, equal = number[..., w] > bound[..., w], number[..., w] == bound[..., w]
        result = above | (equal & result)
    return result


def _row_and_threshold(rate: jax.Array, first: int) -> tuple[jax.Array, jax.Array]:
    """Return the j of a rate and floor(2³² p 2^j). A power of two scales without rounding."""
    p = jnp.minimum(jax.lax.stop_gradient(rate), 2.0**-first * (1 - 2.0**-24))
    row = jnp.clip(-jnp.frexp(p)[1], first, _LAST)
    return row, jnp.floor(jnp.ldexp(p, row + 32)).astype(jnp.uint32)


@functools.partial(jax.jit, static_argnums=1)
def charged_rate(rate: jax.Array, largest_rate: float) -> jax.Array:
    """Return the probability, (), with which `draw` includes a client at this rate.

    It is p itself for a float32 p in [2^(−33), largest_rate]. A smaller p, or one of more bits, is
    rounded down; a larger p stops at the power of two above `largest_rate`.
    """
    row, threshold = _row_and_threshold(rate, _first_row(largest_rate))
    return jnp.ldexp(threshold.astype(rate.dtype), -row - 32)


def draw(
    count_key: jax.Array,
    point_key: jax.Array,
    rate: jax.Array,
    num_clients: int,
    largest_rate: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draw a Poisson sample of clients, with a key of the round for each step.

    Inclusion has probability `charged_rate`; `largest_rate` sets the number of slots. Returns ids,
    (slots,) int32, block by block; whether each is drawn, (slots,) bool; and the number of points
    without a slot, () int32: positive with probability at most 1e-34.
    """
    first = _first_row(largest_rate)
    width = _block_bits(first)
    blocks, places = math.ceil(num_clients / 2**width), _places(num_clients, first)
    row, threshold = _row_and_threshold(rate, first)
    # A block, and a point of a block, are counters of one hash of the step's key.
    number = jnp.arange(blocks, dtype=jnp.uint32)[:, None]
    halves = threefry.words(
        jax.random.key_data(count_key), number, jnp.arange(2, dtype=jnp.uint32)[None, :]
    )
    table = jnp.asarray(_distribution_functions(first))[row - first]
    reached = _at_least(jnp.stack(halves, axis=-1).reshape(blocks, 1, _WORDS), table)
    counts = jnp.sum(reached, axis=1, dtype=jnp.int32)
    totals = jnp.cumsum(counts)
    slots = jnp.arange(places)
    block = jnp.minimum(jnp.searchsorted(totals, slots, side="right"), blocks - 1)
    position, coins = threefry.words(
        jax.random.key_data(point_key),
        block.astype(jnp.uint32),
        (slots - totals[block] + counts[block]).astype(jnp.uint32),
    )
    ids = block * 2**width + (position >> (32 - width)).astype(jnp.int32)
    ids = jnp.where((slots < totals[-1]) & (ids < num_clients), ids, num_clients)
    # An id hit twice keeps the coin of its first point; a block has no more points than the table.
    before = jnp.pad(ids, (table.shape[0] - 1, 0), constant_values=-1)
    again = jnp.zeros(places, bool)
    for shift in range(1, table.shape[0]):
        again |= ids == before[table.shape[0] - 1 - shift :][:places]
    drawn = ~again & (coins < threshold) & (ids < num_clients)
    return ids, drawn, jnp.maximum(totals[-1] - places, 0)
