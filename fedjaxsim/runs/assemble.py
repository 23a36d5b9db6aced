"""Assemble the population and the simulation that settings name, and check that they fit."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjaxsim import tasks
from fedjaxsim.algorithm import Algorithm
from fedjaxsim.algorithms import optimizers
from fedjaxsim.checks import Name, SettingError
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.data.readers import TABLES, DataSpec
from fedjaxsim.data.splitting import hold_out, limit_training_rows, with_held_out
from fedjaxsim.data.tables.load import load, populate
from fedjaxsim.data.tables.table import read_table
from fedjaxsim.data.tables.user_reader import is_frame, source_of_rows
from fedjaxsim.data.transforms import (
    BY_NUMBER,
    as_classes,
    drop_constant_columns,
    invert,
    ranges_of,
    scale,
    scale_by_rows,
    unit_rows,
)
from fedjaxsim.factories import is_user_code
from fedjaxsim.models.model import Model, in_bfloat16
from fedjaxsim.privacy.mechanisms import Mechanism
from fedjaxsim.privacy.private_examples import private_examples
from fedjaxsim.privacy.private_ranges import scale_privately
from fedjaxsim.privacy.samplers import Availability, Sampling, available, full_participation
from fedjaxsim.runs.baseline import RARE, rare_class
from fedjaxsim.runs.parts import (
    LOSSES,
    MODELS,
    OF_TOKENS,
    check_takes,
    find_user_code,
    run_user_code,
)
from fedjaxsim.runs.settings import RunConfig, flag
from fedjaxsim.simulation import Simulation
from fedjaxsim.tasks.named_metrics import is_named
from fedjaxsim.tasks.regressions import EXPOSURE
from fedjaxsim.tasks.task import Task, known_regression

TRANSFORMS = {"drop-constant": drop_constant_columns, "invert": invert, "unit-rows": unit_rows}
_OF_CLASSES, _OF_NUMBERS = ("class", "rank"), ("number", "count")
"""Targets of losses that number classes, and of those that are numbers; see `Loss`."""
_DIVISOR = (
    "M = Σ min(b, n_k), the divisor of the weighted objective, is made of the clients' numbers of "
    "training rows n_k and taken as public."
)


class Parts(NamedTuple):
    """The parts of a simulation besides its population; see `Simulation`."""

    algorithm: Algorithm
    sampling: Sampling
    minibatches: Minibatches
    mechanism: Mechanism


def simulation_of(
    config: RunConfig, population: Population, task: Task | None = None
) -> Simulation:
    """Make the simulation of a run on a population; settings of data are not read.

    `task` may be the task of these settings for another population with the same classes.
    """
    parts = parts_of(config, population, population.num_clients, task)
    if config.streamed and jax.process_count() > 1:
        raise ValueError("a streamed run takes one process: give --streamed or several processes")
    divided = jax.device_count() > 1 and not config.streamed
    return Simulation(
        parts.algorithm,
        population,
        parts.sampling,
        parts.minibatches,
        parts.mechanism,
        chunk_size=config.chunk_size,
        chunk_map=config.chunk_map,
        devices=jax.devices() if divided else None,
        streamed=config.streamed,
    )


def parts_of(
    config: RunConfig, population: Population, num_clients: int, task: Task | None = None
) -> Parts:
    """Make the parts of a run's simulation of m clients, maybe more than the population has."""
    if task is None:
        task = _task(config, population)
        if config.protects_examples:
            epsilon = config.get("example_epsilon")
            rounds = None if epsilon is None else config.rounds
            task = private_examples(task, epsilon=epsilon, rounds=rounds)
    full = config.sampler == "full"
    sampling = full_participation() if full else _part(config, "sampling", Sampling)
    if "availability" in config.parts:
        sampling = available(sampling, _part(config, "availability", Availability))
    # Penalties that select features need only the diagonal of a Gram matrix.
    supplied: dict[str, Any] = {"diagonal": (config.get("penalty") or "").endswith("group-sparse")}
    if config.get("weights") == "rows":
        supplied["weights"] = np.resize(population.splits["train"].count, num_clients)
    return Parts(
        _algorithm(config, task, population, num_clients),
        sampling,
        _minibatches(config),
        _part(config, "mechanism", Mechanism, supplied=supplied),
    )


