"""Tasks with several targets per row: labels that may hold together, and several numbers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjaxsim import checks
from fedjaxsim.metrics import METRICS
from fedjaxsim.models.model import Model
from fedjaxsim.tasks.task import (
    OfOutputs,
    Task,
    curvature_of,
    divergence_of_coins,
    divergence_of_normals,
    task_of_outputs,
)


def multilabel(model: Model, num_outputs: int) -> Task:
    """Classification by L labels that may hold together; "y" is 0 and 1, (n, L).

    The loss of a row is the sum of the labels' logistic losses. "accuracy" is the mean over labels,
    and "accuracy_0", "accuracy_1", … are each label's. Predictions are 0 and 1, (n, L), with the
    probability of 1.

    Args:
      model: outputs (b, L): the log-odds of each label.
      num_outputs: L.
    """

    def losses(outputs, y):
        positive = y.astype(outputs.dtype)
        return jnp.sum(optax.losses.sigmoid_binary_cross_entropy(outputs, positive), axis=1)

    def right(outputs, y):
        values = ((outputs > 0) == (y > 0)).astype(outputs.dtype)
        return jnp.where(jnp.isnan(outputs), jnp.nan, values)

    def says(outputs):
        prediction = jnp.where(jnp.isnan(outputs), -1, outputs > 0).astype(jnp.int32)
        return {"prediction": prediction, "probability": jax.nn.sigmoid(outputs)}

    return _of_targets(
        "multilabel", model, num_outputs, losses, "accuracy", right, says,
        divergence=divergence_of_coins, labels=((0, 1),), curvature=curvature_of(model, 1 / 4),
    )  # fmt: skip


def squared_targets(model: Model, num_outputs: int) -> Task:
    """Regression of t targets with ½‖prediction − y‖²; "y" is (n, t).

    "squared_error" is the mean over targets, and "squared_error_0", "squared_error_1", … are each
    target's. nMSE is the mean of each target's own, whatever their units.

    Args:
      model: outputs (b, t).
      num_outputs: t.
    """
    return _of_targets(
        "squared_targets", model, num_outputs,
        lambda outputs, y: jnp.sum(optax.losses.l2_loss(outputs, y), axis=1),
        "squared_error", lambda outputs, y: jnp.square(outputs - y),
        lambda outputs: {"prediction": outputs},
        divergence=divergence_of_normals, curvature=curvature_of(model),
    )  # fmt: skip


def _of_targets(
    name: str,
    model: Model,
    num_outputs: int,
    losses: OfOutputs,
    metric: str,
    of_targets: Callable[[jax.Array, jax.Array], jax.Array],
    says: Callable[[jax.Array], dict[str, jax.Array]],
    **more: Any,
) -> Task:
    """Make a task whose `metric` is the mean of `of_targets`, (b, t), with one for each target."""
    checks.count(num_outputs=num_outputs)
    by_target = {
        f"{metric}_{target}": lambda outputs, y, target=target: of_targets(outputs, y)[:, target]
        for target in range(num_outputs)
    }
    record = METRICS[metric]
    records = {
        column: record._replace(title=f"{record.title} of y{target}", target=target, in_tables=())
        for target, column in enumerate(by_target)
    }
    records[metric] = record._replace(mean_of=tuple(by_target))

    def mean(outputs, y):
        return jnp.mean(of_targets(outputs, y), axis=1)

    def suits(y):
        return y.ndim == 2 and y.shape[1] == num_outputs and np.dtype(y.dtype).kind in "iuf"

    return task_of_outputs(
        name, model, num_outputs, {"loss": losses, metric: mean, **by_target}, says,
        f"{name} needs {num_outputs} targets per row, y (n, {num_outputs})", suits,
        records=records, **more,
    )  # fmt: skip
