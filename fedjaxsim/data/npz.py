"""A plain format for one's own data: a .npz file of flat arrays.

The arrays of a file:

- any number of fields of shape (N, ...), by convention `x` and `y`;
- who owns the rows, as one of
  `client`: (N,) ids, integers or strings, in any order, or
  `counts`: (m,) integers, where the rows of client 0 come first, then those of client 1, ...;
- optionally `names`: (m,) strings; with `client`, ids are then positions in `names`;
- optionally `split`: (N,) integers, 0 for rows to train on, 1 to validate, 2 to test;
- optionally `public`: strings, what `Population.public` says;
- optionally `categories.FIELD`: strings, what the integers 0, 1, … of a field stand for.
"""

import dataclasses
import os
import zipfile
import zlib

import numpy as np

from fedjaxsim.data.arrays import common_length
from fedjaxsim.data.files import in_file
from fedjaxsim.data.population import SPLITS, Population, consecutive

_RESERVED = ("client", "counts", "names", "split", "public")
_CATEGORIES = "categories."


def load_npz(path: str | os.PathLike[str]) -> Population:
    """Read a population; see this module for the format.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or its arrays do not fit the format.
    """
    arrays = read_arrays(path)
    with in_file(path):
        return assemble(arrays)


def save_npz(path: str | os.PathLike[str], population: Population) -> None:
    """Write a population with all that it says, so that `load_npz` returns the same.

    Raises:
        ValueError: a field has a name that the format reserves.
    """
    taken = sorted(name for name in population.fields if _is_reserved(name))
    if taken:
        raise ValueError(
            f"fields may not be called {_RESERVED} or {_CATEGORIES}… in a .npz file, got {taken}"
        )
    client = np.empty(population.num_rows, dtype=np.int32)
    split = np.empty(population.num_rows, dtype=np.int8)
    for s, name in enumerate(SPLITS):
        ranges = population.splits[name]
        rows = ranges.all_rows()
        client[rows], split[rows] = ranges.owners(), s
    arrays = {"client": client, "split": split, "names": population.names, **population.fields}
    if population.public:
        arrays["public"] = np.array(population.public)
    for field, names in population.categories.items():
        arrays[_CATEGORIES + field] = np.array(names)
    # np.savez would append .npz to other paths, and fail for fields named like its arguments.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, values in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.save(file, values, allow_pickle=False)


def read_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """All arrays of a .npz file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or an array holds Python objects.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no .npz file at {path}")
    try:
        with zipfile.ZipFile(path):  # np.load would take a single array or a pickle for a file
            pass
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a readable .npz file: {error}") from error


def has_clients(arrays: dict[str, np.ndarray]) -> bool:
    """Whether the arrays of a file say who owns its rows."""
    return "client" in arrays or "counts" in arrays


def fields_of(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The fields among the arrays of a file."""
    return {name: values for name, values in arrays.items() if not _is_reserved(name)}


def described(population: Population, arrays: dict[str, np.ndarray]) -> Population:
    """The population with what the arrays of a file say of it besides.

    Raises:
        ValueError: they hold no strings, or do not suit the population.
    """
    texts = {n: v for n, v in arrays.items() if n == "public" or n.startswith(_CATEGORIES)}
    for name, values in texts.items():
        if values.dtype.kind != "U" or values.ndim != 1:
            raise ValueError(f"{name} must hold strings, got type {values.dtype}")
    return dataclasses.replace(
        population,
        public=(*population.public, *texts.pop("public", np.array([], dtype=str)).tolist()),
        categories={
            name.removeprefix(_CATEGORIES): tuple(values.tolist()) for name, values in texts.items()
        },
    )


def assemble(arrays: dict[str, np.ndarray]) -> Population:
    """The population that arrays describe in which clients own the rows; see `load_npz`.

    Raises:
        ValueError: they do not fit the format.
    """
    if ("client" in arrays) == ("counts" in arrays):
        raise ValueError("exactly one of the arrays 'client' and 'counts' must say who owns rows")
    fields = fields_of(arrays)
    n = common_length(
        {name: values.shape[0] if values.ndim else 0 for name, values in fields.items()}, "file"
    )
    client, names = _owners(arrays, n)
    split = arrays.get("split", np.zeros(n, dtype=np.int8))
    if split.shape != (n,) or not np.isin(split, range(len(SPLITS))).all():
        raise ValueError(f"split must hold 0, 1 or 2 for each of the {n} rows, got {split!r}")
    order = np.lexsort((split, client))  # by client, then by split, otherwise in the file's order
    sizes = np.bincount(client, minlength=len(names))
    population = Population.from_flat(
        {name: values[order] for name, values in fields.items()}, sizes, names
    )
    counts = [np.bincount(client[split == s], minlength=len(names)) for s in range(len(SPLITS))]
    return described(dataclasses.replace(population, splits=consecutive(*counts)), arrays)


def _is_reserved(name: str) -> bool:
    return name in _RESERVED or name.startswith(_CATEGORIES)


def _owners(arrays: dict[str, np.ndarray], n: int) -> tuple[np.ndarray, np.ndarray]:
    """The client of every row, (N,) integers, and the clients' names, (m,)."""
    names = arrays.get("names")
    if names is not None and names.ndim != 1:
        raise ValueError(f"names must have shape (m,), got {names.shape}")
    if "counts" in arrays:
        counts = arrays["counts"]
        if counts.ndim != 1 or counts.dtype.kind not in "iu" or (counts <= 0).any():
            raise ValueError(f"counts must be positive integers (m,), got {counts!r}")
        if counts.sum() != n:
            raise ValueError(f"counts must sum to the {n} rows, got {counts.sum()}")
        if names is None:
            names = np.arange(len(counts))
        return np.repeat(np.arange(len(counts)), counts), names
    ids = arrays["client"]
    if ids.shape != (n,) or ids.dtype.kind not in "iuU":
        raise ValueError(
            f"client must be an integer or string for each of the {n} rows, got {ids!r}"
        )
    if names is None:
        values, client = np.unique(ids, return_inverse=True)
        return client, values
    if ids.dtype.kind == "U" or ids.min() < 0 or ids.max() >= len(names):
        raise ValueError(f"client must lie in [0, {len(names)}), the positions in names")
    return ids.astype(np.int64), names
