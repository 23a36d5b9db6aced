"""The data of all clients, ragged, in one flat array per field.

Axes: m clients, N rows of all clients together, n rows of one client, d features.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

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

if TYPE_CHECKING:
    from narwhals.typing import IntoDataFrame

SPLITS = ("train", "validation", "test")
MOST_ROWS = int(np.iinfo(np.int32).max)
"""Rows of all clients together: their numbers are int32."""
_BLOCK = 1 << 20
"""Rows that are shuffled at once."""


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

    def all_rows(self) -> np.ndarray:
        """The indices of all clients' rows, one client after another, (Σn,) int32."""
        before = np.cumsum(self.count, dtype=np.int32) - self.count
        shift = np.repeat(self.start - before, self.count)
        return np.add(shift, np.arange(len(shift), dtype=np.int32), out=shift)

    def owners(self) -> np.ndarray:
        """Whose each of `all_rows` is, (Σn,) int32."""
        return np.repeat(np.arange(len(self.count), dtype=np.int32), self.count)


@dataclasses.dataclass(frozen=True, eq=False)
class Population:
    """All clients' examples, one client after another, so nobody pays for the largest client.

    Use `from_clients` or `from_flat` to build one: they also bring fields to their types. Integers
    stay integers (of 64 bits, int32 where that can hold them), so that they can be tokens; all else
    becomes float32 (float64 is kept). Labels "y" are int32 where all values are whole numbers, and
    otherwise of the same floating types; their shape is (N,), or (N, L) for one label per token.

    Attributes:
        fields: arrays of shape (N, ...); by convention "x" are features and "y" labels. What nobody
            can write to, such as a file mapped for reading, is kept as it is; of all else there is
            a copy, read-only, in memory that a CPU's device shares.
        splits: the rows of "train" (at least one per client), "validation" and "test" (which may
            be empty) of each client. Every row belongs to exactly one client and one split.
        names: the clients' distinct names, (m,) str or, as numbers take less memory, integers.
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

    def __repr__(self) -> str:
        """Clients, rows of each split, and a line for each field."""
        lines = (f"  {name}: {dtype} {shape}" for name, dtype, shape in self._described())
        return "\n".join([self._title, *lines])

    def _repr_html_(self) -> str:
        return notebook.table(self._title, ["field", "type", "shape"], self._described())

    @property
    def _title(self) -> str:
        rows = ", ".join(f"{int(self.splits[name].count.sum()):,} {name}" for name in SPLITS)
        return f"Population of {self.num_clients:,} clients, {self.num_rows:,} rows ({rows})"

    def _described(self) -> list[tuple[str, str, str]]:
        """Return the name, type and shape of each field."""
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

    def of_rows(self, index: np.ndarray, counts: np.ndarray, clients: Any = slice(None)) -> Self:
        """A population of some rows, in another order.

        Args:
            index: the rows of each client, one client after another, and of each client its rows in
                the order of `SPLITS`, (N',) integers.
            counts: how many each client has in each split, (m', 3).
            clients: the indices of these clients, (m',); by default they are all.
        """
        # Before the fields, which take most: what is needed on the way there is given back.
        splits = consecutive(*np.transpose(counts))
        fields = {field: taken(values, index) for field, values in self.fields.items()}
        return dataclasses.replace(self, fields=fields, splits=splits, names=self.names[clients])

    def of_clients(self, clients: np.ndarray) -> Self:
        """A population of some clients, (m',) indices, with their names and splits."""
        parts = {
            name: Ranges(ranges.start[clients], ranges.count[clients])
            for name, ranges in self.splits.items()
        }
        return self.of_rows(*in_order(parts), clients)


def consecutive(train: Any, validation: Any, test: Any) -> dict[str, Ranges]:
    """Splits of clients that follow one another, each with its splits in this order.

    Args:
        train: number of training rows of each client, (m,).
        validation: number of validation rows, (m,).
        test: number of test rows, (m,).

    Raises:
        ValueError: there are more rows than int32 can index.
    """
    given = (train, validation, test)
    ends = np.zeros(len(train), np.int64)
    for count in given:
        ends += np.asarray(count).astype(np.int64)
    np.cumsum(ends, out=ends)
    if ends[-1] > MOST_ROWS:
        raise ValueError(f"a population holds at most {MOST_ROWS} rows, got {ends[-1]}")
    counts = [shareable(np.asarray(count, np.int32)) for count in given]
    start = ends.astype(np.int32)
    for count in counts:
        start -= count
    splits = {}
    for name, count in zip(SPLITS, counts, strict=True):
        splits[name] = Ranges(start, count)
        start = start + count
    return splits


def in_order(parts: Mapping[str, Ranges]) -> tuple[np.ndarray, np.ndarray]:
    """The rows of each client, and of each client in the order of `SPLITS`.

    Args:
        parts: where the rows of each split lie.

    Returns:
        The rows, (N,) int32, and how many each client has in each split, (m, 3).
    """
    counts = np.stack([parts[name].count for name in SPLITS])
    counts.flags.writeable = False  # `consecutive` then takes them as they are
    counts = counts.T
    rows = int(counts.sum(dtype=np.int64))
    if _are_consecutive(parts, rows):
        return np.arange(rows, dtype=np.int32), counts
    index = np.empty(rows, np.int32)
    for name, ranges in consecutive(*counts.T).items():
        index[ranges.all_rows()] = parts[name].all_rows()
    return index, counts


def split(
    population: Population, *, validation: float = 0.0, test: float = 0.0, seed: int = 0
) -> Population:
    """Move random training rows of every client to its validation and test splits.

    Each client's training rows are shuffled by random words of their own, which depend on the seed,
    the client's index and the row's number alone; so its split depends on no other client's data.
    The fractions are rounded to whole rows per client; where nothing would be left to train on,
    validation gives up rows first, then test. A split that has rows already is kept: its fraction
    must be 0. Where both are, the population stays as it is.

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
    if validation == test == 0:
        return population
    return population.of_rows(*_divided(population, validation, test, seed))


def _divided(
    population: Population, validation: float, test: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a population that is split, and how many each client has, as of `in_order`."""
    parts, n = dict(population.splits), population.splits["train"].count
    start = parts["train"].start
    left, validations, tests = numbers_of_rows(n, validation, test)
    parts["train"] = Ranges(start, left)
    if validation > 0:
        parts["validation"] = Ranges(start + left, validations)
    if test > 0:
        parts["test"] = Ranges(start + left + validations, tests)
    index, counts = in_order(parts)
    shuffled = _shuffled(population.splits["train"], population.num_rows, seed)
    return shuffled[index], counts


def numbers_of_rows(
    count: np.ndarray, validation: float, test: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How many of some clients' rows are for training, validation and testing, each (m,) int32."""
    tests = np.minimum(_whole(test * count), count - 1)
    validations = np.minimum(_whole(validation * count), count - 1 - tests)
    return count - tests - validations, validations, tests


def _whole(rows: np.ndarray) -> np.ndarray:
    """Numbers of rows, rounded; halves upwards."""
    return np.floor(rows + 0.5).astype(np.int32)


def _shuffled(ranges: Ranges, num_rows: int, seed: int) -> np.ndarray:
    """All rows, (N,) int32, each client's within a range in random order.

    Clients with as many rows as each other are sorted together, a block of them at a time.
    """
    index = np.arange(num_rows, dtype=np.int32)
    [origin] = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    by_count = np.argsort(ranges.count, kind="stable")
    sizes, first = np.unique(ranges.count[by_count], return_index=True)
    for size, same in zip(sizes, np.split(by_count, first[1:]), strict=True):
        for clients in np.array_split(same, -(-len(same) * size // _BLOCK)):
            rows = ranges.start[clients, None] + np.arange(size, dtype=np.int32)
            words = _words(_words(origin, clients)[:, None], np.arange(size))
            order = np.argsort(words, axis=1, kind="stable")
            index[rows] = np.take_along_axis(rows, order, axis=1)
    return index


def _words(origin: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Random words, uint64, each a function of an origin, another one, and of a number.

    They are those of SplitMix64, of any place in its stream (Steele, Lea, Flood, "Fast splittable
    pseudorandom number generators", 2014).
    """
    words = np.asarray(origin + (number + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words ^ (words >> np.uint64(31))


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
        return np.arange(clients, dtype=np.int32)
    if len(names) != clients:
        raise ValueError(f"names must name all {clients} clients, got {len(names)} names")
    if isinstance(names, np.ndarray) and names.dtype.kind in "iuU":
        return names
    return np.asarray([str(name) for name in names])


def _check_structure(population: Population) -> None:
    names, splits = population.names, population.splits
    rows = common_length({f: len(v) for f, v in population.fields.items()}, "population")
    if names.ndim != 1 or names.size == 0 or names.dtype.kind not in "iuU":
        raise ValueError(
            f"names must be a non-empty array of strings or integers (m,), got {names!r}"
        )
    if not np.all(names[1:] > names[:-1]):
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
    if _are_consecutive(splits, rows):
        return
    start = np.concatenate([splits[s].start for s in SPLITS]).astype(np.int64)
    count = np.concatenate([splits[s].count for s in SPLITS]).astype(np.int64)
    occupied = np.flatnonzero(count)
    order = occupied[np.argsort(start[occupied])]
    ends = (start + count)[order]
    if np.any(count < 0) or not np.array_equal(start[order], np.append(0, ends[:-1])):
        raise ValueError("the ranges of clients and splits must not overlap or leave gaps")
    if ends[-1] != rows:
        raise ValueError(f"the ranges of clients and splits must end at row {rows}, got {ends[-1]}")


def _are_consecutive(splits: Mapping[str, Ranges], rows: int) -> bool:
    """Whether clients and their splits follow one another up to the last row, as mostly."""
    if any(np.any(ranges.count < 0) for ranges in splits.values()):
        return False
    if sum(int(ranges.count.sum(dtype=np.int64)) for ranges in splits.values()) != rows:
        return False
    # Where each split of a client begins, one split after another, in one array.
    begin = functools.reduce(np.add, (splits[name].count for name in SPLITS))
    np.cumsum(begin, out=begin)
    for name in reversed(SPLITS):
        count = splits[name].count
        begin -= count
        if np.any((begin != splits[name].start) & (count > 0)):
            return False
    return True


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
