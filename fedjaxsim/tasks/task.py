"""Learning tasks: a model with a loss and the per-example metrics of evaluation."""

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from fedjaxsim import checks
from fedjaxsim.data.minibatches import Batch, ProtectedBatch
from fedjaxsim.data.source import listed
from fedjaxsim.data.synthetic import feature_variances
from fedjaxsim.factories import made_by, maker
from fedjaxsim.kernels import threefry
from fedjaxsim.kernels.linear_steps import Linear
from fedjaxsim.metrics import Metric as Metric
from fedjaxsim.metrics import resolve_metrics
from fedjaxsim.models.model import STATISTICS, Dense, FrozenWeights, Model, linear, require_model
from fedjaxsim.tasks.streaming_metrics import StreamingMetric, area_under_roc

PyTree = Any
OfOutputs = Callable[[jax.Array, jax.Array], jax.Array]
"""(outputs (b, c), labels or other outputs) -> (b,)."""
Check = Callable[[Mapping[str, jax.ShapeDtypeStruct]], None]
_ROUNDING = 1e-6
ROW_WEIGHT = "row_weight"
"""The field with the weight of each row in the loss, (N,) in (0, 1], so that curvature is bounded
as without."""


class Positive(NamedTuple):
    """All positive numbers, as a set of labels."""


POSITIVE = Positive()
PRIOR = "The prior at which intercepts start is given and taken as public."
Augment = Callable[[jax.Array, dict[str, jax.Array]], dict[str, jax.Array]]
"""(key, fields of an example) -> its fields in this step."""


class Layers(NamedTuple):
    """A task on dense layers, for gradients of single examples.

    Attributes:
      of: `Task.loss`, in another form.
      dense: the layers.
      losses: `(outputs, fields) -> (b,)`, the loss of each example.
    """

    of: Callable[[PyTree, Batch], jax.Array]
    dense: Dense
    losses: Callable[[jax.Array, Mapping[str, jax.Array]], jax.Array]


class Classes(NamedTuple):
    """The scores of a classification, for named metrics.

    Attributes:
      number: number of classes c.
      scores: `(params, fields) -> (b, c)`; the largest is the predicted class.
      labels: `(fields) -> (b,)`, classes 0, 1, …
      probabilistic: whether scores are logits, whose softmax are probabilities.
    """

    number: int
    scores: Callable[[PyTree, Mapping[str, jax.Array]], jax.Array]
    labels: Callable[[Mapping[str, jax.Array]], jax.Array]
    probabilistic: bool


