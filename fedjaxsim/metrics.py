"""Records of metrics: what a metric is called, which way is better, and how it is averaged.

`resolve_metrics` decides the record of each metric once, from the task. The records travel with
the results: in an `Evaluation`, in a run's config.toml, in the metadata of a sweep's results. Every
reader (tables, progress, comparisons, sweeps, tuning, patience, figures) takes them from there and
reads no meaning into a metric's name. JAX is not imported: comparing finished runs needs none.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from fedjaxsim import checks


class Metric(NamedTuple):
    """Properties of a metric.

    Attributes:
      title: name in tables and figures.
      unit: unit of the values, if any.
      larger_is_better: direction of improvement; if it is None, nothing is chosen by the metric.
      range: smallest and largest value, to which intervals in figures are clipped.
      logarithmic: whether it belongs on a logarithmic axis.
      smooth: whether it has a derivative in the models' parameters.
      pooled: whether its plain value is the mean over examples and `_unweighted` the mean over
        clients; else the plain value is the mean over clients and `_weighted` over examples.
      power: power of the target's unit in which it is measured: 2 for a squared error. Metrics are
        reported in the units of the target's source, whatever scaled it.
      target: place of the target in whose unit it is measured, if rows have several.
      mean_of: names of the metrics of single targets whose mean it is, if rows have several.
      in_tables: endings of its columns in tables of runs, "" for its plain value.
    """

    title: str
    unit: str | None = None
    larger_is_better: bool | None = None
    range: tuple[float, float] = -math.inf, math.inf
    logarithmic: bool = False
    smooth: bool = True
    pooled: bool = False
    power: int = 0
    target: int = 0
    mean_of: tuple[str, ...] = ()
    in_tables: tuple[str, ...] = ("",)

    @property
    def averaging(self) -> str:
        """Average of its plain value; clients without a value are in no mean over clients."""
        return "pooled" if self.pooled else "client mean"


MetricRecords = Mapping[str, Metric]
"""Records by the names of metrics; runs are judged by the first that they have."""

SAMPLED = "sampled_clients"
"""The key of the number of clients in a record, if a sample was evaluated."""
ENDINGS = (
    "_weighted", "_unweighted", "_p10", "_p50", "_p90", "_std", "_worst_tenth", "_undefined",
)  # fmt: skip
"""Endings of the columns of a metric besides its plain value."""
_FRACTION, _POSITIVE, _SPREAD = (0.0, 1.0), (0.0, math.inf), ("", "_p10", "_p90")
METRICS = {
    "rare_class_loss": Metric("log loss (rare class)", None, False, _POSITIVE),
    "excess_risk": Metric(
        "excess risk", larger_is_better=False, range=_POSITIVE, logarithmic=True, in_tables=_SPREAD
    ),
    "accuracy": Metric("accuracy", "fraction", True, _FRACTION, smooth=False, in_tables=_SPREAD),
    "nmse": Metric("nMSE", "MSE / variance", False, _POSITIVE, pooled=True, in_tables=_SPREAD),
    "auc": Metric("aAUC", None, True, _FRACTION, smooth=False),
    "concordance": Metric("concordance", None, True, _FRACTION, smooth=False),
    "loss": Metric("loss", larger_is_better=False, in_tables=()),
    "squared_error": Metric("squared error", None, False, _POSITIVE, power=2, in_tables=()),
}
"""Records of the package's metrics, in the order of tables."""


def find_metric(name: str, records: MetricRecords) -> Metric:
    """Return the record of a metric; without one, the package's, or its name as the title."""
    return records.get(name) or METRICS.get(name) or Metric(name.replace("_", " "))


def resolve_metrics(
    names: Collection[str], stated: MetricRecords, judged_by: str | None = None
) -> dict[str, Metric]:
    """Decide the records of a task's metrics and their order: runs are judged by the first.

    Metrics that tables show and that have a direction come first, then others with a direction,
    such as the loss; among them, `METRICS`' before the task's own.

    Args:
      names: names of all metrics of the task.
      stated: the task's own `records`.
      judged_by: the metric by which runs are judged, in place of that first one.

    Raises:
      ValueError: if a record is of no metric or is no `Metric`, if the columns of two metrics
        would have one name, or if the task lacks the metric `judged_by`.
    """
    if judged_by is not None:
        judged_by = named_metric(judged_by, names)
        checks.one_of(names, metric=judged_by)
    for name, record in stated.items():
        if not isinstance(record, Metric):
            raise ValueError(f"records must hold fjs.tasks.Metric, got {record!r} for {name!r}")
        if name not in names:
            raise ValueError(
                f"records describe the metric {name!r}, which the task does not compute: it has "
                f"{', '.join(names)}"
            )
    _check_names(names)
    ordered = dict.fromkeys([*(name for name in METRICS if name in names), *names])
    records = {name: find_metric(name, stated) for name in ordered}
    if judged_by is not None:
        record = records[judged_by]
        records[judged_by] = record._replace(in_tables=record.in_tables or ("",))

    def rank(name: str) -> tuple[bool, bool, bool]:
        record = records[name]
        return name != judged_by, record.larger_is_better is None, not record.in_tables

    return {name: records[name] for name in sorted(records, key=rank)}


