"""A task in the terms of the source of its rows: units of targets, names of columns and classes.

Models, losses and rows of a run are stored numbers. This is the only place where what leaves a run
(metrics, predictions, coefficients) is turned into the terms of the user's own table, and where
other rows are turned into the run's.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np

from fedjaxsim import checks
from fedjaxsim.data.columns import Columns
from fedjaxsim.data.population import Population
from fedjaxsim.metrics import Metric, MetricRecords
from fedjaxsim.tasks.task import Task, check_rows

PyTree = Any
_UNNAMED = Columns(("y",))


@dataclasses.dataclass(frozen=True, eq=False)
class TaskInSource:
    """A task with the columns and the classes of the rows on which its models are trained.

    Attributes:
      task: the task.
      x: the columns of the features; None if they are no rows (N, d).
      y: the columns of the targets; classes have no unit.
      classes: the names of the classes 0, 1, …; None if they have none.
    """

    task: Task
    x: Columns | None
    y: Columns
    classes: tuple[str, ...] | None

    @classmethod
    def of(cls, task: Task, population: Population) -> Self:
        """Return the task on a population, whose rows must suit it."""
        columns, classes = population.columns, population.categories.get("y")
        check_rows(task, population.fields, classes)
        return cls(task, columns.get("x"), columns.get("y", _UNNAMED), classes)

    # --- bounds -----------------------------------------------------------------------------------

    @property
    def largest_row(self) -> float:
        """Largest Euclidean norm of a row of features that is known without reading rows."""
        return math.inf if self.x is None else self.x.norm

    @property
    def bounds_targets(self) -> bool:
        """Return whether targets are bounded by the task's labels or by public ranges.

        Counts have no bound.
        """
        has_labels = bool(self.task.labels) and self.task.exposure is None
        return has_labels or max(self.y.bound) < math.inf

    # --- metrics ----------------------------------------------------------------------------------

    def metric_records(self, means: Collection[str]) -> dict[str, Metric]:
        """Decide the records of metrics; a metric of one of several targets names its column."""
        records = self.task.metric_records(means)
        for record in [*records.values()]:
            for part in record.mean_of:
                title = f"{record.title} of {self.y.names[records[part].target]}"
                records[part] = records[part]._replace(title=title)
        return records

    def in_units(
        self, values: Mapping[str, np.ndarray], records: MetricRecords
    ) -> dict[str, np.ndarray]:
        """Return a dict of metrics in the units of the targets."""
        scaled = {name: value * self.factor(records[name]) for name, value in values.items()}
        if len({*map(abs, self.y.half_range)}) > 1:  # a mean over targets of several units
            for name in scaled:
                if parts := records[name].mean_of:
                    scaled[name] = np.mean([scaled[part] for part in parts], axis=0)
        return scaled

    def factor(self, record: Metric) -> float:
        """Return by what stored values of a metric are multiplied."""
        checks.count(0, len(self.y.names) - 1, target=record.target)
        return abs(self.y.half_range[record.target]) ** record.power

    def variances(self, targets: np.ndarray) -> np.ndarray:
        """Return the variance of each target of rows (n,) or (n, t), in their units, (t,)."""
        variances = np.atleast_1d(np.var(targets, axis=0, dtype=np.float64))
        return variances * np.square(self.y.half_range)

    # --- rows and predictions ---------------------------------------------------------------------

    def stored(self, population: Population) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """Return the fields to predict of other rows, and whether each row was clipped, (N,)."""
        fields = {name: values for name, values in population.fields.items() if name != "y"}
        row_columns = population.columns.get("x")
        if self.x is None or row_columns is None or row_columns == self.x:
            return fields, None
        beyond = self.x.beyond(fields["x"], row_columns)
        return fields | {"x": self.x.aligned(fields["x"], row_columns)}, beyond

    def predicted(self, outputs: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
        """Return what the task says of rows: numbers in the target's units, names of classes."""
        said = {name: np.asarray(value) for name, value in outputs.items()}
        return said | {"prediction": _in_source(said["prediction"], self.y, self.classes)}

    # --- coefficients -----------------------------------------------------------------------------

    def require_linear(self, models: PyTree, axes: int) -> tuple[str, ...]:
        """Return the names of the columns that models are linear in, the last axis of kernels.

        `axes` others come before it; a ValueError refuses other models.
        """
        parts = models if isinstance(models, dict) else {}
        shape = np.shape(parts.get("kernel", 0.0))
        linear = {*parts} <= {"kernel", "bias"} and len(shape) == axes + 1
        if not linear or self.x is None or shape[-1] != len(self.x.names):
            raise ValueError(
                "only linear models on rows x (N, d) have coefficients, one for each column: other "
                "models have `models`"
            )
        return self.x.names

    def linear(self, models: PyTree) -> tuple[np.ndarray, np.ndarray]:
        """Return linear models' slopes (m, c, d) and intercepts (m, c) in the source's units."""
        self.require_linear(models, 2)
        assert self.x is not None
        kernel = models["kernel"]
        m, c, _ = kernel.shape
        slopes = np.asarray(kernel, np.float64) / np.array(self.x.half_range)
        intercepts = np.asarray(models.get("bias", np.zeros((m, c))), np.float64)
        intercepts = intercepts - slopes @ np.array(self.x.centre)
        if self.y.scaled:
            centre, half_range = np.array(self.y.centre), np.array(self.y.half_range)
            slopes, intercepts = slopes * half_range[:, None], centre + half_range * intercepts
        return slopes, intercepts

    def outputs(self, number: int) -> dict[str, np.ndarray]:
        """Return the column of a table that names a model's outputs; none of a single one."""
        if number == 1:
            return {}
        if len(self.y.names) == number:
            return {"target": np.array(self.y.names, object)}
        names = range(number) if self.classes is None else self.classes
        return {"class": class_names(names, np.arange(number))}

    def coefficients(self, models: PyTree, clients: np.ndarray) -> dict[str, np.ndarray]:
        """Return a table of the coefficients of linear models, leaves (m, ...), of `clients`."""
        slopes, intercepts = self.linear(models)
        m, c, _ = slopes.shape
        outputs = {header: np.tile(names, m) for header, names in self.outputs(c).items()}
        table = {"client": np.repeat(clients, c), **outputs, "intercept": intercepts.reshape(m * c)}
        names = self.require_linear(models, 2)
        if taken := {*table} & {*names}:
            raise ValueError(f"a column may not be called {min(taken)!r}: coefficients have it")
        return table | dict(zip(names, slopes.reshape(m * c, -1).T, strict=True))


def targets_of(population: Population) -> dict[str, np.ndarray]:
    """Return the targets of rows as "target", in the terms of their source; {} without targets."""
    if "y" not in population.fields:
        return {}
    columns, classes = population.columns.get("y", _UNNAMED), population.categories.get("y")
    return {"target": _in_source(population.fields["y"], columns, classes)}


def _in_source(values: np.ndarray, columns: Columns, classes: Sequence[str] | None) -> np.ndarray:
    """Return stored targets, or predictions of them, as numbers or names of their source."""
    if columns.scaled:
        values = np.asarray(columns.original(values), np.float32)
    return values if classes is None else class_names(classes, values)


def class_names(classes: Sequence[Any], numbers: np.ndarray) -> np.ndarray:
    """Return classes by their names, None for −1; whole numbers if all names are."""
    names = [str(name) for name in classes]
    are_integers = all(name.removeprefix("-").isdecimal() for name in names)
    labels = [int(name) for name in names] if are_integers else names
    if np.min(numbers, initial=0) >= 0:
        return np.array(labels)[numbers]
    return np.array([*labels, None], object)[numbers]
