"""A plain format for a user's own data: a .npz file of flat arrays.

The arrays of a file:

- any number of fields of shape (N, ...), by convention `x` and `y`;
- the clients of the rows, as one of
  `client`: (N,) ids, integers or strings, in any order, or
  `counts`: (m,) integers, where the rows of client 0 come first, then those of client 1, ...;
- optionally `names`: (m,) strings; with `client`, ids are then positions in `names`;
- optionally `split`: (N,) integers, 0 for training, 1 for validation, 2 for test rows;
- optionally `public`: strings, see `Population.public`;
- optionally `categories.FIELD`: strings, the names of the integers 0, 1, … of a field.

Readers of tables and images return the same arrays, and `assemble` makes the population.
"""

import dataclasses
import os
import zipfile
import zlib

import numpy as np

from fedjaxsim.data.arrays import common_length
from fedjaxsim.data.files import existing, in_file
from fedjaxsim.data.population import Population
from fedjaxsim.data.ranges import SPLITS, consecutive

_RESERVED = ("client", "counts", "names", "split", "public")
_CATEGORIES = "categories."


def load_npz(path: str | os.PathLike[str]) -> Population:
    """Read a population; the module's docstring describes the format.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or its arrays do not fit the format.
    """
    arrays = read_arrays(path)
    with in_file(path):
        return assemble(arrays)


def save_npz(path: str | os.PathLike[str], population: Population) -> None:
    """Write a population with all its attributes but `generate`, for `load_npz`.

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
    """Read all arrays of a .npz file."""
    path = existing(path, ".npz file")
    try:
        with zipfile.ZipFile(path):  # np.load would also take a single array or a pickle
            pass
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a readable .npz file: {error}") from error


def has_clients(arrays: dict[str, np.ndarray]) -> bool:
    """Return whether the arrays name the clients of the rows."""
    return "client" in arrays or "counts" in arrays


def fields_of(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the fields among the arrays of a file."""
    return {name: values for name, values in arrays.items() if not _is_reserved(name)}


def described(population: Population, arrays: dict[str, np.ndarray]) -> Population:
    """Add the public sentences and the categories among the arrays to a population."""
    texts = {n: v for n, v in arrays.items() if n == "public" or n.startswith(_CATEGORIES)}
    for name, values in texts.items():
        if values.dtype.kind != "U" or values.ndim != 1:
            raise ValueError(f"{name} must hold strings, got type {values.dtype}")
    lists = {name: tuple(values.tolist()) for name, values in texts.items()}
    return dataclasses.replace(
        population,
        public=(*population.public, *lists.pop("public", ())),
        categories={name.removeprefix(_CATEGORIES): names for name, names in lists.items()},
    )


def assemble(arrays: dict[str, np.ndarray]) -> Population:
    """Make the population of arrays that name the clients of the rows."""
    if ("client" in arrays) == ("counts" in arrays):
        raise ValueError("exactly one of the arrays 'client' and 'counts' must be given")
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
    """Return the client of every row, (N,) integers, and the clients' names, (m,)."""
    names = arrays.get("names")
    if names is not None and names.ndim != 1:
        raise ValueError(f"names must have shape (m,), got {names.shape}")
    if "counts" in arrays:
        counts = arrays["counts"]
        if counts.ndim != 1 or counts.dtype.kind not in "iu" or (counts <= 0).any():
            raise ValueError(f"counts must be positive integers (m,), got {counts!r}")
        if counts.sum() != n:
            raise ValueError(f"counts must sum to the {n} rows, got {counts.sum()}")
        clients = np.arange(len(counts))
        return np.repeat(clients, counts), clients if names is None else names
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
