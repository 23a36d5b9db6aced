"""The files of a sweep: written whole or not at all, so that an interrupted one can go on.

A sweep directory holds

    sweep.toml          what was asked for (it can be run again), what followed, versions
    parts/NNNN.parquet  the rows of runs that are done, one file per chunk of runs
    checkpoint/         of the chunk in progress: its rows so far and the state of the engine
    results.parquet     all parts: one row per run and evaluation, by run and round
    envelopes.parquet   the best of the sweep, round by round
    report.json         a summary, guarantees, draws, and what is not covered; written last
    *.png               figures
    report.html         all of it for people, where it was asked for
"""

import dataclasses
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjaxsim.engine.checkpoint import Checkpoint, Checkpoints
from fedjaxsim.extras import importing
from fedjaxsim.privacy.guarantee import SHARED_SEED
from fedjaxsim.report.envelopes import LAST_COLUMNS
from fedjaxsim.report.files import (
    Record,
    make_directory,
    read_tables,
    write_atomically,
    write_json,
    write_tables,
)
from fedjaxsim.runs.plan import SWEEP, Plan
from fedjaxsim.runs.settings import flag
from fedjaxsim.runs.table import tidy

with importing("tables"):
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

PICTURES = ("envelopes.png", "trade_off.png", "heat.png")
PAGE = "report.html"
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


@dataclasses.dataclass(frozen=True)
class SweepDirectory:
    """Where one sweep puts its files.

    Attributes:
      path: the directory.
      plan: what is run.
      versions: of the programs, which every part notes.
      data: a fingerprint of the clients' rows, which a checkpoint belongs to.
    """

    path: Path
    plan: Plan
    versions: Mapping[str, str]
    data: str = ""

    @classmethod
    def open(
        cls,
        path: Path,
        plan: Plan,
        versions: Mapping[str, str],
        data: str = "",
        *,
        overwrite: bool = False,
    ) -> "SweepDirectory":
        """Makes the directory, or goes on with the same sweep in it.

        Args:
          path: the directory; its parents are made too.
          plan: what is run. A sweep goes on where all its runs are the same.
          versions: of the programs, by name.
          data: a fingerprint of the clients' rows.
          overwrite: start anew, without the files of the sweep that the directory holds.

        Raises:
          ValueError: if the path is a file or cannot be made, or holds another sweep and may not
            be overwritten.
        """
        if not overwrite:
            _check_same(path, plan)
        names = (PARTS, CHECKPOINT, RESULTS, ENVELOPES, REPORT, SWEEP) if overwrite else ()
        make_directory(path, names, "sweep", overwrite=overwrite, pictures=(*PICTURES, PAGE))
        directory = cls(path, plan, versions, data)
        (path / PARTS).mkdir(exist_ok=True)
        for unfinished in (path / PARTS).glob(".*"):
            unfinished.unlink()
        write_tables(path / SWEEP, directory._description())
        return directory

    @property
    def checkpoints(self) -> Checkpoints:
        """Of the chunk in progress; notes say which `runs` it has, in how many `places`."""
        about = {"settings": self.plan.fingerprint, "data": self.data}
        return Checkpoints(self.path / CHECKPOINT, about)

    def finished(self) -> set[int]:
        """The indices of the runs that are done.

        Raises:
          ValueError: if a part is damaged, comes from another sweep, or repeats a run.
        """
        return {run for table in self._tables(["run"]) for run in table["run"].to_pylist()}

    def write_part(self, rows: Iterable[Record], **times: float) -> Path:
        """Writes all evaluations of runs that are done; their checkpoint is then gone.

        Args:
          rows: as `tidy` takes them.
          **times: the `seconds` and `compile_seconds` that they took.

        Returns:
          The file, with the next free number.
        """
        taken = [int(path.stem) for path in self._parts()]
        path = self.path / PARTS / f"{max(taken, default=-1) + 1:04}.parquet"
        note = json.dumps(
            {"fingerprint": self.plan.fingerprint, "versions": dict(self.versions), **times}
        )
        _write_table(path, tidy(self.plan, rows).replace_schema_metadata({_METADATA: note}))
        self.checkpoints.clear()
        return path

    def checkpoint(self) -> Checkpoint | None:
        """That of the chunk in progress; None where there is none, or its runs are done.

        Raises:
          ValueError: if it is damaged or belongs to another sweep.
        """
        last = self.checkpoints.last()
        # The part is written before its checkpoints are removed.
        if last is not None and set(last.note["runs"]) <= self.finished():
            self.checkpoints.clear()
            return None
        return last

    def join(self) -> pa.Table:
        """Writes all parts as one table, by run and round, and returns it.

        Raises:
          ValueError: as `finished`.
        """
        tables = self._tables() or [tidy(self.plan, [])]
        table = pa.concat_tables(tables, promote_options="default").replace_schema_metadata(None)
        # A metric that the first part lacks has come last.
        first = [name for name in table.column_names if name not in LAST_COLUMNS]
        table = table.select([*first, *LAST_COLUMNS])
        table = table.sort_by([("run", "ascending"), ("round", "ascending")])
        _write_table(self.path / RESULTS, table)
        return table

    def times(self) -> dict[str, float]:
        """The `seconds` and `compile_seconds` of all parts together."""
        schemas = [pq.read_schema(path).metadata or {} for path in self._parts()]
        notes = [json.loads(metadata.get(_METADATA, b"{}")) for metadata in schemas]
        return {
            name: sum(note.get(name, 0.0) for note in notes)
            for name in ("seconds", "compile_seconds")
        }

    def write_envelopes(self, envelope: pd.DataFrame) -> None:
        """Writes the best of the sweep, from `envelopes.envelope`."""
        table = pa.Table.from_pandas(envelope, preserve_index=False)
        _write_table(self.path / ENVELOPES, table.replace_schema_metadata(None))

    def write_report(
        self, summary: Mapping[str, Any], guarantees: Any, traffic: Any = (), draws: Any = ()
    ) -> None:
        """Writes all of it, and that choosing among runs is not covered."""
        report = {"summary": summary, "selection": SELECTION, "shared_seed": SHARED_SEED}
        report |= {"guarantees": guarantees, "draws": draws, "traffic": traffic}
        write_json(self.path / REPORT, report)

    def _parts(self) -> list[Path]:
        return sorted((self.path / PARTS).glob("[0-9]*.parquet"), key=lambda path: int(path.stem))

    def _tables(self, columns: Sequence[str] | None = None) -> list[pa.Table]:
        """All parts, or some of their columns, `run` among them."""
        tables: list[pa.Table] = []
        known: set[int] = set()
        for path in self._parts():
            tables.append(self._read(path, columns))
            runs = set(tables[-1]["run"].to_pylist())
            if known & runs:
                raise ValueError(
                    f"{path} holds run {min(known & runs)}, which an earlier part holds too: "
                    "delete it"
                )
            known |= runs
        return tables

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
            "data_fingerprint": self.data,
        }
        return {**self.plan.settings(), "resolved": resolved, "versions": dict(self.versions)}


def _check_same(path: Path, plan: Plan) -> None:
    """That a directory holds no other sweep."""
    if not (path / SWEEP).is_file():
        return
    try:
        stored = read_tables(path / SWEEP)
        fingerprint = stored["resolved"]["fingerprint"]
    except (ValueError, KeyError, TypeError) as error:
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
