"""What makes programs compile quickly that no variable of the environment can say.

Processes that tests start inherit the variables, and call `quicken`.
"""

import contextlib
import gc

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives

from fedjaxsim.kernels import threefry

moves_by_numpy = True
"""Whether what only fills, converts or moves numbers compiles nothing outside `jax.jit`."""
_CHECKERS = (
    "jax_debug_nans", "jax_debug_infs",
    "jax_transfer_guard_host_to_device", "jax_transfer_guard_device_to_host",
)  # fmt: skip


def quicken() -> None:
    """Lower lightly, hash in a loop, move numbers by numpy, and collect seldom, in this process."""
    _lower_lightly()
    _move_by_numpy()
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


def _move_by_numpy() -> None:
    """Do by numpy what moves numbers outside `jax.jit`, where JAX compiles for each shape.

    Strict checkers see what JAX does, and so does whoever counts programs.
    """
    moves = {
        primitives.convert_element_type_p: (_converted, "new_dtype"),
        primitives.broadcast_in_dim_p: (_broadcast, "shape", "broadcast_dimensions"),
        primitives.copy_p: (_same,),
        primitives.iota_p: (_iota, "dtype", "shape", "dimension"),
        primitives.slice_p: (_sliced, "start_indices", "limit_indices"),
        primitives.squeeze_p: (np.squeeze, "dimensions"),
        primitives.reshape_p: (np.reshape, "new_sizes"),
    }
    with contextlib.suppress(ImportError):
        from jax._src.core import stage_p  # of `jnp.asarray`

        moves[stage_p] = (_same,)
    for primitive, (move, *names) in moves.items():
        primitive.def_impl(_moved(primitive.impl, move, names))


def _moved(compiled, move, names):
    """Return `move` of an operation's operands and these of its parameters, the others unset."""

    def moved(*operands, **params):
        found = None
        usual = not any(value for name, value in params.items() if name not in names)
        if moves_by_numpy and usual and all(map(_is_plain, operands)) and not _is_strict():
            found = move(*map(np.asarray, operands), *(params[name] for name in names))
        if found is None:
            return compiled(*operands, **params)
        return jax.device_put(np.array(found))  # a copy, as JAX may keep what it is given

    return moved


def _is_plain(x) -> bool:
    """Return whether `x` has numbers of a fixed type, on the device that JAX would choose."""
    if isinstance(x, jax.Array):
        of_numbers = isinstance(x.dtype, np.dtype) and not x.weak_type
        return of_numbers and not x.committed and x.sharding.num_devices == 1
    return hasattr(x, "shape") and not isinstance(x, np.generic) and x.dtype.kind in "biuf"


def _is_strict() -> bool:
    return any(getattr(jax.config, name) not in (None, False, "allow") for name in _CHECKERS)


def _same(x):
    return x


def _converted(x, dtype):
    """Return None where numpy might round otherwise than XLA."""
    whole = isinstance(dtype, np.dtype) and x.dtype.kind in "biu" and dtype.kind in "iuf"
    return x.astype(dtype) if whole or x.dtype == dtype else None


def _broadcast(x, shape, axes):
    sizes = dict(zip(axes, x.shape, strict=True))
    return np.broadcast_to(x.reshape([sizes.get(axis, 1) for axis in range(len(shape))]), shape)


def _iota(dtype, shape, dimension):
    return _broadcast(np.arange(shape[dimension]).astype(dtype), shape, [dimension])


def _sliced(x, starts, limits):
    return x[tuple(map(slice, starts, limits))]


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
