"""The data of all clients, ragged, in one flat array per field.

Axes: m clients, N rows of all clients together, n rows of one client, d features.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from fedjaxsim import notebook
from fedjaxsim.data.arrays import (
    as_numbers,
    common_length,
    first_not_finite,
    join,
    shareable,
    taken,
)
from fedjaxsim.data.minibatches import Generate
from fedjaxsim.data.ranges import SPLITS, Ranges, check_ranges, consecutive, in_order


@dataclasses.dataclass(frozen=True, eq=False)
class Population:
    """All clients' examples, one client after another, so no client pays for the largest one.

    `from_clients` and `from_flat` make one from arrays and convert fields to their types: integers
    stay integers (64-bit ones become int32 where they fit), so that they can be tokens; everything
    else becomes float32 (float64 is kept). Labels "y" are int32 where all values are whole numbers,
    otherwise floating; their shape is (N,), or (N, L) for one label per token.

    Attributes:
        fields: arrays of shape (N, ...); by convention "x" are features and "y" labels. Read-only
            arrays, such as a mapped file, are kept; others are copied to read-only memory that a
            CPU device can share.
        splits: the rows of each client for "train" (at least one per client), "validation" and
            "test" (possibly empty). Every row belongs to exactly one client and one split.
        names: the clients' distinct names, (m,) str, or integers, which take less memory.
        generate: for synthetic problems, `(key, row, b) -> fields`: minibatches are made afresh in
            every round from the client's first training row (its true parameters, say). Compiled
            code is shared between equal functions: use a module's function or a frozen dataclass.
        public: sentences on results of all clients' data that are taken as public, such as
            the features that were dropped; they join the assumptions of a guarantee.
        categories: names of the integers 0, 1, … of a field, by field, such as names of classes.
            There may be more than occur.

    Raises:
        ValueError: an attribute breaks one of the rules above, or a value is not finite.
    """

    fields: dict[str, np.ndarray]
    splits: dict[str, Ranges]
    names: np.ndarray
    generate: Generate | None = None
    public: tuple[str, ...] = ()
    categories: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        rows = common_length({f: len(v) for f, v in self.fields.items()}, "population")
        _check_names(self.names)
        check_ranges(self.splits, self.names, rows)
        _check_categories(self)
        _check_finite(self)
        kept = {name: shareable(values) for name, values in self.fields.items()}
        object.__setattr__(self, "fields", kept)

    @classmethod
    def from_clients(
        cls, clients: Sequence[Mapping[str, Any]], names: Sequence[str] | np.ndarray | None = None
    ) -> Self:
        """Join the clients' own arrays; all rows are training rows.

        Args:
            clients: one mapping of the same fields per client, each value (n, ...) array-like.
            names: distinct names of the clients, (m,); by default 0, 1, ...

        Raises:
            ValueError: no client, an empty client, fields that differ between clients or disagree
                in length, values that are not finite numbers, or duplicate names.
        """
        if len(clients) == 0:
            raise ValueError("a population needs at least one client, got an empty list")
        named = _as_names(names, len(clients))
        labels = [str(name) for name in named]
        expected = sorted(clients[0])
        for name, client in zip(labels, clients, strict=True):
            if sorted(client) != expected:
                raise ValueError(
                    f"client {name!r} has the fields {sorted(client)}, but client "
                    f"{labels[0]!r} has {expected}; all clients need the same"
                )
        owners = [f"client {name!r}, field " for name in labels]
        parts = {
            field: [
                as_numbers(client[field], f"{owner}{field!r}")
                for owner, client in zip(owners, clients, strict=True)
            ]
            for field in clients[0]
        }
        counts = [
            common_length(
                {field: len(arrays[k]) for field, arrays in parts.items()}, f"client {n!r}"
            )
            for k, n in enumerate(labels)
        ]
        fields = {field: join(field, arrays, owners) for field, arrays in parts.items()}
        return cls.from_flat(fields, counts, named)

    @classmethod
    def from_flat(
        cls,
        fields: Mapping[str, Any],
        counts: Sequence[int] | np.ndarray,
        names: Sequence[str] | np.ndarray | None = None,
    ) -> Self:
        """Cut flat arrays into consecutive clients; all rows are training rows.

        Args:
            fields: array-likes of shape (N, ...).
            counts: positive numbers of rows of each client that sum to N, (m,) integers.
            names: distinct names of the clients, (m,); by default 0, 1, ...

        Raises:
            ValueError: the counts do not sum to N, or the arrays are refused by `from_clients`.
        """
        sizes = np.asarray(counts)
        if sizes.ndim != 1 or sizes.size == 0 or sizes.dtype.kind not in "iu":
            raise ValueError(f"counts must be a non-empty list of integers, got {counts!r}")
        labels = _as_names(names, len(sizes))
        if np.any(sizes <= 0):
            k = int(np.argmax(sizes <= 0))
            raise ValueError(
                f"client {str(labels[k])!r} has {sizes[k]} rows; each needs at least one"
            )
        arrays = {field: as_numbers(value, f"field {field!r}") for field, value in fields.items()}
        rows = common_length({field: len(value) for field, value in arrays.items()}, "population")
        if int(sizes.sum()) != rows:
            raise ValueError(f"counts must sum to the {rows} rows, got {int(sizes.sum())}")
        none = np.zeros_like(sizes)
        return cls(
            {field: join(field, [value], ["field "]) for field, value in arrays.items()},
            consecutive(sizes, none, none),
            labels,
        )

    def __repr__(self) -> str:
        """List clients, rows of each split, and every field."""
        lines = (f"  {name}: {dtype} {shape}" for name, dtype, shape in self._described())
        return "\n".join([self._title, *lines])

    def _repr_html_(self) -> str:
        return notebook.table(self._title, ["field", "type", "shape"], self._described())

    @property
    def _title(self) -> str:
        rows = ", ".join(f"{int(self.splits[name].count.sum()):,} {name}" for name in SPLITS)
        return f"Population of {self.num_clients:,} clients, {self.num_rows:,} rows ({rows})"

    def _described(self) -> list[tuple[str, str, str]]:
        return [(name, str(v.dtype), str(v.shape)) for name, v in self.fields.items()]

    @property
    def num_clients(self) -> int:
        """Number of clients m."""
        return len(self.names)

    @property
    def num_rows(self) -> int:
        """Number of rows N of all clients and splits together."""
        return len(next(iter(self.fields.values())))

    def rows(self, client: int, split: str | None = None) -> dict[str, np.ndarray]:
        """Return one client's rows of a split; by default of all, in the order of `SPLITS`.

        Raises:
            ValueError: there is no such client or split.
        """
        if not 0 <= client < self.num_clients:
            raise ValueError(f"client must lie in [0, {self.num_clients}), got {client}")
        if split is not None and split not in SPLITS:
            raise ValueError(f"split must be one of {SPLITS} or None, got {split!r}")
        chosen = SPLITS if split is None else (split,)
        index = np.concatenate([self.splits[name].rows(client) for name in chosen])
        return {field: values[index] for field, values in self.fields.items()}

    def of_rows(self, index: np.ndarray, counts: np.ndarray, clients: Any = slice(None)) -> Self:
        """Return a population of some rows, in another order.

        Args:
            index: rows client after client, each client's in the order of `SPLITS`, (N',).
            counts: number of rows of each client in each split, (m', 3).
            clients: indices of these clients, (m',); by default all.
        """
        # Ranges come first: their scratch memory is free before fields, which take most, are made.
        splits = consecutive(*np.transpose(counts))
        fields = {field: taken(values, index) for field, values in self.fields.items()}
        return dataclasses.replace(self, fields=fields, splits=splits, names=self.names[clients])

    def of_clients(self, clients: np.ndarray) -> Self:
        """Return a population of some clients, (m',) indices, with their names and splits."""
        parts = {
            name: Ranges(ranges.start[clients], ranges.count[clients])
            for name, ranges in self.splits.items()
        }
        return self.of_rows(*in_order(parts), clients)


def _as_names(names: Sequence[str] | np.ndarray | None, clients: int) -> np.ndarray:
    if names is None:
        return np.arange(clients, dtype=np.int32)
    if len(names) != clients:
        raise ValueError(f"names must name all {clients} clients, got {len(names)} names")
    if isinstance(names, np.ndarray) and names.dtype.kind in "iuU":
        return names
    return np.asarray([str(name) for name in names])


def _check_names(names: np.ndarray) -> None:
    if names.ndim != 1 or names.size == 0 or names.dtype.kind not in "iuU":
        raise ValueError(
            f"names must be a non-empty array of strings or integers (m,), got {names!r}"
        )
    if not np.all(names[1:] > names[:-1]):
        distinct, times = np.unique(names, return_counts=True)
        if len(distinct) < len(names):
            raise ValueError(f"names must be distinct, got {str(distinct[times > 1][0])!r} twice")


def _check_categories(population: Population) -> None:
    for field, names in population.categories.items():
        values = population.fields.get(field)
        if values is None or values.dtype.kind not in "iu":
            raise ValueError(f"categories need a field of integers, got {field!r}")
        if len(set(names)) < len(names) or int(values.max()) >= len(names):
            raise ValueError(
                f"categories of field {field!r} must be distinct names of 0 to {values.max()}, "
                f"got {len(names)}, {len(set(names))} of them distinct"
            )


def _check_finite(population: Population) -> None:
    for field, values in population.fields.items():
        row = first_not_finite(values)
        if row is None:
            continue
        owner = next(
            str(population.names[k])
            for ranges in population.splits.values()
            for k in np.flatnonzero((ranges.start <= row) & (row < ranges.start + ranges.count))
        )
        found = values[row]
        raise ValueError(
            f"client {owner!r}, field {field!r}: all values must be finite numbers, "
            f"got {found[~np.isfinite(found)].ravel()[0]} in row {row} of the population"
        )