class Task(NamedTuple):
    """A learning task as pure functions, from this module or a user's own.

    Attributes:
      init: `(key) -> params`.
      loss: `(params, batch) -> ()`, the weighted mean loss of a minibatch.
      metrics: `(params, batch) -> {name: (b,)}`, per-example values; evaluation averages them over
        each client's rows, and also reports "squared_error" as nMSE.
      check: `(fields) -> None`, raises ValueError if a dict of these shapes and types does
        not suit the task. It sees no values, so none can reach what clients compute.
      labels: the sets of labels "y" that suit the task, `range(c)` for classes, or `POSITIVE`; any
        if empty.
      output_layer: the output layer of the model, see `Model`.
      linear: the linear form of a linear task, for speed only; else None.
      public: sentences on numbers that may be made of private data but are taken as public, such as
        a number of classes; see `Algorithm`.
      divergence: `(params, other, batch) -> (b,)`, the symmetrized KL divergence per example,
        KL(p‖q) + KL(q‖p), between the predictions of two sets of parameters; or None.
      streaming_metrics: named metrics that are no sums over rows, such as "auc"; evaluation
        computes them in the same pass. A client that has none, such as an AUC of one class, has NaN
        and does not count in means and percentiles.
      records: the record of each of your metrics: title, direction, unit. They travel
        with the results to every table, picture and choice. Without a direction a metric has no
        worst tenth, and nothing is chosen by it.
      judged_by: the metric by which runs are judged: patience, choices and pictures read it, and it
        is the first in tables. None for the first that tables show and that has a direction.
      targets: `(fields) -> (n,)`, the number of targets of each row, such as tokens. Metrics are
        then sums over the targets of an example, and a client's sums are divided by its number of
        targets. None if every row has one target.
      frozen: the frozen weights of the model, see `Model`.
      track: `(params, moved, batch) -> params`: `moved`, the parameters after a local step from
        `params` on a batch, with the running statistics after that batch, see `Model.train`; None
        without them. Call `tracked`.
      model: the model of a softmax classification; None for other tasks.
      on_model: `(model) -> Task`: the same task on another model; None where `model` is None.
      predict: `(params, fields) -> {name: (b, ...)}`, which reads no labels: "prediction", and in a
        classification its "probability" (for `logistic` and `multilabel` of the positive
        class); class −1 if the model's outputs are NaN. Or None.
      examples: the protection of single examples by noise in `gradient`, from `private_examples`;
        None without.
      layers: the form of the loss on dense layers, for speed only; else None.
      curvature: `(bound) -> L`: the largest curvature of the loss in the parameters, if features of
        rows have ‖x‖² ≤ bound; None if it has no bound. For `poisson` it holds around the prior.
      classes: the scores of a classification with one label per row, for `with_metrics`; else None.
      exposure: the field that multiplies a row's mean count, if rows have it; None if none does.

    Example:
      >>> task = fjs.tasks.squared(fjs.models.linear((3,), 1))
      >>> batch = fjs.Batch({"x": jnp.ones((1, 3)), "y": jnp.full(1, 2.0)}, jnp.ones(1))
      >>> zero = jax.tree.map(jnp.zeros_like, task.init(jax.random.key(0)))
      >>> float(task.loss(zero, batch))  # (0 − 2)²/2
      2.0
    """

    init: Callable[[jax.Array], PyTree]
    loss: Callable[[PyTree, Batch], jax.Array]
    metrics: Callable[[PyTree, Batch], dict[str, jax.Array]]
    check: Check = lambda fields: None
    labels: tuple[Collection[float] | Positive, ...] = ()
    output_layer: str | None = None
    linear: Linear | None = None
    public: tuple[str, ...] = ()
    divergence: Callable[[PyTree, PyTree, Batch], jax.Array] | None = None
    streaming_metrics: Mapping[str, StreamingMetric] = MappingProxyType({})
    records: Mapping[str, Metric] = MappingProxyType({})
    judged_by: str | None = None
    targets: Callable[[Mapping[str, jax.Array]], jax.Array] | None = None
    frozen: FrozenWeights | None = None
    track: Callable[[PyTree, PyTree, Batch], PyTree] | None = None
    model: Model | None = None
    on_model: "Callable[[Model], Task] | None" = None
    predict: Callable[[PyTree, Mapping[str, jax.Array]], dict[str, jax.Array]] | None = None
    examples: Any = None
    layers: Layers | None = None
    curvature: Callable[[float], float] | None = None
    classes: Classes | None = None
    exposure: str | None = None

    def __repr__(self) -> str:
        """Name the factories of its loss and model, and metrics that it adds to the usual ones."""
        more = ", ".join(dict.fromkeys((*self.streaming_metrics, *self.records)))
        judged = f", judged by {self.judged_by}" if self.judged_by else ""
        metrics = f", metrics also {more}" if more else ""
        return f"Task {maker(self.loss)} on model {made_by(self.init)}{metrics}{judged}"

    def gradient(self, params: PyTree, batch: Batch | ProtectedBatch) -> PyTree:
        """Compute the gradient of the loss at a minibatch, like `params`.

        The loss itself is no result: the mean over a client's minibatches is its metric "loss". If
        examples are protected the gradient is clipped, summed and noised; see `private_examples`.
        """
        return batch.gradient(self, params)

    def metric_records(self, means: Collection[str]) -> dict[str, Metric]:
        """Decide the records of all metrics; `means` names the means over rows.

        Runs are judged by the first of them. Raises ValueError if `records` or `judged_by`
        contradict the metrics.
        """
        derived = ["nmse"] if "squared_error" in means else []
        names = [*means, *self.streaming_metrics, *derived]
        return resolve_metrics(names, self.records, self.judged_by)

    def with_outputs(self, apply: Callable[[Any, jax.Array], jax.Array]) -> "Task":
        """Return the softmax task of an algorithm whose clients predict with more than parameters.

        `apply`, `(predictor, x (b, ...)) -> outputs (b, c)`, makes the outputs of evaluations and
        predictions from what `predict` returns, any pytree, or `predict_with_data` if there is one;
        the loss stays a function of parameters.
        """
        if self.model is None or self.on_model is None:
            raise ValueError(
                "outputs can be replaced in a softmax classification only: give another task its "
                "`metrics` and `predict` by `_replace`"
            )
        softmax_task = self.on_model(Model(self.model.init, apply))
        return self._replace(
            metrics=softmax_task.metrics,
            streaming_metrics=softmax_task.streaming_metrics,
            divergence=softmax_task.divergence,
            predict=softmax_task.predict,
            classes=softmax_task.classes,
        )

    def tracked(self, params: PyTree, moved: PyTree, batch: Batch) -> PyTree:
        """Return `moved`, the parameters after a step, with the running statistics after it.

        They are replaced: no gradient, pull or optimizer moves them. `params` are those before it.
        """
        return moved if self.track is None else self.track(params, moved, batch)