def _part(
    config: RunConfig,
    role: str,
    kind: type,
    *args: Any,
    supplied: Mapping[str, Any] = {},
    **more: Any,
) -> Any:
    """Make the part of a role, of type `kind`; its factory takes what it can of `supplied`."""
    return config.parts[role].make(kind, supplied, *args, **config.arguments(role) | more)


def population_of(config: RunConfig) -> Population:
    """Load the population of a run: the clients that are kept, those held out, or all."""
    population = whole_population_of(config)
    if config.clients_used == "kept":
        return population
    if population.held_out is None:
        used = config.clients_used
        raise ValueError(f"clients-used {used} needs held-out-clients above 0, got 0")
    return population.held_out if config.clients_used == "held-out" else with_held_out(population)


def whole_population_of(config: RunConfig) -> Population:
    """Load the population of the kept clients, with those held out in `held_out`.

    Its preparation reads rows of the kept clients alone, and is the same for the others.
    """
    spec, arguments = DataSpec(config.data), config.arguments("data")
    division: dict[str, Any] = {
        "partition": config.partition,
        "seed": config.data_seed,
        "validation": config.get("validation_fraction"),
        "test": config.get("test_fraction"),
        "split_by": config.get("split_by"),
        "max_rows": config.get("max_rows"),
        **config.arguments("partition"),
    }
    if spec.is_user_code:
        rows, roles = config.parts["data"].rows(arguments, config.data_seed)
        population = populate(source_of_rows(rows, spec, roles), spec, **division)
    else:
        population = load(spec, **division, **arguments)
    of_classes = config.loss_record.targets not in (*_OF_NUMBERS, "any")
    if config.get("as_classes"):
        y = population.fields.get("y")
        if y is None or y.ndim > 1 or y.dtype.kind not in "iu":
            raise ValueError("as-classes needs one whole number as the target of each row")
    if config.get("as_classes") or (of_classes and not _has_range(config, population)):
        population = as_classes(population)
    if config.held_out_clients:
        kept, held_out = hold_out(population, config.held_out_clients, config.data_seed)
        population = dataclasses.replace(kept, held_out=held_out)
    population = _scaled(config, population)
    for step in config.get("preprocess"):
        population = TRANSFORMS[step](population)
    most = config.get("train_rows")
    return population if most is None else limit_training_rows(population, most, config.data_seed)


def source_frame(config: RunConfig) -> Any:
    """Return the data frame or table that a run reads; None for data that are none."""
    spec, arguments = DataSpec(config.data).require_known(), config.arguments("data")
    if spec.is_user_code:
        rows, _ = config.parts["data"].rows(arguments, config.data_seed)
        return rows if is_frame(rows) else None
    if spec.kind not in TABLES:
        return None
    how = {name: arguments[name] for name in ("client", "missing", "sep", "decimal")}
    return read_table(spec.path, **how)


def _has_range(config: RunConfig, population: Population) -> bool:
    """Return whether the target has a public range and no loss is chosen: it is a number."""
    columns = population.columns.get("y")
    ranged = columns is not None and {*columns.names} & {*ranges_of(config.get("range"))}
    return bool(ranged) and config.get("loss") is None


def _scaled(config: RunConfig, population: Population) -> Population:
    """Scale columns as the settings ask: public ranges first, then the other columns."""
    population = scale(population, ranges_of(config.get("range")))
    how, target = config.get("scale"), config.loss in ("squared", "quantile", "squared-targets")
    if how == "all":
        return scale_by_rows(population, target=target)
    if how == "private":
        noise = config.get("scale_noise")
        return scale_privately(population, noise, target=target, seed=config.data_seed)
    return population


