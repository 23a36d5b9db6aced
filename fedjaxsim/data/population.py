"""The data of all clients, ragged, in one flat array per field.

Axes: m clients, N rows of all clients together, n rows of one client, d features.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from fedjaxsim.data.arrays import as_numbers, common_length, join, shareable
from fedjaxsim.data.minibatches import Generate

if TYPE_CHECKING:
    from narwhals.typing import IntoDataFrame

SPLITS = ("train", "validation", "test")
_LARGEST_INT32 = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True, eq=False)
class Ranges:
    """Client k owns the rows `start[k] : start[k] + count[k]` of every field.

    Attributes:
        start: first row of each client, (m,) int32.
        count: number of rows of each client, (m,) int32.
    """

    start: np.ndarray
    count: np.ndarray

    def rows(self, client: int) -> np.ndarray:
        """The indices of one client's rows, (n,)."""
        return self.start[client] + np.arange(self.count[client])


@dataclasses.dataclass(frozen=True, eq=False)
class Population:
    """All clients' examples, one client after another, so nobody pays for the largest client.

    Use `from_clients` or `from_flat` to build one: they also bring fields to their types. Integers
    stay integers (of 64 bits, int32 where that can hold them), so that they can be tokens; all else
    becomes float32 (float64 is kept). Labels "y" are int32 where all values are whole numbers, and
    otherwise of the same floating types; their shape is (N,), or (N, L) for one label per token.

    Attributes:
        fields: arrays of shape (N, ...); by convention "x" are features and "y" labels. They are
            kept read-only, in memory that a CPU's device shares instead of holding a copy.
        splits: the rows of "train" (at least one per client), "validation" and "test" (which may
            be empty) of each client. Every row belongs to exactly one client and one split.
        names: the clients' distinct names, (m,) str.
        generate: for synthetic problems, `(key, row, b) -> fields`: training minibatches are made
            afresh in every round from the client's first training row (its true parameters, say)
            instead of drawn from its rows. It should compare equal where it computes the same,
            for compiled code to be shared: a function of a module or a frozen dataclass, no lambda.
        public: sentences on what was made of all clients' data before the run and is taken as
            public, such as which features were dropped; a guarantee names them among its
            assumptions. Whoever changes a population keeps them.
        categories: of fields of integers, by name: what 0, 1, … stand for, such as the names of
            classes. There may be more than occur.

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
        _check_structure(self)
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
            names: distinct names of the clients, (m,); by default "0", "1", ...

        Raises:
            ValueError: no client, an empty client, fields that differ between clients or disagree
                in length, values that are not finite numbers, or duplicate names.
        """
        if len(clients) == 0:
            raise ValueError("a population needs at least one client, got an empty list")
        labels = _as_names(names, len(clients)).tolist()
        expected = sorted(clients[0])
        counts = []
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
        for k, name in enumerate(labels):
            lengths = {field: len(arrays[k]) for field, arrays in parts.items()}
            counts.append(common_length(lengths, f"client {name!r}"))
        fields = {field: join(field, arrays, owners) for field, arrays in parts.items()}
        return cls.from_flat(fields, counts, labels)

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
            names: distinct names of the clients, (m,); by default "0", "1", ...

        Raises:
            ValueError: as `from_clients`, or the counts do not sum to N.
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

    @classmethod
    def from_dataframe(
        cls,
        frame: "IntoDataFrame",
        *,
        client: str,
        target: str,
        split: str | None = None,
        one_hot: Sequence[str] = (),
        drop: Sequence[str] = (),
    ) -> "Population":
        """A population from a table with one row per example: pandas, polars, a pyarrow table.

        Every other column is a feature, in the order of the columns: "x" is (N, d) float32. Clients
        are sorted by name, as numbers where all are whole numbers, and keep the order of their
        rows. A target of numbers stays; of text, "y" holds classes 0 … c − 1 in sorted order, whose
        names `categories` keeps.

        Args:
            frame: a data frame that narwhals knows.
            client: the column that says whose a row is.
            target: the column that is to be predicted.
            split: a column of "train", "validation" and "test"; without it, all rows are for
                training.
            one_hot: columns of which each becomes one column of 0 and 1 per value that occurs.
            drop: columns that are no features.

        Raises:
            TypeError: the frame is none.
            ValueError: names the column that is absent, has missing values or holds no numbers.
        """
        from fedjaxsim.data.npz import assemble
        from fedjaxsim.data.table import Columns, arrays_of

        columns = Columns(target, client, split, tuple(one_hot), tuple(drop))
        return assemble(arrays_of(frame, columns))

    @property
    def num_clients(self) -> int:
        """Number of clients m."""
        return len(self.names)

    @property
    def num_rows(self) -> int:
        """Number of rows N of all clients and splits together."""
        return len(next(iter(self.fields.values())))

    def rows(self, client: int, split: str | None = None) -> dict[str, np.ndarray]:
        """One client's rows, of one split or of all ("train" first, then the others).

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

    def of_rows(self, rows: Sequence[Sequence[np.ndarray]], clients: Any = slice(None)) -> Self:
        """A population of some rows, in another order.

        Args:
            rows: for each client the indices of its rows in each of `SPLITS`.
            clients: the indices of these clients, (k,); by default they are all.
        """
        index = np.concatenate([part for parts in rows for part in parts])
        counts = np.array([[len(part) for part in parts] for parts in rows])
        return dataclasses.replace(
            self,
            fields={field: values[index] for field, values in self.fields.items()},
            splits=consecutive(*counts.T),
            names=self.names[clients],
        )


def consecutive(train: Any, validation: Any, test: Any) -> dict[str, Ranges]:
    """Splits of clients that follow one another, each with its splits in this order.

    Args:
        train: number of training rows of each client, (m,).
        validation: number of validation rows, (m,).
        test: number of test rows, (m,).

    Raises:
        ValueError: there are more rows than int32 can index.
    """
    counts = np.stack([train, validation, test], axis=1).astype(np.int64)  # (m, 3)
    ends = np.cumsum(counts.ravel())
    if ends[-1] > _LARGEST_INT32:
        raise ValueError(f"a population holds at most {_LARGEST_INT32} rows, got {ends[-1]}")
    starts = ends.reshape(counts.shape) - counts
    return {
        split: Ranges(starts[:, s].astype(np.int32), counts[:, s].astype(np.int32))
        for s, split in enumerate(SPLITS)
    }


def split(
    population: Population, *, validation: float = 0.0, test: float = 0.0, seed: int = 0
) -> Population:
    """Move random training rows of every client to its validation and test splits.

    Each client's training rows are shuffled with a generator of its own, seeded by (seed, k), so
    a client's split does not depend on the data of the others. The fractions are rounded to
    whole rows per client; where nothing would be left to train on, validation gives up rows
    first, then test. A split that has rows already is kept: its fraction must be 0.

    Args:
        population: the rows of each client; its training rows are divided.
        validation: fraction of each client's training rows, in [0, 1).
        test: the same for the test split; both together less than 1.
        seed: a non-negative integer.

    Returns:
        The same rows, reordered so that every split of a client is one range.

    Raises:
        ValueError: a fraction or the seed is out of range, or the split it fills has rows.
    """
    check_fractions(validation, test)
    check_seed(seed)
    for name, fraction in (("validation", validation), ("test", test)):
        if fraction > 0 and population.splits[name].count.any():
            raise ValueError(
                f"the population has {name} rows already, so {name} must be 0, got {fraction}"
            )
    rows = []
    for k in range(population.num_clients):
        old = {name: ranges.rows(k) for name, ranges in population.splits.items()}
        n = len(old["train"])
        tests = min(int(np.floor(test * n + 0.5)), n - 1)
        validations = min(int(np.floor(validation * n + 0.5)), n - 1 - tests)
        shuffled = np.random.default_rng((seed, k)).permutation(old["train"])
        train, new_validation, new_test = np.split(shuffled, [n - tests - validations, n - tests])
        rows.append(
            [
                train,
                np.concatenate([new_validation, old["validation"]]),
                np.concatenate([new_test, old["test"]]),
            ]
        )
    return population.of_rows(rows)


def check_fractions(validation: float, test: float) -> None:
    """Raise ValueError unless both lie in [0, 1) and leave some rows to train on."""
    for name, fraction in (("validation", validation), ("test", test)):
        if not 0 <= fraction < 1:
            raise ValueError(f"{name} must lie in [0, 1), got {fraction}")
    if validation + test >= 1:
        raise ValueError(
            f"validation + test must be less than 1, got {validation} + {test}; "
            "some rows must remain to train on"
        )


def check_seed(seed: int) -> None:
    """Raise ValueError unless the seed is a non-negative integer."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise ValueError(f"seed must be a non-negative integer, got {seed!r}")