def check_rows(
    task: Task, fields: Mapping[str, np.ndarray], names: Sequence[str] | None = None
) -> None:
    """Check that fields of rows, each (N, ...), suit a task's `check` and `labels`.

    `names` are the names of the labels 0, 1, …, if they have some.
    """
    task.check({name: jax.ShapeDtypeStruct(v.shape, v.dtype) for name, v in fields.items()})
    if not task.labels:
        return
    y, words = fields["y"], []
    low, high = y.min().item(), y.max().item()
    for labels in task.labels:
        # Plain sets, so that no code of a user sees a label.
        if isinstance(labels, Positive):
            if low > 0:
                return
            words.append("positive")
            continue
        allowed = labels if type(labels) is range else {*map(float, labels)}
        if (
            low in allowed
            and high in allowed
            and (allowed is labels or {*np.unique(y).tolist()} <= {*allowed})
        ):
            return
        words.append(f"in {labels}" if allowed is labels else " and ".join(map(str, labels)))
    wanted, values = f"labels of this task must be {' or '.join(words)}", np.unique(y)
    if names is not None:
        raise ValueError(f"{wanted}, got the classes {listed([names[k] for k in values])}")
    fit = y.dtype.kind in "iu" and y.ndim == 1 and len(values) <= max(map(len, task.labels))
    hint = f" ({listed(values.tolist())}): fjs.data.as_classes numbers them from 0" if fit else ""
    raise ValueError(f"{wanted}, got labels from {low} to {high}{hint}")


def augmented(task: Task, augment: Augment) -> Task:
    """Make a task whose examples are changed at random in training: cropped, flipped, noised.

    Evaluations read them as they are. `augment`, `(key, fields) -> fields` of one example, keeps
    the shapes; each example, client, round and step has its key.
    """

    def changed(batch: Batch) -> Batch:
        if batch.keys is None:
            return batch
        keys, layer_keys = jax.vmap(threefry.split)(batch.keys)  # random layers have others
        return batch._replace(fields=jax.vmap(augment)(keys, batch.fields), keys=layer_keys)

    track, on_model = task.track, task.on_model
    return task._replace(
        loss=lambda params, batch: task.loss(params, changed(batch)),
        track=track and (lambda params, moved, batch: track(params, moved, changed(batch))),
        on_model=on_model and (lambda model: augmented(on_model(model), augment)),
        linear=None,
        layers=None,
    )


