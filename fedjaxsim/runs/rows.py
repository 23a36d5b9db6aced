"""The tidy table of a sweep: one row per run and evaluation.

The columns of the results are `run`; every swept key by its field name (`target_epsilon` for ε),
null where a run's table does not set it; `round`; `train_loss`; the evaluation's metrics;
`epsilon` and `epsilon_replace`, what was spent up to here (joint DP, zero-out and replace; null
where nothing is promised) at `delta`; and `diverged`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from fedjaxsim.report.files import Record
from fedjaxsim.runs.plan import Plan, value_type

LAST_COLUMNS = ("epsilon", "epsilon_replace", "delta", "diverged")
"""The columns after the metrics."""

_SPENT = ("epsilon", "epsilon_replace")
_GROWTH = 10
_TYPES = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}


def records(runs: Sequence[int], round_: int, columns: Mapping[str, Any]) -> list[Record]:
    """One evaluation of many runs as one record per run.

    Args:
      runs: S indices of runs.
      round_: rounds done.
      columns: by name, (S,) values, or one value or None for all.
    """
    table = [
        [value] * len(runs) if value is None or np.ndim(value) == 0 else list(value)
        for value in columns.values()
    ]
    return [
        {"run": run, "round": round_, **dict(zip(columns, values, strict=True))}
        for run, *values in zip(runs, *table, strict=True)
    ]


def tidy(plan: Plan, rows: Iterable[Record]) -> pa.Table:
    """The table of results, by run and round.

    Args:
      plan: of the sweep.
      rows: one per run and evaluation, each run's from its first evaluation on: `run`, `round`,
        `train_loss` (None where no one took part since the last evaluation), metrics by name,
        `epsilon`, `epsilon_replace` (None or inf where nothing is promised) and `delta`.

    Returns:
      The table. A run counts as diverged from where its training loss, or a metric that was finite
      at first, is not finite; and where its training loss is more than ten times its first one. (A
      run that noise carries away from a good start is worse, and not diverging.)
    """
    ordered = sorted(rows, key=lambda row: (row["run"], row["round"]))
    fixed = {"run", *plan.columns, "round", "train_loss", *LAST_COLUMNS}
    names = dict.fromkeys(name for row in ordered for name in row)
    metrics = [name for name in names if name not in fixed]
    by_run: dict[int, list[Record]] = {}
    for row in ordered:
        by_run.setdefault(int(row["run"]), []).append(row)
    diverged = [state for of_run in by_run.values() for state in _diverged(of_run, metrics)]
    swept = {run: plan.values(run) for run in by_run}
    columns: dict[str, pa.Array] = {"run": pa.array([row["run"] for row in ordered], pa.int32())}
    for key, name in zip(plan.keys, plan.columns, strict=True):
        if name not in LAST_COLUMNS:
            values = [swept[int(row["run"])][name] for row in ordered]
            columns[name] = pa.array(values, _TYPES[value_type(key)])
    columns["round"] = pa.array([row["round"] for row in ordered], pa.int32())
    for name in ("train_loss", *metrics):
        columns[name] = _floats(row.get(name) for row in ordered)
    for name in _SPENT:
        columns[name] = _floats(_promised(row.get(name)) for row in ordered)
    columns["delta"] = _floats(row.get("delta") for row in ordered)
    columns["diverged"] = pa.array(diverged, pa.bool_())
    return pa.table(columns)


def _floats(values: Iterable[Any]) -> pa.Array:
    """NaN stays NaN, None becomes null."""
    return pa.array([None if value is None else float(value) for value in values], pa.float64())


def _promised(epsilon: float | None) -> float | None:
    return None if epsilon is None or not math.isfinite(epsilon) else epsilon


def _diverged(rows: Sequence[Record], metrics: Sequence[str]) -> Iterator[bool]:
    """Whether one run has diverged, evaluation by evaluation."""

    def finite(value: Any) -> bool:
        return value is None or math.isfinite(value)

    # A metric that has no value from the start (no client has test rows) says nothing.
    watched = [name for name in metrics if finite(rows[0].get(name))]
    first, broken, growing = None, False, False
    for row in rows:
        loss = row.get("train_loss")
        broken |= not all(finite(value) for value in (loss, *map(row.get, watched)))
        if loss is not None and not broken:
            first = loss if first is None else first
            growing = loss > _GROWTH * first
        yield broken or growing
