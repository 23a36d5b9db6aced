"""Changes to the columns of a whole population.

Changes that depend on all clients' data, such as which columns are constant, are the curator's
preprocessing: they spend no privacy budget, and `Population.public` names them. Public ranges cost
nothing. No ε covers the ranges of all rows, as `Population.voids_epsilon` says; private ranges
come from `privacy.scale_privately`.
"""

import dataclasses
import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from fedjaxsim import checks
from fedjaxsim.checks import Name, SettingError
from fedjaxsim.data.arrays import to_float32
from fedjaxsim.data.columns import Columns, Preparation
from fedjaxsim.data.population import Population
from fedjaxsim.data.source import listed

Range = tuple[float, float]
"""The smallest and the largest value of a column, in the units of its source."""
BY_NUMBER = "Which classes there are, by number, is read from all clients' rows, as public."
_GIVEN = "The ranges of columns are given and taken as public."
_MANY = 0.1
"""Share of clipped rows from which on a range is worth a warning."""
_ROUNDING = 1e-6
_READ = "the data were scaled by the ranges of all rows, which no ε covers"


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
    columns = population.columns["x"].chosen(varies)
    return noted(population.with_field("x", lambda rows: rows[:, varies], columns), sentence)


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
        ones = np.ones(len(columns.names))
        columns = columns.mapped(ones, -ones, ones)
    return population.with_field("x", lambda rows: 1 - rows, columns)


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
    names = {**population.categories, "y": tuple(map(str, numbers.tolist()))}
    numbered = population.with_field(
        "y", lambda labels: np.searchsorted(numbers, labels).astype(np.int32), categories=names
    )
    return noted(numbered, BY_NUMBER)


def scale(population: Population, ranges: Mapping[str, Range]) -> Population:
    """Map columns of x, and a numeric target, from public ranges to [-1, 1].

    Values beyond are clipped, but for targets of validation and test rows: metrics, which are in
    the target's own units, are the data's. Columns without a range stay as they are. Warns
    of a range that misses more than a tenth of the rows; `Columns.clipped` has the shares.

    Args:
      population: features x (N, d), and targets y.
      ranges: (smallest, largest) value by column, in the units of the source.

    Raises:
      ValueError: there is no such column, it holds classes, a range is empty or misses all rows.
    """
    field_by_name = {name: field for field in ("y", "x") for name in _names(population, field)}
    require_columns(ranges, field_by_name)
    for name, limits in ranges.items():
        if len(limits) != 2 or not -math.inf < limits[0] < limits[1] < math.inf:
            raise ValueError(
                f"the range of column {name!r} must be (smallest, largest), got {limits}"
            )
    if not ranges:
        return population
    chosen: dict[str, dict[str, Range]] = {}
    for name, limits in ranges.items():
        chosen.setdefault(field_by_name[name], {})[name] = limits
    scaled = map_columns(population, chosen)
    for name, share in clipped_shares(scaled).items():
        if name not in ranges or share <= _MANY:
            continue
        low, high = ranges[name]
        missed = f"the range {low:g}:{high:g} of column {name!r} misses {share:.1%} of the rows"
        if share == 1:
            raise ValueError(f"{missed}: it must be in the units of the column")
        message = f"{missed}, which are clipped: is it in the units of the column?"
        warnings.warn(message, stacklevel=2)
    return noted(scaled, _GIVEN)


def require_columns(ranges: Iterable[str], columns: Collection[str]) -> None:
    """Check that each range names a column that can be scaled."""
    for name in ranges:
        if name not in columns:
            hint = checks.did_you_mean(name, columns)
            raise ValueError(
                f"there is no column {name!r} to scale, only {listed([*columns])}{hint}"
            )


def clipped_shares(population: Population) -> dict[str, float]:
    """Return the share of the rows beyond a column's range, for columns with such rows."""
    shares = {
        name: share
        for columns in population.columns.values()
        for name, share in zip(columns.names, columns.clipped, strict=True)
    }
    return {name: share for name, share in shares.items() if share > 0}


