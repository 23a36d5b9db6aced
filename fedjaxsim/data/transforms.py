"""Changes to the features of a whole population.

Changes that depend on all clients' data (constant columns, clients with rows of some classes) are
the curator's preprocessing: they spend no privacy budget, and `Population.public` names them.
"""

import dataclasses

import numpy as np

from fedjaxsim.data.arrays import to_float32
from fedjaxsim.data.columns import Columns
from fedjaxsim.data.population import Population
from fedjaxsim.data.ranges import SPLITS


def drop_constant_columns(population: Population) -> Population:
    """Remove the features that have the same value in all N rows, such as a column of ones.

    Raises:
      ValueError: x is not (N, d), or no column would be left.
    """
    x = _matrix(population)
    varies = (x != x[0]).any(axis=0)
    if not varies.any():
        raise ValueError(f"all {x.shape[1]} columns of x are constant; at least one must vary")
    sentence = (
        f"Which {x.shape[1] - varies.sum()} of the {x.shape[1]} features are the same in all rows, "
        "and were dropped, is read from all clients' data and taken as public."
    )
    public = (*population.public, sentence)
    columns = population.columns["x"].chosen(varies)
    return population.with_field("x", lambda rows: rows[:, varies], columns, public=public)


def unit_rows(population: Population) -> Population:
    """Scale every row of x to Euclidean norm 1; rows of zeros stay zero.

    Raises:
      ValueError: x is not (N, d).
    """
    x = _matrix(population)

    def unit(x):
        x = x if x.dtype.kind == "f" else to_float32(x)
        # Dividing by the largest entry first keeps squares from over- or underflowing.
        scaled = _divide(x, np.abs(x).max(axis=1, keepdims=True, initial=0))
        return _divide(scaled, np.linalg.norm(scaled, axis=1, keepdims=True))

    d = x.shape[1]
    names = tuple(f"{name} / ‖x‖" for name in population.columns["x"].names)
    return population.with_field("x", unit, Columns(names, bound=(1.0,) * d, norm=1.0))


def _matrix(population: Population) -> np.ndarray:
    if "x" not in population.fields or population.fields["x"].ndim != 2:
        shapes = {field: values.shape for field, values in population.fields.items()}
        raise ValueError(f"the features x must have shape (N, d), got {shapes}")
    return population.fields["x"]


def _divide(rows: np.ndarray, by: np.ndarray) -> np.ndarray:
    return np.divide(rows, by, out=np.zeros_like(rows), where=by > 0)


def invert(population: Population) -> Population:
    """Invert grey images, x ↦ 1 − x, so that white paper (1) becomes 0.

    With a background of ones a linear model spends its steps on the mean image.
    """
    x = population.fields.get("x")
    if x is None or x.min() < 0 or x.max() > 1:
        raise ValueError("invert needs a field 'x' with values in [0, 1]")
    columns = population.columns.get("x")
    if columns is not None:
        ones = (1.0,) * len(columns.names)
        columns = columns.mapped(ones, [-1.0] * len(ones), ones)
    return population.with_field("x", lambda rows: 1 - rows, columns)


def first_classes(population: Population, classes: int) -> Population:
    """Keep rows with labels 0 … classes − 1, and the clients with training rows among them."""
    labels = population.fields.get("y")
    if labels is None or labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise ValueError("classes need integer labels in the field 'y', one for each row")
    counts, kept = population.counts, labels < classes
    cells = np.repeat(np.arange(counts.size), counts.ravel())  # client and split of each row
    counts = np.bincount(cells[kept], minlength=counts.size).reshape(counts.shape)
    has_train = counts[:, 0] > 0
    chosen = np.flatnonzero(has_train)
    if not len(chosen):
        raise ValueError(f"no client has training rows of the first {classes} classes")
    kept &= has_train[cells // len(SPLITS)]
    sentence = (
        f"Which {len(chosen)} of {population.num_clients} clients have training rows of the first "
        f"{classes} classes, and so take part, is read from their labels and taken as public."
    )
    categories = dict(population.categories)
    if "y" in categories:
        categories["y"] = categories["y"][:classes]
    whole = population.of_rows(np.flatnonzero(kept), counts[chosen], chosen)
    public = (*population.public, sentence)
    held_out = population.held_out and first_classes(population.held_out, classes)
    return dataclasses.replace(whole, public=public, categories=categories, held_out=held_out)


def as_classes(population: Population) -> Population:
    """Make integer labels other than 0 … c − 1 classes, whose names are the integers.

    So −1 and 1, or 1 … c, are classes as text is. Labels with names, with fractions, or for each
    token stay as they are.
    """
    y = population.fields.get("y")
    if y is None or y.ndim > 1 or y.dtype.kind not in "iu" or "y" in population.categories:
        return population
    parts = [y, *([population.held_out.fields["y"]] if population.held_out else [])]
    numbers = np.unique(np.concatenate(parts))
    if numbers[0] == 0 and numbers[-1] == len(numbers) - 1:
        return population
    sentence = "Which classes there are, by number, is read from all clients' rows, as public."
    return population.with_field(
        "y",
        lambda labels: np.searchsorted(numbers, labels).astype(np.int32),
        categories={**population.categories, "y": tuple(map(str, numbers.tolist()))},
        public=(*population.public, sentence),
    )