def _with_checks(name: str, model: Any, num_outputs: int, *, per_token: bool) -> Model:
    """Return the model of task `name`; traced with other outputs, it raises."""
    model = require_model(f"{name} needs", model)
    train, dense = model.train, model.dense
    wanted = f"(b, {'L, ' if per_token else ''}{num_outputs})"

    def checked(outputs, x):
        shape: Any = getattr(outputs, "shape", ())
        if len(shape) != 2 + per_token or (shape[0], shape[-1]) != (len(x), num_outputs):
            got = f"shape {shape}" if shape else checks.described(outputs)
            raise ValueError(
                f"{name} needs a model with outputs {wanted}, got {got} for {len(x)} rows"
            )
        return outputs

    def apply(params, x):
        return checked(model.apply(params, x), x)

    def trained(train, params, x, *arguments):
        outputs, statistics = train(params, x, *arguments)
        return checked(outputs, x), statistics

    return model._replace(
        apply=apply,
        train=train and functools.partial(trained, train),
        dense=dense._replace(of=apply) if dense and dense.of is model.apply else None,
    )


def task_of_outputs(
    name: str,
    model: Model,
    num_outputs: int,
    metrics: Mapping[str, OfOutputs],
    says: Callable[[jax.Array], dict[str, jax.Array]],
    wanted: str,
    suits: Callable[[jax.ShapeDtypeStruct], bool],
    score: Callable[[jax.Array], jax.Array] | None = None,
    targets: Callable[[Mapping[str, jax.Array]], jax.Array] | None = None,
    exposure: str | None = None,
    **more: Any,
) -> Task:
    """Make a task of functions of outputs and labels; the metric "loss" is the loss.

    `says` makes predictions of outputs, `suits` judges labels y by the rule `wanted`,
    `score` of two classes is larger for the positive one, (b,), `exposure` is a field whose
    logarithm is added to the outputs if rows have it, and `more` are other attributes, among them
    the `divergence` of outputs. If rows have the field "row_weight", it multiplies their losses in
    training; metrics count each row once.
    """
    model = _with_checks(name, model, num_outputs, per_token=targets is not None)
    features, dense, between = model.features, model.dense, more.pop("divergence", None)

    def check(fields):
        if not {"x", "y"} <= {*fields}:
            raise ValueError(f"this task needs the fields 'x' and 'y', got {sorted(fields)}")
        y = fields["y"]
        if not suits(y):
            raise ValueError(f"{wanted}, got {y.dtype} {y.shape}")

    def losses_of(outputs, fields):
        losses = metrics["loss"](exposed(outputs, fields), fields["y"])
        if ROW_WEIGHT not in fields:
            return losses
        return losses * fields[ROW_WEIGHT].astype(losses.dtype)

    def exposed(outputs, fields):
        if exposure not in fields:
            return outputs
        return outputs + jnp.log(fields[exposure].astype(outputs.dtype))[:, None]

    def outputs_of(params, batch):
        return exposed(model.apply(params, batch.fields["x"]), batch.fields)

    def trained(params, batch):
        if model.train is None:
            return model.apply(params, batch.fields["x"]), None
        return model.train(params, batch.fields["x"], batch.weight, batch.keys)

    def loss(outputs, batch):
        losses = losses_of(outputs, batch.fields)
        if targets is None:
            return batch.mean(losses)
        count = batch.sum(targets(batch.fields).astype(losses.dtype))
        return batch.sum(losses) / jnp.maximum(count, 1)

    def loss_of(params, batch):
        return loss(trained(params, batch)[0], batch)

    loss_of.__qualname__ = name  # by which a task is shown

    def track(params, moved, batch):
        return moved | {STATISTICS: trained(params, batch)[1]}

    def metrics_of(params, batch):
        outputs, labels = outputs_of(params, batch), batch.fields["y"]
        values = {name: metric(outputs, labels) for name, metric in metrics.items()}
        return {name: value.astype(values["loss"].dtype) for name, value in values.items()}

    def divergence(params, other, batch):
        return between(outputs_of(params, batch), outputs_of(other, batch))

    streaming = {}
    if score is not None:
        streaming["auc"] = area_under_roc(
            lambda params, batch: score(outputs_of(params, batch)),
            lambda batch: batch.fields["y"] > 0,
        )
    layers = None
    if dense is not None and dense.of is model.apply and model.train is None:
        layers = Layers(loss_of, dense, losses_of)
    assumed = "The weights that the model starts from hold nothing of the clients' data."
    return Task(
        model.init,
        loss_of,
        metrics_of,
        check,
        output_layer=model.output_layer,
        linear=features and Linear(lambda batch: features(batch.fields["x"]), loss),
        public=() if model.frozen is None else (assumed,),
        divergence=between and divergence,
        streaming_metrics=streaming,
        targets=targets,
        frozen=model.frozen,
        track=track if model.keeps_statistics else None,
        predict=lambda params, fields: says(exposed(model.apply(params, fields["x"]), fields)),
        layers=layers,
        exposure=exposure,
        **more,
    )


