"""The tidy table of a sweep: one row per run and evaluation.

The columns of the results are `run`; every swept key by its field name (`target_epsilon` for ε),
null where a run's table does not set it; `round`; `train_loss`; the evaluation's metrics;
`epsilon` and `epsilon_replace`, what was spent up to here (joint DP, zero-out and replace; null
where nothing is promised) at `delta`; and `diverged`.
"""

import math
from collections.abc import Iterable
from typing import Any

from fedjaxsim.extras import importing
from fedjaxsim.report.envelopes import LAST_COLUMNS
from fedjaxsim.report.files import Record
from fedjaxsim.runs.divergence import diverged
from fedjaxsim.runs.plan import Plan

with importing("tables"):
    import pyarrow as pa

_SPENT = ("epsilon", "epsilon_replace")
_TYPES = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}


def tidy(plan: Plan, rows: Iterable[Record]) -> pa.Table:
    """The table of results, by run and round.

    Args:
      plan: of the sweep.
      rows: one per run and evaluation, each run's from its first evaluation on: `run`, `round`,
        `train_loss` (None where no one took part since the last evaluation), metrics by name,
        `epsilon`, `epsilon_replace` (None or inf where nothing is promised) and `delta`.

    Returns:
      The table; `diverged` is as `divergence.diverged` says.
    """
    ordered = sorted(rows, key=lambda row: (row["run"], row["round"]))
    fixed = {"run", *plan.columns, "round", "train_loss", *LAST_COLUMNS}
    names = dict.fromkeys(name for row in ordered for name in row)
    metrics = [name for name in names if name not in fixed]
    by_run: dict[int, list[Record]] = {}
    for row in ordered:
        by_run.setdefault(int(row["run"]), []).append(row)
    broken = [each for of_run in by_run.values() for each in diverged(of_run)]
    swept = {run: plan.values(run) for run in by_run}
    columns: dict[str, pa.Array] = {"run": pa.array([row["run"] for row in ordered], pa.int32())}
    for key, name in zip(plan.keys, plan.columns, strict=True):
        if name not in LAST_COLUMNS:
            values = [swept[int(row["run"])][name] for row in ordered]
            columns[name] = pa.array(values, _TYPES[plan.value_type(key)])
    columns["round"] = pa.array([row["round"] for row in ordered], pa.int32())
    for name in ("train_loss", *metrics):
        columns[name] = _floats(row.get(name) for row in ordered)
    for name in _SPENT:
        columns[name] = _floats(_promised(row.get(name)) for row in ordered)
    columns["delta"] = _floats(row.get("delta") for row in ordered)
    columns["diverged"] = pa.array(broken, pa.bool_())
    return pa.table(columns)


def _floats(values: Iterable[Any]) -> pa.Array:
    """NaN stays NaN, with the one sign that JSON leaves it; None becomes null."""
    numbers = (None if value is None else float(value) for value in values)
    return pa.array([math.nan if each != each else each for each in numbers], pa.float64())


def _promised(epsilon: float | None) -> float | None:
    return None if epsilon is None or not math.isfinite(epsilon) else epsilon