def _minibatches(config: RunConfig) -> Minibatches:
    steps, epochs = config.get("local_steps"), config.get("local_epochs")
    if steps is None and epochs is None:
        # Fresh examples have no epochs.
        one_minibatch = config.system.one_minibatch or config.data == "synthetic-stream"
        steps, epochs = (1, None) if one_minibatch else (None, 1)
    size, passes = config.get("batch_size"), config.get("passes")
    return Minibatches(size, steps=steps, epochs=epochs, passes=passes)


def _task(config: RunConfig, population: Population) -> Task:
    fields = population.fields
    if population.generate is not None:
        if (config.model, config.loss) != ("linear", "squared"):
            raise ValueError(
                "synthetic-stream is a linear regression: model must be linear and loss squared, "
                f"got model {config.model} and loss {config.loss}"
            )
        return known_regression(fields["theta"].shape[1])
    if "x" not in fields or "y" not in fields:
        raise ValueError(f"the data must have the fields x and y, got {', '.join(fields)}")
    target = config.loss_record.targets
    if EXPOSURE in fields and target not in ("count", "any"):
        of_counts = [name for name, loss in LOSSES.items() if loss.targets == "count"]
        raise ValueError(f"exposure is for loss {' and '.join(of_counts)}, got loss {config.loss}")
    classes = population.categories.get("y")
    outputs, made_for = 1, tuple[int, ...]()
    if target == "any":
        targets = fields["y"].shape[1] if fields["y"].ndim == 2 else 1
        outputs = config.get("outputs") or (targets if classes is None else len(classes))
        made_for = (outputs,)
    elif target == "several":
        outputs = fields["y"].shape[1]
        made_for = (outputs,)
    elif target in _OF_CLASSES:
        num_classes = max(2, int(fields["y"].max()) + 1 if classes is None else len(classes))
        outputs, made_for = num_classes if target == "class" else 1, (num_classes,)
    public = []
    per_token = config.loss == "softmax" and fields["y"].ndim == 2
    supplied: dict[str, Any] = {}
    if config.model in OF_TOKENS:
        tokens = population.categories.get("x", ())
        num_tokens = len(tokens) or int(fields["x"].max()) + 1
        if not tokens:
            public.append(f"The number of tokens, {num_tokens}, is the largest of them")
        padding = tokens.index("") if "" in tokens else None
        supplied = {"num_tokens": num_tokens, "last": not per_token, "padding": padding}
    shape = fields["x"].shape[1:]
    model = _part(config, "model", Model, shape, outputs, supplied=supplied)
    if is_user_code(config.model):
        check_model(config.model, model, fields["x"], outputs)
    if config.compute == "bfloat16":
        model = in_bfloat16(model)
    if target in _OF_CLASSES and classes is None:  # else their names give the number
        public.append(f"The number of classes, {made_for[0]}, is the largest label")
    if not per_token:
        task = _part(config, "loss", Task, model, *made_for)
    elif config.get("prior") is not None:
        raise ValueError("prior is for one label per row, not for one per token: leave it out")
    else:
        task = tasks.softmax_sequence(model, outputs)
    if config.loss in ("softmax", "logistic") and (name := rare_class(population)) is not None:
        task = _judged_by_loss(task, name)
    users = [word for word in config.metrics if is_user_code(word)]
    if named := [word for word in config.metrics if word not in users]:
        task = tasks.with_metrics(task, named)
    for word in users:
        task = _with_own_metric(task, word)
        named.append(word.rpartition(":")[2])
    if config.metric is not None:
        if is_named(config.metric) and config.metric not in named and target != "any":
            raise SettingError(
                Name("metric"), f" {config.metric} needs ", Name("metrics"), f" {config.metric}"
            )
        task = task._replace(judged_by=config.metric)
    made = " of all clients and one more; it is taken as public."
    return task._replace(public=(*task.public, *(f"{sentence}{made}" for sentence in public)))


def _with_own_metric(task: Task, word: str) -> Task:
    """Return the task with the metric of a user's "module:factory", which is called as that."""
    factory = find_user_code("metrics", word)

    def make(task):
        check_takes("metrics", word, factory, task)
        return run_user_code(f"metrics {word}", lambda: factory(task))

    return tasks.with_own_metric(task, word.rpartition(":")[2], make)


