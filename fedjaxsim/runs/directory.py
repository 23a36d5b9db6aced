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
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tomli_w

from fedjaxsim.report.files import Record, strict, write_atomically, write_json

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
GUARANTEE = "guarantee.json"
SUMMARY = "summary.json"
CLIENTS = "clients.csv"
STATE = "state.npz"

Tree = TypeVar("Tree")


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
        from fedjaxsim.runs.states import to_arrays

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
        from fedjaxsim.runs.states import from_arrays

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


def _parse(text: str, path: Path) -> Record:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
