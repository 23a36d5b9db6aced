"""Metrics of classifications by the names that people expect, pooled over the rows of all clients.

A client's confusion counts, calibration bins or scores are small, and add up or stand side by side:
the same function gives a client's metric from its own, and the pooled one from all of them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim import checks
from fedjaxsim.checks import Name, SettingError
from fedjaxsim.data.minibatches import Batch
from fedjaxsim.metrics import Metric
from fedjaxsim.tasks.streaming_metrics import StreamingMetric, area_under_roc
from fedjaxsim.tasks.task import Classes, Task, cross_entropy

BINS = 15
"""Bins of equal width of the expected calibration error (Guo et al. 2017)."""
OwnMetric = Callable[[Task], tuple[StreamingMetric | Callable[[Any, Batch], jax.Array], Metric]]
_FRACTION = (0.0, 1.0)
_pooled = functools.partial(Metric, range=_FRACTION, smooth=False, pooled=True)
RECORDS = {
    "f1": _pooled("F1", larger_is_better=True),
    "balanced_accuracy": _pooled("balanced accuracy", larger_is_better=True),
    "precision": _pooled("precision", larger_is_better=True),
    "recall": _pooled("recall", larger_is_better=True),
    "ece": _pooled("ECE", larger_is_better=False),
    "log_loss": Metric("log loss", "nats", False, (0.0, float("inf")), pooled=True),
    "auc_pooled": _pooled("AUC", larger_is_better=True),
}
"""Records of named metrics, but for `top_K` of any K."""


def with_metrics(task: Task, names: Sequence[str]) -> Task:
    """Return a classification that also evaluates named metrics, pooled over all rows.

    F1, precision and recall are class 1's if there are two classes, else the mean over the
    classes that occur or are predicted, as scikit-learn's "binary" and "macro"; a client without
    such rows has none. The column of a metric is its pooled value, `_unweighted` the mean over
    clients.

    Args:
      task: softmax, one_vs_all, logistic or ordinal.
      names: f1, balanced-accuracy, precision, recall, top-K for a number K, such as top-5; of
        probabilities ece (expected calibration error in 15 bins) and log-loss; of two classes
        auc-pooled, which keeps a score of each row.

    Raises:
      ValueError: for an unknown name, or a task that does not have the metric.
    """
    classes = task.classes
    if classes is None:
        raise ValueError(
            "named metrics are for classifications (softmax, one-vs-all, logistic, ordinal): "
            "give another task your own, MODULE:FACTORY or with_own_metric"
        )
    streaming, means, records = dict(task.streaming_metrics), {}, dict(task.records)
    for name in (spelled.replace("-", "_") for spelled in dict.fromkeys(names)):
        kind, _, number = name.rpartition("_")
        if kind == "top" and number.isdecimal():
            _check_k(int(number), classes.number)
            means[name] = functools.partial(_within_largest, classes, int(number))
            records[name] = _pooled(f"top-{number} accuracy", larger_is_better=True)
            continue
        if name not in RECORDS:
            allowed = [*(metric.replace("_", "-") for metric in RECORDS), "top-5"]
            spelled = name.replace("_", "-")
            hint = checks.did_you_mean(spelled, allowed)
            if name in ("accuracy", "loss"):
                hint = ", which is there without asking"
            choices = f"{', '.join(allowed)} or your own, MODULE:FACTORY"
            raise ValueError(f"metrics must be {choices}, got {spelled!r}{hint}")
        if name in ("ece", "log_loss") and not classes.probabilistic:
            raise ValueError(
                f"{name.replace('_', '-')} needs probabilities, which one-vs-all lacks"
            )
        if name == "auc_pooled" and classes.number != 2:
            raise ValueError(f"auc-pooled takes two classes, got {classes.number}")
        records[name] = RECORDS[name]
        if name == "log_loss":
            means[name] = functools.partial(_log_loss, classes)
        elif name == "ece":
            streaming[name] = _calibration(classes)
        elif name == "auc_pooled":
            streaming[name] = _area(classes)
        else:
            streaming[name] = _confusion(classes, _OF_COUNTS[name])

    def metrics(params, batch):
        values = task.metrics(params, batch)
        return {**values, **{name: mean(params, batch) for name, mean in means.items()}}

    again = task.on_model
    return task._replace(
        metrics=metrics if means else task.metrics,
        streaming_metrics=streaming,
        records=records,
        on_model=again and (lambda model: with_metrics(again(model), names)),
    )


def with_own_metric(task: Task, name: str, factory: OwnMetric) -> Task:
    """Return a task that also evaluates a metric of yours.

    Args:
      task: the task.
      name: the metric's name in columns of results.
      factory: `(task) -> metric, record`. The metric is a `StreamingMetric`, or a function
        `(params, batch) -> (b,)` of rows, whose mean counts; the record says its title, direction
        and unit.

    Raises:
      ValueError: the task has a metric with that name, or the factory returns something else.
    """
    made = factory(task)
    if (
        not isinstance(made, tuple)
        or len(made) != 2
        or not (callable(made[0]) or isinstance(made[0], StreamingMetric))
        or not isinstance(made[1], Metric)
    ):
        raise ValueError(
            f"metric {name} must return a StreamingMetric or a function (params, batch) -> (b,), "
            f"and its fjs.tasks.Metric(title, …), got {checks.described(made)}"
        )
    metric, record = made
    again = task.on_model
    streaming = {name: metric} if isinstance(metric, StreamingMetric) else {}
    of_rows = {} if isinstance(metric, StreamingMetric) else {name: metric}

    def metrics(params, batch):
        values = task.metrics(params, batch)
        derived = {"nmse"} if "squared_error" in values else set()
        if name in values.keys() | task.streaming_metrics.keys() | derived:
            raise ValueError(f"the task has a metric {name!r} already: give yours another name")
        return {**values, **{name: value(params, batch) for name, value in of_rows.items()}}

    return task._replace(
        metrics=metrics,
        streaming_metrics={**task.streaming_metrics, **streaming},
        records={**task.records, name: record},
        on_model=again and (lambda model: with_own_metric(again(model), name, factory)),
    )


def is_named(name: str) -> bool:
    """Return whether `with_metrics` may add a metric of this name."""
    return name.replace("-", "_") in RECORDS or name.startswith("top-")


def _check_k(k: int, number: int) -> None:
    if not 1 <= k < number:
        raise SettingError(
            Name("metrics"),
            f" take top-K with K from 1 to {number - 1}, below the classes, got {k}",
        )


def _within_largest(classes: Classes, k: int, params: Any, batch: Batch) -> jax.Array:
    """Return 1 if the label is among the k largest scores, of equal ones the first, else 0."""
    scores, labels = classes.scores(params, batch.fields), classes.labels(batch.fields)
    chosen = jnp.take_along_axis(scores, labels[:, None], axis=1)
    earlier = jnp.arange(classes.number) < labels[:, None]
    before = (scores > chosen) | ((scores == chosen) & earlier)
    inside = jnp.sum(before, axis=1) < k
    return jnp.where(jnp.isnan(scores).any(axis=1), jnp.nan, inside.astype(scores.dtype))


def _log_loss(classes: Classes, params: Any, batch: Batch) -> jax.Array:
    return cross_entropy(classes.scores(params, batch.fields), classes.labels(batch.fields))


# --- sums over rows: those of all clients are the sum of their statistics (n, k) ------------------


def _summed(
    size: int, of_rows: Callable[[Any, Batch], jax.Array], value: Callable[..., Any]
) -> StreamingMetric:
    """Make the metric `value(xp, sums)` of the sums (size,) of numbers (b, size) of rows."""

    def add(sums, params, batch):
        numbers = of_rows(params, batch).astype(sums.dtype)
        return sums + jnp.sum(jnp.where(batch.weight[:, None] > 0, numbers, 0), axis=0)

    def pool(statistics):
        return value(np, np.sum(statistics, axis=0, dtype=np.float64))

    start = jnp.zeros(size)
    return StreamingMetric(
        lambda most_rows: start, add, lambda sums: value(jnp, sums), lambda sums: sums, pool
    )


def _confusion(classes: Classes, value: Callable[..., Any]) -> StreamingMetric:
    """Make a metric of each class's true positives, predictions and occurrences."""

    def of_rows(params, batch):
        scores, labels = classes.scores(params, batch.fields), classes.labels(batch.fields)
        predicted = jax.nn.one_hot(jnp.argmax(scores, axis=1), classes.number)
        occurring = jax.nn.one_hot(labels, classes.number)
        counts = jnp.concatenate([predicted * occurring, predicted, occurring], axis=1)
        return jnp.where(jnp.isnan(scores).any(axis=1, keepdims=True), jnp.nan, counts)

    def of_sums(xp, sums):
        return value(xp, *xp.split(sums, 3))

    return _summed(3 * classes.number, of_rows, of_sums)


