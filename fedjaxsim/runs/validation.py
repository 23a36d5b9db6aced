"""Checks that data suit the settings of a run, before it computes anything."""

import numpy as np

from fedjaxsim.data.population import Population
from fedjaxsim.runs.parts import MODELS, OF_TOKENS
from fedjaxsim.runs.settings import RunConfig, flag

_CLASSES = ("digits", "leaf")
"""Data whose labels are classes."""
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
    if config.loss == "squared" and (kind in _CLASSES or "y" in population.categories):
        raise ValueError(
            f"the labels of {kind} are classes, which loss squared would take for numbers: loss "
            "must be softmax or one-vs-all"
        )
    labels = population.fields.get("y")
    if labels is not None and labels.min() == labels.max():
        raise ValueError(f"y is {labels.flat[0]} in all rows: there is nothing to predict")
    of_classes = config.loss in ("softmax", "one-vs-all") and "y" not in population.categories
    if of_classes and labels is not None and labels.dtype.kind == "i":
        occurring, outputs = len(np.unique(labels)), int(labels.max()) + 1
        if outputs > _SPARSE * max(2, occurring):
            raise ValueError(
                f"labels must number the classes from 0: only {occurring} different ones occur, "
                f"but the largest is {outputs - 1}, which asks for {outputs} outputs"
            )


def labels_like_classes(config: RunConfig, population: Population) -> str | None:
    """Return a warning where loss squared meets labels 0 … c − 1, which may number c classes."""
    labels = population.fields.get("y")
    if config.loss != "squared" or labels is None or population.generate is not None:
        return None
    values = np.unique(labels)
    if len(values) < 3 or not np.array_equal(values, np.arange(len(values))):
        return None
    return (
        f"the labels are 0 to {len(values) - 1}, which loss squared takes for numbers: if they are "
        "classes, loss must be softmax or one-vs-all"
    )
