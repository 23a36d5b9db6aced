"""The files of a sweep, written by `fedjaxsim.store`, so that an interrupted one can resume.

A sweep directory holds

    sweep.toml          the sweep as asked for (it can be run again), resolved values, versions
    results.parquet     finished runs: one row per run and evaluation, by run and round
    search/             the runs that chose the settings, a sweep of its own, if the file searches
    checkpoint/         the chunk in progress: its rows so far and the state of the engine
    report.json         a summary, guarantees, draws, and what is not covered; written last
    *.png, *.pdf        figures
"""

import dataclasses
import io
import itertools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedjaxsim import store
from fedjaxsim.data.files import read_tables
from fedjaxsim.divergence import failures
from fedjaxsim.engine.checkpoint import Checkpoint, CheckpointFolder
from fedjaxsim.engine.processes import is_first
from fedjaxsim.extras import importing
from fedjaxsim.privacy.assumptions import SHARED_SEED
from fedjaxsim.records import fits
from fedjaxsim.report.files import (
    Record,
    make_directory,
    write_json,
    write_tables,
)
from fedjaxsim.report.results import LAST_COLUMNS
from fedjaxsim.runs.sweep_runs import SWEEP, SweepRuns

with importing("tables"):
    import pyarrow as pa
    import pyarrow.parquet as pq

PICTURES = ("envelopes.png", "trade_off.png")
CHECKPOINT = "checkpoint"
ROWS = "rows.jsonl"
RESULTS = "results.parquet"
SEARCH = "search"
REPORT = "report.json"

SELECTION = (
    "Each guarantee is that of one run alone. Choosing the best of a sweep by metrics of private "
    "data is not covered by any of them, and neither is publishing the metrics: both need a budget "
    "of their own."
)
"""A sentence of every report of a sweep."""


@dataclasses.dataclass(frozen=True)
class SweepDirectory:
    """The directory of one sweep.

    Methods raise ValueError for a damaged file, or a checkpoint of another sweep.

    Attributes:
      path: the directory.
      sweep: the runs.
      data: a fingerprint of the clients' rows, which a checkpoint belongs to.
    """

    path: Path
    sweep: SweepRuns
    data: str = ""

    @classmethod
    def open(
        cls,
        path: Path,
        sweep: SweepRuns,
        versions: Mapping[str, str],
        data: str = "",
        *,
        overwrite: bool = False,
    ) -> "SweepDirectory":
        """Make the directory and its parents, or open it to resume the same runs.

        With `overwrite`, the files of the sweep that the directory holds are removed. `versions` of
        the programs, by name, are written into its file.

        Raises:
          ValueError: if the path is a file or cannot be made, or holds another sweep and may not
            be overwritten.
        """
        if is_first():
            names = (CHECKPOINT, RESULTS, REPORT, SWEEP) if overwrite else ()
            papers = [name.replace(".png", ".pdf") for name in PICTURES]
            pictures = (*PICTURES, *papers)
            make_directory(path, names, "sweep", overwrite=overwrite, pictures=pictures)
        if not overwrite:
            _check_same(path, sweep)
        if is_first():
            resolved = {
                "fingerprint": sweep.fingerprint,
                "runs": len(sweep.runs),
                "programs": len(sweep.families()),
                "best_over": list(sweep.best_over),
                "data_fingerprint": data,
            }
            tables = {**sweep.settings(), "resolved": resolved, "versions": dict(versions)}
            write_tables(path / SWEEP, tables)
        return cls(path, sweep, data)

    @property
    def checkpoints(self) -> CheckpointFolder:
        """The chunk in progress; notes hold its `runs` and the number of its `places`."""
        about = {"settings": self.sweep.fingerprint, "data": self.data}
        return CheckpointFolder(self.path / CHECKPOINT, about, fits(self.rows))

    @property
    def rows(self) -> Path:
        """The evaluations of the chunk in progress."""
        return self.path / CHECKPOINT / ROWS

    def results(self) -> pa.Table:
        """Read the evaluations of all finished runs, by run and round."""
        path, empty = self.path / RESULTS, tidy(self.sweep, [])
        if not path.exists():
            return empty
        table = read_results(path)
        missing = set(empty.column_names) - set(table.column_names)
        if missing:
            raise _damaged(path, f"it lacks the column {min(missing)}")
        return table

    def finished(self) -> set[int]:
        """Return the indices of the finished runs."""
        return set(self.results()["run"].to_pylist())

    def add(self, rows: Iterable[Record]) -> None:
        """Add all evaluations of finished runs to the results, and remove their checkpoint.

        Args:
          rows: as for `tidy`.
        """
        added = tidy(self.sweep, rows)
        table = pa.concat_tables([self.results(), added], promote_options="default")
        # A metric that earlier runs lack has come last.
        first = [name for name in table.column_names if name not in LAST_COLUMNS]
        table = table.select([*first, *LAST_COLUMNS])
        table = table.sort_by([("run", "ascending"), ("round", "ascending")])
        sink = io.BytesIO()
        pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
        store.write(self.path / RESULTS, sink.getvalue())
        self.checkpoints.clear()

    def checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint of the chunk in progress; None without one."""
        last = self.checkpoints.last()
        # Results are written before their checkpoints are removed.
        if last is not None and set(last.note["runs"]) <= self.finished():
            if is_first():
                self.checkpoints.clear()
            return None
        return last

    def write_report(self, summary: Mapping[str, Any], guarantees: Any, draws: Any = ()) -> None:
        """Write the report, with a sentence that no guarantee covers the choice of a run."""
        report = {"summary": summary, "selection": SELECTION, "shared_seed": SHARED_SEED}
        report |= {"guarantees": guarantees, "draws": draws}
        write_json(self.path / REPORT, report)


def read_results(path: Path) -> pa.Table:
    """Read the evaluations of finished runs, by run and round.

    Raises:
      ValueError: if the file is damaged.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table, expected = file.read(use_threads=False), file.metadata.num_rows
    except (pa.ArrowException, ValueError, OSError) as error:
        raise _damaged(path, error) from error
    # Checksums cover the data of a page, but not the header with its length.
    if table.num_rows != expected:
        raise _damaged(path, f"it must have {expected} rows, got {table.num_rows}")
    return table