def _as_names(names: Sequence[str] | np.ndarray | None, clients: int) -> np.ndarray:
    if names is None:
        return np.arange(clients).astype(str)
    if len(names) != clients:
        raise ValueError(f"names must name all {clients} clients, got {len(names)} names")
    return np.asarray([str(name) for name in names])


def _check_structure(population: Population) -> None:
    names, splits = population.names, population.splits
    rows = common_length({f: len(v) for f, v in population.fields.items()}, "population")
    if names.ndim != 1 or names.size == 0 or names.dtype.kind != "U":
        raise ValueError(f"names must be a non-empty array of strings (m,), got {names!r}")
    distinct, times = np.unique(names, return_counts=True)
    if len(distinct) < len(names):
        raise ValueError(f"names must be distinct, got {str(distinct[times > 1][0])!r} twice")
    if set(splits) != set(SPLITS):
        raise ValueError(f"splits must be exactly {SPLITS}, got {tuple(splits)}")
    for name, ranges in splits.items():
        for part in (ranges.start, ranges.count):
            if part.shape != names.shape or part.dtype != np.int32:
                raise ValueError(
                    f"the ranges of {name!r} must be int32 of shape {names.shape}, "
                    f"got {part.dtype} of {part.shape}"
                )
    if np.any(splits["train"].count < 1):
        k = int(np.argmax(splits["train"].count < 1))
        raise ValueError(f"client {str(names[k])!r} has no training rows; each needs at least one")
    start = np.concatenate([splits[s].start for s in SPLITS]).astype(np.int64)
    count = np.concatenate([splits[s].count for s in SPLITS]).astype(np.int64)
    occupied = np.flatnonzero(count)
    order = occupied[np.argsort(start[occupied])]
    ends = (start + count)[order]
    if np.any(count < 0) or not np.array_equal(start[order], np.append(0, ends[:-1])):
        raise ValueError("the ranges of clients and splits must not overlap or leave gaps")
    if ends[-1] != rows:
        raise ValueError(f"the ranges of clients and splits must end at row {rows}, got {ends[-1]}")


def _check_categories(population: Population) -> None:
    for field, names in population.categories.items():
        values = population.fields.get(field)
        if values is None or values.dtype.kind not in "iu":
            raise ValueError(f"categories name what integers of a field stand for, got {field!r}")
        if len(set(names)) < len(names) or int(values.max()) >= len(names):
            raise ValueError(
                f"categories of field {field!r} must be distinct names of 0 to {values.max()}, "
                f"got {len(names)}, {len(set(names))} of them distinct"
            )


def _check_finite(population: Population) -> None:
    for field, values in population.fields.items():
        finite = np.isfinite(values)
        if finite.all():
            continue
        row = int(np.argmin(finite.reshape(len(values), -1).all(axis=1)))
        owner = next(
            str(population.names[k])
            for ranges in population.splits.values()
            for k in np.flatnonzero((ranges.start <= row) & (row < ranges.start + ranges.count))
        )
        raise ValueError(
            f"client {owner!r}, field {field!r}: all values must be finite numbers, "
            f"got {values[row][~finite[row]].ravel()[0]} in row {row} of the population"
        )