def _judged_by_loss(task: Task, rare: str) -> Task:
    """Return the task of a rare class, whose runs are judged by log loss."""

    def metrics(params, batch):
        values = task.metrics(params, batch)
        return {"rare_class_loss": values["loss"], **values}

    sentence = f"That class {rare!r} is rare is read from all clients' labels and taken as public."
    again = task.on_model
    return task._replace(
        metrics=metrics,
        public=(*task.public, sentence),
        on_model=again and (lambda model: _judged_by_loss(again(model), rare)),
    )


def _algorithm(
    config: RunConfig, task: Task, population: Population, num_clients: int
) -> Algorithm:
    arguments = config.arguments("algorithm")
    more: dict[str, Any] = {}
    if config.get("schedule") != "constant":
        decay = {
            "cosine": optax.cosine_decay_schedule(1.0, config.rounds),
            "linear": optax.linear_schedule(1.0, 0.0, config.rounds),
        }[config.get("schedule")]
        more["local_optimizer"] = optimizers.local(arguments["local_optimizer"], decay)
        if personal := arguments.get("personal_optimizer"):
            rate = optimizers.PERSONAL_LEARNING_RATE
            more["personal_optimizer"] = optimizers.local(personal, decay, rate)
    supplied: dict[str, Any] = {"num_clients": num_clients}
    if arguments.get("objective") == "weighted":
        rows = population.splits["train"].count
        supplied["sizes"] = np.minimum(rows, config.get("batch_size"))
    algorithm = _part(config, "algorithm", Algorithm, task, supplied=supplied, **more)
    if "sizes" in supplied:
        algorithm = algorithm._replace(public=(_DIVISOR,))
    if (adds_up := algorithm.noise_adds_up) and is_user_code(config.algorithm):
        remedy = f"{adds_up.algorithm} with {adds_up.remedy}"
        adds_up = adds_up._replace(algorithm=config.algorithm, remedy=remedy)
        algorithm = algorithm._replace(noise_adds_up=adds_up)
    return algorithm


# --- checks of data and models --------------------------------------------------------------------

_CLASSES = ("digits", "leaf")
"""Data whose labels are classes."""
_FEW = 20
"""Classes that may occur in any number of rows."""
_MISSING = ("", "?", "-", "na", "n/a", "nan", "null", "none", "missing")
"""Names of classes that may stand for missing labels."""
_LARGE, _UNEVEN, _SAMPLED = 30, 1e3, 10_000
"""Features, and their ratio, that one step hardly suits, and the rows that are looked at."""
_SPARSE = 10
"""The largest ratio of outputs to distinct labels; labels beyond it do not number classes."""


