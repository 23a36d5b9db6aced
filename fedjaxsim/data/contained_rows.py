"""Rows of clients inside an array, found by hashes of consecutive numbers.

What is found is an honest mistake: an array that was made of rows. Numbers computed from rows, such
as twice a row, look like others.
"""

from collections.abc import Mapping

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

_PIECES, _SIZE = 256, 2**10
"""Evenly spread pieces of a larger array that count, and their numbers."""
_RUNS = 2**20
"""Numbers of a field up to which all of its runs are hashed; of a larger one, some of each row."""
_PLACES = 5
"""Evenly spread runs of each row of a larger field."""
_SHORT = 8
"""Distinct short rows of a field, of fewer than 4 numbers, that tell a copy."""
_DETAIL = 2**12
"""A number that is no multiple of its own size over 2¹² is no round one."""
_FACTORS = np.random.default_rng(0).integers(2**63, size=16, dtype=np.uint64) * 2 + 1


def contained_rows(array: np.ndarray, fields: Mapping[str, np.ndarray]) -> str | None:
    """Return the name of a field, (N, ...), with rows, or long parts of rows, in an array; or None.

    Rows are found in any order of rows and axes and in other number types: by 4 consecutive real
    numbers, 8 if they repeat, or 16 whole ones. Rows of fewer numbers, such as labels, are found if
    they are real numbers of many digits, and 8 of them occur. Not found are shorter parts, other
    orders of columns, and rows of fewer than 16 whole numbers. Of a field of more than 2²⁰ numbers
    each row counts by five of its runs, and of an array of more than 2¹⁸ numbers 256 pieces of 2¹⁰.
    """
    array = np.atleast_1d(array)
    if array.dtype.kind not in "iuf" and array.dtype.name != "bfloat16":
        return None
    orders = [np.moveaxis(array, axis, -1).ravel() for axis in range(array.ndim)]
    pieces = [
        piece[:_SIZE]
        for order in orders
        for piece in np.array_split(order, max(1, min(_PIECES, len(order) // _SIZE)))
    ]
    for name, values in fields.items():
        if array.dtype.kind in "iu" and values.dtype.kind == "f":
            continue
        numbers = values.ravel()
        some = numbers[:4096]
        whole, repeats = np.all(some == np.floor(some)), len(np.unique(some)) <= len(some) // 2
        width = 16 if whole else 8 if repeats else 4
        held = [_hashes(_runs(piece, width), array.dtype) for piece in pieces]
        if any(map(len, held)):  # most constants are short
            with np.errstate(over="ignore", invalid="ignore"):  # of narrower types
                own = _hashes(_runs_of_rows(values, width), array.dtype)
            if np.isin(np.concatenate(held), own).any():
                return name
        size = numbers.size // max(1, len(values))
        if not whole and size < width and _shares_short_rows(pieces, values, size, array.dtype):
            return name
    return None


def _shares_short_rows(
    pieces: list[np.ndarray], values: np.ndarray, size: int, dtype: np.dtype
) -> bool:
    """Return whether pieces of an array hold many rows of `size` numbers, none of them round."""
    held = np.concatenate([_detailed(_runs(piece, size), dtype) for piece in pieces])
    if len(np.unique(held)) < _SHORT:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        own = _detailed(values.reshape(len(values), size), dtype)
    return len(np.intersect1d(held, own)) >= _SHORT


def _detailed(rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Hash rows (k, size) that have no round number, as of type `dtype`."""
    rows = rows.astype(dtype).astype(np.float64)
    fraction = np.frexp(np.where(np.isfinite(rows), rows, 0))[0] * _DETAIL
    return _mixed(rows[np.all(fraction != np.floor(fraction), axis=1)])


def _runs(numbers: np.ndarray, width: int) -> np.ndarray:
    """Return all runs of `width` numbers, (k, width)."""
    if len(numbers) < width:
        return np.zeros((0, width))
    return sliding_window_view(numbers, width)


def _runs_of_rows(values: np.ndarray, width: int) -> np.ndarray:
    """Return the runs of a field, or of a large one some of each row, (k, width)."""
    rows = values.reshape(len(values), -1)
    size = rows.shape[1]
    if rows.size <= _RUNS or size < width:
        return _runs(rows.ravel(), width)
    places = np.unique(np.linspace(0, size - width, _PLACES).astype(int))
    return np.concatenate([rows[:, place : place + width] for place in places])


def _hashes(runs: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Hash runs, as of type `dtype`, but for those that a common constant has."""
    runs = runs.astype(dtype).astype(np.float64)
    if not len(runs):
        return np.zeros(0, np.uint64)
    distinct = 1 + np.sum(np.diff(np.sort(runs, axis=1), axis=1) > 0, axis=1)
    steps = np.diff(runs, axis=1)
    bends = np.ptp(steps, axis=1) > 1e-4 * np.abs(steps).max(axis=1)  # no line
    return _mixed(runs[(distinct >= 4) & bends])


def _mixed(rows: np.ndarray) -> np.ndarray:
    """Hash rows of float64, (k, width), (k,) uint64."""
    bits = np.ascontiguousarray(rows).view(np.uint64)
    bits = bits ^ (bits >> np.uint64(32))  # a float32 has zeros in its lower half
    return (bits * _FACTORS[: rows.shape[1]]).sum(axis=1, dtype=np.uint64)
