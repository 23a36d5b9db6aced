"""Metrics of a client that are no sums over its rows, computed in evaluation's one pass."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjaxsim.data.minibatches import Batch

PyTree = Any


class StreamingMetric(NamedTuple):
    """A metric of one client, computed in one pass over its rows.

    Attributes:
      start: `(most_rows) -> carry`, before the first batch; most_rows bounds the rows of clients.
      add: `(carry, params, batch) -> carry`. Rows of weight 0 are padding and must not count.
      value: `(carry) -> ()`, after the last batch; NaN if undefined for this client.
    """

    start: Callable[[int], PyTree]
    add: Callable[[PyTree, PyTree, Batch], PyTree]
    value: Callable[[PyTree], jax.Array]


def balanced_accuracy(
    correct: Callable[[PyTree, Batch], jax.Array],
    label: Callable[[Batch], jax.Array],
    num_classes: int,
) -> StreamingMetric:
    """Return the mean recall over the classes, labels in [0, c), that occur in the client's rows.

    It equals `sklearn.metrics.balanced_accuracy_score` (Brodersen, Ong, Stephan, Buhmann 2010).
    `correct` is 1 if the predicted class is right, else 0, (b,); NaN, and so the metric, if the
    model predicts none.
    """

    def start(most_rows):
        none = jnp.zeros(num_classes, jnp.int32)
        return none, none, jnp.array(False)

    def add(carry, params, batch):
        rows, hits, failed = carry
        labels = label(batch)[:, None]
        of_class = labels == jnp.arange(num_classes, dtype=labels.dtype)[None]
        of_class &= batch.weight[:, None] > 0
        right = correct(params, batch)
        hit = of_class & (right == 1)[:, None]
        return (
            rows + jnp.sum(of_class, 0, jnp.int32),
            hits + jnp.sum(hit, 0, jnp.int32),
            failed | _any_nan(right, batch),
        )

    def value(carry):
        rows, hits, failed = carry
        recall = hits / jnp.maximum(rows, 1)  # 0 for a class that does not occur
        return jnp.where(failed, jnp.nan, jnp.sum(recall) / jnp.sum(rows > 0, dtype=recall.dtype))

    return StreamingMetric(start, add, value)


def micro_f1(
    scores: Callable[[PyTree, Batch], jax.Array], positive: Callable[[Batch], jax.Array]
) -> StreamingMetric:
    """Return 2 TP/(2 TP + FP + FN) over all labels of a client's rows; 0 without any.

    It equals `sklearn.metrics.f1_score(average="micro")`. `scores` and `positive` are (b, k); a
    label is predicted if its score is above 0. It is NaN if a score is.
    """

    def start(most_rows):
        return jnp.int32(0), jnp.int32(0), jnp.array(False)

    def add(carry, params, batch):
        hits, marked, failed = carry
        found, wanted = scores(params, batch), positive(batch)
        real = batch.weight[:, None] > 0
        said, wanted = (found > 0) & real, wanted & real
        return (
            hits + jnp.sum(said & wanted, dtype=jnp.int32),
            marked + jnp.sum(said, dtype=jnp.int32) + jnp.sum(wanted, dtype=jnp.int32),
            failed | _any_nan(jnp.sum(found, axis=-1), batch),
        )

    def value(carry):
        hits, marked, failed = carry
        return jnp.where(failed, jnp.nan, 2 * hits / jnp.maximum(marked, 1))

    return StreamingMetric(start, add, value)


def area_under_roc(
    score: Callable[[PyTree, Batch], jax.Array], positive: Callable[[Batch], jax.Array]
) -> StreamingMetric:
    """Return the share of pairs of a positive and a negative row with the positive scored higher.

    Ties count one half, so this is the area under the ROC curve (Hanley, McNeil 1982), equal to
    `sklearn.metrics.roc_auc_score`. `score` and `positive` are (b,). It is NaN for a client with
    rows of one class only, or with a score that is NaN.
    """

    def start(most_rows):
        ordinals, signs = _ordinal(jnp.zeros(most_rows)), jnp.zeros(most_rows, jnp.int8)
        return ordinals, signs, jnp.int32(0), jnp.array(False)

    def add(carry, params, batch):
        ordinals, signs, at, failed = carry
        scores = score(params, batch).astype(float)
        new = _ordinal(scores).astype(ordinals.dtype)
        sign = jnp.where(batch.weight > 0, jnp.where(positive(batch), 1, -1), 0)
        return (
            jax.lax.dynamic_update_slice(ordinals, new, (at,)),
            jax.lax.dynamic_update_slice(signs, sign.astype(signs.dtype), (at,)),
            at + len(new),
            failed | _any_nan(scores, batch),
        )

    def value(carry):
        ordinals, signs, _, failed = carry
        positives, negatives = jnp.sum(signs > 0), jnp.sum(signs < 0)
        beyond = jnp.iinfo(ordinals.dtype).max
        ranked = jax.lax.sort(jnp.where(signs < 0, ordinals, beyond), is_stable=False)
        below = jnp.searchsorted(ranked, ordinals, side="left")
        up_to = jnp.searchsorted(ranked, ordinals, side="right")
        wins = (below + up_to) / (2 * negatives)
        share = jnp.sum(jnp.where(signs > 0, wins, 0)) / positives.astype(wins.dtype)
        return jnp.where(failed, jnp.nan, share)

    return StreamingMetric(start, add, value)


def _any_nan(values: jax.Array, batch: Batch) -> jax.Array:
    return jnp.any(jnp.isnan(values) & (batch.weight > 0))


def _ordinal(scores: jax.Array) -> jax.Array:
    """Map scores to integers in the same order, with equal ones equal; NaN has no place.

    XLA sorts integers five times as fast as floats on a CPU.
    """
    bits = 8 * scores.dtype.itemsize
    # 0 and −0 are equal.
    scores = jnp.where(scores == 0, 0, scores)
    integers = jax.lax.bitcast_convert_type(scores, jnp.dtype(f"int{bits}"))
    return integers ^ ((integers >> (bits - 1)) & jnp.iinfo(integers.dtype).max)
