"""Rows as a reader finds them, with their clients and what is known of them."""

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from fedjaxsim.data.arrays import SPLITS, common_length, split_called
from fedjaxsim.data.files import in_file
from fedjaxsim.data.population import Population

_SHOWN = 8
"""Names of columns that fit into a message."""


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """Rows as every reader returns them, with or without their clients.

    Attributes:
      fields: arrays (N, ...).
      client: position in `names` of each row's client, (N,), in any order; None for rows to
        partition, and for rows of consecutive clients.
      names: distinct names of the clients, (m,); by default 0, 1, …
      split: position in `SPLITS` of each row, (N,); by default all are training rows.
      about: a dict of other attributes of the population.
      source_row: position of each row in the file, (N,); by default 0, 1, …
      counts: numbers of rows of consecutive clients, (m,), or, of fields that have the types of a
        population, of their splits, (m, 3), in place of `client` and `split`.
      in_time: whether rows were sorted by time.
    """

    fields: Mapping[str, np.ndarray]
    client: np.ndarray | None = None
    names: np.ndarray | None = None
    split: np.ndarray | None = None
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source_row: np.ndarray | None = None
    counts: np.ndarray | None = None
    in_time: bool = False

    @classmethod
    def of(cls, population: Population) -> Self:
        """Return the rows of a population."""
        parts = {
            field.name: getattr(population, field.name) for field in dataclasses.fields(population)
        }
        ours = {name: parts.pop(name) for name in ("fields", "counts", "names", "source_row")}
        return cls(**ours, about=parts)

    @property
    def has_clients(self) -> bool:
        """Return whether rows have their clients, so that no partition divides them."""
        return self.client is not None or self.counts is not None

    def to_predict(self, stranger: str) -> Self:
        """Return the rows without splits; those without clients are the client `stranger`'s."""
        about = {name: value for name, value in self.about.items() if name != "max_rows"}
        rows = dataclasses.replace(self, split=None, about=about)
        if self.counts is not None and self.counts.ndim > 1:
            counts = np.zeros_like(self.counts)
            counts[:, 0] = self.counts.sum(axis=1)
            return dataclasses.replace(rows, counts=counts)
        if self.has_clients:
            return rows
        client = np.zeros(common_length(self.fields, "file"), np.intp)
        return dataclasses.replace(rows, client=client, names=np.array([stranger]))

    def population(self, path: str | os.PathLike[str] | None = None) -> Population:
        """Make the population; leave clients without training rows out; errors name the file."""
        with in_file(path):
            fields, client, rows = self.fields, self.client, self.source_row
            if self.counts is not None:
                return self._of_counts(self.counts)
            if client is None or self.names is None:
                raise ValueError("rows need their clients: one of 'client' and 'counts'")
            names = self.names
            n, m = common_length(fields, "file"), len(names)
            split = np.zeros(n, np.int8) if self.split is None else self.split
            if split.shape != (n,) or not np.isin(split, range(len(SPLITS))).all():
                got = shown(split)
                raise ValueError(f"split must hold 0, 1 or 2 for each of the {n} rows, got {got}")
            trained = np.bincount(client[split == 0], minlength=m) > 0
            if not trained.any():
                raise ValueError("no client has training rows")
            if not trained.all():
                example = str(names[np.argmin(trained)])
                warnings.warn(
                    f"{m - trained.sum()} of {m} clients, such as {example!r}, have no training "
                    "rows: left out",
                    stacklevel=2,
                )
                of_trained, place = trained[client], np.cumsum(trained) - 1
                fields = {name: values[of_trained] for name, values in fields.items()}
                client, names, split = place[client[of_trained]], names[trained], split[of_trained]
                rows = np.flatnonzero(of_trained) if rows is None else rows[of_trained]
            return Population.from_rows(fields, client, names, split, rows, **self.about)

    def _of_counts(self, counts: np.ndarray) -> Population:
        if counts.ndim == 1:
            return Population.from_flat(
                self.fields, counts, self.names, source_row=self.source_row, **self.about
            )
        names = np.arange(len(counts), dtype=np.int32) if self.names is None else self.names
        fields = dict(self.fields)
        return Population(fields, counts, names, source_row=self.source_row, **self.about)


def splits_of(values: np.ndarray, where: str) -> np.ndarray:
    """Return the position in `SPLITS` of each row, (N,), from positions or usual names."""
    if values.dtype.kind not in "OU":
        return values
    places = [split_called(value) for value in values.tolist()]
    if None in places:
        row = places.index(None)
        raise ValueError(
            f"{where} must hold {', '.join(SPLITS)}, got {str(values[row])[:40]!r} in row {row + 1}"
        )
    return np.array(places, np.int8)


def numbered(texts: np.ndarray, *, by_number: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct texts, sorted, and the place there of each text, (N,).

    If `by_number` and all are whole numbers, they are sorted as such.
    """
    values = texts.tolist()
    distinct = sorted(set(values))
    if by_number and all(text.removeprefix("-").isdecimal() for text in distinct):
        distinct.sort(key=int)
    place = {text: number for number, text in enumerate(distinct)}
    return np.array(distinct, str), np.fromiter(
        map(place.__getitem__, values), np.intp, len(values)
    )


def listed(names: Sequence[Any]) -> str:
    """List names for a message, the first of many."""
    more = [f"… ({len(names)} in all)"] if len(names) > _SHOWN else []
    return ", ".join([*map(repr, names[:_SHOWN]), *more])


def shown(values: np.ndarray) -> str:
    """Return the type, the shape and the first numbers of an array, for a message."""
    return f"{values.dtype} {values.shape}: {', '.join(map(str, values.ravel()[:4]))} …"
