"""Arrays of a population: types, lengths, and memory of fields, and the ranges of clients' rows."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

ALIGNMENT = 64
_BLOCK = 1 << 24
"""Bytes that are read or copied at once."""
_EXACT = 2**24
"""Every integer up to this one is a float32."""
_LARGEST_INT32 = np.iinfo(np.int32).max
SPLITS = ("train", "validation", "test")
_SPELLINGS = {"training": 0, "val": 1, "valid": 1, "dev": 1, "testing": 2}


def to_float32(array: np.ndarray) -> np.ndarray:
    """Round to float32; overflow becomes inf; `Population` rejects it and names the field."""
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def as_numbers(value: Any, where: str) -> np.ndarray:
    """Return an array of numbers; floats in lists rather than arrays become float32."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{where} is not an array: its rows differ in shape") from error
    if array.dtype.kind not in "fiub" or array.ndim == 0:
        raise ValueError(
            f"{where} must be an array of numbers with one row per example, "
            f"got type {array.dtype} and shape {array.shape}"
        )
    given_as_array = hasattr(value, "dtype")
    return array if given_as_array or array.dtype.kind != "f" else to_float32(array)


def unit_pixels(values: np.ndarray) -> np.ndarray:
    """Return pictures of bytes, (N, height, width, ...) uint8, as float32 in [0, 1].

    Every reader calls this; other values stay as they are.
    """
    is_picture = values.dtype == np.uint8 and values.ndim > 2
    return np.divide(values, 255, dtype=np.float32) if is_picture else values


def common_length(fields: Mapping[str, Any], where: str) -> int:
    """Return the number of rows of all fields; raise ValueError if they disagree or are empty."""
    if not isinstance(fields, Mapping):
        raise ValueError(
            f"{where} must be a dict of arrays, such as {{'x': …, 'y': …}}, got a "
            f"{type(fields).__name__}"
        )
    lengths = {field: len(values) if np.ndim(values) else 0 for field, values in fields.items()}
    if not lengths:
        raise ValueError(f"{where} has no fields; it needs at least one")
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{field!r} has {n} rows" for field, n in lengths.items())
        raise ValueError(f"{where}: {listed}; all fields must have equally many")
    length = next(iter(lengths.values()))
    if length == 0:
        raise ValueError(f"{where} has no rows; each client needs at least one")
    return length


