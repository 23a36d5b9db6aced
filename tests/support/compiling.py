"""What makes programs compile quickly that no variable of the environment can say.

Processes that tests start inherit the variables, and call `quicken`.
"""

import gc

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.kernels import threefry


def quicken() -> None:
    """Lower lightly, hash in a loop, and collect seldom, in this process."""
    _lower_lightly()
    threefry.words = hash_in_a_loop
    # Tracing makes many small objects that live: Python's collector would go through them again
    # and again, for a sixth of a test's time.
    gc.set_threshold(200_000, 20, 50)


def _lower_lightly() -> None:
    """Lower programs without the languages of kernels, whose loading takes 4 ms of each.

    That is a private class of JAX: without it, tests are slower and no different.
    """
    try:
        from jax._src.interpreters import mlir

        context = mlir.JaxIrContext
    except (ImportError, AttributeError):
        return

    class LightContext(context):
        def load_all_available_dialects(self):
            assert self.dialects["func"]

    mlir.JaxIrContext = LightContext


def _schedule() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rotations of Threefry's steps, and the words of the key and numbers they add."""
    rotations = np.concatenate([threefry._ROTATIONS[group % 2] for group in range(5)])
    words, numbers = np.zeros((2, 20, 3), np.uint32), np.zeros((2, 20), np.uint32)
    for group in range(5):
        last = 4 * group + 3
        words[0, last, (group + 1) % 3] = words[1, last, (group + 2) % 3] = 1
        numbers[1, last] = group + 1
    return rotations.astype(np.uint32), words, numbers


@jax.jit
def hash_in_a_loop(key, x, y):
    """`threefry.words` as a loop: its hundred steps are a fifth of what a round compiles."""
    rotations, words, numbers = _schedule()
    keys = jnp.concatenate([key, (key[0] ^ key[1] ^ threefry._PARITY)[None]])
    added = jnp.sum(words * keys, axis=-1, dtype=np.uint32) + numbers

    def step(pair, each):
        (x, y), (left, right, more_x, more_y) = pair, each
        x = x + y
        y = x ^ ((y << left) | (y >> right))
        return (x + more_x, y + more_y), None

    # Both vary over devices if one does.
    start = x + key[0] + (y ^ y), y + key[1] + (x ^ x)
    return jax.lax.scan(step, start, (rotations, 32 - rotations, *added))[0]
