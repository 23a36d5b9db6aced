"""The data of all clients, ragged, in one flat array per field.

Axes: m clients, N rows of all clients together, n rows of one client, d features.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from fedjaxsim import checks
from fedjaxsim.checks import Name, SettingError
from fedjaxsim.data.arrays import (
    SPLITS,
    Ranges,
    as_counts,
    as_numbers,
    blocks,
    common_length,
    consecutive,
    join,
    joined,
    shareable,
    taken,
)
from fedjaxsim.data.columns import Columns, Preparation
from fedjaxsim.data.minibatches import Generate

_LARGE = 1e3
"""Standard deviation of the numbers that replace a client's rows."""


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
      counts: numbers of rows of each client for training (at least 1), validation and testing,
        (m, 3) int32, read-only; given as (m,), all are for training. Clients follow one another,
        each with its splits in this order.
      names: the clients' distinct names, (m,) str, or integers, which take less memory.
      generate: for synthetic problems, `(key, row, b) -> fields`: minibatches are made afresh in
        every round from the client's first training row (its true parameters, say). Compiled
        code is shared between equal functions: use a module's function or a frozen dataclass.
      public: sentences on results of all clients' data that are taken as public, such as
        the features that were dropped; they join the assumptions of a guarantee.
      categories: names of the integers 0, 1, … of a field, by field, such as names of classes.
        There may be more than occur.
      columns: names and units of the columns, by field: of features "x", and of the target "y".
        Fields (N,) and (N, d) without names get x0, x1, …; others have none.
      voids_epsilon: sentences on results of all clients' data, such as the ranges of columns, that
        no ε covers: no run on the population has one.
      preparations: noised releases about all clients' data, such as private ranges of columns:
        every run on the population is charged for them. Like `voids_epsilon` it also has what
        the columns are adapted to, whatever is given.
      held_out: clients that take no part in a run, as another population; None if there
        are none.
      source_row: (N,) the position of each row in its source, such as the data frame that it was
        read from; None if the rows are in the source's order.
      max_rows: the most rows that a client may have in a split, a public number: it bounds loops
        and buffers, and the layout of the work follows from it. None takes the largest numbers of
        all clients, which a guarantee then names as public.

    Raises:
      ValueError: an attribute breaks one of the rules above, or a value is not finite or too large.

    Example:
      >>> pair = fjs.Population.from_flat({"x": np.eye(3), "y": np.arange(3)}, [1, 2])
      >>> pair.num_clients, pair.rows(1)["y"].tolist()
      (2, [1, 2])
    """

    fields: dict[str, np.ndarray]
    counts: np.ndarray
    names: np.ndarray
    generate: Generate | None = None
    public: tuple[str, ...] = ()
    categories: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    columns: Mapping[str, Columns] = dataclasses.field(default_factory=dict)
    voids_epsilon: tuple[str, ...] = ()
    preparations: tuple[Preparation, ...] = ()
    held_out: "Population | None" = None
    source_row: np.ndarray | None = None
    max_rows: int | None = None

    def __post_init__(self):
        rows = common_length(self.fields, "population")
        object.__setattr__(self, "counts", as_counts(self.counts, self.names, rows))
        _check_names(self.names)
        _check_most(self)
        _check_categories(self)
        _check_numbers(self)
        if self.source_row is not None and np.shape(self.source_row) != (rows,):
            raise ValueError(
                f"source_row must have the shape ({rows},), got {np.shape(self.source_row)}"
            )
        object.__setattr__(self, "columns", _columns(self))
        adapted_to = [of for columns in self.columns.values() for of in columns.adapted_to]
        releases = [of for of in adapted_to if isinstance(of, Preparation)]
        sentences = [of for of in adapted_to if isinstance(of, str)]
        for name, more in (("preparations", releases), ("voids_epsilon", sentences)):
            object.__setattr__(self, name, tuple(dict.fromkeys((*getattr(self, name), *more))))
        shareable_fields = {name: shareable(values) for name, values in self.fields.items()}
        object.__setattr__(self, "fields", shareable_fields)

    @classmethod
    def from_clients(
        cls, clients: Sequence[Mapping[str, Any]], names: Sequence[str] | np.ndarray | None = None
    ) -> Self:
        """Join arrays of each client; all rows are training rows.

        Args:
          clients: one mapping of the same fields per client, each value (n, ...) array-like.
          names: distinct names of the clients, (m,); by default 0, 1, ...

        Raises:
          ValueError: no client, an empty client, fields that differ between clients or disagree
            in length, values that are not finite numbers, or duplicate names.

        Example:
          >>> first, second = {"x": [[0.0], [1.0]], "y": [0.0, 2.0]}, {"x": [[3.0]], "y": [5.0]}
          >>> two = fjs.Population.from_clients([first, second], names=["Ada", "Bob"])
          >>> two.splits["train"].count.tolist(), two.names.tolist()
          ([2, 1], ['Ada', 'Bob'])
        """
        wanted = "clients must be a list with a dict of arrays for each, such as [{'x': …, 'y': …}]"
        if not isinstance(clients, Sequence):
            raise ValueError(f"{wanted}, got a {type(clients).__name__}")
        for client in clients:
            if not isinstance(client, Mapping) and not hasattr(client, "columns"):
                raise ValueError(f"{wanted}, got a {type(client).__name__} in it")
        named = _as_names(names, len(clients))
        fields, counts = joined(clients, [str(name) for name in named])
        return cls.from_flat(fields, counts, named)

    @classmethod
    def from_flat(
        cls,
        fields: Mapping[str, Any],
        counts: Sequence[int] | Sequence[Sequence[int]] | np.ndarray,
        names: Sequence[str] | np.ndarray | None = None,
        **more: Any,
    ) -> Self:
        """Cut flat arrays into consecutive clients.

        Args:
          fields: array-likes of shape (N, ...).
          counts: numbers of training rows of each client, (m,) integers, or of its training,
            validation and test rows, (m, 3), which follow one another; they sum to N.
          names: distinct names of the clients, (m,); by default 0, 1, ...
          **more: other attributes of a population.

        Raises:
          ValueError: the counts do not sum to N, a client has no training rows, or the arrays are
            refused by `from_clients`.
        """
        if not isinstance(fields, Mapping):
            raise ValueError(
                "fields must be a dict of arrays, such as {'x': …, 'y': …}, got a "
                f"{type(fields).__name__}"
            )
        arrays = {field: as_numbers(value, f"field {field!r}") for field, value in fields.items()}
        typed = {field: join(field, [value], ["field "]) for field, value in arrays.items()}
        sizes = np.atleast_1d(counts)
        return cls(typed, sizes, _as_names(names, len(sizes)), **more)

    @classmethod
    def from_rows(
        cls,
        fields: Mapping[str, Any],
        client: np.ndarray,
        names: Sequence[str] | np.ndarray | int,
        split: np.ndarray | int = 0,
        source_row: np.ndarray | None = None,
        **more: Any,
    ) -> Self:
        """Sort rows by client and split; rows of one client and split keep their order.

        Args:
          fields: array-likes of shape (N, ...).
          client: position of each row's client in `names`, (N,) integers.
          names: distinct names of the clients, (m,), or m for 0, 1, …
          split: position of each row's split in "train", "validation", "test", (N,).
          source_row: position of each row in its source, (N,); by default 0, 1, …
          **more: other attributes of a population.

        Raises:
          ValueError: a client has no training rows, or the arrays are refused by `from_clients`.
        """
        names = np.arange(names, dtype=np.int32) if isinstance(names, int) else names
        # 43 clients times 3 splits exceed an int8.
        cell = np.multiply(client, len(SPLITS), dtype=np.int64) + split
        order = np.argsort(cell, kind="stable")
        counts = np.bincount(cell, minlength=len(names) * len(SPLITS)).reshape(-1, len(SPLITS))
        sorted_fields = {field: np.asarray(values)[order] for field, values in fields.items()}
        rows = order if source_row is None else source_row[order]
        return cls.from_flat(sorted_fields, counts, names, source_row=rows, **more)

    def with_field(
        self,
        name: str,
        change: Callable[[np.ndarray], np.ndarray],
        columns: Columns | None = None,
        **more: Any,
    ) -> Self:
        """Return the population with `change(rows)` of a field, of those held out, too.

        Its columns are by default as before, or x0, x1, … for another number of them, and adapted
        to what the old ones were; `more` are other attributes.
        """
        held_out = self.held_out and self.held_out.with_field(name, change, columns, **more)
        fields = {**self.fields, name: change(self.fields[name])}
        columns_by_field = {
            field: of_field for field, of_field in self.columns.items() if field != name
        }
        if name in self.columns and (default := _default_names(name, fields[name])):
            before = self.columns[name]
            if columns is None:
                alike = fields[name].shape[1:] == self.fields[name].shape[1:]
                columns = before if alike else Columns(default)
            adapted_to = (*before.adapted_to, *columns.adapted_to)
            columns = dataclasses.replace(columns, adapted_to=adapted_to)
        columns_by_field |= {} if columns is None else {name: columns}
        return dataclasses.replace(
            self, fields=fields, columns=columns_by_field, held_out=held_out, **more
        )

    def __repr__(self) -> str:
        """List clients, rows of each split, and every field."""
        rows = ", ".join(
            f"{n:,} {name}" for n, name in zip(self.counts.sum(axis=0), SPLITS, strict=True)
        )
        title = f"Population of {self.num_clients:,} clients, {self.num_rows:,} rows ({rows})"
        lines = (f"  {name}: {v.dtype} {v.shape}" for name, v in self.fields.items())
        return "\n".join([title, *lines])

    @functools.cached_property
    def splits(self) -> dict[str, Ranges]:
        """The rows of each client by "train", "validation" and "test"."""
        return consecutive(self.counts)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of all rows and of the clients that have them."""
        digest = hashlib.sha256(
            getattr(self.generate, "__qualname__", repr(self.generate)).encode()
        )
        arrays = {f"field {name}": values for name, values in self.fields.items()}
        for name, ranges in self.splits.items():
            arrays |= {f"start {name}": ranges.start, f"count {name}": ranges.count}
        for name, values in sorted((arrays | {"names": self.names}).items()):
            array = np.ascontiguousarray(values)
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(array.reshape(-1).view(np.uint8).data)
        return digest.hexdigest()[:16]

    def has(self, split: str) -> bool:
        """Return whether some client has rows of a split."""
        checks.one_of(SPLITS, split=split)
        return bool(self.counts[:, SPLITS.index(split)].any())

    def bound(self, split: str) -> int:
        """Return the public bound on each client's rows of a split; see `max_rows`."""
        checks.one_of(SPLITS, split=split)
        largest = int(self.counts[:, SPLITS.index(split)].max())
        return largest if self.max_rows is None else self.max_rows

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
        checks.count(0, self.num_clients - 1, client=client)
        if split is not None:
            checks.one_of(SPLITS, split=split)
        chosen = SPLITS if split is None else (split,)
        index = np.concatenate([self.splits[name].rows(client) for name in chosen])
        return {field: values[index] for field, values in self.fields.items()}

    def of_rows(self, index: np.ndarray, counts: np.ndarray, clients: Any = slice(None)) -> Self:
        """Return a population of the rows `index`, (N',), of `clients`, (m',), by default all.

        Rows are client after client, each client's in the order of `SPLITS`; `counts` are (m', 3).
        """
        fields = {field: taken(values, index) for field, values in self.fields.items()}
        return dataclasses.replace(
            self,
            fields=fields,
            counts=counts,
            names=self.names[clients],
            source_row=index if self.source_row is None else self.source_row[index],
        )

    def of_clients(self, clients: Sequence[int] | np.ndarray) -> Self:
        """Return a population of some clients, with their names and splits.

        Args:
          clients: distinct indices, (m',), or whether each client is kept, (m,) bool.

        Raises:
          ValueError: for other indices, or none.
        """
        chosen, m = np.asarray(clients), self.num_clients
        if chosen.shape == (m,) and chosen.dtype == bool:
            chosen = np.flatnonzero(chosen)
        listed = chosen.ndim == 1 and chosen.size and chosen.dtype.kind in "iu"
        if not listed or chosen.min() < 0 or chosen.max() >= m:
            raise ValueError(f"clients must be indices in [0, {m}), at least one, got {clients!r}")
        counts = self.counts[chosen]
        rows = Ranges(self.splits["train"].start[chosen], counts.sum(axis=1, dtype=np.int32))
        return self.of_rows(rows.all_rows(), counts, chosen)


