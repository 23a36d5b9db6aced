"""The files of a sweep: written whole or not at all, so that an interrupted one can go on.

A sweep directory holds

    sweep.toml          what was asked for (it can be run again), what followed, versions
    parts/NNNN.parquet  the rows of runs that are done, one file per chunk of runs
    checkpoint/         of the chunk in progress: its rows so far and the state of the engine
    results.parquet     all parts: one row per run and evaluation, by run and round
    envelopes.parquet   the best of the sweep, round by round
    report.json         a summary, the guarantees of the runs, what they do not cover; written last
    *.png               figures
"""

import contextlib
import dataclasses
import io
import json
import os
import shutil
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tomli_w

from fedjaxsim.report.files import Record, write_atomically, write_json
from fedjaxsim.runs.plan import Plan
from fedjaxsim.runs.rows import LAST_COLUMNS, tidy
from fedjaxsim.runs.settings import flag

SWEEP = "sweep.toml"
PARTS = "parts"
CHECKPOINT = "checkpoint"
RESULTS = "results.parquet"
ENVELOPES = "envelopes.parquet"
REPORT = "report.json"

SELECTION = (
    "Each guarantee is that of one run alone. Choosing the best of a sweep by metrics of private "
    "data, as envelopes do, is not covered by any of them, and neither is publishing the metrics: "
    "both need a budget of their own."
)
"""What every report of a sweep says."""