def _share(xp: Any, part: Any, total: Any) -> Any:
    return xp.where(total > 0, part / xp.maximum(total, 1), xp.where(total == 0, 0.0, xp.nan))


def _over_classes(xp: Any, part: Any, total: Any, present: Any) -> Any:
    """Return part/total of class 1 of two, or the mean over the classes that are present."""
    shares = _share(xp, part, total)
    if len(part) == 2:
        return xp.where(total[1] == 0, xp.nan, shares[1])
    return xp.sum(xp.where(present > 0, shares, 0.0 * part)) / xp.sum(present > 0)


def _f1(xp: Any, hits: Any, predicted: Any, occurring: Any) -> Any:
    return _over_classes(xp, 2 * hits, predicted + occurring, predicted + occurring)


def _precision(xp: Any, hits: Any, predicted: Any, occurring: Any) -> Any:
    return _over_classes(xp, hits, predicted, predicted + occurring)


def _recall(xp: Any, hits: Any, predicted: Any, occurring: Any) -> Any:
    return _over_classes(xp, hits, occurring, predicted + occurring)


def _balanced_accuracy(xp: Any, hits: Any, predicted: Any, occurring: Any) -> Any:
    del predicted
    present = occurring != 0
    return xp.sum(xp.where(present, _share(xp, hits, occurring), 0.0)) / xp.sum(present)


