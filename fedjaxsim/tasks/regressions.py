"""Losses that tables need besides squared errors: counts, quantiles, ordered classes."""

import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy

from fedjaxsim import checks
from fedjaxsim.metrics import Metric
from fedjaxsim.models.model import Model, require_model
from fedjaxsim.tasks.task import PRIOR, Classes, Task, task_of_outputs, with_intercepts

EXPOSURE = "exposure"
"""The field with each row's exposure, such as its years at risk, (N,), positive."""
_BEYOND = 1e4
"""A logit of probability 1."""


def poisson(model: Model, prior: float | None = None) -> Task:
    """Poisson regression of counts with a log link; "y" holds whole numbers from 0 on, (n,).

    If rows have the field "exposure", a row's mean count is its exposure times the model's rate.
    The loss is the negative log-likelihood without log y!; the metric is the deviance
    2(y log(y/μ) − y + μ), as in `sklearn.metrics.mean_poisson_deviance`. Predictions are mean
    counts μ.

    Args:
      model: outputs (b, 1): the logarithm of the rate.
      prior: A public rate at which the intercept starts.
    """
    if prior is not None:
        checks.positive(prior=prior)
        model = with_intercepts(model, (jnp.log(prior),))

    def losses(outputs, y):
        return jnp.exp(outputs[:, 0]) - y * outputs[:, 0]

    def deviance(outputs, y):
        mean = jnp.exp(outputs[:, 0])
        return 2 * (xlogy(y, y) - y * outputs[:, 0] - y + mean)

    task = task_of_outputs(
        "poisson", model, 1, {"loss": losses, "deviance": deviance},
        lambda outputs: {"prediction": jnp.exp(outputs[:, 0])},
        "poisson needs one count per row, y (n,)", lambda y: y.ndim == 1,
        labels=(range(2**31),), exposure=EXPOSURE,
        records={"deviance": Metric("deviance", None, False, (0.0, jnp.inf))},
    )  # fmt: skip
    return task if prior is None else task._replace(public=(*task.public, PRIOR))


def quantile(model: Model, quantile: float = 0.5) -> Task:
    """Quantile regression: the pinball loss of q, max(q e, (q − 1) e) with e = y − prediction.

    So a share q of the targets lies below the predictions (Koenker and Bassett 1978); q = 0.5 is
    the median. The metric "below" is that share.

    Args:
      model: outputs (b, 1).
      quantile: q, in (0, 1).
    """
    checks.in_range("(0, 1)", quantile=quantile)

    def losses(outputs, y):
        error = y - outputs[:, 0]
        return jnp.maximum(quantile * error, (quantile - 1) * error)

    return task_of_outputs(
        "quantile", model, 1,
        {
            "loss": losses,
            "pinball": losses,
            "below": lambda outputs, y: (y <= outputs[:, 0]).astype(outputs.dtype),
        },
        lambda outputs: {"prediction": outputs[:, 0]},
        "quantile needs one target per row, y (n,)", lambda y: y.ndim == 1,
        records={
            "pinball": Metric("pinball loss", None, False, (0.0, jnp.inf), power=1),
            "below": Metric("below", "fraction", None, (0.0, 1.0), smooth=False),
        },
    )  # fmt: skip


def ordinal(model: Model, num_classes: int) -> Task:
    """Classification with ordered classes by cumulative logits: P(y ≤ k) = σ(θ_k − output).

    The proportional-odds model (McCullagh 1980). Its c − 1 cuts θ are parameters, "cuts": the first
    one and the logarithms of the gaps. Predictions are the likeliest class, and its probability.
    "off" is the mean number of classes between prediction and label.

    Args:
      model: outputs (b, 1); its intercept, if any, moves all cuts.
      num_classes: c; "y" holds integers in [0, c), in their order.
    """
    checks.count(2, num_classes=num_classes)
    model = require_model("ordinal needs", model)

    def init(key):
        cuts = jnp.zeros(num_classes - 1).at[0].set(1 - num_classes / 2)
        return {"model": model.init(key), "cuts": cuts}

    def apply(params, x):
        first, gaps = params["cuts"][:1], jnp.exp(params["cuts"][1:])
        thresholds = jnp.concatenate([first, first + jnp.cumsum(gaps)])
        return thresholds - model.apply(params["model"], x)

    def probabilities(outputs):
        below = jnp.pad(jax.nn.sigmoid(outputs), ((0, 0), (1, 0)))
        return jnp.diff(below, axis=1, append=1.0)

    def losses(outputs, labels):
        ends = jnp.pad(outputs, ((0, 0), (1, 0)), constant_values=-_BEYOND)
        ends = jnp.pad(ends, ((0, 0), (0, 1)), constant_values=_BEYOND)
        place = jnp.arange(num_classes + 1)
        low, high = (
            jnp.sum(jnp.where(labels[:, None] + shift == place, ends, 0), axis=1)
            for shift in (0, 1)
        )
        # σ(h) − σ(l) = σ(h) σ(−l) (1 − e^(l − h)), without cancellation.
        likelihood = jax.nn.log_sigmoid(high) + jax.nn.log_sigmoid(-low)
        return -likelihood - jnp.log(-jnp.expm1(low - high))

    def predicted(outputs):
        failed = jnp.isnan(outputs).any(axis=1)
        return jnp.where(failed, -1, jnp.argmax(probabilities(outputs), axis=1)).astype(jnp.int32)

    def measured(outputs, values):
        return jnp.where(jnp.isnan(outputs).any(axis=1), jnp.nan, values.astype(outputs.dtype))

    def scores(params, fields):
        outputs = apply(params, fields["x"])
        labels = jnp.arange(num_classes)
        return -jax.vmap(lambda y: losses(outputs, jnp.full(len(outputs), y)), out_axes=1)(labels)

    task = task_of_outputs(
        "ordinal", Model(init, apply), num_classes - 1,
        {
            "loss": losses,
            "accuracy": lambda outputs, y: measured(outputs, predicted(outputs) == y),
            "off": lambda outputs, y: measured(outputs, jnp.abs(predicted(outputs) - y)),
        },
        lambda outputs: {
            "prediction": predicted(outputs),
            "probability": jnp.max(probabilities(outputs), axis=1),
        },
        "ordinal needs integer labels y (n,)",
        lambda y: jnp.issubdtype(y.dtype, jnp.integer) and y.ndim == 1,
        labels=(range(num_classes),),
        records={"off": Metric("classes off", None, False, (0.0, num_classes - 1.0), smooth=False)},
    )  # fmt: skip
    classes = Classes(num_classes, scores, lambda fields: fields["y"], probabilistic=True)
    return task._replace(classes=classes)
