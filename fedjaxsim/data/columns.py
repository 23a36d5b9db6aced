"""Names and units of the columns of a field: what stored numbers mean in the user's own table."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np


@dataclasses.dataclass(frozen=True)
class Columns:
    """The d columns of a field (N, d), or the only one of a field (N,).

    A stored number s of column j stands for `centre[j] + half_range[j] * s` in the units of its
    source. Readers name columns; scaling and other affine changes move the map along.

    Attributes:
      names: distinct names, (d,).
      centre: (d,); by default 0.
      half_range: (d,), not 0, negative for inverted columns; by default 1.
      bound: (d,) largest magnitude of stored training rows that is known without reading them, such
        as 1 for scaled and for encoded columns; by default unknown, ∞.
      norm: largest Euclidean norm of a stored row that is known without reading rows; by default
        it follows from `bound` and `exclusive`.
      exclusive: by how much the sum of squared bounds exceeds that of any row, since of the columns
        that encode one, only one is not 0.

    Raises:
      ValueError: numbers do not fit the names, or names are not distinct.
    """

    names: tuple[str, ...]
    centre: tuple[float, ...] = ()
    half_range: tuple[float, ...] = ()
    bound: tuple[float, ...] = ()
    norm: float = math.inf
    exclusive: float = 0.0

    def __post_init__(self):
        d = len(self.names)
        if len(set(self.names)) < d:
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise ValueError(f"columns must have distinct names, got {twice!r} twice")
        for name, default in (("centre", 0.0), ("half_range", 1.0), ("bound", math.inf)):
            values = getattr(self, name) or (default,) * d
            if len(values) != d:
                raise ValueError(f"{name} must hold {d} numbers, one for each column, got {values}")
            object.__setattr__(self, name, tuple(map(float, values)))
        if 0 in self.half_range:
            constant = self.names[self.half_range.index(0)]
            raise ValueError(f"half_range must not be 0, as it is for column {constant!r}")
        of_bounds = sum(each**2 for each in self.bound) - self.exclusive
        norm = min(float(self.norm), math.sqrt(of_bounds))
        object.__setattr__(self, "norm", norm)

    @property
    def scaled(self) -> bool:
        """Return whether stored numbers differ from the source's."""
        return any(self.centre) or any(each != 1 for each in self.half_range)

    def original(self, stored: Any) -> Any:
        """Return stored numbers, (..., d), or (...) of one column, in the source's units."""
        centre, half_range = np.array(self.centre), np.array(self.half_range)
        if len(self.names) == 1:
            return centre[0] + half_range[0] * np.asarray(stored)
        return centre + half_range * np.asarray(stored)

    def aligned(self, values: np.ndarray, given: "Columns") -> np.ndarray:
        """Return rows (n, d') of the columns `given` as rows (n, d) of these columns, float32.

        Columns are found by name, and a value of an encoded column that does not occur is 0.
        """
        place = {name: number for number, name in enumerate(given.names)}
        encoded = {name.partition("=")[0] for name in self.names if "=" in name}
        for name in self.names:
            if name not in place and not ("=" in name and self.bound[self.names.index(name)] == 1):
                raise ValueError(f"the rows lack column {name!r}, which the models read")
        for name in given.names:
            if name not in self.names:
                unseen = "a value that" if name.partition("=")[0] in encoded else "which"
                raise ValueError(f"the rows have {name!r}, {unseen} the models do not know")
        found = np.zeros((len(values), len(self.names)))
        known = [number for number, name in enumerate(self.names) if name in place]
        chosen = [place[self.names[number]] for number in known]
        centre, half_range = np.array(given.centre), np.array(given.half_range)
        found[:, known] = (centre + half_range * values)[:, chosen]
        stored = (found - np.array(self.centre)) / np.array(self.half_range)
        bound = np.array(self.bound)
        return np.clip(stored, -bound, bound).astype(np.float32)

    def mapped(
        self,
        centre: Sequence[float],
        half_range: Sequence[float],
        bound: Sequence[float] = (),
    ) -> Self:
        """Return the columns after s ↦ (s − centre)/half_range, each (d,), then of this `bound`."""
        moved = [
            c + h * new for c, h, new in zip(self.centre, self.half_range, centre, strict=True)
        ]
        wide = [h * new for h, new in zip(self.half_range, half_range, strict=True)]
        keeps = [c == 0 and h == 1 for c, h in zip(centre, half_range, strict=True)]
        return dataclasses.replace(
            self,
            centre=tuple(moved),
            half_range=tuple(wide),
            bound=tuple(bound),
            norm=math.inf,
            exclusive=self._exclusive_of(keeps),
        )

    def chosen(self, kept: np.ndarray) -> Self:
        """Return some of the columns, where `kept`, (d,) bool."""
        some = {
            name: tuple(
                each for each, keep in zip(getattr(self, name), kept.tolist(), strict=True) if keep
            )
            for name in ("names", "centre", "half_range", "bound")
        }
        return dataclasses.replace(self, **some, exclusive=self._exclusive_of(kept.tolist()))

    def _exclusive_of(self, same: Sequence[bool]) -> float:
        """Return `exclusive` if only columns without a bound change, 0 otherwise."""
        bounded = (each < math.inf for each in self.bound)
        changes = any(known and not stays for known, stays in zip(bounded, same, strict=True))
        return 0.0 if changes else self.exclusive


def columns_of(name: str, values: np.ndarray) -> Columns | None:
    """Return columns of a field without names: x0, x1, … or y; None for a field of other ranks."""
    if values.ndim == 1:
        return Columns((name,))
    if values.ndim == 2:
        return Columns(tuple(f"{name}{j}" for j in range(values.shape[1])))
    return None
