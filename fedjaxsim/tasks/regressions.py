"""Losses that tables need besides squared errors: counts, costs, times, quantiles, orders."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy

from fedjaxsim import checks
from fedjaxsim.metrics import Metric
from fedjaxsim.models.model import Model, require_model
from fedjaxsim.tasks.streaming_metrics import StreamingMetric
from fedjaxsim.tasks.task import (
    POSITIVE,
    PRIOR,
    ROW_WEIGHT,
    Classes,
    OfOutputs,
    Task,
    curvature_of,
    task_of_outputs,
    with_intercepts,
)

EXPOSURE = "exposure"
"""The field with each row's exposure, such as its years at risk, (N,), positive."""
_DEVIANCE = Metric("deviance", None, False, (0.0, jnp.inf))
_OF_COUNTS: dict[str, Any] = {"labels": (range(2**31),), "exposure": EXPOSURE}
"""Targets of `poisson` and `negative_binomial`."""
_BEYOND = 1e4
"""A logit of probability 1."""


def poisson(model: Model, prior: float | None = None) -> Task:
    """Poisson regression of counts with a log link; "y" holds whole numbers from 0 on, (n,).

    If rows have the field "exposure", a row's mean count is its exposure times the model's rate.
    The loss is the negative log-likelihood without log y!; the metric is the deviance
    2(y log(y/μ) − y + μ), as in `sklearn.metrics.mean_poisson_deviance`. Predictions are mean
    counts μ.

    The curvature in an output is the row's rate, which has no bound. With a prior r, the curvature
    counts as if rates were at most e r: it is e r (R² + 1) for a linear model on rows with ‖x‖ ≤ R.
    With the default step 1/L, no step expands where no rate exceeds 2e r.
    Minibatches with counts far above r can step out of there and diverge, so r should be about the
    mean count. Without a prior, or with exposures, no step follows.

    Args:
      model: outputs (b, 1): the logarithm of the rate.
      prior: A public rate at which the intercept starts.
    """
    curvature = None if prior is None else curvature_of(model, math.e * prior)

    def losses(outputs, y):
        return jnp.exp(outputs[:, 0]) - y * outputs[:, 0]

    def deviance(outputs, y):
        mean = jnp.exp(outputs[:, 0])
        return 2 * (xlogy(y, y) - y * outputs[:, 0] - y + mean)

    losses_by_name = {"loss": losses, "deviance": deviance}
    more = {**_OF_COUNTS, "curvature": curvature}
    return _with_log_link("poisson", model, losses_by_name, prior, "count", **more)


def negative_binomial(model: Model, dispersion: float = 1.0, prior: float | None = None) -> Task:
    """Regression of counts whose variance is μ + α μ², with a log link; "y" is as for `poisson`.

    The loss is the negative log-likelihood without terms that do not depend on the model; the
    metric is the deviance 2(y log(y/μ) − (y + 1/α) log((1 + αy)/(1 + αμ))). "exposure" counts as in
    `poisson`.

    Args:
      model: outputs (b, 1): the logarithm of the rate.
      dispersion: α > 0, known in advance; statsmodels calls it alpha.
      prior: A public rate at which the intercept starts.
    """
    checks.positive(dispersion=dispersion)
    alpha = dispersion

    def losses(outputs, y):
        log_mean = outputs[:, 0]
        # log(1 + αμ), which does not overflow.
        return (y + 1 / alpha) * jax.nn.softplus(log_mean + jnp.log(alpha)) - y * log_mean

    def deviance(outputs, y):
        saturated = xlogy(y, y) - (y + 1 / alpha) * jnp.log1p(alpha * y)
        return 2 * (saturated + losses(outputs, y))

    losses_by_name = {"loss": losses, "deviance": deviance}
    return _with_log_link("negative_binomial", model, losses_by_name, prior, "count", **_OF_COUNTS)


def gamma(model: Model, prior: float | None = None) -> Task:
    """Gamma regression of positive numbers, such as costs, with a log link; "y" is (n,), above 0.

    The loss is y/μ + log μ, the negative log-likelihood for any fixed shape; the metric is the
    deviance 2((y − μ)/μ − log(y/μ)), as in `sklearn.metrics.mean_gamma_deviance`. Predictions are
    means μ.

    Args:
      model: outputs (b, 1): the logarithm of the mean.
      prior: A public mean at which the intercept starts.
    """

    def losses(outputs, y):
        return y * jnp.exp(-outputs[:, 0]) + outputs[:, 0]

    def deviance(outputs, y):
        ratio = y * jnp.exp(-outputs[:, 0])
        return 2 * (ratio - 1 - jnp.log(y) + outputs[:, 0])

    losses_by_name = {"loss": losses, "deviance": deviance}
    return _with_log_link("gamma", model, losses_by_name, prior, "number", labels=(POSITIVE,))


