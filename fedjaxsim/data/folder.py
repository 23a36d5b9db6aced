"""Populations on disk: a folder of arrays that are mapped into memory instead of read.

The arrays are those of a .npz file (see `fedjaxsim.data.npz`), each a plain `.npy` file.
`population.json` gives for each its file, type, shape, bytes and SHA-256. Loading a folder compares
sizes, `check_folder` the digests.
"""

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
from fedjaxsim.data.files import existing, in_file, reading
from fedjaxsim.data.npz import arrays_of, assemble
from fedjaxsim.data.population import Population

_ABOUT = "population.json"
_KIND = "folder of a population"
_VERSION = 2
_AT_ONCE = 1 << 24
"""Bytes that are compared at once."""


def save_folder(path: str | os.PathLike[str], population: Population) -> None:
    """Write a population with all its attributes but `generate`.

    Rows are written a block at a time. The folder appears when it is complete, and not at all if
    writing fails or is interrupted.

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
    arrays = arrays_of(population)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        about: dict[str, Any] = {
            "version": _VERSION,
            "arrays": {
                name: _write(partial / f"array-{number}.npy", np.ascontiguousarray(values))
                for number, (name, values) in enumerate(arrays.items())
            },
        }
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
      ValueError: it holds no population, or an array is missing or differs in size, type or
        shape from the one that was written.
    """
    path = existing(path, _KIND, folder=True)
    with in_file(path):
        arrays = {name: _mapped(path, name, each) for name, each in _about(path).items()}
    return assemble(arrays, path)


def check_folder(
    path: str | os.PathLike[str], on_read: Callable[[int, int], None] = lambda done, size: None
) -> int:
    """Compare all arrays of a folder with the digests taken while it was written.

    Args:
      path: the folder.
      on_read: called after each block with the bytes read so far and the bytes in all.

    Returns:
      The bytes of all arrays.

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: names the arrays that changed, or `load_folder` refuses the folder.
    """
    path = existing(path, _KIND, folder=True)
    with in_file(path):
        arrays = _about(path, intact=True)
        files = {name: _file(path, name, each) for name, each in arrays.items()}
        size, done, changed = sum(each["bytes"] for each in arrays.values()), 0, []
        for name, each in arrays.items():
            digest = hashlib.sha256()
            with open(files[name], "rb") as stream:
                while block := stream.read(_AT_ONCE):
                    digest.update(block)
                    done += len(block)
                    on_read(done, size)
            if digest.hexdigest() != each["sha256"]:
                changed.append(f"{name} ({each['file']})")
        if changed:
            raise ValueError(f"not what was written: {', '.join(changed)}")
    return size


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


def _about(path: Path, intact: bool = False) -> dict[str, dict[str, Any]]:
    """Return the records of the arrays."""
    try:
        about = json.loads((path / _ABOUT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"no population: it holds no {_ABOUT}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_ABOUT} is damaged: {error}") from error
    if not isinstance(about, dict) or about.get("version") != _VERSION:
        raise ValueError(f"{_ABOUT} must be of version {_VERSION}: write the folder again")
    if intact and about.get("sha256") != _digest(about):
        raise ValueError(f"{_ABOUT} is not what was written")
    kinds, found = {"file": str, "dtype": str, "shape": list, "bytes": int}, about.get("arrays")
    if not isinstance(found, dict) or not all(
        isinstance(each, dict) and isinstance(each.get(name), kind)
        for each in found.values()
        for name, kind in kinds.items()
    ):
        raise ValueError(f"{_ABOUT} is damaged: it must describe each array")
    return found


def _file(path: Path, name: str, array: dict[str, Any]) -> Path:
    """Return the file of an array, with its size checked."""
    file = path / array["file"]
    if file.parent != path or not file.is_file():
        raise ValueError(f"the array {name} is missing ({file.name})")
    if (size := file.stat().st_size) != array["bytes"]:
        raise ValueError(f"the array {name} has {size} bytes instead of {array['bytes']}")
    return file


def _mapped(path: Path, name: str, array: dict[str, Any]) -> np.ndarray:
    """Map an array into memory, read-only."""
    file = _file(path, name, array)
    with reading(f"array {name}"):
        values = np.lib.format.open_memmap(file, mode="r")
    found, written = (values.dtype.str, [*values.shape]), (array["dtype"], array["shape"])
    if found != written:
        raise ValueError(f"the array {name} holds {found} instead of {written}")
    return values.view(np.ndarray)