def joined(
    clients: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> tuple[dict[str, np.ndarray], list[int]]:
    """Concatenate the clients' arrays, (n, ...), into fields, (N, ...); also count their rows."""
    if not clients:
        raise ValueError("a population needs at least one client, got an empty list")
    expected = sorted(clients[0])
    for name, client in zip(names, clients, strict=True):
        if sorted(client) != expected:
            raise ValueError(
                f"client {name!r} has the fields {sorted(client)}, but client "
                f"{names[0]!r} has {expected}; all clients need the same"
            )
    owners = [f"client {name!r}, field " for name in names]
    parts = {
        field: [
            as_numbers(client[field], f"{owner}{field!r}")
            for owner, client in zip(owners, clients, strict=True)
        ]
        for field in clients[0]
    }
    counts = [
        common_length({field: arrays[k] for field, arrays in parts.items()}, f"client {name!r}")
        for k, name in enumerate(names)
    ]
    return {field: join(field, arrays, owners) for field, arrays in parts.items()}, counts


def join(field: str, parts: list[np.ndarray], owners: list[str]) -> np.ndarray:
    """Concatenate the clients' parts of one field, in the type that suits all of them."""
    if field == "y":
        parts = [part.reshape(_without_trailing_ones(part.shape)) for part in parts]
    for part, owner in zip(parts, owners, strict=True):
        if part.shape[1:] != parts[0].shape[1:]:
            raise ValueError(
                f"{owner}{field!r} has rows of shape {part.shape[1:]}, "
                f"but {owners[0]}{field!r} of {parts[0].shape[1:]}; all must agree"
            )
    if field == "y" and parts[0].ndim > 2:
        raise ValueError(
            f"{owners[0]}'y' must have shape (n,) or (n, L): one label per row, or one per token, "
            f"got {parts[0].shape}"
        )
    counted = field == "y" or all(part.dtype.kind in "iu" for part in parts)
    if counted and all(map(_is_integral, parts)):
        common = np.result_type(*parts)
        small = field != "y" and common.itemsize < 4
        return _concatenated(parts, common if small else np.dtype(np.int32))
    for part, owner in zip(parts, owners, strict=True):
        if (merged := merged_integers(part)) is not None:
            raise ValueError(
                f"{owner}{field!r} holds integers that float32 cannot tell apart, such as "
                f"{merged}: number them from 0, or round them"
            )
    wide = any(part.dtype.kind == "f" and part.dtype.itemsize >= 8 for part in parts)
    return _concatenated(parts, np.dtype(np.float64 if wide else np.float32))


def merged_integers(values: np.ndarray) -> int | None:
    """Return an integer that another one equals in float32; None if there is none."""
    if values.dtype.kind not in "iu" or not values.size or np.abs(values).max() <= _EXACT:
        return None
    distinct = np.unique(values)
    places = distinct.astype(np.float32)
    same = np.flatnonzero(places[1:] == places[:-1])
    return int(distinct[same[0]]) if len(same) else None


def _concatenated(parts: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """Concatenate in one type; a single part of this type is returned as it is."""
    if len(parts) == 1 and parts[0].dtype == dtype:
        return parts[0]
    joined = aligned((sum(map(len, parts)), *parts[0].shape[1:]), dtype)
    return _frozen(np.concatenate(parts, out=joined, casting="unsafe"))


def _without_trailing_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _is_integral(values: np.ndarray) -> bool:
    """Return whether all values are integers that fit into int32."""
    largest = np.float64(_LARGEST_INT32)  # compared in float64: float32 would round it up
    fits = np.all((values >= -largest) & (values <= largest))
    return bool(fits and (values.dtype.kind != "f" or np.all(values == np.rint(values))))


def taken(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return the rows at `index`, (k, ...), aligned and read-only."""
    rows = aligned((len(index), *values.shape[1:]), values.dtype)
    for part in blocks(values, len(index)):
        # "clip" is the mode that writes to `out` without a buffer; no index is out of bounds.
        np.take(values, index[part], axis=0, out=rows[part], mode="clip")
    return _frozen(rows)


def shareable(values: np.ndarray) -> np.ndarray:
    """Return read-only values as they are, others as an aligned, read-only copy.

    A CPU device shares memory that begins at a multiple of 64 bytes.
    """
    if not any(part.flags.writeable for part in _views(values)):
        return values
    copy = aligned(values.shape, values.dtype)
    copy[...] = values
    return _frozen(copy)


def blocks(values: np.ndarray, count: int) -> Iterator[slice]:
    """Cut `count` rows into slices of at most 16 MiB."""
    rows = max(1, _BLOCK // max(1, values[:1].nbytes))
    return (slice(begin, begin + rows) for begin in range(0, count, rows))


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialized array that begins at a multiple of 64 bytes."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)


def _frozen(values: np.ndarray) -> np.ndarray:
    """Make the values, and the memory below them, read-only."""
    for part in _views(values):
        part.flags.writeable = False
    return values


def _views(values: np.ndarray) -> Iterator[np.ndarray]:
    """Iterate over an array and the arrays that it is a view of."""
    part: Any = values
    while isinstance(part, np.ndarray):
        yield part
        part = part.base


def split_called(name: object) -> int | None:
    """Return the position in `SPLITS` of a split's name, such as Train, val or valid, or None."""
    text = str(name).strip().lower()
    return SPLITS.index(text) if text in SPLITS else _SPELLINGS.get(text)


@dataclasses.dataclass(frozen=True, eq=False)
class Ranges:
    """Client k owns the rows `start[k] : start[k] + count[k]` of every field; both (m,) int32."""

    start: np.ndarray
    count: np.ndarray

    def rows(self, client: int) -> np.ndarray:
        """Return the indices of one client's rows, (n,)."""
        return self.start[client] + np.arange(self.count[client])

    def all_rows(self) -> np.ndarray:
        """Return the indices of all clients' rows, client after client, (Σn,) int32."""
        before = np.cumsum(self.count, dtype=np.int32) - self.count
        shift = np.repeat(self.start - before, self.count)
        return np.add(shift, np.arange(len(shift), dtype=np.int32), out=shift)


def consecutive(counts: np.ndarray) -> dict[str, Ranges]:
    """Return the splits of consecutive clients with `counts`, (m, 3), rows, split after split."""
    stops = np.cumsum(counts, dtype=np.int32).reshape(counts.shape)
    start = np.ascontiguousarray((stops - counts).T)
    return {name: Ranges(start[k], counts[:, k]) for k, name in enumerate(SPLITS)}


def as_counts(counts: Any, names: np.ndarray, rows: int) -> np.ndarray:
    """Return the numbers of rows of clients and splits, (m, 3) int32, read-only, if they fit."""
    array, m = np.asarray(counts), len(names)
    if array.shape not in ((m,), (m, len(SPLITS))) or array.dtype.kind not in "iu":
        raise ValueError(
            f"counts must be integers ({m}, 3), or ({m},) without splits, got {array.dtype} "
            f"{array.shape}"
        )
    if array.ndim == 1:
        array = np.stack([array, 0 * array, 0 * array], axis=1)
    if rows > _LARGEST_INT32:
        raise ValueError(f"a population holds at most {_LARGEST_INT32} rows, got {rows}")
    if np.any(array[:, 0] < 1):
        k = int(np.argmax(array[:, 0] < 1))
        raise ValueError(f"client {str(names[k])!r} has no training rows; each needs at least one")
    total = int(array.sum(dtype=np.int64))
    if total != rows or np.any(array < 0):
        raise ValueError(f"counts must sum to the {rows} rows, each 0 or more, got {total}")
    return shareable(array.T.astype(np.int32, copy=False)).T  # each split's in one piece
