"""MATLAB files with one cell per client, such as the School and Landmine data sets."""

import os
from typing import Annotated

import numpy as np

from fedjaxsim.data.arrays import joined, to_float32
from fedjaxsim.data.files import existing, in_file, reading
from fedjaxsim.data.population import Population
from fedjaxsim.data.source import Source
from fedjaxsim.data.tables.matlab_cells import read_cells

Fields = Annotated[tuple[str, ...], "Cell arrays of features and labels; by default X,Y."]


def load_matlab(
    path: str | os.PathLike[str], *, fields: tuple[str, ...] = ("X", "Y")
) -> Population:
    """Read two cell arrays of m matrices each: features (n, d) and labels (n, 1) or (1, n).

    Features become float32; clients are named by position, "0", "1", ... A file is of version 5 to
    7.2.

    Args:
      path: the file.
      fields: names of the cell arrays of features and labels.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is damaged, lacks a cell array, or its cells do not fit together.
    """
    return read_matlab(path, fields=fields).population(path)


def read_matlab(path: str | os.PathLike[str], *, fields: Fields = ("X", "Y")) -> Source:
    """Read clients from two cell arrays; see `load_matlab`."""
    if len(fields) != 2:
        raise ValueError(f"fields must be two names, got {', '.join(fields)}")
    path = existing(path, "MATLAB file")
    with in_file(path):
        with reading("MATLAB file (v5 to v7.2)"):
            cells = read_cells(os.fspath(path))
        for name in fields:
            if name not in cells:
                listed = ", ".join(cells) or "no other"
                raise ValueError(f"there is no cell array {name!r} (fields), only {listed}")
        x, y = fields
        features, labels = cells[x], cells[y]
        if len(features) != len(labels):
            raise ValueError(f"{x} has {len(features)} cells but {y} has {len(labels)}")
        x_of = [to_float32(cell) if cell.dtype.kind in "fiub" else cell for cell in features]
        y_of = [cell.T if cell.shape[:1] == (1,) else cell for cell in labels]
        clients = [{"x": x, "y": y} for x, y in zip(x_of, y_of, strict=True)]
        arrays, counts = joined(clients, [*map(str, range(len(clients)))])
        return Source(arrays, counts=np.array(counts))