_METADATA = b"fedjaxsim"
_STATE = "state/"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A chunk of runs in progress.

    Attributes:
      runs: their indices, in the order of the engine.
      round: rounds done.
      rows: records so far, as `tidy` takes them.
      state: the arrays of the engine, by name.
      places: how many runs the engine's arrays hold, repetitions included; None where not known.
    """

    runs: tuple[int, ...]
    round: int
    rows: Sequence[Record]
    state: Mapping[str, np.ndarray]
    places: int | None = None


@dataclasses.dataclass(frozen=True)
class SweepDirectory:
    """Where one sweep puts its files.

    Attributes:
      path: the directory.
      plan: what is run.
      versions: of the programs, which every part notes.
    """

    path: Path
    plan: Plan
    versions: Mapping[str, str]

    @classmethod
    def open(
        cls, path: Path, plan: Plan, versions: Mapping[str, str], *, overwrite: bool = False
    ) -> "SweepDirectory":
        """Makes the directory, or goes on with the same sweep in it.

        Args:
          path: the directory; its parents are made too.
          plan: what is run. A sweep goes on where all its runs are the same.
          versions: of the programs, by name.
          overwrite: start anew, without the files of the sweep that the directory holds.

        Raises:
          ValueError: if the path is a file or cannot be made, or holds another sweep and may not
            be overwritten.
        """
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} must be a directory, and is a file")
        if not overwrite:
            _check_same(path, plan)
        directory = cls(path, plan, versions)
        try:
            if overwrite:
                directory._clear()
            for folder in (path / PARTS, path / CHECKPOINT):
                folder.mkdir(parents=True, exist_ok=True)
                for unfinished in folder.glob(".*"):
                    unfinished.unlink()
            write_atomically(path / SWEEP, tomli_w.dumps(directory._description()).encode())
        except OSError as error:
            raise ValueError(f"{path} cannot be written to: {error.strerror}") from error
        return directory

    def finished(self) -> set[int]:
        """The indices of the runs that are done.

        Raises:
          ValueError: if a part is damaged, comes from another sweep, or repeats a run.
        """
        runs: set[int] = set()
        for path in self._parts():
            of_part = set(self._read(path, ["run"])["run"].to_pylist())
            if runs & of_part:
                raise ValueError(
                    f"{path} holds run {min(runs & of_part)}, which an earlier part holds too: "
                    "delete it"
                )
            runs |= of_part
        return runs

    def write_part(self, rows: Iterable[Record]) -> Path:
        """Writes all evaluations of runs that are done; their checkpoint is then gone.

        Args:
          rows: as `tidy` takes them.

        Returns:
          The file, with the next free number.
        """
        taken = [int(path.stem) for path in self._parts()]
        path = self.path / PARTS / f"{max(taken, default=-1) + 1:04}.parquet"
        note = json.dumps({"fingerprint": self.plan.fingerprint, "versions": dict(self.versions)})
        _write_table(path, tidy(self.plan, rows).replace_schema_metadata({_METADATA: note}))
        self._checkpoint.unlink(missing_ok=True)
        return path

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Replaces the checkpoint: rows and state together, in one file."""
        meta = {
            "fingerprint": self.plan.fingerprint,
            "runs": list(map(int, checkpoint.runs)),
            "round": checkpoint.round,
            "places": checkpoint.places,
            "dtypes": {name: str(array.dtype) for name, array in checkpoint.state.items()},
        }
        rows = _parquet(tidy(self.plan, checkpoint.rows))
        arrays = {f"{_STATE}{name}": _plain(array) for name, array in checkpoint.state.items()}
        with _written(self._checkpoint) as file:
            np.savez(
                file,
                allow_pickle=False,
                meta=np.frombuffer(json.dumps(meta).encode(), np.uint8),
                rows=np.frombuffer(rows, np.uint8),
                **arrays,
            )

    def load_checkpoint(self) -> Checkpoint | None:
        """The chunk in progress; None where there is none, or its runs are done.

        Raises:
          ValueError: if the file is damaged or belongs to another sweep.
        """
        path = self._checkpoint
        if not path.is_file():
            return None
        try:
            with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
                arrays = dict(file)
            meta = json.loads(arrays["meta"].tobytes())
            rows = _table(pa.BufferReader(arrays["rows"].tobytes())).to_pylist()
            state = {
                name: arrays[f"{_STATE}{name}"].view(np.dtype(dtype))
                for name, dtype in meta["dtypes"].items()
            }
        except (zipfile.BadZipFile, ValueError, EOFError, OSError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is damaged ({error}): delete it, and its runs start anew"
            ) from error
        if meta["fingerprint"] != self.plan.fingerprint:
            raise ValueError(f"{path} belongs to another sweep: delete it")
        # The part is written before its checkpoint is removed.
        if set(meta["runs"]) <= self.finished():
            return None
        return Checkpoint(tuple(meta["runs"]), meta["round"], rows, state, meta.get("places"))

    def join(self) -> pa.Table:
        """Writes all parts as one table, by run and round, and returns it.

        Raises:
          ValueError: as `finished`.
        """
        self.finished()
        tables = [self._read(path) for path in self._parts()] or [tidy(self.plan, [])]
        table = pa.concat_tables(tables, promote_options="default").replace_schema_metadata(None)
        # A metric that the first part lacks has come last.
        first = [name for name in table.column_names if name not in LAST_COLUMNS]
        table = table.select([*first, *LAST_COLUMNS])
        table = table.sort_by([("run", "ascending"), ("round", "ascending")])
        _write_table(self.path / RESULTS, table)
        return table

    def write_envelopes(self, table: pa.Table) -> None:
        """Writes the best of the sweep, from `envelopes.envelope`."""
        _write_table(self.path / ENVELOPES, table)

    def write_report(self, summary: Mapping[str, Any], guarantees: Any) -> None:
        """Writes the summary and the guarantees, and that choosing among runs is not covered."""
        report = {"summary": summary, "selection": SELECTION, "guarantees": guarantees}
        write_json(self.path / REPORT, report)

    @property
    def _checkpoint(self) -> Path:
        return self.path / CHECKPOINT / "state.npz"

    def _parts(self) -> list[Path]:
        return sorted((self.path / PARTS).glob("[0-9]*.parquet"), key=lambda path: int(path.stem))

    def _read(self, path: Path, columns: Sequence[str] | None = None) -> pa.Table:
        """A part, or some of its columns."""
        try:
            table = _table(path, columns)
            note = json.loads((table.schema.metadata or {}).get(_METADATA, b"{}"))
            wanted = tidy(self.plan, []).column_names if columns is None else columns
            missing = [name for name in wanted if name not in table.column_names]
            if missing:
                raise ValueError(f"it lacks the column {missing[0]}")
        except (pa.ArrowException, ValueError, OSError) as error:
            raise ValueError(
                f"{path} is damaged ({error}): delete it, and its runs are computed again"
            ) from error
        if note.get("fingerprint") != self.plan.fingerprint:
            raise ValueError(f"{path} belongs to another sweep: delete it, or say --overwrite")
        return table

    def _description(self) -> Record:
        resolved = {
            "fingerprint": self.plan.fingerprint,
            "runs": len(self.plan.runs),
            "groups": len(self.plan.groups()),
            "best_over": list(self.plan.best_over),
        }
        return {**self.plan.settings(), "resolved": resolved, "versions": dict(self.versions)}

    def _clear(self) -> None:
        """Removes the files of a sweep; what says which one it was goes last."""
        for folder in (PARTS, CHECKPOINT):
            if (self.path / folder).is_dir():
                shutil.rmtree(self.path / folder)
        names = (RESULTS, ENVELOPES, REPORT, SWEEP)
        for path in (*self.path.glob("*.png"), *(self.path / name for name in names)):
            path.unlink(missing_ok=True)


