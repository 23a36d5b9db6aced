"""Records of metrics, which tables, figures and tuning read.

A task has the records of its own metrics, in `Task.records`. A metric without a record has its name
as title, is a plain mean over clients, and has no direction: nothing that needs one is reported.
JAX is not imported: comparing finished runs needs none.
"""

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple


class Metric(NamedTuple):
    """Properties of a metric.

    Attributes:
      title: name in tables and figures.
      unit: unit of the values, if any.
      larger_is_better: direction of improvement; None if it is unknown.
      range: smallest and largest value, to which intervals in figures are clipped.
      logarithmic: whether it belongs on a logarithmic axis.
      smooth: whether it has a derivative in the models' parameters.
      pooled: whether its plain value is the mean over examples and `_unweighted` the mean over
        clients; else the plain value is the mean over clients and `_weighted` over examples.
      power: power of the target's unit in which it is measured: 2 for a squared error. Metrics are
        reported in the units of the target's source, whatever scaled it.
      in_tables: endings of its columns in tables of runs.
    """

    title: str
    unit: str | None = None
    larger_is_better: bool | None = None
    range: tuple[float, float] = -math.inf, math.inf
    logarithmic: bool = False
    smooth: bool = True
    pooled: bool = False
    power: int = 0
    in_tables: tuple[str, ...] = ("", "_p10", "_p90")


SAMPLED = "sampled_clients"
"""The key of the number of clients in a record, if a sample was evaluated."""
_FRACTION, _POSITIVE = (0.0, 1.0), (0.0, math.inf)
METRICS = {
    "excess_risk": Metric("excess risk", larger_is_better=False, range=_POSITIVE, logarithmic=True),
    "accuracy": Metric("accuracy", "fraction", True, _FRACTION, smooth=False),
    "nmse": Metric("nMSE", "MSE / variance", False, _POSITIVE, pooled=True),
    "loss": Metric("loss", larger_is_better=False, in_tables=()),
    "auc": Metric("aAUC", None, True, _FRACTION, smooth=False, in_tables=("",)),
    "squared_error": Metric("squared error", None, False, _POSITIVE, power=2, in_tables=()),
}
"""Records by metric name. A run is judged by the first metric of this list that it has."""


def metric(name: str, own: Mapping[str, Metric] = MappingProxyType({})) -> Metric:
    """Return the record of a task's metric; `own` are the task's `records`."""
    return own.get(name) or METRICS.get(name) or Metric(name.replace("_", " "))


def larger_is_better(name: str, own: Mapping[str, Metric] = MappingProxyType({})) -> bool:
    """Return the direction of a task's metric; raise ValueError if it states none."""
    known = metric(name, own).larger_is_better
    if known is None:
        raise ValueError(
            f"the metric {name!r} must state whether larger is better: give its task "
            f"records={{{name!r}: fjs.tasks.Metric({name!r}, larger_is_better=True)}}"
        )
    return known


def of_column(column: str) -> Metric:
    """Return the record of a column of results, such as `test_accuracy_p10`."""
    name = column.partition("_")[2]
    known = (one for one in METRICS if name == one or name.startswith(f"{one}_"))
    return metric(max(known, key=len, default=name))


def label(column: str) -> str:
    """Return the label of a column of results, with its unit if it has one."""
    split, _, name = column.partition("_")
    if name not in METRICS:
        return column.replace("_", " ")
    unit = METRICS[name].unit
    return f"{split} {METRICS[name].title}" + (f" ({unit})" if unit else "")


def judged_by(columns: Iterable[str]) -> str | None:
    """Return the test column by which runs are judged, by the order of `METRICS`, others last."""
    columns = [column for column in columns if column.startswith("test_")]
    return next((f"test_{n}" for n in METRICS if f"test_{n}" in columns), next(iter(columns), None))


def in_tables() -> list[tuple[str, Metric]]:
    """Return the columns of tables and progress lines, with their metrics."""
    return [(f"test_{name}", one) for name, one in METRICS.items() if one.in_tables]
