"""Rows of clients inside an array, found by hashes of consecutive numbers.

What is found is an honest mistake: an array that was made of rows. Numbers computed from rows, such
as twice a row, look like others.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

_PIECES, _SIZE = 256, 2**10
"""Evenly spread pieces of a larger array that count, and their numbers."""
_RUNS = 2**20
"""Numbers of a field up to which all of its runs are hashed; of a larger one, some of each row."""
_PLACES = 5
"""Evenly spread runs of each row of a larger field."""
_AT_ONCE = 2**17
"""Runs of a field that are hashed at once."""
_FEWEST = 4
"""Numbers below which an array is never a copy of rows."""
_SHORT = 8
"""Distinct short rows of a field, of fewer than 4 numbers, that tell a copy."""
_DETAIL = 2**12
"""A number is round if it is a multiple of its size over 2¹²."""
_FACTORS = np.random.default_rng(0).integers(2**63, size=16, dtype=np.uint64) * 2 + 1

FieldHashes = dict[tuple[str, int, np.dtype], np.ndarray]
"""A dict of fields' sorted hashes, numbers in a run and the type that they were hashed as."""


def contained_rows(
    array: np.ndarray, fields: Mapping[str, np.ndarray], hashes: FieldHashes | None = None
) -> str | None:
    """Return the name of a field, (N, ...), with rows, or long parts of rows, in an array; or None.

    Rows are found in any order of rows and axes and in other number types: by 4 consecutive real
    numbers, 8 if they repeat, or 16 whole ones. Rows of fewer numbers, such as labels, are found if
    they are real numbers of many digits, and 8 of them occur. Not found are shorter parts, other
    orders of columns, and rows of fewer than 16 whole numbers. Of a field of more than 2²⁰ numbers
    each row counts by five of its runs, and of an array of more than 2¹⁸ numbers 256 pieces of 2¹⁰.
    Hashes of the fields are kept in `hashes`, for the next array.
    """
    array = np.atleast_1d(array)
    if array.size < _FEWEST:
        return None
    if array.dtype.kind not in "iuf" and array.dtype.name != "bfloat16":
        return None
    orders = [np.moveaxis(array, axis, -1).ravel() for axis in range(array.ndim)]
    pieces = [
        piece[:_SIZE]
        for order in orders
        for piece in np.array_split(order, max(1, min(_PIECES, len(order) // _SIZE)))
    ]
    hashes = {} if hashes is None else hashes
    for name, values in fields.items():
        if array.dtype.kind in "iu" and values.dtype.kind == "f":
            continue
        numbers = values.ravel()
        some = numbers[:4096]
        are_integers, repeats = (
            np.all(some == np.floor(some)),
            len(np.unique(some)) <= len(some) // 2,
        )
        width = 16 if are_integers else 8 if repeats else 4
        held = np.concatenate([_hashes(_runs(piece, width), array.dtype) for piece in pieces])
        if len(held):  # most constants are short
            key = name, width, array.dtype
            if key not in hashes:
                if _count_between(array, values) < width:
                    continue
                hashes[key] = _sorted_hashes(_runs_of_rows(values, width), array.dtype)
            if np.any(_are_in(held, hashes[key])):
                return name
        size = numbers.size // max(1, len(values))
        if are_integers or size >= width:
            continue
        held = np.concatenate([_detailed(_runs(piece, size), array.dtype) for piece in pieces])
        held = np.unique(held)
        if len(held) >= _SHORT:
            key = name, size, array.dtype
            if key not in hashes:
                rows = values.reshape(len(values), size)
                with np.errstate(over="ignore", invalid="ignore"):
                    hashes[key] = np.sort(_detailed(rows, array.dtype))
            if np.sum(_are_in(held, hashes[key])) >= _SHORT:
                return name
    return None


def _count_between(array: np.ndarray, values: np.ndarray) -> int:
    """Count the numbers of an array between the least and the largest of a field, in its type.

    Where whole numbers overflow the type, all count.
    """
    low, high = values.min(), values.max()
    if array.dtype.kind in "iu":
        kind = np.iinfo(array.dtype)
        if low < kind.min or high > kind.max:
            return array.size
    with np.errstate(over="ignore"):
        low, high = low.astype(array.dtype), high.astype(array.dtype)
    return int(np.count_nonzero((array >= low) & (array <= high)))


def _sorted_hashes(blocks: Iterator[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """Return the hashes of blocks of runs, sorted; `np.unique` takes 18 times as long."""
    with np.errstate(over="ignore", invalid="ignore"):  # of narrower types
        return np.sort(np.concatenate([_hashes(runs, dtype) for runs in blocks]))


def _are_in(hashes: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """Return which hashes are among `ordered` ones."""
    if not len(ordered):
        return np.zeros(len(hashes), bool)
    places = np.minimum(np.searchsorted(ordered, hashes), len(ordered) - 1)
    return ordered[places] == hashes


def _detailed(rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Hash rows (k, size) that have no round number, as type `dtype`."""
    rows = rows.astype(dtype).astype(np.float64)
    fraction = np.frexp(np.where(np.isfinite(rows), rows, 0))[0] * _DETAIL
    return _mixed(rows[np.all(fraction != np.floor(fraction), axis=1)])


def _runs(numbers: np.ndarray, width: int) -> np.ndarray:
    """Return all runs of `width` numbers, (k, width)."""
    if len(numbers) < width:
        return np.zeros((0, width))
    return sliding_window_view(numbers, width)


def _runs_of_rows(values: np.ndarray, width: int) -> Iterator[np.ndarray]:
    """Yield the runs of a field, or of a large one some of each row, in blocks (k, width)."""
    rows = values.reshape(len(values), -1)
    size = rows.shape[1]
    if rows.size <= _RUNS or size < width:
        parts = [_runs(rows.ravel(), width)]
    else:
        places = np.unique(np.linspace(0, size - width, _PLACES).astype(int))
        parts = [rows[:, place : place + width] for place in places]
    for part in parts:
        for first in range(0, max(1, len(part)), _AT_ONCE):
            yield part[first : first + _AT_ONCE]


def _hashes(runs: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Hash runs, as type `dtype`, but for those that a common constant has."""
    if not len(runs):
        return np.zeros(0, np.uint64)
    numbers = np.ascontiguousarray(runs.T).astype(dtype).astype(np.float64)  # faster than rows
    ordered, steps = np.sort(numbers, axis=0), np.diff(numbers, axis=0)
    distinct = 1 + np.sum(ordered[1:] > ordered[:-1], axis=0)
    bends = np.ptp(steps, axis=0) > 1e-4 * np.abs(steps).max(axis=0)  # no line
    return _mixed(numbers.T[(distinct >= 4) & bends])


def _mixed(rows: np.ndarray) -> np.ndarray:
    """Hash rows of float64, (k, width), (k,) uint64."""
    bits = np.ascontiguousarray(rows).view(np.uint64)
    bits = bits ^ (bits >> np.uint64(32))  # a float32 has zeros in its lower half
    return (bits * _FACTORS[: rows.shape[1]]).sum(axis=1, dtype=np.uint64)
