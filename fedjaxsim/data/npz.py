"""A plain format for users' data: flat arrays in a .npz file, or in a folder of .npy files.

The arrays:

- any number of fields of shape (N, ...), by convention `x` and `y`;
- the clients of the rows, as one of
  `client`: (N,) ids, integers or strings, in any order, or
  `counts`: (m,) integers, where the rows of client 0 come first, then those of client 1, ..., or
  (m, 3), each client's training, validation and test rows, as `save_npz` writes them: then fields
  keep their types;
- optionally `names`: (m,) strings; with `client`, ids are then positions in `names`;
- with `client`, optionally `split`: (N,) integers, 0 for training, 1 for validation, 2 for test
  rows;
- optionally `public` and `unprotected`: strings, see `Population`;
- optionally `categories.FIELD`: strings, the names of the integers 0, 1, … of a field;
- optionally `columns.FIELD`: (d,) strings, the names of a field's columns, and `units.FIELD`,
  (5, d) float64, their `centre`, `half_range` and `bound`, and, of all of them, `norm` and
  `exclusive`; see `Columns`;
- optionally `held_out.NAME`, the same arrays of `Population.held_out`.

A folder is mapped into memory instead of read. Its SHA256SUMS lists the arrays in order;
`sha256sum -c SHA256SUMS`, inside the folder, compares them with their digests. Readers of tables
and images return the same arrays, and `assemble` makes the population.
"""

import dataclasses
import hashlib
import os
import shutil
import warnings
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from fedjaxsim.data.arrays import SPLITS, common_length
from fedjaxsim.data.columns import Columns
from fedjaxsim.data.files import existing, in_file, reading
from fedjaxsim.data.population import Population

_RESERVED = ("client", "counts", "names", "split", "public", "unprotected")
_CATEGORIES, _COLUMNS, _UNITS, _HELD_OUT = "categories.", "columns.", "units.", "held_out."
_PREFIXES = (_CATEGORIES, _COLUMNS, _UNITS, _HELD_OUT)
_SUMS = "SHA256SUMS"


def load_npz(path: str | os.PathLike[str]) -> Population:
    """Read a population; the module's docstring describes the format.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is damaged or its arrays do not fit the format.
    """
    return assemble(read_arrays(path), path)


def save_npz(path: str | os.PathLike[str], population: Population) -> None:
    """Write a population with all its attributes but `generate`.

    Raises:
      ValueError: a field has a name that the format reserves.
    """
    arrays = _arrays_of(population)
    # np.savez would append .npz to other paths, and fail for fields named like its arguments.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, values in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.save(file, values, allow_pickle=False)


def load_folder(path: str | os.PathLike[str]) -> Population:
    """Return a population with its fields on disk, mapped into memory read-only.

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: it holds no population, or an array is missing, damaged or of another size.
    """
    path = existing(path, "folder of a population", folder=True)
    with in_file(path):
        if not (path / _SUMS).is_file():
            raise ValueError(f"no population: it holds no {_SUMS}")
        lines = (path / _SUMS).read_text(encoding="utf-8").splitlines()
        names = [line.partition("  ")[2] for line in lines]
        return assemble({unquote(name.removesuffix(".npy")): _map(path, name) for name in names})


def save_folder(path: str | os.PathLike[str], population: Population) -> None:
    """Write a population with all its attributes but `generate`.

    The folder appears when it is complete, and not at all if writing fails or is interrupted.

    Raises:
      FileExistsError: there is something at the path.
      OSError: it cannot be written, such as on a full disk.
      ValueError: the population generates its minibatches, or a field has a reserved name.
    """
    path = Path(path)
    if population.generate is not None:
        raise ValueError("a population that generates its minibatches has no rows to write")
    if path.exists():
        raise FileExistsError(f"{path} exists already")
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        sums = [
            _write(partial / f"{quote(name, safe='')}.npy", np.ascontiguousarray(values))
            for name, values in _arrays_of(population).items()
        ]
        (partial / _SUMS).write_text("".join(sums), encoding="utf-8")
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write(file: Path, values: np.ndarray) -> str:
    """Write a .npy file and return its line of SHA256SUMS."""
    with open(file, "xb+") as stream:
        np.save(stream, values, allow_pickle=False)
        stream.flush()
        os.fsync(stream.fileno())
        stream.seek(0)
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return f"{digest}  {file.name}\n"


