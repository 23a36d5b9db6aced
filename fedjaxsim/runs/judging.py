"""The models of a trained state judged on rows: personal models and the published one."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedjaxsim.data.aligned import aligned_with, no_model_for, rows_of, with_test_rows
from fedjaxsim.data.population import Population
from fedjaxsim.engine.evaluation import Evaluation
from fedjaxsim.engine.standard_errors import ColumnArrays
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.extras import importing
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.metrics import find_metric
from fedjaxsim.simulation import Simulation
from fedjaxsim.tasks.in_source import class_names

if TYPE_CHECKING:
    import pandas as pd

Judged = Literal["personal", "published"]
PERSONAL: Judged = "personal"
PUBLISHED: Judged = "published"
_NO_CLASSES = "by='class' needs a task that predicts one class for each row"


def judged(
    sim: Simulation,
    state: SimulationState,
    hparams: Hyperparameters,
    population: Population | None,
    *,
    split: str,
    by: Mapping[Any, str] | Literal["class"] | None,
) -> "pd.DataFrame":
    """Return the table of `FinishedRun.evaluate`."""
    sim.check_evaluated(split, None)
    if isinstance(by, str) and by != "class":
        raise ValueError(f"by must be 'class' or the group of each client by its name, got {by!r}")
    run, rows = sim.population, None
    if population is not None:
        if "y" not in population.fields:
            raise ValueError("rows to judge need their targets")
        rows = aligned_with(population, run)
    names = _names(run if rows is None else rows)
    took_part = np.isin(names, _names(run))
    published = sim.algorithm.warm_start.published(state.shared) is not None
    if not took_part.any() and not published:
        raise no_model_for(run, names, "judges rows of new clients")
    judged_split, judged_rows = (split, run) if rows is None else ("train", rows)
    count = judged_rows.splits[judged_split].count
    if not judged_rows.has(judged_split):
        raise ValueError(f"split {split} has no rows: nothing of it can be judged")
    groups: dict[str, str] | None = None
    if by is not None and by != "class":
        groups = {str(name): str(group) for name, group in by.items()}
        without = [name for name in names[count > 0].tolist() if name not in groups]
        if without:
            raise ValueError(f"client {without[0]!r} has no group ({len(without)} such in all)")
    models: list[Judged] = []
    if took_part.any():
        models.append(PERSONAL)
    if published:
        models.append(PUBLISHED)
    if by == "class":
        all_rows = rows_of(run, split) if rows is None else rows
        return frame_of(_by_class(sim, state, hparams, all_rows, models))
    lines = []
    for model in models:
        if model == PUBLISHED:
            evaluation = sim.evaluate_published(state, hparams, rows, judged_split)
        elif rows is None:
            evaluation = sim.evaluate(state, hparams, split)
        else:
            names = _names(run)
            tested = sim.with_population(with_test_rows(run, rows))
            evaluation = tested.evaluate(state, hparams, "test")
        of_clients = None if groups is None else [groups.get(name, "") for name in names.tolist()]
        lines += [{"model": model, **line} for line in _lines(evaluation, of_clients)]
    return frame_of({name: np.array([line[name] for line in lines]) for name in lines[0]})


def frame_of(columns: Mapping[str, np.ndarray]) -> "pd.DataFrame":
    """Return a table; arrays of several numbers a row become lists."""
    with importing("tables"):
        import pandas as pd
    return pd.DataFrame({k: v if v.ndim == 1 else list(v) for k, v in columns.items()})


def _names(population: Population) -> np.ndarray:
    """Return the clients' names as text, (m,)."""
    return population.names.astype(str)


def _lines(evaluation: Evaluation, groups: list[str] | None) -> Iterator[dict[str, Any]]:
    """Yield clients, rows and metrics, in all or of each group of clients."""
    parts = {} if groups is None else evaluation.by_group(groups)
    for group, part in (parts or {"": evaluation}).items():
        if not part.count.any():
            continue
        line: dict[str, Any] = {} if groups is None else {"group": group}
        line |= {"clients": int(np.sum(part.count > 0)), "rows": int(np.sum(part.count))}
        for name in part.values:
            record = find_metric(name, part.records)
            line[name] = part.pooled(name) if record.pooled else part.mean(name)
            if record.larger_is_better is not None:
                line[f"{name}_worst_tenth"] = part.worst_tenth(name)
        yield line


def _by_class(
    sim: Simulation,
    state: SimulationState,
    hparams: Hyperparameters,
    rows: Population,
    models: list[Judged],
) -> ColumnArrays:
    """Return precision, recall and F1 of each class, of the rows of all clients together."""
    tables, labels = list[ColumnArrays](), rows.fields["y"]
    if labels.ndim > 1 or labels.dtype.kind not in "iu":
        raise ValueError(_NO_CLASSES)
    took_part = np.isin(_names(rows), _names(sim.population))
    for model in models:
        judged_rows = rows if model == PUBLISHED else rows.of_clients(took_part)
        predictions = sim.predict(state, hparams, judged_rows, model=model)
        labels, source_row = judged_rows.fields["y"], judged_rows.source_row
        if "probability" not in predictions:
            raise ValueError(_NO_CLASSES)
        if source_row is not None:
            labels = labels[np.argsort(source_row, kind="stable")]
        classes = sim.population.categories.get("y")
        if classes is not None:
            labels = class_names(classes, labels)
        of_classes = precision_and_recall(labels, predictions["prediction"])
        tables.append({"model": np.repeat(model, len(of_classes["class"])), **of_classes})
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


def precision_and_recall(labels: np.ndarray, predicted: np.ndarray) -> ColumnArrays:
    """Return precision, recall and F1 of each class that occurs; precision may be NaN."""
    classes = np.unique(labels)
    right, occur, told = (
        np.array([np.sum(rows == name) for name in classes], float)
        for rows in (labels[predicted == labels], labels, predicted)
    )
    with np.errstate(invalid="ignore"):
        precision, recall, f1 = right / told, right / occur, 2 * right / (told + occur)
    return {
        "class": classes, "rows": occur.astype(int),
        "precision": precision, "recall": recall, "f1": f1,
    }  # fmt: skip
