"""Names and units of the columns of a field: what stored numbers mean in the user's own table."""

import dataclasses
import itertools
import math
import warnings
from typing import Any, NamedTuple, Self

import numpy as np

_ROUNDING = 1e-6
"""How far beyond its range a value may lie and be as good as at its end."""


class Preparation(NamedTuple):
    """A release about all clients' rows before round 1, to which a population was adapted.

    Attributes:
      digest: one-way digest of its random key: equal ones are one release.
      clients: m; all took part.
      noise_multiplier: z of the Gaussian release that costs as much.
    """

    digest: str
    clients: int
    noise_multiplier: float


@dataclasses.dataclass(frozen=True)
class Columns:
    """The d columns of a field (N, d), or the only one of a field (N,).

    A stored number s of column j stands for `centre[j] + half_range[j] * s` in the units of its
    source. Readers name columns; scaling and other affine changes move the map along. Unscaled
    columns of bound 1 named "COLUMN=VALUE" encode a column: one of them is 1, the others are 0.

    Attributes:
      names: distinct names, (d,).
      centre: (d,); by default 0.
      half_range: (d,), not 0, negative for inverted columns; by default 1.
      bound: (d,) largest magnitude of stored training rows that is known without reading them, such
        as 1 for scaled and for encoded columns; by default unknown, ∞.
      norm: largest Euclidean norm of a stored row that is known without reading rows; by default
        it follows from `bound`, where columns that encode one count once.
      clipped: (d,) share of the rows whose value lay beyond the column's range, of all splits; of
        several scalings the largest. It is read from rows, and equal columns may differ in it.
      adapted_to: what `centre` and `half_range` follow from in all clients' rows: noised releases,
        and sentences on what no ε covers. A population with the columns is charged for it.

    Raises:
      ValueError: numbers do not fit the names, or names are not distinct.
    """

    names: tuple[str, ...]
    centre: tuple[float, ...] = ()
    half_range: tuple[float, ...] = ()
    bound: tuple[float, ...] = ()
    norm: float = math.inf
    clipped: tuple[float, ...] = dataclasses.field(default=(), compare=False)
    adapted_to: tuple[Preparation | str, ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self):
        object.__setattr__(self, "names", tuple(self.names))
        d = len(self.names)
        if len(set(self.names)) < d:
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise ValueError(f"columns must have distinct names, got {twice!r} twice")
        defaults = {"centre": 0.0, "half_range": 1.0, "bound": math.inf, "clipped": 0.0}
        for name, default in defaults.items():
            values = getattr(self, name) or (default,) * d
            if len(values) != d:
                raise ValueError(f"{name} must hold {d} numbers, one for each column, got {values}")
            object.__setattr__(self, name, tuple(map(float, values)))
        adapted_to = (of if isinstance(of, str) else Preparation(*of) for of in self.adapted_to)
        object.__setattr__(self, "adapted_to", tuple(dict.fromkeys(adapted_to)))
        if 0 in self.half_range:
            constant = self.names[self.half_range.index(0)]
            raise ValueError(f"half_range must not be 0, as it is for column {constant!r}")
        encoded = self.encoded
        bounds = [b for name, b in zip(self.names, self.bound, strict=True) if name not in encoded]
        of_bounds = math.sqrt(sum(b**2 for b in bounds) + len({*encoded.values()}))
        object.__setattr__(self, "norm", min(float(self.norm), of_bounds))

    @property
    def encoded(self) -> dict[str, str]:
        """Map each column that encodes another to the encoded one."""
        columns = zip(self.names, self.centre, self.half_range, self.bound, strict=True)
        return {
            name: name.partition("=")[0]
            for name, *numbers in columns
            if "=" in name and numbers == [0, 1, 1]
        }

    @property
    def scaled(self) -> bool:
        """Return whether stored numbers differ from the source's."""
        return any(self.centre) or any(half_range != 1 for half_range in self.half_range)

    def original(self, stored: Any) -> Any:
        """Return stored numbers, (..., d), or (...) of one column, in the source's units."""
        centre, half_range = np.array(self.centre), np.array(self.half_range)
        if len(self.names) == 1:
            return centre[0] + half_range[0] * np.asarray(stored)
        return centre + half_range * np.asarray(stored)

    def aligned(self, values: np.ndarray, given: "Columns") -> np.ndarray:
        """Return rows (n, d') of the columns `given` as rows (n, d) of these columns, float32.

        Columns are found by name. A value of an encoded column that does not occur is 0, and so are
        all columns that encode it for a value that the models do not know, with a warning.
        Values beyond a known bound are clipped; see `beyond`.
        """
        bound, encoded = np.array(self.bound), {*self.encoded.values()}
        unseen = [
            name
            for name in given.names
            if name not in self.names and name.partition("=")[0] in encoded
        ]
        if unseen:
            counts = ", ".join(
                f"{name!r} ({np.count_nonzero(values[:, given.names.index(name)])} rows)"
                for name in unseen
            )
            warnings.warn(f"the models know nothing of {counts}, which count as none", stacklevel=2)
        return np.clip(self._stored(values, given), -bound, bound).astype(np.float32)

    def beyond(self, values: np.ndarray, given: "Columns") -> np.ndarray:
        """Return whether `aligned` clips a value of each row, (n,)."""
        bound = np.array(self.bound) + _ROUNDING
        return np.any(np.abs(self._stored(values, given)) > bound, axis=1)

    def _stored(self, values: np.ndarray, row_columns: "Columns") -> np.ndarray:
        """Return rows of `row_columns` as rows of these columns, not clipped."""
        place = {name: number for number, name in enumerate(row_columns.names)}
        lacking = [name for name in self.names if name not in place and name not in self.encoded]
        if lacking:
            raise ValueError(f"the rows lack column {lacking[0]!r}, which the models read")
        encoded = {*self.encoded.values()}
        unknown = [
            name
            for name in row_columns.names
            if name not in self.names and name.partition("=")[0] not in encoded
        ]
        if unknown:
            raise ValueError(f"the rows have {unknown[0]!r}, which the models do not know")
        rows = np.zeros((len(values), len(self.names)))
        places = [number for number, name in enumerate(self.names) if name in place]
        rows[:, places] = row_columns.original(values)[:, [place[self.names[j]] for j in places]]
        return (rows - self.centre) / np.array(self.half_range)

    def mapped(
        self,
        centre: np.ndarray,
        half_range: np.ndarray,
        bound: np.ndarray,
        adapted_to: tuple[Preparation | str, ...] = (),
    ) -> Self:
        """Return the columns after s ↦ (s − centre)/half_range, then of this `bound`, each (d,)."""
        wide = np.array(self.half_range)
        return dataclasses.replace(
            self,
            centre=tuple(self.centre + wide * centre),
            half_range=tuple(wide * half_range),
            bound=tuple(bound),
            norm=math.inf,
            adapted_to=(*self.adapted_to, *adapted_to),
        )

    def chosen(self, kept: np.ndarray) -> Self:
        """Return some of the columns, where `kept`, (d,) bool."""
        names = ("names", "centre", "half_range", "bound", "clipped")
        some = {name: tuple(itertools.compress(getattr(self, name), kept)) for name in names}
        return dataclasses.replace(self, **some)