def _damaged(path: Path, why: object) -> ValueError:
    return ValueError(f"{path} is damaged ({why}): delete it, and its runs are computed again")


def _check_same(path: Path, sweep: SweepRuns) -> None:
    """Check that a directory holds no other sweep."""
    if not (path / SWEEP).is_file():
        return
    try:
        fingerprint = read_tables(path / SWEEP)["resolved"]["fingerprint"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path / SWEEP} is damaged ({error}): choose another directory or say --overwrite"
        ) from error
    if fingerprint != sweep.fingerprint:
        raise ValueError(
            f"{path} holds another sweep (sweep.toml): choose another directory or say --overwrite"
        )


# --- the table of results -----------------------------------------------------------------------


def tidy(sweep: SweepRuns, rows: Iterable[Record]) -> pa.Table:
    """Return the table of results: one row per run and evaluation, by run and round.

    Its columns are `run`; every swept key by its field name (`target_epsilon` for ε), null where a
    run's table does not set it; `round`; `train_loss`; the evaluation's metrics; `epsilon` and
    `epsilon_replace`, spent up to this round (joint DP, zero-out and replace; null without a
    guarantee) at `delta`; and `failed`, from `divergence.failures`.

    Args:
      sweep: the runs of the sweep.
      rows: one per run and evaluation, from each run's first one on: `run`, `round`, `train_loss`
        (None if no client took part since the last evaluation), metrics by name, `epsilon`,
        `epsilon_replace` (None or inf without a guarantee) and `delta`.
    """
    ordered = sorted(rows, key=lambda row: (row["run"], row["round"]))
    swept = {run: sweep.values(run) for run in {int(row["run"]) for row in ordered}}
    fixed = {"run", *sweep.columns, "round", "train_loss", *LAST_COLUMNS}
    metrics = [name for name in dict.fromkeys(itertools.chain(*ordered)) if name not in fixed]
    by_run = (list(alike) for _, alike in itertools.groupby(ordered, key=lambda row: row["run"]))
    columns: dict[str, pa.Array] = {"run": pa.array([row["run"] for row in ordered], pa.int32())}
    for name in sweep.columns:
        if name not in LAST_COLUMNS:
            columns[name] = pa.array([swept[row["run"]][name] for row in ordered])
    columns["round"] = pa.array([row["round"] for row in ordered], pa.int32())
    for name in ("train_loss", *metrics, *LAST_COLUMNS[:-1]):
        columns[name] = pa.array([_float(name, row.get(name)) for row in ordered], pa.float64())
    columns["failed"] = pa.array(itertools.chain(*map(failures, by_run)), pa.bool_())
    return pa.table(columns)


def _float(name: str, value: Any) -> float | None:
    """Return None for an infinite ε, and NaN with the sign that JSON leaves it."""
    if value is None or (name in LAST_COLUMNS and not math.isfinite(value)):
        return None
    return float(value) if value == value else math.nan
