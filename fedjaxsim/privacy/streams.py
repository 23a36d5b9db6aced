"""Which noise a run drew: so that two runs do not share it by accident, and no ε ignores it if so.

Noise is a function of the run's key, of a fingerprint and of the round. Two runs that share all
three publish, between them, the noiseless difference of their releases, whatever their ledgers say.
So `Simulation.run` folds a fingerprint of all settings into the noise. And a ledger remembers the
streams that it was charged for: the digest of key and fingerprint, and the rounds.

A sweep, and a derivative, draw the noise of all their settings from the common stream of the key
(fingerprint 0) on purpose: differences between settings then have little variance. Of such runs at
most one may be published under its own ε.

The data have no part in a fingerprint: noise that depended on them would be no noise. Whoever runs
one seed and one setting on two states of the data has to choose another seed.
"""

import dataclasses
import functools
import hashlib
import inspect
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.privacy.events import Stream

PLACES = 8
"""Streams that a ledger remembers."""
COMMON = np.zeros(2, np.uint32)
"""The fingerprint of runs that share their noise on purpose."""
_DIGEST_WORDS = 4
_LIBRARIES = ("fedjaxsim", "jax", "optax", "flax", "numpy")
"""Their functions are known by name and settings alone, in whatever version."""


def none() -> jax.Array:
    """A history without streams, (PLACES, 6) uint32.

    A row holds the digest in four words, the first round, and how many rounds had been charged when
    the stream was opened. Free rows are zero.
    """
    return jnp.zeros((PLACES, _DIGEST_WORDS + 2), jnp.uint32)


def opened(
    history: jax.Array, key: jax.Array, fingerprint: np.ndarray, round_: int, charged: int
) -> jax.Array:
    """The history of a state whose next rounds draw from a stream.

    Args:
      history: (PLACES, 6), as from `none`.
      key: the run's.
      fingerprint: (2,) uint32.
      round_: the next round's number.
      charged: rounds charged so far.

    Returns:
      The same history where the stream just goes on. Where there is no place left, the last one
      says so: which noise was drawn is then unknown.
    """
    rows = np.asarray(history)
    used = int(np.count_nonzero(rows.any(axis=1)))
    new = np.array([*_digest(key, fingerprint), round_, charged], np.uint32)
    if used:
        last = rows[used - 1]
        goes_on = round_ - charged == int(last[-2]) - int(last[-1])
        if goes_on and np.array_equal(last[:_DIGEST_WORDS], new[:_DIGEST_WORDS]):
            return history
        if int(last[-1]) == charged:
            used -= 1  # Nothing was drawn from it.
    rows = rows.copy()
    if used < PLACES:
        rows[used] = new
    else:
        rows[-1, :_DIGEST_WORDS] = np.iinfo(np.uint32).max
    return jnp.asarray(rows)


def drawn(history: jax.Array, charged: int) -> tuple[Stream, ...] | None:
    """The streams of a state that was charged for so many rounds; None where they are not known."""
    rows = np.asarray(history)
    rows = rows[rows.any(axis=1)]
    if not len(rows) or np.any(np.all(rows[:, :_DIGEST_WORDS] == 2**32 - 1, axis=1)):
        return None if charged else ()
    ends = [*rows[1:, -1].astype(int), charged]
    found = [
        Stream(
            row[:_DIGEST_WORDS].astype(">u4").tobytes().hex(), int(row[-2]), int(end) - int(row[-1])
        )
        for row, end in zip(rows, ends, strict=True)
    ]
    return tuple(stream for stream in found if stream.rounds)


def _digest(key: jax.Array, fingerprint: np.ndarray) -> np.ndarray:
    words = np.concatenate([np.ravel(np.asarray(jax.random.key_data(key))), fingerprint])
    digest = hashlib.sha256(b"noise" + words.astype(">u4").tobytes()).digest()
    return np.frombuffer(digest[: 4 * _DIGEST_WORDS], ">u4").astype(np.uint32)


def fingerprint(*settings: Any) -> np.ndarray:
    """64 bits of whatever settings are: (2,) uint32, never those of the common stream.

    Numbers, strings and arrays count with their values; functions with their name, the values they
    close over and their defaults (and, if they come from none of the libraries here, their code);
    other objects with their type and attributes. Nothing depends on addresses or hashes, so a
    setting has one fingerprint in every process.
    """
    digest = hashlib.sha256()
    _feed(digest, settings, ())
    found = np.frombuffer(digest.digest()[:8], ">u4").astype(np.uint32)
    return found if np.any(found != COMMON) else np.array([0, 1], np.uint32)


def _feed(digest: Any, value: Any, above: tuple[int, ...]) -> None:
    """Adds a value to a digest; `above` are the objects that it is part of."""
    if id(value) in above:
        digest.update(b"again")
        return
    above = (*above, id(value))

    def feed(*parts: Any) -> None:
        for part in parts:
            _feed(digest, part, above)

    digest.update(type(value).__qualname__.encode() + b":")
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        digest.update(repr(value).encode())
    elif isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    elif isinstance(value, Mapping):
        for name in sorted(value, key=str):
            feed(str(name), value[name])
    elif isinstance(value, list | tuple | set | frozenset):
        feed(len(value), *(value if isinstance(value, list | tuple) else sorted(value, key=str)))
    elif isinstance(value, functools.partial):
        feed(value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        feed(value.__func__, value.__self__)
    elif isinstance(value, type | types.ModuleType):
        digest.update(f"{value.__name__}".encode())
    elif inspect.isfunction(value):
        module = value.__module__ or ""
        digest.update(f"{module}.{value.__qualname__}".encode())
        if module.split(".")[0] not in _LIBRARIES:
            digest.update(value.__code__.co_code)
            feed([c for c in value.__code__.co_consts if not isinstance(c, types.CodeType)])
        feed(value.__defaults__, value.__kwdefaults__, inspect.getclosurevars(value).nonlocals)
    elif dataclasses.is_dataclass(value):
        feed({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    elif hasattr(value, "__wrapped__"):
        feed(value.__wrapped__)
    elif type(value).__module__.split(".")[0] not in _LIBRARIES:
        feed(getattr(value, "__dict__", {}))
