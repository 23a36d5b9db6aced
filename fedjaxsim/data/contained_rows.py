"""Rows of clients inside an array, found by windows of consecutive numbers."""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

_MOST = 2**18
"""Numbers of an array that are compared, and a quarter of the rows of a field."""
_PIECES = 256
"""Pieces of a larger array or field."""
_PLACES = 8
"""Windows of one row that are searched for."""
_FACTORS = np.random.default_rng(0).integers(2**63, size=16, dtype=np.uint64) * 2 + 1


def contained_rows(array: np.ndarray, fields: Mapping[str, np.ndarray]) -> str | None:
    """Return the name of a field, (N, ...), with rows, or long parts of rows, in an array; or None.

    Rows are found in any order of rows and axes and in other number types, if 4 to 16 consecutive
    numbers are unchanged and varied: rows of zeros and ones are like many constants. Of a larger
    array 2^18 numbers count, and of a larger field 2^20 rows, in evenly spread pieces.
    """
    array = np.asarray(array)
    if array.dtype.kind not in "iuf" and array.dtype.name != "bfloat16":
        return None
    orders = [np.moveaxis(array, axis, -1).ravel() for axis in range(array.ndim)]
    pieces = [piece for order in orders for piece in _pieces(order, _MOST)]
    for name, values in fields.items():
        if array.dtype.kind in "iu" and values.dtype.kind == "f":
            continue
        width = _width(values)
        windows = [_varied(sliding_window_view(p, width)) for p in pieces if p.size >= width]
        searched = np.unique(np.concatenate([np.zeros(0, np.uint64), *map(_hashes, windows)]))
        if not searched.size:
            continue
        with np.errstate(over="ignore", invalid="ignore"):  # of narrower types
            for rows in _windows(values, width):
                if _any_in(_hashes(_varied(rows.astype(array.dtype))), searched):
                    return name
    return None


def _pieces(values: np.ndarray, most: int) -> list[np.ndarray]:
    """Return all values, or evenly spread pieces that hold `most` together."""
    if len(values) <= most:
        return [values]
    size = most // _PIECES
    starts = np.linspace(0, len(values) - size, _PIECES).astype(int)
    return [values[start : start + size] for start in starts]


def _width(values: np.ndarray) -> int:
    """Return how many consecutive numbers identify a row: few where numbers are real."""
    some = np.asarray(values).reshape(-1)[:4096]
    if np.all(some == np.floor(some)):
        return 16
    return 4 if len(np.unique(some)) > some.size // 2 else 8


def _windows(values: np.ndarray, width: int) -> Iterator[np.ndarray]:
    """Yield windows of rows, (k, width); short rows are read on into the next."""
    rows = values.reshape(len(values), -1)
    size = rows.shape[1]
    if size < width:
        pieces = _pieces(rows, 4 * _MOST)
        flat = (piece.reshape(-1) for piece in pieces if piece.size >= width)
        yield from (sliding_window_view(numbers, width)[:: max(1, size)] for numbers in flat)
        return
    places = np.unique(np.linspace(0, size - width, _PLACES).astype(int))
    for piece in _pieces(rows, 4 * _MOST):
        for place in places:
            yield piece[:, place : place + width]


def _varied(windows: np.ndarray) -> np.ndarray:
    """Return the windows (k, width) that no common constant has: neither few numbers nor a line."""
    changes = np.count_nonzero(windows[:, 1:] != windows[:, :-1], axis=1)
    values = windows[changes >= 3].astype(np.float64)
    distinct = 1 + np.sum(np.diff(np.sort(values), axis=1) > 0, axis=1)
    steps = np.diff(values, axis=1)
    bends = np.abs(np.diff(steps, axis=1)).max(axis=1) > 1e-4 * np.abs(steps).max(axis=1)
    return values[(distinct >= 4) & bends]


def _hashes(windows: np.ndarray) -> np.ndarray:
    """Compute a number of 64 bits for each window, (k,)."""
    bits = np.ascontiguousarray(windows, np.float64).view(np.uint64)
    bits = bits ^ (bits >> np.uint64(32))  # a float32 has zeros in its lower half
    return (bits * _FACTORS[: bits.shape[1]]).sum(axis=1, dtype=np.uint64)


def _any_in(hashes: np.ndarray, known: np.ndarray) -> bool:
    """Return whether a sorted array holds any of some numbers."""
    places = np.searchsorted(known, hashes)
    return bool(np.any(known[np.minimum(places, len(known) - 1)] == hashes))