def _check_same(path: Path, plan: Plan) -> None:
    """That a directory holds no other sweep."""
    if not (path / SWEEP).is_file():
        return
    try:
        stored = tomllib.loads((path / SWEEP).read_text(encoding="utf-8"))
        fingerprint = stored["resolved"]["fingerprint"]
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path / SWEEP} is damaged ({error}): choose another directory or say --overwrite"
        ) from error
    if fingerprint != plan.fingerprint:
        old, new = _flat(stored), _flat(plan.settings())
        changes = [
            f"{key} is {old.get(key, 'not set')} there and {new.get(key, 'not set')} here"
            for key in dict.fromkeys([*old, *new])
            if old.get(key) != new.get(key)
        ] or ["another version resolved it"]
        more = f", and {len(changes) - 3} more" if len(changes) > 3 else ""
        raise ValueError(
            f"{path} holds another sweep ({'; '.join(changes[:3])}{more}): choose another "
            "directory or say --overwrite"
        )


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that results depend on, those of tables with the table's number."""
    ignored = ("sweep", "memory", "best_over", "resolved", "versions")
    flat = {flag(key): value for key, value in settings.items() if key not in ignored}
    for index, table in enumerate(settings.get("sweep", ())):
        for key, values in table.items():
            flat[f"{flag(key)} in sweep {index + 1}"] = values
    return flat


def _plain(array: np.ndarray) -> np.ndarray:
    """An array of numpy's own types, which are all that its file format knows: others as bits."""
    array = np.ascontiguousarray(array) if array.ndim else array
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")


def _parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return sink.getvalue()


def _write_table(path: Path, table: pa.Table) -> None:
    write_atomically(path, _parquet(table))


def _table(source: Any, columns: Sequence[str] | None = None) -> pa.Table:
    """Reads a table, or some of its columns, and checks that it is whole."""
    with pq.ParquetFile(source, page_checksum_verification=True) as file:
        table, expected = file.read(columns, use_threads=False), file.metadata.num_rows
    # Checksums cover the data of a page, but not the header that says how much there is.
    if table.num_rows != expected:
        raise ValueError(f"it must have {expected} rows, got {table.num_rows}")
    return table


@contextlib.contextmanager
def _written(path: Path) -> Iterator[io.BufferedWriter]:
    """A file that takes the place of `path` once all of it has been written.

    Engine states are too large to be held in memory a second time, as bytes.
    """
    temporary = path.with_name(f".{path.name}")
    try:
        with open(temporary, "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
