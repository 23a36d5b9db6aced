"""The files of a sweep: written whole or not at all, so that an interrupted one can go on.

A sweep directory holds

    sweep.toml          what was asked for (it can be run again), what followed, versions
    results.parquet     of the runs that are done: one row per run and evaluation, by run and round
    checkpoint/         of the chunk in progress: its rows so far and the state of the engine
    envelopes.parquet   the best of the sweep, round by round
    report.json         a summary, guarantees, draws, and what is not covered; written last
    *.png               figures
    report.html         all of it for people, where it was asked for
"""

import dataclasses
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedjaxsim.engine.checkpoint import Checkpoint, CheckpointFolder
from fedjaxsim.extras import importing
from fedjaxsim.privacy.assumptions import SHARED_SEED
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
      versions: of the programs.
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
        names = (CHECKPOINT, RESULTS, ENVELOPES, REPORT, SWEEP) if overwrite else ()
        make_directory(path, names, "sweep", overwrite=overwrite, pictures=(*PICTURES, PAGE))
        directory = cls(path, plan, versions, data)
        for unfinished in path.glob(f".{RESULTS}.*"):
            unfinished.unlink()
        write_tables(path / SWEEP, directory._description())
        return directory

    @property
    def checkpoints(self) -> CheckpointFolder:
        """Of the chunk in progress; notes say which `runs` it has, in how many `places`."""
        about = {"settings": self.plan.fingerprint, "data": self.data}
        return CheckpointFolder(self.path / CHECKPOINT, about)

    def results(self) -> pa.Table:
        """Read the evaluations of all runs that are done, by run and round.

        Raises:
          ValueError: if the file is damaged.
        """
        path = self.path / RESULTS
        if not path.exists():
            return tidy(self.plan, [])
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                table, expected = file.read(use_threads=False), file.metadata.num_rows
            # Checksums cover the data of a page, but not the header with its length.
            if table.num_rows != expected:
                raise ValueError(f"it must have {expected} rows, got {table.num_rows}")
            missing = set(tidy(self.plan, []).column_names) - set(table.column_names)
            if missing:
                raise ValueError(f"it lacks the column {min(missing)}")
        except (pa.ArrowException, ValueError, OSError) as error:
            raise ValueError(
                f"{path} is damaged ({error}): delete it, and its runs are computed again"
            ) from error
        return table

    def finished(self) -> set[int]:
        """Return the indices of the runs that are done.

        Raises:
          ValueError: as `results`.
        """
        return set(self.results()["run"].to_pylist())

    def times(self) -> dict[str, float]:
        """Return the `seconds` and `compile_seconds` of all runs that are done."""
        metadata = self.results().schema.metadata or {}
        return json.loads(metadata.get(_METADATA, b'{"seconds": 0.0, "compile_seconds": 0.0}'))

    def add(self, rows: Iterable[Record], *, seconds: float, compile_seconds: float) -> None:
        """Add all evaluations of runs that are done to the results, and remove their checkpoint.

        Args:
          rows: as `tidy` takes them.
          seconds: time of rounds and evaluations.
          compile_seconds: time of compilation.

        Raises:
          ValueError: as `results`.
        """
        table = pa.concat_tables([self.results(), tidy(self.plan, rows)], promote_options="default")
        # A metric that earlier runs lack has come last.
        first = [name for name in table.column_names if name not in LAST_COLUMNS]
        table = table.select([*first, *LAST_COLUMNS])
        table = table.sort_by([("run", "ascending"), ("round", "ascending")])
        times = self.times()
        times["seconds"] += seconds
        times["compile_seconds"] += compile_seconds
        _write_table(
            self.path / RESULTS, table.replace_schema_metadata({_METADATA: json.dumps(times)})
        )
        self.checkpoints.clear()

    def checkpoint(self) -> Checkpoint | None:
        """That of the chunk in progress; None where there is none, or its runs are done.

        Raises:
          ValueError: if it is damaged or belongs to another sweep.
        """
        last = self.checkpoints.last()
        # Results are written before their checkpoints are removed.
        if last is not None and set(last.note["runs"]) <= self.finished():
            self.checkpoints.clear()
            return None
        return last

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


def _write_table(path: Path, table: pa.Table) -> None:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    write_atomically(path, sink.getvalue())
