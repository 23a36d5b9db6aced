"""Named random streams: the one place where the keys of a run come from.

Whatever is random in a run draws from a stream, `stream(key, name, number)`. The name is the high
word of a Threefry counter and the number its low word, so two streams of one key have different
keys: a cipher maps no two counters to one block. `jax.random` leaves the high word 0, so whatever
user code folds into or splits from a key is no named stream of that key.

A key that a client's functions see (minibatches, context, predictions) is a leaf of this tree: no
other client's stream comes from it, nor any of the server's.
"""

import enum

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjaxsim import checks
from fedjaxsim.kernels import backend, threefry


@enum.unique
class Stream(enum.IntEnum):
    """The names of all streams, by the key that they are streams of.

    A name's number stays what it is: it decides what a seed draws.
    """

    # Of a seed.
    TUNING = 0x74_75_6E_65  # the runs of a tuning, and those that test its result
    SELECTION = 0x73_65_6C_65  # the runs among which one is selected privately
    AUDIT = 0x61_75_64_69  # the runs that an audit attacks
    HELD_OUT = 0x68_6F_6C_64  # the clients who are held out, by numpy's generator
    RANGES = 0x72_61_6E_67  # private ranges of columns, of a digest of the rows that they protect
    # Of the key of `init`.
    INIT = 0x8000_0001  # the algorithm's first states
    WARM_START = 0x8000_0004  # first states that start from models
    RUN = 0x8000_0002  # the key of the run, which the state carries
    CANARIES = 0x8000_0003  # the coins of canaries, a stream of the algorithm's key
    # Of the key of a run.
    SAMPLING = 0x8000_0010  # cohorts; the sampler derives those of the rounds
    CLIENTS = 0x8000_0011  # the clients of a round
    ORDERS = 0x8000_0012  # the orders in which minibatches are consumed over the whole run
    ROUND_NOISE = 0x8000_0013  # fresh noise of a round
    RUN_NOISE = 0x8000_0014  # correlated noise, which draws earlier rounds again
    PREDICTION = 0x8000_0015  # the training rows of a client that predicts with them
    EVALUATION = 0x8000_0016  # the rows of a client that is evaluated
    RELEASED = 0x8000_0017  # the noise of evaluations that are released
    EVALUATED = 0x8000_0018  # the evaluated clients, by numpy's generator
    STAGE = 0x8000_0019  # the next stage, which starts after some round
    NEW_CLIENTS = 0x8000_001A  # a stage of clients who took no part before
    DIGEST = 0x64_72_61_77  # the digest by which a ledger knows the key
    # Of the key of a sampler.
    COHORT = 0x8000_0020  # a cohort of a fixed size
    COINS = 0x8000_0021  # a coin for each client, or the number of points of each block
    POINTS = 0x8000_0022  # the points of blocks
    KEPT = 0x8000_0023  # the members that a cohort above its capacity keeps
    PERIOD = 0x8000_0024  # a period of rounds
    TURNS = 0x8000_0025  # each client's round of a period, of the period's key
    # Of the key of a round's clients.
    MINIBATCHES = 0x8000_0030
    CONTEXT = 0x8000_0031
    AVAILABILITY = 0x8000_0032  # whether the client answers, and its share of local steps
    # Of the key of a client's minibatches, or of its orders.
    DRAWN = 0x8000_0040  # rows drawn with replacement
    PASS = 0x8000_0041  # the order of a pass over the rows
    GENERATED = 0x8000_0042  # a minibatch of fresh examples
    EXAMPLES = 0x8000_0043  # random layers and augmentation, for each example
    PROTECTED = 0x8000_0044  # a minibatch of protected examples
    # Of the key of such a minibatch.
    EXAMPLE_COINS = 0x8000_0050
    GRADIENT_NOISE = 0x8000_0051  # noise of each ticket
    # Of the key of a client's context.
    EXAMPLE_NOISE = 0x65_78_61_6D  # noise of a client that protects its examples


def seed_key(seed: int) -> jax.Array:
    """Return the key of a seed; of a larger one than 32 bits all 64 count.

    Other generators than Threefry share one stream under vmap, which breaks noise and sampling.

    Raises:
      ValueError: the seed is negative or has more bits; JAX would give it another seed's key.
    """
    checks.count(0, 2**64 - 1, seed=seed)
    if seed < 2**32:
        return jax.random.key(seed, impl="threefry2x32")
    # Without x64, `jax.random.key` takes the low 32 bits.
    return threefry.wrap((jnp.uint32(seed >> 32), jnp.uint32(seed % 2**32)))


def words(key: jax.Array, name: Stream, numbers: ArrayLike = 0) -> tuple[jax.Array, jax.Array]:
    """Compute 64 random bits for each of a stream's numbers below 2³², in two uint32 words."""
    numbers = np.uint32(numbers) if isinstance(numbers, int) else numbers
    low = jnp.asarray(numbers).astype(jnp.uint32)
    return threefry.words(jax.random.key_data(key), jnp.full_like(low, int(name)), low)


def stream(key: jax.Array, name: Stream, *numbers: ArrayLike) -> jax.Array:
    """Return the key of a stream of `key`: of one number, 0 by default, or of several in turn.

    The keys of an array of numbers have its shape.
    """
    for number in numbers or (0,):
        key = threefry.wrap(words(key, name, number))
    return key


def streams(key: jax.Array, *named: tuple[Stream, ArrayLike]) -> tuple[jax.Array, ...]:
    """Return `stream(key, name, number)` of each pair of a name and a number ().

    A CPU computes them by one hash, which compiles faster. On an accelerator a kernel would have to
    put them together, and others to take them apart.
    """
    if backend.platform() != "cpu":
        return tuple(stream(key, *pair) for pair in named)
    high = jnp.asarray(np.array([name for name, _ in named], np.uint32))
    low = jnp.stack([jnp.asarray(number).astype(jnp.uint32) for _, number in named])
    return tuple(threefry.wrap(threefry.words(jax.random.key_data(key), high, low)))
