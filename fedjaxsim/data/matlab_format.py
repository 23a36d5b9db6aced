"""Cell arrays of matrices in MATLAB files of versions 5 to 7.2.

scipy's reader allocates what dimensions declare, and looks types up without a check of their range:
damaged files end the process. Source: "MAT-File Format" (The MathWorks, R2023b), section 1.
"""

import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fedjaxsim.data.files import check_inflated, check_size

_HEADER = 128
_INTEGERS = ("i1", "u1", "i2", "u2", "i4", "u4")
_TYPES = dict(enumerate(_INTEGERS, 1)) | {7: "f4", 9: "f8", 12: "i8", 13: "u8"}
"""Types of numbers as stored."""
_MATRIX, _COMPRESSED = 14, 15
_CELL = 1
_CLASSES = {6: "f8", 7: "f4"} | dict(enumerate((*_INTEGERS, "i8", "u8"), 8))
"""Types of numbers in MATLAB, which stores them in fewer bytes where they fit."""
_COMPLEX = 0x0800


def read_cells(path: Path) -> dict[str, list[np.ndarray] | None]:
    """Read the variables of a file, by name.

    Returns:
      The matrices of each cell array, in C order; a cell that is no matrix of real numbers is an
      array of objects, (). Other variables are None.

    Raises:
      ValueError: if the file is damaged or of another version.
    """
    check_size(path.stat().st_size, "the file")
    content = path.read_bytes()
    order = {b"IM": "<", b"MI": ">"}.get(content[126:128])
    if order is None:
        raise ValueError("it is not of version 5 to 7.2")
    found = {}
    for kind, body in _elements(memoryview(content)[_HEADER:], order):
        inner = [(kind, body)] if kind == _MATRIX else _elements(_inflated(body, order), order)
        for inner_kind, matrix in inner:
            if inner_kind == _MATRIX:
                name, of_class, shape, parts = _matrix(matrix, order)
                cells = of_class == _CELL
                found[name] = _cells(shape, parts, order) if cells else None
    return found


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Yield the type and the content of each element."""
    at = 0
    while at < len(data):
        kind, size = struct.unpack_from(f"{order}II", data, at)
        begin = at + 8
        if kind >> 16:  # a small element: type and size in one word, four bytes of data in the next
            kind, size, begin = kind & 0xFFFF, kind >> 16, at + 4
        end = begin + size
        if end > len(data):
            raise ValueError(f"an element declares {size} bytes, and {len(data) - begin} follow")
        yield kind, data[begin:end]
        at = end if kind == _COMPRESSED else end + -end % 8


def _inflated(body: memoryview, order: str) -> memoryview:
    """Return a compressed element, of the size that its first bytes declare."""
    unpack = zlib.decompressobj()
    start = unpack.decompress(body, 8)
    size = struct.unpack(f"{order}II", start)[1]
    check_inflated(size, len(body), "a compressed array")
    rest = unpack.decompress(unpack.unconsumed_tail, size)
    if len(rest) < size or not (unpack.eof or unpack.decompress(unpack.unconsumed_tail, 1) == b""):
        raise ValueError("a compressed array has another size than it declares")
    return memoryview(start + rest)


def _matrix(
    data: memoryview, order: str
) -> tuple[str, int, tuple[int, ...], Iterator[tuple[int, memoryview]]]:
    """Return name, class (0 for complex numbers), shape and the remaining elements of a matrix."""
    if not data:  # an empty matrix
        return "", 6, (0, 0), iter([(9, data)])
    parts = _elements(data, order)
    flags, lengths, name = (next(parts, (0, memoryview(b"")))[1] for _ in range(3))
    [bits] = struct.unpack(f"{order}I", flags[:4])
    shape = tuple(np.frombuffer(lengths, f"{order}i4").tolist())
    if min(shape, default=-1) < 0:
        raise ValueError(f"an array has the shape {shape}")
    of_class = 0 if bits & _COMPLEX else bits & 0xFF
    return bytes(name).decode("latin-1"), of_class, shape, parts


def _cells(
    shape: tuple[int, ...], parts: Iterator[tuple[int, memoryview]], order: str
) -> list[np.ndarray]:
    matrices = [_numbers(body, order) for kind, body in parts if kind == _MATRIX]
    if math.prod(shape) != len(matrices):
        raise ValueError(f"an array of shape {shape} has {len(matrices)} cells")
    places = np.arange(len(matrices)).reshape(shape, order="F")
    return [matrices[place] for place in places.ravel()]


def _numbers(body: memoryview, order: str) -> np.ndarray:
    """Return a matrix of real numbers, or an array of objects, () for another one."""
    _, of_class, shape, parts = _matrix(body, order)
    if of_class not in _CLASSES:
        return np.array(None)
    kind, data = next(parts, (0, memoryview(b"")))
    if kind not in _TYPES:
        raise ValueError(f"numbers are of the unknown type {kind}")
    stored = np.frombuffer(data, f"{order}{_TYPES[kind]}")
    if stored.size != math.prod(shape):
        raise ValueError(f"an array of shape {shape} has {stored.size} numbers")
    with np.errstate(all="ignore"):
        return stored.astype(_CLASSES[of_class]).reshape(shape, order="F")
