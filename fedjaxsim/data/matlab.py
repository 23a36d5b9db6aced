"""MATLAB files with one cell per client, such as the School and Landmine data sets."""

import itertools
import math
import os
import struct
import zlib
from pathlib import Path

import numpy as np

from fedjaxsim.data.arrays import to_float32
from fedjaxsim.data.files import check_inflated, check_size, existing, in_file, reading
from fedjaxsim.data.population import Population

_HEADER = 128
_INT32, _MATRIX, _COMPRESSED = 5, 14, 15
"""Types of elements of a MATLAB file of version 5."""
_NESTED, _SPARSE = (1, 2, 3), 5
"""Classes of matrices: cells, structures and objects hold elements of at least eight bytes."""
_DEPTH = 4


def load_matlab(
    path: str | os.PathLike[str], x: str | None = None, y: str | None = None
) -> Population:
    """Read two cell arrays of m matrices each: features (n, d) and labels (n, 1) or (1, n).

    Features become float32; clients are named by position, "0", "1", ...

    Args:
      path: a .mat file of version 4 to 7.2.
      x: name of the cell array with the features. By default X and Y if the file has both, else
        the only pair of cell arrays in which one holds a label for every row of the other.
      y: name of the cell array with the labels; given with x.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is damaged, lacks a variable, or its cells do not fit together; or no
        two are named and not exactly one pair fits.
    """
    if (x is None) != (y is None):
        raise ValueError(f"x and y must be given together, got {x} and {y}")
    path = existing(path, "MATLAB file")
    from scipy.io import loadmat

    with in_file(path):
        # scipy raises errors of many types on damaged files.
        with reading("MATLAB file (v4 to v7.2)", Exception):
            _check_sizes(path)
            variables = loadmat(os.fspath(path), variable_names=None if x is None else [x, y])
        if x is None or y is None:
            x, y = _found(variables)
        features, labels = (_cells(variables, name) for name in (x, y))
        if len(features) != len(labels):
            raise ValueError(f"{x} has {len(features)} cells but {y} has {len(labels)}")
        clients = [
            {
                "x": to_float32(a) if a.dtype.kind in "fiub" else a,
                "y": b.reshape(-1) if _is_vector(b) else b,
            }
            for a, b in zip(features, labels, strict=True)
        ]
        return Population.from_clients(clients)


def _check_sizes(path: Path) -> None:
    """Check that a file of version 5 holds what it declares: scipy would allocate it."""
    check_size(path.stat().st_size, "the file")
    content = path.read_bytes()
    order = {b"IM": "<", b"MI": ">"}.get(content[126:128])
    if order is not None:
        _check_elements(memoryview(content)[_HEADER:], order, 0)


def _check_elements(data: memoryview, order: str, depth: int) -> None:
    if depth > _DEPTH:
        raise ValueError(f"cells lie in each other more than {_DEPTH} deep")
    at, of_matrix = 0, 0
    while at + 8 <= len(data):
        kind, size = struct.unpack_from(f"{order}II", data, at)
        begin, end = at + 8, at + 8 + size
        if kind >> 16:  # a small element: both numbers in one word, and the data in the other
            kind, size, begin, end = kind & 0xFFFF, kind >> 16, at + 4, at + 8
        if end > len(data) or size > end - begin:
            raise ValueError("it is truncated")
        body = data[begin:end]
        if kind == _COMPRESSED:
            _check_elements(memoryview(_inflated(body, order)), order, depth)
        elif kind == _MATRIX:
            _check_elements(body, order, depth + 1)
        elif depth and of_matrix == 1 and kind == _INT32:
            lengths = struct.unpack(f"{order}{size // 4}i", body[: size // 4 * 4])
            of_class = data[8 if order == "<" else 11]
            least = 8 if of_class in _NESTED else int(of_class != _SPARSE)
            if min(lengths, default=0) < 0 or least * math.prod(lengths) > len(data):
                raise ValueError(f"an array of shape {lengths} has {len(data)} bytes")
        of_matrix += 1
        at = end if kind == _COMPRESSED else end + -end % 8


def _inflated(body: memoryview, order: str) -> bytes:
    """Return a compressed element, of the size that its first bytes declare."""
    unpack = zlib.decompressobj()
    start = unpack.decompress(body, 8)
    size = struct.unpack(f"{order}II", start)[1]
    check_inflated(size, len(body), "a compressed array")
    return start + unpack.decompress(unpack.unconsumed_tail, size)


def _found(variables: dict) -> tuple[str, str]:
    """Return the names of the cells with the features and the labels, by their shapes."""
    if {"X", "Y"} <= set(variables):
        return "X", "Y"
    cells = {name: _cells(variables, name) for name, v in variables.items() if _is_cells(v)}
    pairs = [(x, y) for x, y in itertools.permutations(cells, 2) if _fit(cells[x], cells[y])]
    if len(pairs) != 1:
        raise ValueError(
            f"of the cell arrays {', '.join(cells) or '(none)'}, {len(pairs)} pairs could be "
            "features and labels: name the two (fields)"
        )
    return pairs[0]


def _fit(features: list[np.ndarray], labels: list[np.ndarray]) -> bool:
    """Return whether clients have a label for each row, and some client several features."""
    return (
        len(features) == len(labels)
        and all(a.ndim == 2 and a.dtype.kind in "fiub" for a in [*features, *labels])
        and all(len(a) == b.size and _is_vector(b) for a, b in zip(features, labels, strict=True))
        and not all(_is_vector(a) for a in features)
    )


def _is_vector(array: np.ndarray) -> bool:
    return array.size == max(array.shape, default=0)


def _is_cells(variable: object) -> bool:
    return isinstance(variable, np.ndarray) and variable.dtype == object


def _cells(variables: dict, name: str) -> list[np.ndarray]:
    if name not in variables:
        raise ValueError(f"there is no variable {name!r}")
    if not _is_cells(variables[name]):
        raise ValueError(f"{name} must be a cell array with one matrix per client")
    return list(variables[name].reshape(-1))


def load_cells(path: str | os.PathLike[str], *, fields: tuple[str, ...] = ()) -> Population:
    """Read a .mat file with the cell arrays of features and labels named in one list.

    Args:
      path: the file.
      fields: Cell arrays of features and labels (mat); by default X,Y or the only two that fit.
    """
    if len(fields) not in (0, 2):
        raise ValueError(f"fields must be two names, got {', '.join(fields)}")
    return load_matlab(path, *fields)
