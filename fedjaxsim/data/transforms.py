"""Changes to the features of a whole population.

What depends on the data here (which columns are constant) is preprocessing on the curator's side:
no privacy budget is charged for it.
"""

import dataclasses

import numpy as np

from fedjaxsim.data.population import Population


def drop_constant_columns(population: Population) -> Population:
    """Remove the features that have the same value in all N rows, such as a column of ones.

    Raises:
        ValueError: x is not (N, d), or no column would be left.
    """
    x = _matrix(population)
    varies = (x != x[0]).any(axis=0)
    if not varies.any():
        raise ValueError(f"all {x.shape[1]} columns of x are constant; at least one must vary")
    return dataclasses.replace(population, fields={**population.fields, "x": x[:, varies]})


def unit_rows(population: Population) -> Population:
    """Scale every row of x to Euclidean norm 1; rows of zeros stay zero.

    Raises:
        ValueError: x is not (N, d).
    """
    x = _matrix(population)
    # Dividing by the largest entry first keeps the squares from over- or underflowing.
    scaled = _divide(x, np.abs(x).max(axis=1, keepdims=True, initial=0))
    unit = _divide(scaled, np.linalg.norm(scaled, axis=1, keepdims=True))
    return dataclasses.replace(population, fields={**population.fields, "x": unit})


def _matrix(population: Population) -> np.ndarray:
    if "x" not in population.fields or population.fields["x"].ndim != 2:
        shapes = {field: values.shape for field, values in population.fields.items()}
        raise ValueError(f"the features x must have shape (N, d), got {shapes}")
    return population.fields["x"]


def _divide(rows: np.ndarray, by: np.ndarray) -> np.ndarray:
    return np.divide(rows, by, out=np.zeros_like(rows), where=by > 0)