def adapted_alike(first: Population, second: Population) -> bool:
    """Return whether runs on two populations have the same ε for what was read before round 1."""
    names = ("voids_epsilon", "preparations")
    return all(getattr(first, name) == getattr(second, name) for name in names)


def has_same_clients(first: Population, second: Population) -> bool:
    """Return whether no row of a source belongs to one client here and to another one there."""
    rows, owners = [], []
    for population in (first, second):
        sizes = population.counts.sum(axis=1)
        of_source = population.source_row
        rows.append(np.arange(population.num_rows) if of_source is None else of_source)
        owners.append(np.repeat(population.names, sizes).astype(str))
    _, here, there = np.intersect1d(*rows, return_indices=True)
    return np.array_equal(owners[0][here], owners[1][there])


def with_other_rows(population: Population, clients: Sequence[int], seed: int) -> Population:
    """Return the population with other rows of some clients, as many in every split.

    Floats become large random numbers, positive ones where none is negative, as times; an integer,
    such as a label, becomes the next larger one that occurs, and the largest becomes the smallest.
    """
    rng = np.random.default_rng((seed, *clients))
    splits = population.splits.values()
    rows = np.concatenate([ranges.rows(client) for client in clients for ranges in splits])
    fields = {}
    for name, values in population.fields.items():
        replaced = np.array(values)
        if np.issubdtype(replaced.dtype, np.integer):
            occurring, index = np.unique(values, return_inverse=True)
            replaced[rows] = occurring[(index.reshape(values.shape)[rows] + 1) % len(occurring)]
        else:
            large = _LARGE * rng.normal(size=replaced[rows].shape)
            replaced[rows] = large if np.min(values) < 0 else np.abs(large)
        fields[name] = replaced
    return dataclasses.replace(population, fields=fields)


