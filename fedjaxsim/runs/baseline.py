"""Predictions of one constant, which the models of a run should beat, and rare classes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.special import xlogy

from fedjaxsim.data.population import Population

RARE = 0.05
"""Share of a class below which accuracy says little of it."""
_COMMON, _MANY = 0.5, 20


def rare_class(population: Population) -> str | None:
    """Return a class with less than `RARE` of the training rows if another has half of them."""
    y = population.fields.get("y")
    if y is None or y.ndim > 1 or y.dtype.kind not in "iu":
        return None
    labels, counts = np.unique(y[population.splits["train"].all_rows()], return_counts=True)
    shares = counts / counts.sum()
    if len(labels) > _MANY or shares.min() >= RARE or shares.max() < _COMMON:
        return None
    label, names = int(labels[np.argmin(shares)]), population.categories.get("y")
    return str(label) if names is None else names[label]


def worse_than_constant(population: Population, summary: Mapping[str, Any]) -> str | None:
    """Say which metric of test rows is worse than one constant for all clients.

    The constant is the mean or the most frequent class of all training rows.

    Args:
      population: the clients of the run.
      summary: metrics of a run by column, such as `test_nmse`.
    """
    y = population.fields.get("y")
    if y is None or y.ndim > 1:
        return None
    train, test = (y[population.splits[name].all_rows()] for name in ("train", "test"))
    if not len(test):
        return None
    constants: dict[str, tuple[str, float, int]] = {"test_nmse": ("nMSE", 1.0, 1)}
    if y.dtype.kind in "iu" and y.min() >= 0:
        counts = np.bincount(train, minlength=int(y.max()) + 1)
        share = float(np.mean(test == np.argmax(counts)))
        constants["test_accuracy_weighted"] = "accuracy", share, -1
        if counts[test].all():
            entropy = -float(np.mean(np.log(counts[test] / len(train))))
            constants["test_rare_class_loss_weighted"] = "log loss", entropy, 1
        if "exposure" not in population.fields and (mean := float(np.mean(train))):
            deviance = 2 * (xlogy(test, test / mean) - test + mean)
            constants["test_deviance_weighted"] = "deviance", float(np.mean(deviance)), 1
    for column, (title, constant, sign) in constants.items():
        value = summary.get(column)
        if value is not None and sign * (value - constant) > 0:
            return f"{title} {value:.3g}, while one constant for all has {constant:.3g}"
    return None
