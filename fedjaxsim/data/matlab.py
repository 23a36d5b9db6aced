"""MATLAB files with one cell per client, such as the School and Landmine data sets."""

import itertools
import os

import numpy as np

from fedjaxsim.data.arrays import to_float32
from fedjaxsim.data.files import existing, in_file, reading
from fedjaxsim.data.matlab_cells import read_cells
from fedjaxsim.data.population import Population

Cells = dict[str, list[np.ndarray]]
"""Matrices of cell arrays by name."""


def load_matlab(path: str | os.PathLike[str], *, fields: tuple[str, ...] = ()) -> Population:
    """Read two cell arrays of m matrices each: features (n, d) and labels (n, 1) or (1, n).

    Features become float32; clients are named by position, "0", "1", ... A file is of version 5 to
    7.2.

    Args:
      path: the file.
      fields: Cell arrays of features and labels (mat); by default X,Y or the only two that fit.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is damaged, lacks a variable, or its cells do not fit together; or no
        two are named and not exactly one pair fits.
    """
    if len(fields) not in (0, 2):
        raise ValueError(f"fields must be two names, got {', '.join(fields)}")
    path = existing(path, "MATLAB file")
    with in_file(path):
        with reading("MATLAB file (v5 to v7.2)"):
            cells = read_cells(os.fspath(path))
        x, y = fields or _found(cells)
        for name in (x, y):
            if name not in cells:
                raise ValueError(f"there is no cell array {name!r}, only {', '.join(cells)}")
        features, labels = cells[x], cells[y]
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


def _found(cells: Cells) -> tuple[str, str]:
    """Return the names of the cells with the features and the labels, by their shapes."""
    if {"X", "Y"} <= set(cells):
        return "X", "Y"
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
