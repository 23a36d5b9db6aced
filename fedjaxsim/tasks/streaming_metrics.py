"""Metrics of a client that are no sums over its rows, computed in evaluation's one pass."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.data.minibatches import Batch

PyTree = Any


class StreamingMetric(NamedTuple):
    """A metric of one client, computed in one pass over its rows.

    Attributes:
      start: `(most_rows) -> carry`, before the first batch; most_rows, an int, is a public bound on
        the rows of every client, the padding of the last batch included. See `Population.max_rows`.
      add: `(carry, params, batch) -> carry`. Rows of weight 0 are padding and must not count.
      value: `(carry) -> ()`, after the last batch; NaN if undefined for this client.
      statistics: `(carry) -> (k, ...)`, one client's numbers, from which `pool` makes the metric of
        the rows of several clients; None if there is no such metric.
      pool: `(statistics (n, k, ...)) -> ()`, of numpy arrays.
    """

    start: Callable[[int], PyTree]
    add: Callable[[PyTree, PyTree, Batch], PyTree]
    value: Callable[[PyTree], jax.Array]
    statistics: Callable[[PyTree], jax.Array] | None = None
    pool: Callable[[np.ndarray], Any] | None = None


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
        return ordinals, signs, jnp.int32(0)

    def add(carry, params, batch):
        ordinals, signs, at = carry
        scores = batch.per_example(score(params, batch), "scores")
        batch_ordinals = _ordinal(scores.astype(float)).astype(ordinals.dtype)
        above = batch.per_example(positive(batch), "whether examples are positive")
        sign = jnp.where(batch.weight > 0, jnp.where(above, 1, -1), 0)
        return (
            jax.lax.dynamic_update_slice(ordinals, batch_ordinals, (at,)),
            jax.lax.dynamic_update_slice(signs, sign.astype(signs.dtype), (at,)),
            at + len(batch_ordinals),
        )

    def value(carry):
        ordinals, signs, _ = carry
        positives, negatives = jnp.sum(signs > 0), jnp.sum(signs < 0)
        beyond = jnp.iinfo(ordinals.dtype).max
        ranked = jax.lax.sort(jnp.where(signs < 0, ordinals, beyond), is_stable=False)
        below = jnp.searchsorted(ranked, ordinals, side="left")
        up_to = jnp.searchsorted(ranked, ordinals, side="right")
        wins = (below + up_to) / (2 * negatives)
        share = jnp.sum(jnp.where(signs > 0, wins, 0)) / positives.astype(wins.dtype)
        failed = jnp.any((signs != 0) & (ordinals == beyond))
        return jnp.where(failed, jnp.nan, share)

    return StreamingMetric(start, add, value)


def _ordinal(scores: jax.Array) -> jax.Array:
    """Map scores to integers in the same order, with equal ones equal, and NaN to the largest.

    XLA sorts integers five times as fast as floats on a CPU.
    """
    bits = 8 * scores.dtype.itemsize
    # 0 and −0 are equal.
    scores = jnp.where(scores == 0, 0, scores)
    integers = jax.lax.bitcast_convert_type(scores, jnp.dtype(f"int{bits}"))
    largest = jnp.iinfo(integers.dtype).max
    return jnp.where(jnp.isnan(scores), largest, integers ^ ((integers >> (bits - 1)) & largest))
