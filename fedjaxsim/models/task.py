"""What is learned: a model with a loss and the per-example values that evaluation reports."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjaxsim.data.minibatches import Batch
from fedjaxsim.models.model import Model

PyTree = Any


class Task(NamedTuple):
    """A learning task, as pure functions; a user's own functions work the same way.

    Attributes:
      init: `(key) -> params`.
      loss: `(params, batch) -> ()`, the weighted mean loss of a minibatch.
      metrics: `(params, batch) -> {name: (b,)}`, per-example values; evaluation averages them over
        each client's rows. "squared_error" is reported as nMSE besides.
      check: `(fields) -> None`, raises ValueError where the rows do not suit the task. Host only.
    """

    init: Callable[[jax.Array], PyTree]
    loss: Callable[[PyTree, Batch], jax.Array]
    metrics: Callable[[PyTree, Batch], dict[str, jax.Array]]
    check: Callable[[Mapping[str, np.ndarray]], None] = lambda fields: None


def _require_xy(fields: Mapping[str, np.ndarray]) -> np.ndarray:
    for name in ("x", "y"):
        if name not in fields:
            raise ValueError(f"this task needs the fields 'x' and 'y', got {sorted(fields)}")
    return fields["y"]


def softmax(model: Model, num_classes: int) -> Task:
    """Classification with softmax cross-entropy (optax); "y" holds integers in [0, c).

    Args:
      model: outputs (b, c) logits.
      num_classes: c.
    """

    def per_example(params, batch):
        logits = model.apply(params, batch.fields["x"])
        labels = batch.fields["y"]
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses, jnp.argmax(logits, axis=-1) == labels

    def metrics(params, batch):
        losses, correct = per_example(params, batch)
        return {"loss": losses, "accuracy": correct.astype(losses.dtype)}

    def check(fields):
        y = _require_xy(fields)
        if not np.issubdtype(y.dtype, np.integer) or y.ndim != 1:
            raise ValueError(f"softmax needs integer labels (n,), got {y.dtype} {y.shape}")
        if y.min() < 0 or y.max() >= num_classes:
            raise ValueError(
                f"labels must lie in [0, {num_classes}), the model's classes, "
                f"got labels from {y.min()} to {y.max()}"
            )

    return Task(model.init, lambda p, batch: batch.mean(per_example(p, batch)[0]), metrics, check)


def logistic(model: Model) -> Task:
    """Binary classification with the logistic loss (optax); "y" holds −1 and 1, or 0 and 1.

    Args:
      model: outputs (b, 1): the log-odds of the positive class.
    """

    def per_example(params, batch):
        logits = model.apply(params, batch.fields["x"])[:, 0]
        positive = batch.fields["y"] > 0
        losses = optax.losses.sigmoid_binary_cross_entropy(logits, positive.astype(logits.dtype))
        return losses, (logits > 0) == positive

    def metrics(params, batch):
        losses, correct = per_example(params, batch)
        return {"loss": losses, "accuracy": correct.astype(losses.dtype)}

    def check(fields):
        y = _require_xy(fields)
        values = set(np.unique(y).tolist())
        if not (values <= {-1, 1} or values <= {0, 1}):
            raise ValueError(
                f"logistic needs labels -1 and 1, or 0 and 1, got {sorted(values)[:10]}"
            )

    return Task(model.init, lambda p, batch: batch.mean(per_example(p, batch)[0]), metrics, check)


def squared(model: Model) -> Task:
    """Regression with ½(prediction − y)² (optax.l2_loss).

    Args:
      model: outputs (b, 1).
    """

    def errors(params, batch):
        return model.apply(params, batch.fields["x"])[:, 0] - batch.fields["y"]

    def metrics(params, batch):
        error = errors(params, batch)
        return {"loss": optax.losses.l2_loss(error), "squared_error": jnp.square(error)}

    def check(fields):
        y = _require_xy(fields)
        if y.ndim != 1:
            raise ValueError(f"squared needs one target per row, y of shape (n,), got {y.shape}")

    def loss(params, batch):
        return batch.mean(optax.losses.l2_loss(errors(params, batch)))

    return Task(model.init, loss, metrics, check)
