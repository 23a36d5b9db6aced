"""The metrics that evaluations report: one record for each, which tables, figures and tuning read.

A metric without a record works as well: it is called by its name, is reduced as a plain mean over
clients, counts as smooth, and as better where it is smaller (unless it is some accuracy). JAX is
not imported, as what compares finished runs needs none.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Metric(NamedTuple):
    """What is known of a metric.

    Attributes:
      title: its name for people.
      unit: of its values, where they have one.
      larger_is_better: its direction.
      logarithmic: whether it belongs on a logarithmic axis.
      smooth: whether it has a derivative in the models' parameters.
      pooled: whether its plain value is the mean over examples, and `_unweighted` that over
        clients; else the plain one is the mean over clients, and `_weighted` that over examples.
      in_tables: endings of its columns in tables of runs; one without any is in no table.
    """

    title: str
    unit: str | None = None
    larger_is_better: bool = False
    logarithmic: bool = False
    smooth: bool = True
    pooled: bool = False
    in_tables: tuple[str, ...] = ("", "_p10", "_p90")


MAJORITY = "majority_accuracy"
"""The accuracy of always saying the class that is most frequent in the training rows."""
METRICS = {
    "excess_risk": Metric("excess risk", logarithmic=True),
    "accuracy": Metric("accuracy", "fraction", larger_is_better=True, smooth=False),
    "nmse": Metric("nMSE", "MSE / variance", pooled=True),
    "loss": Metric("loss", in_tables=()),
    "auc": Metric("aAUC", larger_is_better=True, smooth=False, in_tables=("",)),
    "balanced_accuracy": Metric(
        "balanced accuracy", "fraction", larger_is_better=True, smooth=False, in_tables=()
    ),
    MAJORITY: Metric(
        "majority accuracy", "fraction", larger_is_better=True, smooth=False, in_tables=()
    ),
}
"""All that are known, by a task's name for them; runs are judged by the first that they have."""


def metric(name: str) -> Metric:
    """The record of a task's metric."""
    plain = Metric(name.replace("_", " "), larger_is_better="accuracy" in name)
    return METRICS.get(name, plain)


def of_column(column: str) -> Metric:
    """The record of a column of results, such as `test_accuracy_p10`."""
    name = column.partition("_")[2]
    known = (one for one in METRICS if name == one or name.startswith(f"{one}_"))
    return metric(next(known, name))


def label(column: str) -> str:
    """A column of results as axes name it, with its unit where it has one."""
    split, _, name = column.partition("_")
    if name not in METRICS:
        return column.replace("_", " ")
    unit = METRICS[name].unit
    return f"{split} {METRICS[name].title}" + (f" ({unit})" if unit else "")


def judged_by(columns: Iterable[str]) -> str | None:
    """The column of test results by which runs are judged: of the first metric in the list.

    None where there is no such column; any other than those in the list comes after them.
    """
    columns = [column for column in columns if column.startswith("test_")]
    return next((f"test_{n}" for n in METRICS if f"test_{n}" in columns), next(iter(columns), None))


def in_tables() -> list[tuple[str, Metric]]:
    """The columns that tables and lines of progress show, where runs have them."""
    return [(f"test_{name}", one) for name, one in METRICS.items() if one.in_tables]
