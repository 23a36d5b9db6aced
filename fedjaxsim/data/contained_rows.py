"""Rows of clients inside an array, found by runs of consecutive numbers."""

from collections.abc import Mapping

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

_PIECES, _SIZE = 256, 2**10
"""Evenly spread pieces of a larger array that count, and their numbers."""
_RUNS = 2**20
"""Runs of a field that are searched for, if it has more numbers."""
_FACTORS = np.random.default_rng(0).integers(2**63, size=16, dtype=np.uint64) * 2 + 1


def contained_rows(array: np.ndarray, fields: Mapping[str, np.ndarray]) -> str | None:
    """Return the name of a field, (N, ...), with rows, or long parts of rows, in an array; or None.

    Rows are found in any order of rows and axes and in other number types: by 4 consecutive real
    numbers, 8 if they repeat, or 16 whole ones.
    """
    array = np.asarray(array)
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
        held = [_runs(piece, width, array.dtype) for piece in pieces]
        if not any(map(len, held)):  # most constants are short
            continue
        with np.errstate(over="ignore", invalid="ignore"):  # of narrower types
            own = _runs(numbers, width, array.dtype, len(numbers) // _RUNS | 1)
        if np.isin(np.concatenate(held), own).any():
            return name
    return None


def _runs(numbers: np.ndarray, width: int, dtype: np.dtype, step: int = 1) -> np.ndarray:
    """Hash runs of `width` numbers, (k,), but for those that a common constant has."""
    if len(numbers) < width:
        return np.zeros(0, np.uint64)
    runs = sliding_window_view(numbers, width)[::step].astype(dtype).astype(np.float64)
    distinct = 1 + np.sum(np.diff(np.sort(runs, axis=1), axis=1) > 0, axis=1)
    steps = np.diff(runs, axis=1)
    bends = np.ptp(steps, axis=1) > 1e-4 * np.abs(steps).max(axis=1)  # no line
    bits = runs[(distinct >= 4) & bends].view(np.uint64)
    bits = bits ^ (bits >> np.uint64(32))  # a float32 has zeros in its lower half
    return (bits * _FACTORS[:width]).sum(axis=1, dtype=np.uint64)