def _with_log_link(
    name: str,
    model: Model,
    losses: Mapping[str, OfOutputs],
    prior: float | None,
    target: str,
    **more: Any,
) -> Task:
    """Make a task whose outputs (b, 1) are logarithms of means; a public `prior` is the first."""
    if prior is not None:
        checks.positive(prior=prior)
        model = with_intercepts(model, (jnp.log(prior),))
    task = task_of_outputs(
        name, model, 1, losses, lambda outputs: {"prediction": jnp.exp(outputs[:, 0])},
        f"{name} needs one {target} per row, y (n,)", lambda y: y.ndim == 1,
        records={"deviance": _DEVIANCE}, **more,
    )  # fmt: skip
    return task if prior is None else task._replace(public=(*task.public, PRIOR))


def cox(model: Model) -> Task:
    """Proportional hazards: Cox's partial likelihood, stratified by client, ties as Breslow's.

    "y" is (n,): the time of an event, or minus the time of a row that is censored, as in XGBoost's
    survival:cox. The risk set of an event is all rows of the *minibatch* that are at risk at its
    time, so minibatches should hold all rows of a client. No client is compared with another, and
    each has its own baseline hazard. An intercept has no effect. Predictions are logarithms of
    hazard ratios. "concordance" is Harrell's C of a client's rows, NaN if no two are comparable.
    Protected examples learn nothing: a row alone has no risk set.

    Args:
      model: outputs (b, 1): the logarithm of the hazard ratio.
    """
    task = task_of_outputs(
        "cox", model, 1, {"loss": lambda outputs, y: jnp.zeros_like(outputs[:, 0])},
        lambda outputs: {"prediction": outputs[:, 0]},
        "cox needs one time per row, negative if censored, y (n,)", lambda y: y.ndim == 1,
    )  # fmt: skip
    biased = model.representation is not None and model.output_layer is None

    def losses(scores, batch):
        y, weight = batch.fields["y"].astype(scores.dtype), batch.weight.astype(scores.dtype)
        if ROW_WEIGHT in batch.fields:
            weight = weight * batch.fields[ROW_WEIGHT].astype(scores.dtype)
        times, counts = jnp.abs(y), weight > 0
        at_risk = (times[None, :] >= times[:, None]) & counts
        hazards = scores + jnp.log(jnp.where(counts, weight, 1))
        total = jax.nn.logsumexp(jnp.where(at_risk, hazards[None, :], -jnp.inf), axis=1)
        happened = (y > 0) & counts
        row_weight = batch.fields.get(ROW_WEIGHT, jnp.ones_like(y))
        return jnp.where(happened, row_weight * (jnp.where(happened, total, 0) - scores), 0)

    def loss(params, batch):
        if model.train is None:
            outputs = model.apply(params, batch.fields["x"])
        else:
            outputs, _ = model.train(params, batch.fields["x"], batch.weight, batch.keys)
        return batch.mean(losses(outputs[:, 0], batch))

    def metrics(params, batch):
        return {"loss": losses(model.apply(params, batch.fields["x"])[:, 0], batch)}

    return task._replace(
        loss=loss,
        metrics=metrics,
        linear=None,
        layers=None,
        streaming_metrics={"concordance": _concordance(model)},
        # The covariance of features in a risk set is at most R².
        curvature=(lambda bound: bound) if biased else None,
    )


def _concordance(model: Model) -> StreamingMetric:
    """Make Harrell's C: the share of comparable pairs in which the earlier event scored higher.

    Equal scores count one half. A pair is comparable if the earlier time is an event's; at equal
    times, if one alone is, as in lifelines.
    """

    def start(most_rows):
        empty = jnp.zeros(most_rows)
        return empty, empty, jnp.zeros(most_rows, bool), jnp.int32(0)

    def add(carry, params, batch):
        scores, times, counts, at = carry
        batch_scores = model.apply(params, batch.fields["x"])[:, 0].astype(scores.dtype)
        y = batch.fields["y"].astype(times.dtype)
        places = ((scores, batch_scores), (times, y), (counts, batch.weight > 0))
        return (
            *(jax.lax.dynamic_update_slice(array, v, (at,)) for array, v in places),
            at + len(batch_scores),
        )

    def value(carry):
        scores, y, counts, _ = carry
        times = jnp.abs(y)

        def of_row(row):
            score, time = row
            later = (times > time) | ((times == time) & (y <= 0))
            comparable = later & counts
            wins = jnp.where(score > scores, 1.0, jnp.where(score == scores, 0.5, 0.0))
            return jnp.sum(jnp.where(comparable, wins, 0)), jnp.sum(comparable)

        wins, pairs = jax.lax.map(of_row, (scores, times))
        happened = (y > 0) & counts
        share = jnp.sum(jnp.where(happened, wins, 0)) / jnp.sum(jnp.where(happened, pairs, 0))
        return jnp.where(jnp.any(jnp.isnan(scores) & counts), jnp.nan, share)

    return StreamingMetric(start, add, value)


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
        padded = jnp.pad(outputs, ((0, 0), (1, 0)), constant_values=-_BEYOND)
        padded = jnp.pad(padded, ((0, 0), (0, 1)), constant_values=_BEYOND)
        place = jnp.arange(num_classes + 1)
        low, high = (
            jnp.sum(jnp.where(labels[:, None] + shift == place, padded, 0), axis=1)
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
