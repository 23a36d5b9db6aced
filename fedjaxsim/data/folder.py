"""Populations on disk: a folder of arrays that are mapped into memory instead of read.

The arrays are those of a .npz file (see `fedjaxsim.data.npz`), each a plain `.npy` file. SHA256SUMS
lists them in order; `sha256sum -c SHA256SUMS`, inside the folder, compares them with their digests.
"""

import hashlib
import os
import shutil
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np

from fedjaxsim.data.files import existing, in_file, reading
from fedjaxsim.data.npz import arrays_of, assemble
from fedjaxsim.data.population import Population

_SUMS = "SHA256SUMS"


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
            for name, values in arrays_of(population).items()
        ]
        (partial / _SUMS).write_text("".join(sums), encoding="utf-8")
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def load_folder(path: str | os.PathLike[str]) -> Population:
    """Return a population with its fields on disk, mapped into memory read-only.

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: it holds no population, or an array is missing, damaged or of another size.
    """
    path = existing(path, "folder of a population", folder=True)
    with in_file(path):
        if not (path / _SUMS).is_file():
            raise ValueError(f"no population: it holds no {_SUMS}; write older folders again")
        lines = (path / _SUMS).read_text(encoding="utf-8").splitlines()
        names = [line.partition("  ")[2] for line in lines]
        return assemble({unquote(name.removesuffix(".npy")): _map(path, name) for name in names})


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
    if (size := file.stat().st_size) != values.offset + values.nbytes:
        wanted = values.offset + values.nbytes
        raise ValueError(f"the array {name} has {size} bytes instead of {wanted}")
    return values.view(np.ndarray)
