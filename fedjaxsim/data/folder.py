"""Populations on disk: a folder of columns that are mapped into memory instead of read.

`population.json` gives the number of clients and rows, and for every column its file, type, shape,
bytes and SHA-256. Columns are plain `.npy` files: one per field, client after client, the rows of a
client in the order of `SPLITS`; `counts.npy`, (m, 3) int32, the number of rows of each client in
each split; and `names.npy`, (m,), unless clients are called 0, 1, …; `held_out` is the folder of
the clients held out, if there are any. Loading a folder compares
sizes, `check_folder` the digests.
"""

import dataclasses
import hashlib
import io
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedjaxsim.data.arrays import blocks
from fedjaxsim.data.columns import Columns, Preparation
from fedjaxsim.data.files import existing, in_file, reading
from fedjaxsim.data.population import Population
from fedjaxsim.data.ranges import consecutive

_ABOUT = "population.json"
_KIND = "folder of a population"
_HELD_OUT = "held_out"
_VERSION = 1
_AT_ONCE = 1 << 24
"""Bytes that are compared at once."""


def save_folder(path: str | os.PathLike[str], population: Population) -> None:
    """Write a population with all its attributes but `generate`.

    Rows are written a block at a time. The folder appears when it is complete, and not at all if
    writing fails or is interrupted.

    Raises:
      FileExistsError: there is something at the path.
      OSError: it cannot be written, such as on a full disk.
      ValueError: the population generates its minibatches.
    """
    path = Path(path)
    if population.generate is not None:
        raise ValueError("a population that generates its minibatches has no rows to write")
    if path.exists():
        raise FileExistsError(f"{path} exists already")
    columns = {"counts": np.ascontiguousarray(population.counts)}
    if not np.array_equal(population.names, np.arange(population.num_clients)):
        columns["names"] = population.names
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        about: dict[str, Any] = {
            "version": _VERSION,
            "clients": population.num_clients,
            "rows": population.num_rows,
            "columns": {
                name: _write(partial / f"{name}.npy", values) for name, values in columns.items()
            },
            "fields": {
                name: _write(partial / f"field-{number}.npy", values)
                for number, (name, values) in enumerate(population.fields.items())
            },
            "public": population.public,
            "categories": population.categories,
            "preparations": population.preparations,
            "named": {
                field: dataclasses.asdict(columns) for field, columns in population.columns.items()
            },
        }
        if population.held_out is not None:
            save_folder(partial / _HELD_OUT, population.held_out)
            about["held_out"] = json.loads((partial / _HELD_OUT / _ABOUT).read_text("utf-8"))[
                "sha256"
            ]
        about["sha256"] = _digest(about)
        (partial / _ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def load_folder(path: str | os.PathLike[str]) -> Population:
    """Return a population with its fields on disk, mapped into memory read-only.

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: it holds no population, or a column is missing or differs in size, type or
        shape from the one that was written.
    """
    path = existing(path, _KIND, folder=True)
    with in_file(path):
        about = _about(path)
        try:
            columns = {name: _mapped(path, each) for name, each in about["columns"].items()}
            fields = {name: _mapped(path, each) for name, each in about["fields"].items()}
            counts, names = columns["counts"], columns.get("names")
            clients, public = about["clients"], tuple(about["public"])
            categories = {name: tuple(each) for name, each in about["categories"].items()}
            made = tuple(Preparation(*each) for each in about["preparations"])
            named = {field: _columns(each) for field, each in about["named"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{_ABOUT} is damaged: {error!r}") from error
        if counts.shape != (clients, 3):
            raise ValueError(f"counts must be ({clients}, 3), got {counts.shape}")
        if names is None:
            names = np.arange(clients, dtype=np.int32)
        held_out = load_folder(path / _HELD_OUT) if _HELD_OUT in about else None
        return Population(
            fields,
            consecutive(*counts.T),
            names,
            public=public,
            categories=categories,
            columns=named,
            held_out=held_out,
            preparations=made,
        )


def check_folder(
    path: str | os.PathLike[str], on_read: Callable[[int, int], None] = lambda done, size: None
) -> int:
    """Compare all columns of a folder with the digests taken while it was written.

    Args:
      path: the folder.
      on_read: called after each block with the bytes read so far and the bytes in all.

    Returns:
      The bytes of all columns.

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: names the columns that changed, or `load_folder` refuses the folder.
    """
    path = existing(path, _KIND, folder=True)
    with in_file(path):
        about = _about(path)
        if about.get("sha256") != _digest(about):
            raise ValueError(f"{_ABOUT} is not what was written")
        columns = {each["file"]: each for each in about["columns"].values()}
        columns |= {f"{each['file']} ({name})": each for name, each in about["fields"].items()}
        files = {name: _file(path, each) for name, each in columns.items()}
        size, done, changed = sum(each["bytes"] for each in columns.values()), 0, []
        for name, each in columns.items():
            digest = hashlib.sha256()
            with open(files[name], "rb") as stream:
                while block := stream.read(_AT_ONCE):
                    digest.update(block)
                    done += len(block)
                    on_read(done, size)
            if digest.hexdigest() != each["sha256"]:
                changed.append(name)
        if changed:
            raise ValueError(f"not what was written: {', '.join(changed)}")
        if _HELD_OUT in about:
            if _about(path / _HELD_OUT).get("sha256") != about[_HELD_OUT]:
                raise ValueError(f"not what was written: {_HELD_OUT}")
            size += check_folder(path / _HELD_OUT)
    return size


def _columns(named: dict[str, Any]) -> Columns:
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in named.items()}
    return Columns(**fields)


def _write(file: Path, values: np.ndarray) -> dict[str, Any]:
    """Write a .npy file and return its record."""
    header: Any = {"descr": values.dtype.str, "fortran_order": False, "shape": values.shape}
    head, digest = io.BytesIO(), hashlib.sha256()
    np.lib.format.write_array_header_2_0(head, header)
    rows = (values[part] for part in blocks(values, len(values)))
    with open(file, "wb") as stream:
        for content in itertools.chain([head.getvalue()], (each.tobytes() for each in rows)):
            digest.update(content)
            stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    return {
        "file": file.name,
        "dtype": values.dtype.str,
        "shape": values.shape,
        "bytes": file.stat().st_size,
        "sha256": digest.hexdigest(),
    }


def _digest(about: dict[str, Any]) -> str:
    """Return the digest of everything else in `population.json`."""
    rest = {name: value for name, value in about.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _about(path: Path) -> dict[str, Any]:
    try:
        about = json.loads((path / _ABOUT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"no population: it holds no {_ABOUT}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_ABOUT} is damaged: {error}") from error
    if not isinstance(about, dict) or about.get("version") != _VERSION:
        raise ValueError(f"{_ABOUT} must be of version {_VERSION}")
    return about


def _file(path: Path, column: dict[str, Any]) -> Path:
    """Return the file of a column, with its size checked."""
    file = path / column["file"]
    if file.parent != path or not file.is_file():
        raise ValueError(f"the column {file.name} is missing")
    if (size := file.stat().st_size) != column["bytes"]:
        raise ValueError(f"the column {file.name} has {size} bytes instead of {column['bytes']}")
    return file


def _mapped(path: Path, column: dict[str, Any]) -> np.ndarray:
    """Map a column into memory, read-only."""
    file, shape, dtype = _file(path, column), tuple(column["shape"]), np.dtype(column["dtype"])
    with reading(f"column {file.name}"):
        values = np.lib.format.open_memmap(file, mode="r")
    if values.dtype != dtype or values.shape != shape:
        raise ValueError(
            f"the column {file.name} holds {values.dtype} {values.shape} instead of {dtype} {shape}"
        )
    return values.view(np.ndarray)
