"""Checks that data suit the settings of a run, before it computes anything."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjaxsim.data.population import Population
from fedjaxsim.runs.parts import LOSSES, MODELS, OF_TOKENS
from fedjaxsim.runs.settings import RunConfig, flag
from fedjaxsim.runs.user_code import calling

_CLASSES = ("digits", "leaf")
"""Data whose labels are classes."""
_FEW = 20
"""Classes that may occur in any number of rows."""
_MISSING = ("", "?", "-", "na", "n/a", "nan", "null", "none", "missing")
"""Names of classes that may stand for missing labels."""
SEVERAL = ("multilabel", "squared")
"""Losses of several targets per row."""
_RARE = 0.1
"""Expected clients of a round that are hardly meant."""
_LARGE, _UNEVEN, _SAMPLED = 30, 1e3, 10_000
"""Features, and their ratio, that one step hardly suits, and the rows that are looked at."""
_SPARSE = 10
"""The largest ratio of outputs to distinct labels; labels beyond it do not number classes."""


def check_data(config: RunConfig, population: Population) -> None:
    """Check that there are rows to test on, and that they suit the model and the loss.

    Raises:
      ValueError: if no client has test rows, text or classes would be taken for numbers, or labels
        are far from 0 … c − 1.
    """
    if not population.splits["test"].count.any():
        raise ValueError(
            "no client has rows to test on: test-fraction must be larger, or the clients must have "
            f"more rows, got test-fraction {config.get('test_fraction')}"
        )
    for name in ("patience", "evaluate_privately"):
        if config.get(name) is not None and not population.splits["validation"].count.any():
            raise ValueError(
                f"{flag(name)} needs rows to validate on, and no client has any: "
                f"validation-fraction must be larger, got {config.get('validation_fraction')}"
            )
    kind = config.data.partition(":")[0]
    numbers = [model for model in MODELS if model not in OF_TOKENS]
    if "x" in population.categories and config.model in numbers:
        raise ValueError(
            f"the features are text, whose characters or words model {config.model} would take for "
            f"numbers: model must be {', '.join(OF_TOKENS)} or one of your own, MODULE:FACTORY"
        )
    x = population.fields.get("x")
    are_tokens = x is None or (x.dtype.kind in "iu" and x.ndim == 2 and x.min() >= 0)
    if config.model in OF_TOKENS and x is not None and not are_tokens:
        raise ValueError(
            f"model {config.model} needs rows of tokens, integers (n, L) from 0 on, got x "
            f"{x.dtype} {x.shape}"
        )
    labels = population.fields.get("y")
    several = labels is not None and labels.ndim > 1 and config.model in numbers
    known = config.loss in LOSSES and config.loss not in SEVERAL
    if labels is not None and several and known:
        raise ValueError(
            f"model {config.model} needs one label y for each row, (n,), got shape {labels.shape}; "
            f"several targets need loss {' or '.join(SEVERAL)}"
        )
    if labels is not None and labels.ndim == 1 and config.loss == "multilabel":
        raise ValueError(
            "loss multilabel needs several targets, as in --target a,b, or y of shape (n, k), got "
            f"{labels.shape}"
        )
    if config.loss == "squared" and (kind in _CLASSES or "y" in population.categories):
        raise ValueError(
            f"the labels of {kind} are classes, which loss squared would take for numbers: loss "
            "must be softmax or one-vs-all"
        )
    if labels is None:
        return
    if labels.min() == labels.max():
        names, only = population.categories.get("y"), labels.flat[0]
        value = f"{only:g}" if names is None else names[int(only)]
        raise ValueError(f"y is {value} in all rows: there is nothing to predict")
    if config.loss in ("softmax", "one-vs-all"):
        _check_classes(config, population, labels)


def _check_classes(config: RunConfig, population: Population, labels: np.ndarray) -> None:
    """Check that labels number classes which occur often enough to learn."""
    occurring, largest = len(np.unique(labels)), labels.max()
    asked = config.get("classes")
    if asked is not None and asked > largest + 1:
        raise ValueError(f"classes must be at most the {largest + 1:g} of the data, got {asked}")
    if labels.ndim == 1 and occurring > max(_FEW, len(labels) / 2):
        raise ValueError(
            f"the labels have {occurring} values in {len(labels)} rows, too many for classes: "
            "predict numbers with loss squared, or choose another target"
        )
    if labels.dtype.kind == "f" and largest > np.iinfo(np.int32).max:
        raise ValueError(f"labels must number the classes from 0, got {largest:g}")
    if "y" not in population.categories and largest + 1 > _SPARSE * max(2, occurring):
        raise ValueError(
            f"labels must number the classes from 0: {occurring} different ones occur, but the "
            f"largest is {largest:g}"
        )


def doubts(config: RunConfig, population: Population) -> list[str]:
    """Return warnings of settings and data that are possible, and seldom meant."""
    found, labels = [], population.fields.get("y")
    for name in population.categories.get("y", ()):
        if name.strip().lower() in _MISSING:
            found.append(
                f"{name!r} is a class of its own: if it stands for missing labels, leave out its "
                "rows"
            )
    if labels is not None and "y" in population.categories:
        names, occurring = population.categories["y"], np.unique(labels)
        absent = [name for k, name in enumerate(names) if name and k not in occurring]
        if absent and labels.ndim == 1:
            more = f" and {len(absent) - 1} others" if len(absent) > 1 else ""
            found.append(f"the class {absent[0]!r}{more} never occurs in the labels")
    expected = (config.get("sampling_rate") or 1.0) * population.num_clients
    if config.sampler != "full" and expected < _RARE:
        found.append(
            f"{expected:.2g} clients are expected in a round, so in most rounds there are none: "
            "sampling-rate may be too small"
        )
    if config.model not in OF_TOKENS and (column := _largest(population)):
        found.append(
            f"column {column[0]!r} holds numbers up to {column[1]:.3g}, so no learning rate suits "
            "all columns: bring them to [-1, 1] by public ranges (--range; `fedjaxsim data show` "
            "lists them)"
        )
    if config.loss == "squared" and labels is not None and population.generate is None:
        values = np.unique(labels)
        if len(values) > 2 and np.array_equal(values, np.arange(len(values))):
            found.append(
                f"the labels are 0 to {len(values) - 1}, which loss squared takes for numbers: if "
                "they are classes, loss must be softmax or one-vs-all"
            )
    return found


def _largest(population: Population) -> tuple[str, float] | None:
    """Return the feature of the largest numbers, if it is far beyond 1 or beyond the others."""
    x = population.fields.get("x")
    if x is None or x.ndim != 2 or x.dtype.kind != "f":
        return None
    sizes = np.abs(np.asarray(x[:_SAMPLED], np.float64)).max(axis=0)
    column = int(np.argmax(sizes))
    known = np.sort(sizes[sizes > 0])
    uneven = len(known) and known[-1] > _UNEVEN * known[(len(known) - 1) // 2]
    if not uneven and sizes[column] <= _LARGE:
        return None
    return population.columns["x"].names[column], sizes[column]


def check_model(path: str, model: Any, x: np.ndarray, outputs: int) -> None:
    """Check the parameters and the outputs of a user's model, by shapes.

    Args:
      path: "module:factory".
      model: the `Model`.
      x: the features, (N, ...).
      outputs: number c of outputs.

    Raises:
      ValueError: if a function fails, a parameter is no floating number, or other outputs than c.
    """
    name, rows = f"model {path}", (3, *x.shape[1:])
    dtype = np.float32 if x.dtype.kind == "f" else x.dtype

    def tried(key: jax.Array) -> tuple[Any, jax.Array]:
        params = model.init(key)
        return params, model.apply(params, jnp.zeros(rows, dtype))

    params, found = calling(name, lambda: jax.eval_shape(tried, jax.random.key(0)))
    for place, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            where = jax.tree_util.keystr(place, simple=True, separator=".")
            raise ValueError(f"{name} must have floating parameters, got {leaf.dtype} at {where}")
    if found.shape[0] != rows[0] or found.shape[-1] != outputs:
        wanted = f"(b, …, {outputs})" if found.ndim > 2 else f"(b, {outputs})"
        raise ValueError(
            f"{name} must return outputs {wanted} for b rows, got {found.shape} for {rows[0]}"
        )