def _check_names(names: Collection[str]) -> None:
    """Check that no metric has the name of another one's column."""
    if "failed" in names:
        raise ValueError(
            "the metric 'failed' must have another name: the column of clients whose model "
            "predicts NaN has it"
        )
    for name in names:
        for ending in ENDINGS:
            if name + ending in names:
                raise ValueError(
                    f"the metric {name + ending!r} must have another name: a column of the metric "
                    f"{name!r} has it"
                )


def merge_metrics(of_tasks: Iterable[MetricRecords]) -> dict[str, Metric]:
    """Return the records of several tasks, in the order of the first one that has them.

    Of records that differ in words alone, the first stays. Raises ValueError if two of one name
    differ in direction, averaging or unit of the target: their values are not comparable.
    """
    merged: dict[str, Metric] = {}
    for records in of_tasks:
        for name, record in records.items():
            first = merged.setdefault(name, record)
            for what in ("larger_is_better", "pooled", "power"):
                values = getattr(first, what), getattr(record, what)
                if values[0] != values[1]:
                    raise ValueError(
                        f"runs contradict each other on the metric {name!r}: {what} is {values[0]} "
                        f"for some and {values[1]} for others; give one of them another name"
                    )
    _check_names(merged)
    return merged


def require_direction(name: str, records: MetricRecords) -> bool:
    """Return whether larger is better; raise ValueError if the metric states no direction."""
    larger_is_better = find_metric(name, records).larger_is_better
    if larger_is_better is None:
        raise ValueError(
            f"the metric {name!r} must state whether larger is better: make its record "
            f"fjs.tasks.Metric({name!r}, larger_is_better=True), or False"
        )
    return larger_is_better


# --- columns of results ---------------------------------------------------------------------------


def named_metric(word: str, names: Collection[str]) -> str:
    """Return the metric that a word names; dashes may stand for underscores, as in `top-5`."""
    return word if word in names else word.replace("-", "_")


def metric_name(column: str, records: MetricRecords = METRICS) -> str | None:
    """Return the metric of a column of results, such as `test_accuracy_p10`; None if of none."""
    name = column.partition("_")[2]
    if name in records:
        return name
    return next((name.removesuffix(e) for e in ENDINGS if name.removesuffix(e) in records), None)


def column_metric(column: str, records: MetricRecords = METRICS) -> Metric:
    """Return the record of the metric of a column of results."""
    name = metric_name(column, records)
    return Metric(column.partition("_")[2].replace("_", " ")) if name is None else records[name]


def column_label(column: str, records: MetricRecords = METRICS) -> str:
    """Return the label of a column of results, with its unit if it has one."""
    split, _, name = column.partition("_")
    if name not in records:
        return column.replace("_", " ")
    unit = records[name].unit
    return f"{split} {records[name].title}" + (f" ({unit})" if unit else "")


def primary_metric(columns: Iterable[str], records: MetricRecords = METRICS) -> str | None:
    """Return the test column by which runs are judged: the first record's; else any."""
    columns = [column for column in columns if column.startswith("test_")]
    return next((f"test_{n}" for n in records if f"test_{n}" in columns), next(iter(columns), None))


def table_metrics(records: MetricRecords = METRICS) -> list[tuple[str, Metric]]:
    """Return the columns of tables and progress lines, with their metrics."""
    return [(f"test_{name}", record) for name, record in records.items() if record.in_tables]


# --- files ----------------------------------------------------------------------------------------


def metrics_to_tables(records: MetricRecords) -> dict[str, dict[str, Any]]:
    """Return records as tables of TOML or JSON, without what is as by default."""
    tables = {}
    for name, record in records.items():
        table = record._asdict()
        least, most = table.pop("range")
        table |= {"least": least, "most": most}
        table |= {n: list(table[n]) for n in ("mean_of", "in_tables")}
        usual = {**Metric._field_defaults, "least": -math.inf, "most": math.inf}
        usual |= {"mean_of": [], "in_tables": [""]}
        tables[name] = {k: v for k, v in table.items() if k == "title" or v != usual[k]}
    return tables


def metrics_from_tables(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Metric]:
    """Return the records that `metrics_to_tables` wrote; raise ValueError for other tables."""
    records = {}
    try:
        for name, table in tables.items():
            values = dict(table)
            value_range = values.pop("least", -math.inf), values.pop("most", math.inf)
            endings = tuple(values.pop("in_tables", ("",)))
            parts = tuple(values.pop("mean_of", ()))
            records[name] = Metric(**values, range=value_range, in_tables=endings, mean_of=parts)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"its records of metrics are damaged: {error}") from error
    return records