def _map(path: Path, name: str) -> np.ndarray:
    """Map an array of the folder into memory, read-only."""
    file = path / name
    if Path(name).name != name or file.suffix != ".npy" or not file.is_file():
        raise ValueError(f"the array {name!r} is missing")
    with reading(f"array {name}"):
        values = np.lib.format.open_memmap(file, mode="r")
    if (size := file.stat().st_size) != (wanted := values.offset + values.nbytes):
        raise ValueError(f"the array {name} has {size} bytes instead of {wanted}")
    return values.view(np.ndarray)


def _arrays_of(population: Population) -> dict[str, np.ndarray]:
    """Return the arrays of a file."""
    taken = sorted(name for name in population.fields if _is_reserved(name))
    if taken:
        raise ValueError(
            f"fields may not be called {_RESERVED} or {'…, '.join(_PREFIXES)}… in a file, got "
            f"{taken}"
        )
    arrays = {"counts": population.counts, **population.fields}
    if not np.array_equal(population.names, np.arange(population.num_clients)):
        arrays["names"] = population.names
    for name in ("public", "unprotected"):
        if sentences := getattr(population, name):
            arrays[name] = np.array(sentences)
    for field, names in population.categories.items():
        arrays[_CATEGORIES + field] = np.array(names)
    for field, columns in population.columns.items():
        arrays |= arrays_of_columns(field, columns)
    if population.held_out is not None:
        held_out = _arrays_of(population.held_out)
        arrays |= {_HELD_OUT + name: values for name, values in held_out.items()}
    return arrays


def arrays_of_columns(field: str, columns: Columns) -> dict[str, np.ndarray]:
    """Return the arrays `columns.FIELD` and `units.FIELD`."""
    of_all = np.full((len(columns.names), 2), [columns.norm, columns.exclusive]).T
    units = np.array([columns.centre, columns.half_range, columns.bound, *of_all])
    return {_COLUMNS + field: np.array(columns.names), _UNITS + field: units}


def read_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read all arrays of a .npz file."""
    path = existing(path, ".npz file")
    ignored = warnings.catch_warnings(action="ignore", category=UserWarning)  # of Python 2's files
    with in_file(path), reading(".npz file"), ignored, open(path, "rb") as stream:
        found = np.load(stream, allow_pickle=False)
        if not isinstance(found, np.lib.npyio.NpzFile):
            raise ValueError("it holds one array: save it with np.savez")
        with found as archive:
            arrays = dict(archive)
        if odd := [name for name, each in arrays.items() if not isinstance(each, np.ndarray)]:
            raise ValueError(f"its member {odd[0]!r} is no array")
        return arrays


def has_clients(arrays: dict[str, np.ndarray]) -> bool:
    """Return whether the arrays name the clients of the rows."""
    return "client" in arrays or "counts" in arrays


def fields_of(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the fields among the arrays of a file."""
    return {name: values for name, values in arrays.items() if not _is_reserved(name)}


def _is_reserved(name: str) -> bool:
    return name in _RESERVED or name.startswith(_PREFIXES)


def owners(clients: np.ndarray) -> dict[str, np.ndarray]:
    """Return the arrays client, (N,), and names, (m,), of the rows' client names, (N,) strings.

    Clients are sorted by name, as numbers where all of them are whole numbers.
    """
    names, client = distinct(clients)
    if all(name.removeprefix("-").isdecimal() for name in names):
        order = np.array(sorted(range(len(names)), key=lambda k: (int(names[k]), k)))
        names, client = names[order], np.argsort(order)[client]
    return {"client": client, "names": names}