def _of_classes(
    name: str,
    model: Model,
    num_classes: int,
    losses: OfOutputs,
    divergence: OfOutputs,
    probabilities: Callable[[jax.Array], jax.Array] | None,
) -> Task:
    """Make a classification in which the largest of c outputs wins."""
    checks.count(2, num_classes=num_classes)
    score = (lambda outputs: outputs[:, 1] - outputs[:, 0]) if num_classes == 2 else None
    task = task_of_outputs(
        name, model, num_classes, {"loss": losses, "accuracy": _largest},
        functools.partial(_class_said, probabilities),
        f"{name} needs integer labels y (n,), as y.argmax(axis=1) of one-hot ones; squared takes "
        "others",
        lambda y: np.issubdtype(y.dtype, np.integer) and y.ndim == 1,
        score=score, divergence=divergence, labels=(range(num_classes),),
    )  # fmt: skip
    classes = Classes(
        num_classes,
        lambda params, fields: model.apply(params, fields["x"]),
        lambda fields: fields["y"],
        probabilities is not None,
    )
    return task._replace(classes=classes)


def _class_said(
    probabilities: Callable[[jax.Array], jax.Array] | None, outputs: jax.Array
) -> dict[str, jax.Array]:
    """Return the class of the largest output, and its probability if outputs have one."""
    prediction = {"prediction": _if_said(jnp.argmax(outputs, axis=-1), outputs)}
    if probabilities is None:
        return prediction
    return prediction | {"probability": jnp.max(probabilities(outputs), axis=-1)}


def _if_said(prediction: jax.Array, outputs: jax.Array) -> jax.Array:
    """Return a class, or −1 if an output is NaN, int32."""
    return jnp.where(jnp.isnan(outputs).any(axis=-1), -1, prediction).astype(jnp.int32)


# KL(p‖q) + KL(q‖p) of an exponential family is (mean of p − mean of q)·(natural parameter of p −
# natural parameter of q), without cancellation for similar p and q.


def _of_categories(logits: jax.Array, other_logits: jax.Array) -> jax.Array:
    """Compute the divergence of categorical distributions, (b,)."""
    log_p, log_q = jax.nn.log_softmax(logits), jax.nn.log_softmax(other_logits)
    return jnp.sum((jnp.exp(log_p) - jnp.exp(log_q)) * (log_p - log_q), axis=-1)


def divergence_of_coins(logits: jax.Array, other_logits: jax.Array) -> jax.Array:
    """Compute the divergence of independent Bernoulli variables with these log-odds, (b,)."""
    p, q = jax.nn.sigmoid(logits), jax.nn.sigmoid(other_logits)
    return jnp.sum((p - q) * (logits - other_logits), axis=-1)


def divergence_of_normals(means: jax.Array, other_means: jax.Array) -> jax.Array:
    """Compute the divergence of independent normal variables of variance 1, (b,)."""
    return jnp.sum(jnp.square(means - other_means), axis=-1)


def _judged(right: jax.Array, outputs: jax.Array) -> jax.Array:
    """Return 1 where a prediction is right, else 0, (b, …); NaN where an output is NaN."""
    return jnp.where(jnp.isnan(outputs).any(axis=-1), jnp.nan, right.astype(outputs.dtype))