def check_data(config: RunConfig, population: Population) -> None:
    """Check that there are rows to test on, and that they suit the model and the loss."""
    if not population.has("test"):
        raise ValueError(
            "no client has rows to test on: test-fraction must be larger, or the clients must have "
            f"more rows, got test-fraction {config.get('test_fraction')}"
        )
    for name in ("patience", "evaluate_privately"):
        if config.get(name) is not None and not population.has("validation"):
            raise ValueError(
                f"{flag(name)} needs rows to validate on, and no client has any: "
                f"validation-fraction must be larger, got {config.get('validation_fraction')}"
            )
    kind = DataSpec(config.data).kind
    numbers = [model for model in MODELS if model not in OF_TOKENS]
    if "x" in population.categories and config.model in numbers:
        raise ValueError(
            f"the features are text, whose characters model {config.model} would take for "
            f"numbers: model must be {', '.join(OF_TOKENS)} or your own, MODULE:FACTORY"
        )
    x = population.fields.get("x")
    are_tokens = x is None or (x.dtype.kind in "iu" and x.ndim == 2 and x.min() >= 0)
    if config.model in OF_TOKENS and x is not None and not are_tokens:
        raise ValueError(
            f"model {config.model} needs rows of tokens, integers (n, L) from 0 on, got x "
            f"{x.dtype} {x.shape}"
        )
    labels = population.fields.get("y")
    if labels is None:
        return
    target = config.loss_record.targets
    if target == "several":
        if labels.ndim != 2:
            raise ValueError(
                f"loss {config.loss} needs several targets per row, y (n, t), got shape "
                f"{labels.shape}"
            )
        return
    if target != "any" and _are_one_hot(labels):
        raise ValueError(
            f"the labels y {labels.shape} are one-hot: give their numbers, y.argmax(axis=1)"
        )
    if labels.ndim > 1 and config.model in numbers and target != "any":
        raise ValueError(
            f"model {config.model} needs one label y for each row, (n,), got shape {labels.shape}: "
            "several targets need loss squared-targets or multilabel"
        )
    if target in _OF_NUMBERS and (kind in _CLASSES or "y" in population.categories):
        raise ValueError(
            f"the labels of {kind} are classes, which loss {config.loss} would take for numbers: "
            "loss must be softmax or one-vs-all"
        )
    if labels.min() == labels.max():
        names, only = population.categories.get("y"), labels.flat[0]
        value = f"{only:g}" if names is None else names[int(only)]
        raise ValueError(f"y is {value} in all rows: there is nothing to predict")
    if config.get("loss") is None and kind not in _CLASSES:
        _ask_for_loss(population, labels)
    if target in _OF_CLASSES:
        _check_classes(config, population, labels)


def _are_one_hot(labels: np.ndarray) -> bool:
    """Return whether each row of labels, (N, c), has a single 1 and else 0; of the first rows."""
    rows = labels[:_SAMPLED]
    if rows.ndim != 2 or not np.isin(rows, (0, 1)).all():
        return False
    return bool((rows.sum(axis=1) == 1).all())


def _ask_for_loss(population: Population, labels: np.ndarray) -> None:
    """Check that a table's target of whole numbers looks like classes; else a loss is chosen."""
    names = population.categories.get("y")
    by_text = names is not None and BY_NUMBER not in population.public
    tabular = "x" in population.columns and "x" not in population.categories
    if labels.ndim > 1 or by_text or not tabular:
        return
    name = population.columns["y"].names[0]
    if labels.dtype.kind == "f":
        raise ValueError(
            f"the target {name!r} holds fractions: predict numbers with --loss squared, or their "
            "median with --loss quantile"
        )
    values = np.unique(labels) if names is None else np.array(names, int)
    gaps = len(values) > 2 and np.ptp(values) >= len(values)
    if not gaps and len(values) <= _FEW:
        return
    counts = ", counts (--loss poisson)" if values.min() >= 0 else ""
    raise ValueError(
        f"the target {name!r} holds {len(values)} different whole numbers from {values.min()} to "
        f"{values.max()}: choose whether they are numbers (--loss squared){counts} or classes "
        "(--loss softmax)"
    )


def _check_classes(config: RunConfig, population: Population, labels: np.ndarray) -> None:
    """Check that labels number classes which occur often enough to learn."""
    occurring, largest = len(np.unique(labels)), labels.max()
    if labels.ndim == 1 and occurring > max(_FEW, len(labels) / 2):
        raise ValueError(
            f"the labels have {occurring} values in {len(labels)} rows, too many for classes: "
            "predict numbers with loss squared, or choose another target"
        )
    if "y" not in population.categories and largest + 1 > _SPARSE * max(2, occurring):
        raise ValueError(
            f"labels must number the classes from 0: {occurring} different ones occur, but the "
            f"largest is {largest:g}"
        )