def distinct(texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct texts, sorted, and the place there of each text, (N,)."""
    values = texts.tolist()
    found = sorted(set(values))
    place = {text: number for number, text in enumerate(found)}
    return np.array(found, str), np.fromiter(map(place.__getitem__, values), np.intp, len(values))


def assemble(
    arrays: dict[str, np.ndarray], path: str | os.PathLike[str] | None = None
) -> Population:
    """Make the population of arrays that name the clients of the rows; errors name the file."""
    with in_file(path):
        if ("client" in arrays) == ("counts" in arrays):
            raise ValueError("exactly one of the arrays 'client' and 'counts' must be given")
        fields = fields_of(arrays)
        n = common_length(fields, "file")
        names = arrays.get("names")
        if names is not None and names.ndim != 1:
            raise ValueError(f"names must have shape (m,), got {names.shape}")
        if "counts" in arrays:
            counts = np.atleast_1d(arrays["counts"])
            if "split" in arrays:
                raise ValueError("split needs client: counts (m, 3) divide the rows themselves")
            if counts.ndim == 1:
                population = described(Population.from_flat(fields, counts, names), arrays)
            else:
                names = np.arange(len(counts), dtype=np.int32) if names is None else names
                population = Population(fields, counts, names, **_attributes(arrays))
        else:
            client, names = _owners(arrays["client"], names, n)
            split = arrays.get("split", np.zeros(n, dtype=np.int8))
            if split.shape != (n,) or not np.isin(split, range(len(SPLITS))).all():
                raise ValueError(
                    f"split must hold 0, 1 or 2 for each of the {n} rows, got {_shown(split)}"
                )
            population = described(_with_held_out(fields, client, names, split), arrays)
        size = len(_HELD_OUT)
        held_out = {name[size:]: v for name, v in arrays.items() if name.startswith(_HELD_OUT)}
        if held_out:
            population = dataclasses.replace(population, held_out=assemble(held_out))
        return population


def _owners(ids: np.ndarray, names: np.ndarray | None, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the client of every row, (N,) integers, and the clients' names, (m,)."""
    if ids.shape != (n,) or ids.dtype.kind not in "iuU":
        raise ValueError(
            f"client must be an integer or string for each of the {n} rows, got {_shown(ids)}"
        )
    if names is None:
        values, client = np.unique(ids, return_inverse=True)
        return client, values
    if ids.dtype.kind == "U" or ids.min() < 0 or ids.max() >= len(names):
        raise ValueError(f"client must lie in [0, {len(names)}), the positions in names")
    return ids.astype(np.int64), names


def _with_held_out(
    fields: dict[str, np.ndarray], client: np.ndarray, names: np.ndarray, split: np.ndarray
) -> Population:
    """Make a population of the clients with training rows; hold the others with rows out."""
    m = len(names)
    rows, trained = np.bincount(client, minlength=m), np.bincount(client[split == 0], minlength=m)
    if not trained.any():
        raise ValueError("no client has training rows")

    def some(chosen: np.ndarray, split: np.ndarray) -> Population:
        kept, place = chosen[client], np.cumsum(chosen) - 1
        if chosen.all():
            return Population.from_rows(fields, client, names, split)
        of_kept = {name: values[kept] for name, values in fields.items()}
        return Population.from_rows(of_kept, place[client[kept]], names[chosen], split[kept])

    empty, new = rows == 0, (rows > 0) & (trained == 0)
    for left, what in ((empty, "no rows: left out"), (new, "no training rows: held out, as new")):
        if left.any():
            name = str(names[np.argmax(left)])
            warnings.warn(
                f"{left.sum()} of {m} clients, such as {name!r}, have {what}", stacklevel=2
            )
    population = some(trained > 0, split)
    if new.any():
        held_out = some(new, np.zeros_like(split))
        population = dataclasses.replace(population, held_out=held_out)
    return population


def described(population: Population, arrays: dict[str, np.ndarray]) -> Population:
    """Add the public sentences, categories and columns among the arrays to a population."""
    known = _attributes(arrays)
    return dataclasses.replace(
        population,
        **(known | {"public": (*population.public, *known["public"])}),
        held_out=population.held_out and described(population.held_out, arrays),
    )


def _attributes(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the attributes of a population that are no rows."""
    found: dict[str, Any] = {"public": (), "unprotected": (), "categories": {}, "columns": {}}
    for name, values in arrays.items():
        kind, _, field = name.partition(".")
        if kind not in found or bool(field) != isinstance(found[kind], dict):
            continue
        if values.dtype.kind != "U" or values.ndim != 1:
            raise ValueError(f"{name} must hold strings, got {_shown(values)}")
        texts = tuple(values.tolist())
        if not field:
            found[name] = texts
        elif kind == "categories":
            found[kind][field] = texts
        else:
            found[kind][field] = _columns(texts, field, arrays.get(_UNITS + field))
    return found


def _columns(names: tuple[str, ...], field: str, units: np.ndarray | None) -> Columns:
    if units is None:
        return Columns(names)
    if units.shape != (5, len(names)) or units.dtype.kind != "f":
        raise ValueError(f"{_UNITS}{field} must be (5, {len(names)}) floats, got {_shown(units)}")
    *each, norm, exclusive = units.tolist()
    return Columns(names, *map(tuple, each), norm=norm[0], exclusive=exclusive[0])


def _shown(values: np.ndarray) -> str:
    """Return the type, the shape and the first numbers of an array, for a message."""
    return f"{values.dtype} {values.shape}: {', '.join(map(str, values.ravel()[:4]))} …"
