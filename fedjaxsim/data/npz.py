"""A plain format for users' data: flat arrays in a .npz file, or in a folder of .npy files.

The arrays:

- any number of fields of shape (N, ...), by convention `x` and `y`: text becomes integers, as in
  `fedjaxsim.data.text.encode`, and pictures of bytes (N, height, width, ...) become [0, 1], unless
  `save_npz` wrote the file;
- the clients of the rows, as one of
  `client`: (N,) ids, integers or strings, in any order, with which
  `split`, (N,), may be 0 or train, 1 or validation, and 2 or test; or
  `counts`: (m,) integers, where the rows of client 0 come first, then client 1's, ..., or
  (m, 3), each client's training, validation and test rows, as `save_npz` writes them: then fields
  keep their types; `names`, (m,), may name the clients;
- optionally `about`: (k,) uint8, the JSON of other attributes of a population.

A folder is mapped into memory instead of read. Its SHA256SUMS lists the arrays in order;
`sha256sum -c SHA256SUMS`, inside the folder, compares them with their digests.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from fedjaxsim.data.arrays import common_length, unit_pixels
from fedjaxsim.data.columns import Columns, Preparation
from fedjaxsim.data.files import existing, in_file, reading
from fedjaxsim.data.population import Population
from fedjaxsim.data.source import Source, shown, splits_of
from fedjaxsim.data.text import encode

_RESERVED = ("client", "counts", "names", "split", "about")
_SUMS = "SHA256SUMS"


def load_npz(path: str | os.PathLike[str]) -> Population:
    """Read a population; the module's docstring describes the format.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is damaged or its arrays do not fit the format.
    """
    return read_npz(path).population(path)


def read_npz(path: str | os.PathLike[str]) -> Source:
    """Read rows with their clients or without."""
    path = existing(path, ".npz file")
    ignored = warnings.catch_warnings(action="ignore", category=UserWarning)  # of Python 2's files
    with in_file(path), open(path, "rb") as stream:
        if stream.read(2) != b"PK":  # numpy would take it for a pickle
            raise ValueError("not a readable .npz file: save the arrays with np.savez")
        stream.seek(0)
        with reading(".npz file"), ignored, np.load(stream, allow_pickle=False) as archive:
            arrays = {name: _member(archive, name) for name in archive}
        return source_of_arrays(arrays)


def _member(archive: Any, name: str) -> np.ndarray:
    """Return an array of an archive; numpy's own error would advise to unpickle its objects."""
    try:
        array = archive[name]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        how = "store numbers, or text as np.array(values, dtype=str)"
        raise ValueError(f"{name!r} holds Python objects: {how}") from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"its member {name!r} is no array")
    return array


def save_npz(path: str | os.PathLike[str], population: Population) -> None:
    """Write a population with all its attributes but `generate`; its rows are in a new order.

    Raises:
      ValueError: clients are held out, or a field has a name that the format reserves.
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
    return read_folder(path).population(path)


def read_folder(path: str | os.PathLike[str]) -> Source:
    """Map the rows of a folder into memory; see `load_folder`."""
    path = existing(path, "folder of a population", folder=True)
    with in_file(path):
        if not (path / _SUMS).is_file():
            raise ValueError(f"no population: it holds no {_SUMS}")
        lines = (path / _SUMS).read_text(encoding="utf-8").splitlines()
        names = [line.partition("  ")[2] for line in lines]
        arrays = {unquote(name.removesuffix(".npy")): _map(path, name) for name in names}
        return source_of_arrays(arrays)


def save_folder(path: str | os.PathLike[str], population: Population) -> None:
    """Write a population with all its attributes but `generate`; its rows are in a new order.

    The folder appears when it is complete, and not at all if writing fails or is interrupted.

    Raises:
      FileExistsError: there is something at the path.
      OSError: it cannot be written, such as on a full disk.
      ValueError: the population generates its minibatches, clients are held out, or a field has a
        reserved name.
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
    if taken := sorted({*_RESERVED} & population.fields.keys()):
        raise ValueError(f"fields may not be called {_RESERVED} in a file, got {taken}")
    if population.held_out is not None:
        raise ValueError("clients are held out of a run, not of a file: leave out held-out-clients")
    arrays = {"counts": population.counts, **population.fields}
    if not np.array_equal(population.names, np.arange(population.num_clients)):
        arrays["names"] = population.names
    about = {name: getattr(population, name) for name in ("public", "voids_epsilon", "categories")}
    columns = {
        field: dataclasses.asdict(of_field) for field, of_field in population.columns.items()
    }
    about |= {"columns": columns, "max_rows": population.max_rows}
    about |= {"preparations": population.preparations}
    about_bytes = json.dumps(about).encode()
    arrays["about"] = np.frombuffer(about_bytes, np.uint8)
    return arrays


def source_of_arrays(arrays: Mapping[str, np.ndarray]) -> Source:
    """Return the rows in the arrays of a file."""
    fields = {name: values for name, values in arrays.items() if name not in _RESERVED}
    n, about = common_length(fields, "file"), _about(arrays)
    has_counts = "counts" in arrays
    for name in ("client", "split") if has_counts else ("names",):
        if name in arrays:
            of = "with" if has_counts else "without"
            raise ValueError(f"{name!r} may not be given {of} 'counts'")
    if "about" not in arrays:  # not written by this package, which keeps types
        fields, about = _read_pixels_and_text(fields)
    if not has_counts:
        split = arrays.get("split")
        split = None if split is None else splits_of(split, "split")
        if (ids := arrays.get("client")) is None:
            return Source(fields, split=split, about=about)
        if ids.shape != (n,) or ids.dtype.kind not in "iuU":
            raise ValueError(
                f"client must be an integer or string for each of the {n} rows, got {shown(ids)}"
            )
        client_names, client = np.unique(ids, return_inverse=True)
        return Source(fields, client, client_names, split, about)
    names = np.atleast_1d(arrays["names"]) if "names" in arrays else None
    return Source(fields, names=names, about=about, counts=np.atleast_1d(arrays["counts"]))


def _read_pixels_and_text(
    fields: Mapping[str, np.ndarray],
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return fields with bytes of pictures in [0, 1] and text as integers, and what names these."""
    pixels = {name: unit_pixels(values) for name, values in fields.items()}
    if not any(values.dtype.kind == "U" for name, values in pixels.items() if name in ("x", "y")):
        return pixels, {}
    read, categories, public = encode({name: [v] for name, v in pixels.items()}, ["field "])
    return read, {"categories": categories, "public": public}


def _about(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the attributes of a population that are no rows."""
    if "about" not in arrays:
        return {}
    with reading("JSON of attributes (about)"):
        about = json.loads(arrays["about"].tobytes())
        sentences = {name: (*map(str, about[name]),) for name in ("public", "voids_epsilon")}
        columns = {field: Columns(**of_field) for field, of_field in about["columns"].items()}
        names = {field: (*map(str, classes),) for field, classes in about["categories"].items()}
        releases = tuple(Preparation(*values) for values in about.get("preparations", ()))
        more = {"max_rows": about.get("max_rows"), "preparations": releases}
        return {**sentences, "categories": names, "columns": columns, **more}