def data_warnings(config: RunConfig, population: Population) -> list[str]:
    """Return warnings of settings and data that are possible, and seldom meant."""
    labels = population.fields.get("y")
    remarks = [
        f"{name!r} counts as a class: if it stands for missing labels, leave out its rows"
        for name in population.categories.get("y", ())
        if name.strip().lower() in _MISSING
    ]
    if config.model not in OF_TOKENS and (column := _largest(population)):
        remarks.append(
            f"column {column[0]!r} holds numbers up to {column[1]:.3g}, so no learning rate suits "
            "all columns: bring them to [-1, 1] by public ranges (--range; `fedjaxsim data show` "
            "lists them)"
        )
    if labels is not None and config.loss_record.targets == "any" and config.get("outputs") is None:
        classes = len(np.unique(labels)) if labels.dtype.kind in "iu" and labels.ndim == 1 else 0
        if 2 < classes <= _FEW and "y" not in population.categories:
            remarks.append(
                f"the model of loss {config.loss} has 1 output, and labels have {classes} values: "
                f"if they are classes, give --outputs {int(labels.max()) + 1}"
            )
    if config.loss in ("softmax", "logistic") and (name := rare_class(population)) is not None:
        remarks.append(
            f"class {name!r} has less than {RARE:.0%} of the rows, so accuracy says little of it: "
            "the run is judged by log loss, and a public share of the class helps (--prior)"
        )
    has_usual_step = "learning_rate" in config.keys and config.get("learning_rate") is None
    if has_usual_step and not config.loss_record.has_bound:
        columns = population.columns
        follows = config.loss == "poisson" and "exposure" not in population.fields
        has_range = "x" in columns and columns["x"].norm < math.inf
        if not (follows and has_range and config.get("prior") is not None):
            other = "; with a public mean count (--prior) and ranges (--range) it follows"
            remarks.append(
                f"the curvature of loss {config.loss} has no bound, so the default learning rate "
                f"may diverge: compare --learning-rate 0.1, 0.01 and 0.001{other * follows}"
            )
    most, size = population.splits["train"].count.max(), config.get("batch_size")
    if config.loss == "cox" and most > size:
        remarks.append(
            f"loss cox compares the rows of a minibatch, here {size} of up to {most} of a client: "
            f"give --batch-size {most}"
        )
    if config.loss == "squared" and labels is not None and population.generate is None:
        values = np.unique(labels)
        if len(values) > 2 and np.array_equal(values, np.arange(len(values))):
            remarks.append(
                f"the labels are 0 to {len(values) - 1}, which loss squared takes for numbers: if "
                "they are classes, loss must be softmax or one-vs-all"
            )
    return remarks


def _largest(population: Population) -> tuple[str, float] | None:
    """Return the feature of the largest numbers, if it is far beyond 1 or beyond the others."""
    x = population.fields.get("x")
    if x is None or x.ndim != 2 or x.dtype.kind != "f":
        return None
    sizes = np.abs(np.asarray(x[:_SAMPLED], np.float64)).max(axis=0)
    column = int(np.argmax(sizes))
    positive = np.sort(sizes[sizes > 0])
    uneven = len(positive) and positive[-1] > _UNEVEN * positive[(len(positive) - 1) // 2]
    if not uneven and sizes[column] <= _LARGE:
        return None
    return population.columns["x"].names[column], sizes[column]


def check_model(path: str, model: Any, x: np.ndarray, outputs: int) -> None:
    """Check the parameters and the outputs of a user's model, "module:factory", by shapes."""
    name, rows = f"model {path}", (3, *x.shape[1:])
    dtype = np.float32 if x.dtype.kind == "f" else x.dtype

    def tried(key: jax.Array) -> tuple[Any, jax.Array]:
        params = model.init(key)
        return params, model.apply(params, jnp.zeros(rows, dtype))

    params, produced = run_user_code(name, lambda: jax.eval_shape(tried, jax.random.key(0)))
    for place, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            where = jax.tree_util.keystr(place, simple=True, separator=".")
            raise ValueError(f"{name} must have floating parameters, got {leaf.dtype} at {where}")
    if produced.shape[0] != rows[0] or produced.shape[-1] != outputs:
        wanted = f"(b, …, {outputs})" if produced.ndim > 2 else f"(b, {outputs})"
        raise ValueError(
            f"{name} must return outputs {wanted} for b rows, got {produced.shape} for {rows[0]}"
        )