def _largest(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    """Judge whether the largest output is the label's, (b, …)."""
    return _judged(jnp.argmax(outputs, axis=-1) == labels, outputs)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Compute −log softmax(logits)[label], (...), of logits (..., c); optax's up to rounding.

    A label's logit is chosen by comparison: the derivative of an index is a scatter, which a CPU
    writes number by number.
    """
    shifted = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    classes = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    chosen = labels[..., None] == classes
    sizes = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    return sizes - jnp.sum(jnp.where(chosen, shifted, 0), axis=-1)


def with_intercepts(model: Model, values: Sequence[ArrayLike]) -> Model:
    """Return the model whose intercepts, linear or of the output layer, start at `values`."""
    model, start = require_model("a prior needs", model), jnp.asarray(values, float)

    def output_layer(params):
        return params if model.output_layer is None else params[model.output_layer]

    layer = output_layer(jax.eval_shape(model.init, jax.random.key(0)))
    if not isinstance(layer, Mapping) or getattr(layer.get("bias"), "shape", ()) != start.shape:
        raise ValueError(f"a prior needs a model with {len(start)} intercepts, called `bias`")

    def init(key):
        params = model.init(key)
        layer = output_layer(params)
        started = {**layer, "bias": start.astype(layer["bias"].dtype)}
        return started if model.output_layer is None else {**params, model.output_layer: started}

    return model._replace(init=init)


def softmax(model: Model, num_classes: int, prior: Sequence[float] | None = None) -> Task:
    """Classification with softmax cross-entropy; "y" holds integers in [0, c).

    Args:
      model: outputs (b, c) logits.
      num_classes: c.
      prior: Public shares of the classes, at whose logarithms the intercepts start.
    """
    if prior is not None:
        if len(prior) != num_classes or min(prior) <= 0 or abs(sum(prior) - 1) > _ROUNDING:
            raise ValueError(
                f"prior must be the shares of the {num_classes} classes, each above 0 and together "
                f"1, got {', '.join(map(str, prior))}"
            )
        model = with_intercepts(model, [math.log(share) for share in prior])
    task = _of_classes("softmax", model, num_classes, cross_entropy, _of_categories, jax.nn.softmax)
    return task._replace(
        public=task.public if prior is None else (*task.public, PRIOR),
        model=model,
        on_model=lambda other: softmax(other, num_classes),
        curvature=curvature_of(model, 1 / 2),  # of diag(p) − p pᵀ
    )


def softmax_sequence(model: Model, num_classes: int) -> Task:
    """Softmax cross-entropy of every token, such as the next character of a text.

    "y" holds integers in [0, c), (n, L), and −1 for padding, which counts in no loss and no
    accuracy. The loss of a minibatch and a client's metrics are means over tokens: a long example
    counts more than a short one.

    Args:
      model: outputs (b, L, c) logits.
      num_classes: c.
    """
    checks.count(2, num_classes=num_classes)

    def summed(of_token):
        def over_tokens(outputs, labels):
            if outputs.shape[:2] != labels.shape:
                raise ValueError(
                    f"outputs of {outputs.shape} do not fit labels y of {labels.shape}"
                )
            values = of_token(outputs, jnp.maximum(labels, 0))
            return jnp.where(labels >= 0, values, 0).sum(axis=1)

        return over_tokens

    return task_of_outputs(
        "softmax_sequence", model, num_classes,
        {"loss": summed(cross_entropy), "accuracy": summed(_largest)},
        functools.partial(_class_said, jax.nn.softmax),
        "softmax_sequence needs integer labels y (n, L)",
        lambda y: y.dtype.kind == "i" and y.ndim == 2,
        targets=lambda fields: (fields["y"] >= 0).sum(axis=1),
        labels=(range(-1, num_classes),),
    )  # fmt: skip


def one_vs_all(model: Model, num_classes: int) -> Task:
    """Classification by c regressions; "y" holds integers in [0, c), the largest output wins.

    The loss of an example, with outputs o_c and one-hot label h, is ½ Σ_c (o_c − (h_c − 0.1))², as
    in the experiments of Bietti et al. (2022), §6; the −0.1, which centres the targets of ten
    classes, is from the authors' code.

    Args:
      model: outputs (b, c).
      num_classes: c.
    """

    def losses(outputs, labels):
        one_hot = jax.nn.one_hot(labels, num_classes, dtype=outputs.dtype)
        return jnp.sum(optax.losses.l2_loss(outputs, one_hot - 0.1), axis=-1)

    task = _of_classes("one_vs_all", model, num_classes, losses, divergence_of_normals, None)
    return task._replace(curvature=curvature_of(model))


def curvature_of(model: Model, of_outputs: float = 1.0) -> Callable[[float], float] | None:
    """Return the bound on a linear model's curvature as a function of the bound on ‖x‖².

    `of_outputs` bounds the curvature of the loss in the outputs.
    """
    if model.representation is None or model.output_layer is not None:
        return None
    biased = "bias" in jax.eval_shape(model.init, jax.random.key(0))
    return lambda bound: of_outputs * (bound + biased)


def logistic(model: Model, prior: float | None = None) -> Task:
    """Binary classification with the logistic loss (optax); "y" holds −1 and 1, or 0 and 1.

    Predictions are 0 and 1, with the probability of 1.

    Args:
      model: outputs (b, 1): the log-odds of the positive class.
      prior: A public probability of the positive class, at whose log-odds the intercept starts.
    """
    if prior is not None:
        checks.in_range("(0, 1)", prior=prior)
        model = with_intercepts(model, [math.log(prior / (1 - prior))])

    def losses(logits, labels):
        positive = (labels > 0).astype(logits.dtype)
        return optax.losses.sigmoid_binary_cross_entropy(logits[:, 0], positive)

    def correct(logits, labels):
        return _judged((logits[:, 0] > 0) == (labels > 0), logits)

    def says(logits):
        odds = logits[:, 0]
        return {"prediction": _if_said(odds > 0, logits), "probability": jax.nn.sigmoid(odds)}

    task = task_of_outputs(
        "logistic", model, 1, {"loss": losses, "accuracy": correct}, says,
        "logistic needs one label per row, y (n,)", lambda y: y.ndim == 1,
        score=lambda logits: logits[:, 0], divergence=divergence_of_coins, labels=((-1, 1), (0, 1)),
        curvature=curvature_of(model, 1 / 4),
    )  # fmt: skip

    def scores(params, fields):
        odds = model.apply(params, fields["x"])
        return jnp.concatenate([jnp.zeros_like(odds), odds], axis=1)

    classes = Classes(2, scores, lambda fields: (fields["y"] > 0).astype(jnp.int32), True)
    task = task._replace(classes=classes)
    return task if prior is None else task._replace(public=(*task.public, PRIOR))


def squared(model: Model) -> Task:
    """Regression with ½(prediction − y)² (optax.l2_loss); "y" is (n,).

    Args:
      model: outputs (b, 1).
    """
    return task_of_outputs(
        "squared", model, 1,
        {
            "loss": lambda outputs, y: optax.losses.l2_loss(outputs[:, 0], y),
            "squared_error": lambda outputs, y: jnp.square(outputs[:, 0] - y),
        },
        lambda outputs: {"prediction": outputs[:, 0]},
        "squared needs one target per row, y (n,)", lambda y: y.ndim == 1,
        divergence=divergence_of_normals, curvature=curvature_of(model),
    )  # fmt: skip


def known_regression(num_features: int) -> Task:
    """Linear regression with ½(prediction − y)², evaluated against the true parameters.

    For `regression_stream`: training sees minibatches of x (b, d) and y (b,); evaluation reads the
    clients' θ_i* and reports "excess_risk" = ‖θ − θ_i*‖²_Σ with Σ = diag(1, 1/2, …, 1/d), the
    paper's form (Bietti et al. 2022, section 6): twice the excess of the expected loss. (The
    authors' code also divides it by d.)

    Args:
      num_features: d. The model is {"kernel": (1, d)}, without bias, started at zero.
    """
    model = linear((num_features,), 1, bias=False)
    variances = feature_variances(num_features)

    def metrics(params, batch):
        error = params["kernel"][0] - batch.fields["theta"]
        return {"excess_risk": jnp.square(error) @ jnp.asarray(variances, error.dtype)}

    def check(fields):
        theta = fields.get("theta")
        if theta is None or theta.shape[1:] != (num_features,):
            raise ValueError(
                f"known_regression needs the field 'theta' of shape (N, {num_features}), got "
                + ", ".join(f"{name!r} {list(value.shape)}" for name, value in fields.items())
            )

    return squared(model)._replace(metrics=metrics, check=check, linear=None, curvature=None)