def scale_by_rows(population: Population, *, target: bool = False) -> Population:
    """Map columns from the ranges of all training rows to [-1, 1]; no ε covers that.

    So runs on the population have no guarantee. Columns of known bounds, such as encoded ones, stay
    as they are; constant ones become 0.

    Args:
      population: features x (N, d).
      target: whether to scale y, too, as for a regression.

    Raises:
      ValueError: x is not (N, d), or the target holds classes.
    """
    rows, ranges = population.splits["train"].all_rows(), {}
    for field, names in unbounded(population, target=target).items():
        columns = population.columns[field]
        values = population.fields[field][rows].reshape(len(rows), -1).astype(np.float64)
        extremes = np.sort(columns.original([values.min(axis=0), values.max(axis=0)]), axis=0)
        extremes += np.where(extremes[0] == extremes[1], [[-1.0], [1.0]], 0.0)
        of_columns = dict(zip(columns.names, map(tuple, extremes.T.tolist()), strict=True))
        ranges[field] = {name: of_columns[name] for name in names}
    return map_columns(population, ranges, adapted_to=(_READ,))


def unbounded(population: Population, *, target: bool) -> dict[str, list[str]]:
    """Return the columns of x, and of a numeric target y, without a known bound, by field.

    Raises:
      ValueError: x is not (N, d), or the target holds classes.
    """
    columns = {}
    for field in ("x", "y") if target else ("x",):
        names = _names(population, field)
        if not names:
            shapes = {name: f"{v.dtype} {v.shape}" for name, v in population.fields.items()}
            raise ValueError(f"scaling needs numbers x (N, d), and a numeric target, got {shapes}")
        bounds = population.columns[field].bound
        unknown = [name for name, bound in zip(names, bounds, strict=True) if bound == math.inf]
        columns |= {field: unknown} if unknown else {}
    return columns


def map_columns(
    population: Population,
    ranges: Mapping[str, Mapping[str, Range]],
    adapted_to: tuple[Preparation | str, ...] = (),
) -> Population:
    """Map columns from ranges, by field and name, to [-1, 1], of clients held out, too.

    Of the field "y" training rows alone are clipped. See `Columns` for `adapted_to`.
    """
    fields, named = dict(population.fields), dict(population.columns)
    for field, of in ranges.items():
        columns, values = named[field], fields[field]
        moved = np.array([name in of for name in columns.names])
        limits = np.tile([[-1.0], [1.0]], len(moved))
        limits[:, moved] = np.array([of[name] for name in columns.names if name in of]).T
        stored_limits = (limits - columns.centre) / np.array(columns.half_range)
        low, high = np.where(moved, np.sort(stored_limits, axis=0), limits)
        centre, half_range = (low + high) / 2, (high - low) / 2
        scaled = (values.reshape(len(values), -1) - centre) / half_range
        beyond = np.where(moved, np.mean(np.abs(scaled) > 1 + _ROUNDING, axis=0), 0.0)
        clips = np.full(len(values), field != "y")
        clips[population.splits["train"].all_rows()] = True
        scaled = np.where(clips[:, None] & moved, np.clip(scaled, -1, 1), scaled)
        fields[field] = scaled.reshape(values.shape).astype(np.float32)
        bound = np.where(moved, 1.0, columns.bound)
        mapped = columns.mapped(centre, half_range, bound, adapted_to)
        clipped = tuple(np.maximum(columns.clipped, beyond).tolist())
        named[field] = dataclasses.replace(mapped, clipped=clipped)
    held_out = population.held_out and map_columns(population.held_out, ranges, adapted_to)
    return dataclasses.replace(population, fields=fields, columns=named, held_out=held_out)


def noted(population: Population, *public: str) -> Population:
    """Return the population with more sentences on public results, held-out clients, too."""
    held_out = population.held_out
    return dataclasses.replace(
        population,
        public=tuple(dict.fromkeys((*population.public, *public))),
        held_out=held_out and noted(held_out, *public),
    )


def ranges_of(words: Sequence[str]) -> dict[str, Range]:
    """Read ranges such as `age=0:100`, by column."""
    ranges = {}
    for word in words:
        name, _, limits = word.rpartition("=")
        try:
            low, high = map(float, limits.split(":"))
        except ValueError:
            raise SettingError(Name("range"), f" must be like age=0:100, got {word!r}") from None
        if not name or name in ranges:
            raise SettingError(Name("range"), f" needs one column each, as age=0:100, got {word!r}")
        if not -math.inf < low < high < math.inf:
            message = f" must have its smallest value first, as age=0:100, got {word!r}"
            raise SettingError(Name("range"), message)
        ranges[name] = (low, high)
    return ranges


def _names(population: Population, field: str) -> tuple[str, ...]:
    """Return the names of a field of numbers; none of classes and tokens."""
    if field in population.categories or field not in population.columns:
        return ()
    return population.columns[field].names
