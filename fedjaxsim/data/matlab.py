"""MATLAB files with one cell per client, as the School and Landmine data sets come in."""

import os

import numpy as np

from fedjaxsim.data.files import in_file
from fedjaxsim.data.population import Population, to_float32


def load_matlab(path: str | os.PathLike[str], x: str = "X", y: str = "Y") -> Population:
    """Read two cell arrays of m matrices each: features (n, d) and labels (n, 1) or (1, n).

    Features become float32; clients are named by position, "0", "1", ...

    Args:
        path: a .mat file of version 4 to 7.2.
        x: name of the cell array with the features.
        y: name of the cell array with the labels.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, lacks a variable, or its cells do not fit together.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no MATLAB file at {path}")
    from scipy.io import loadmat

    try:
        variables = loadmat(path, variable_names=[x, y])
    except Exception as error:  # scipy raises errors of many types on damaged files
        raise ValueError(f"{path} is not a readable MATLAB file (v4 to v7.2): {error}") from error
    features, labels = (_cells(variables, name, path) for name in (x, y))
    if len(features) != len(labels):
        raise ValueError(f"{path}: {x} has {len(features)} cells but {y} has {len(labels)}")
    clients = [
        {"x": _narrow(a), "y": b.reshape(-1) if b.size == max(b.shape, default=0) else b}
        for a, b in zip(features, labels, strict=True)
    ]
    with in_file(path):
        return Population.from_clients(clients)


def _cells(variables: dict, name: str, path: str) -> list[np.ndarray]:
    if name not in variables:
        raise ValueError(f"{path} has no variable {name!r}")
    cells = variables[name]
    if not isinstance(cells, np.ndarray) or cells.dtype != object:
        raise ValueError(f"{path}: {name} must be a cell array with one matrix per client")
    return list(cells.reshape(-1))


def _narrow(matrix: np.ndarray) -> np.ndarray:
    return to_float32(matrix) if matrix.dtype.kind in "fiub" else matrix
