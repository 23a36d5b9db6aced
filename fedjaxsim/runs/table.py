"""The tidy table of a sweep: one row per run and evaluation.

Its columns are `run`; every swept key by its field name (`target_epsilon` for ε), null where a
run's table does not set it; `round`; `train_loss`; the evaluation's metrics; `epsilon` and
`epsilon_replace`, spent up to this round (joint DP, zero-out and replace; null without a guarantee)
at `delta`; and `failed`, from `report.results.failures`.
"""

import itertools
import math
from collections.abc import Iterable
from typing import Any

from fedjaxsim.divergence import failures
from fedjaxsim.extras import importing
from fedjaxsim.report.files import Record
from fedjaxsim.report.results import LAST_COLUMNS
from fedjaxsim.runs.sweep_runs import SweepRuns

with importing("tables"):
    import pyarrow as pa

_TYPES = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}


def tidy(sweep: SweepRuns, rows: Iterable[Record]) -> pa.Table:
    """Return the table of results, by run and round.

    Args:
      sweep: the runs of the sweep.
      rows: one per run and evaluation, from each run's first one on: `run`, `round`, `train_loss`
        (None if no client took part since the last evaluation), metrics by name, `epsilon`,
        `epsilon_replace` (None or inf without a guarantee) and `delta`.
    """
    ordered = sorted(rows, key=lambda row: (row["run"], row["round"]))
    fixed = {"run", *sweep.columns, "round", "train_loss", *LAST_COLUMNS}
    metrics = [name for name in dict.fromkeys(itertools.chain(*ordered)) if name not in fixed]
    by_run = [list(rows) for _, rows in itertools.groupby(ordered, key=lambda row: row["run"])]
    swept = {rows[0]["run"]: sweep.values(int(rows[0]["run"])) for rows in by_run}
    columns: dict[str, pa.Array] = {"run": pa.array([row["run"] for row in ordered], pa.int32())}
    for key, name in zip(sweep.keys, sweep.columns, strict=True):
        if name not in LAST_COLUMNS:
            values = [swept[row["run"]][name] for row in ordered]
            columns[name] = pa.array(values, _TYPES[sweep.value_type(key)])
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
