"""The files of one run: written whole or not at all, and read back with clear errors.

A run directory holds

    config.toml     the settings, what followed from them (`resolved`), and `versions`
    metrics.jsonl   one strict JSON object per evaluation
    guarantee.json  adjacency -> view -> accountant -> ε, δ and what they rest on
    summary.json    the last metrics, speed, whether the run was interrupted; written last
    clients.csv     one line of test metrics per client
    state.npz       the final state, one array per leaf of its pytree
    *.png           curves

JSON has no infinity: null stands for "no finite number", e.g. for ε where nothing is promised.
"""

import csv
import dataclasses
import io
import json
import math
import os
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import tomli_w

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
GUARANTEE = "guarantee.json"
SUMMARY = "summary.json"
CLIENTS = "clients.csv"
STATE = "state.npz"

Record = dict[str, Any]
Tree = TypeVar("Tree")


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that a reader sees the old content or the new one, never a part."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def strict(value: Any) -> Any:
    """The value as strict JSON: numpy becomes Python, what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return strict(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _json(value: Any) -> str:
    return json.dumps(strict(value), indent=2, allow_nan=False, ensure_ascii=False)


def write_json(path: Path, value: Any) -> None:
    """Writes strict JSON, atomically."""
    write_atomically(path, f"{_json(value)}\n".encode())


def print_json(value: Any) -> None:
    """Prints strict JSON."""
    print(_json(value))


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """Where one run puts its files.

    Attributes:
      path: the directory.
    """

    path: Path

    @classmethod
    def create(cls, path: Path, *, overwrite: bool = False) -> "RunDirectory":
        """Makes the directory, and with `overwrite` removes the files of the run it holds.

        Raises:
          ValueError: if the path is a file, cannot be made, or holds a run and may not be
            overwritten.
        """
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} must be a directory, and is a file")
        names = (CONFIG, METRICS, GUARANTEE, SUMMARY, CLIENTS, STATE)
        present = [name for name in names if (path / name).exists()]
        if present and not overwrite:
            raise ValueError(
                f"{path} already holds a run ({', '.join(present)}): choose another directory "
                "or say --overwrite"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            for file in [*(path / name for name in present), *path.glob("*.png")]:
                file.unlink()
        except OSError as error:
            raise ValueError(f"{path} cannot be written to: {error.strerror}") from error
        return cls(path)

    def write_config(self, tables: Mapping[str, Any]) -> None:
        """Writes the resolved settings and versions as TOML."""
        write_atomically(self.path / CONFIG, tomli_w.dumps(tables).encode())

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Adds one evaluation: a whole line, in a single write."""
        line = json.dumps(strict(record), allow_nan=False) + "\n"
        with open(self.path / METRICS, "ab", buffering=0) as file:
            file.write(line.encode())

    def write_guarantee(self, guarantee: Mapping[str, Any]) -> None:
        """Writes the privacy report as nested JSON."""
        write_json(self.path / GUARANTEE, guarantee)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes the summary; its presence says that all other files are there."""
        write_json(self.path / SUMMARY, summary)

    def write_clients(self, columns: Mapping[str, Iterable[Any]]) -> None:
        """Writes one line per client; what is not finite stays empty.

        Args:
          columns: name -> (m,) values.
        """
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        lists = [strict(np.asarray(column)) for column in columns.values()]
        writer.writerows(zip(*lists, strict=True))
        write_atomically(self.path / CLIENTS, text.getvalue().encode())

    def write_state(self, state: Any) -> None:
        """Writes the leaves of a pytree as arrays, named by their paths in it."""
        stream = io.BytesIO()
        np.savez(stream, allow_pickle=False, **to_arrays(state))
        write_atomically(self.path / STATE, stream.getvalue())

    def load_state(self, like: Tree) -> Tree:
        """Reads the final state back into the structure of a like-shaped one.

        Args:
          like: a state of the same simulation, e.g. what its `init` returns.

        Returns:
          The saved state, with the structure, shapes and types of `like`.

        Raises:
          FileNotFoundError: if the directory holds no state.
          ValueError: if the file is damaged, or its leaves are not those of `like`.
        """
        path = self._existing(STATE)
        try:
            with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
                saved = dict(file)
        except (zipfile.BadZipFile, ValueError, EOFError, OSError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        return from_arrays(saved, like, str(path))

    def config(self) -> dict[str, Any]:
        """The resolved settings, as nested tables."""
        path = self._existing(CONFIG)
        try:
            return tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error

    def metrics(self) -> list[Record]:
        """All evaluations, in the order of rounds."""
        path = self._existing(METRICS)
        return [_parse(line, path) for line in path.read_text(encoding="utf-8").splitlines()]

    def guarantee(self) -> Record:
        """The privacy report."""
        return self._json(GUARANTEE)

    def summary(self) -> Record:
        """The summary."""
        return self._json(SUMMARY)

    def _json(self, name: str) -> Record:
        path = self._existing(name)
        return _parse(path.read_text(encoding="utf-8"), path)

    def _existing(self, name: str) -> Path:
        if not self.path.is_dir():
            raise FileNotFoundError(f"no directory {self.path}")
        if not (self.path / name).is_file():
            raise FileNotFoundError(
                f"{self.path} holds no {name}: not a run, or not a finished one"
            )
        return self.path / name


def to_arrays(state: Any) -> dict[str, np.ndarray]:
    """The leaves of a pytree as numpy's own kinds of arrays, named by their paths in it."""
    return {name: _raw(leaf) for name, leaf in _leaves(state)}


def from_arrays(saved: Mapping[str, np.ndarray], like: Tree, where: str) -> Tree:
    """The pytree that `to_arrays` took apart.

    Args:
      saved: arrays by name.
      like: a pytree of the same structure, shapes and types.
      where: what held the arrays, for messages.

    Raises:
      ValueError: if the arrays are not those of `like`.
    """
    leaves = _leaves(like)
    if saved.keys() != dict(leaves).keys():
        differing = sorted(saved.keys() ^ dict(leaves).keys())
        raise ValueError(f"{where} holds another kind of state: {', '.join(differing)} differ")
    restored = [_restore(saved[name], leaf, f"{where}: {name}") for name, leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(like), restored)


def _parse(text: str, path: Path) -> Record:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _leaves(tree: Any) -> Sequence[tuple[str, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path).lstrip("."), leaf) for path, leaf in leaves]


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _raw(leaf: Any) -> np.ndarray:
    """A leaf on the host; of a typed random key its words, of any float type its bits."""
    array = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    # The file format knows numpy's own types only: others (bfloat16) travel as integers.
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")


def _restore(saved: np.ndarray, like: Any, name: str) -> Any:
    expected = _raw(like)
    if saved.shape != expected.shape or saved.dtype != expected.dtype:
        raise ValueError(
            f"{name} must be {expected.dtype}{list(expected.shape)}, "
            f"got {saved.dtype}{list(saved.shape)}"
        )
    if _is_key(like):
        return jax.random.wrap_key_data(jnp.asarray(saved), impl=jax.random.key_impl(like))
    return jnp.asarray(saved.view(np.asarray(like).dtype))