_OF_COUNTS = {
    "f1": _f1, "precision": _precision, "recall": _recall,
    "balanced_accuracy": _balanced_accuracy,
}  # fmt: skip


def _calibration(classes: Classes) -> StreamingMetric:
    """Make the expected calibration error: the mean over rows of |accuracy − confidence| by bin."""

    def of_rows(params, batch):
        probabilities = jax.nn.softmax(classes.scores(params, batch.fields), axis=1)
        confidence = jnp.max(probabilities, axis=1)
        right = jnp.argmax(probabilities, axis=1) == classes.labels(batch.fields)
        # A bin holds its upper edge.
        place = jnp.clip(jnp.ceil(confidence * BINS) - 1, 0, BINS - 1).astype(jnp.int32)
        inside = jax.nn.one_hot(place, BINS)
        numbers = [inside, inside * confidence[:, None], inside * right[:, None]]
        wrong = jnp.isnan(probabilities).any(axis=1, keepdims=True)
        return jnp.where(wrong, jnp.nan, jnp.concatenate(numbers, axis=1))

    def of_sums(xp, sums):
        rows, confidence, right = xp.split(sums, 3)
        return xp.sum(xp.abs(right - confidence)) / xp.sum(rows)

    return _summed(3 * BINS, of_rows, of_sums)


# --- scores of all rows side by side --------------------------------------------------------------


def _area(classes: Classes) -> StreamingMetric:
    """Make the AUC, whose pooled value ranks the rows of all clients together."""

    def score(params, batch):
        scores = classes.scores(params, batch.fields)
        return scores[:, 1] - scores[:, 0]

    of_client = area_under_roc(score, lambda batch: classes.labels(batch.fields) == 1)

    def statistics(carry):
        ordinals, signs, _ = carry
        return jnp.stack([ordinals, signs.astype(ordinals.dtype)])

    def pool(statistics):
        ordinals, signs = (part.ravel() for part in np.moveaxis(np.asarray(statistics), 1, 0))
        ordinals, signs = ordinals[signs != 0], signs[signs != 0]
        if np.any(ordinals == np.iinfo(ordinals.dtype).max):
            return np.nan
        negatives, positives = np.sort(ordinals[signs < 0]), ordinals[signs > 0]
        below = np.searchsorted(negatives, positives, side="left")
        up_to = np.searchsorted(negatives, positives, side="right")
        pairs = len(negatives) * len(positives)
        return float(np.sum(below + up_to, dtype=np.float64)) / (2 * pairs) if pairs else np.nan

    return of_client._replace(statistics=statistics, pool=pool)