def with_other_counts(population: Population, client: int) -> Population:
    """Return the population with as many rows of a client, more or fewer of them in training.

    A client with a single row keeps it, and so does one whose splits are all full.
    """
    total, train = int(population.counts[client].sum()), int(population.counts[client, 0])
    most = population.bound("train")
    high = min(total, most)
    # The other two splits hold the rest.
    low = min(high, max(1, total - 2 * most) if population.max_rows else 1)
    half = min(max(total // 2, low), high)
    new_train = half if train > half or train == high else high
    new_train = low if new_train == train else new_train
    validation = (total - new_train + 1) // 2
    counts = population.counts.copy()
    counts[client] = new_train, validation, total - new_train - validation
    return dataclasses.replace(population, counts=counts)


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


def _check_most(population: Population) -> None:
    if population.max_rows is None:
        return
    checks.count(max_rows=population.max_rows)
    most = population.counts.max(axis=1)
    if most.max() > population.max_rows:
        name = str(population.names[most.argmax()])
        raise SettingError(
            f"client {name!r} has {most.max()} rows in a split, more than ",
            Name("max_rows"),
            f" = {population.max_rows}: drop some, or declare a larger public number",
        )


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


def _columns(population: Population) -> dict[str, Columns]:
    """Return the columns of all fields that have some; raise ValueError where they do not fit."""
    columns_by_field = {}
    for field, values in population.fields.items():
        default = _default_names(field, values)
        columns = population.columns.get(field) or Columns(default)
        if len(columns.names) != len(default):
            raise ValueError(
                f"field {field!r} has rows of shape {values.shape[1:]}, but "
                f"{len(columns.names)} columns: {', '.join(columns.names[:8])}"
            )
        if default:
            columns_by_field[field] = columns
    if unknown := population.columns.keys() - population.fields.keys():
        raise ValueError(f"columns need a field, got {sorted(unknown)[0]!r}")
    return columns_by_field


def _default_names(field: str, values: np.ndarray) -> tuple[str, ...]:
    """Return the names of a field's columns; () if its rows are no numbers or vectors."""
    width = values.shape[1] if values.ndim == 2 else 0
    return (field,) if values.ndim == 1 else tuple(f"{field}{j}" for j in range(width))


def _check_numbers(population: Population) -> None:
    largest = np.finfo(jnp.result_type(float)).max
    for field, values in population.fields.items():
        if 0 in values.shape[1:]:
            shape = values.shape[1:]
            raise ValueError(f"field {field!r} holds no numbers: rows have shape {shape}")
        for part in blocks(values, len(values) if values.dtype.kind == "f" else 0):
            refused = np.argwhere(~(np.abs(values[part]) <= largest))
            if len(refused):
                row, got = part.start + refused[0, 0], values[part][tuple(refused[0])]
                client = np.searchsorted(population.splits["train"].start, row, side="right") - 1
                raise ValueError(
                    f"client {str(population.names[client])!r}, field {field!r}: all values must "
                    f"be finite and fit into float32, got {got} in row {row}"
                )
