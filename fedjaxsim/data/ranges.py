"""Rows of clients and splits as ranges of one flat array."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedjaxsim.data.arrays import shareable

SPLITS = ("train", "validation", "test")
_SPELLINGS = {"training": 0, "val": 1, "valid": 1, "dev": 1, "testing": 2}
MOST_ROWS = int(np.iinfo(np.int32).max)
"""Most rows of a population: row numbers are int32."""


def split_called(name: object) -> int | None:
    """Return the position in `SPLITS` of a split's name, such as Train, val or valid, or None."""
    text = str(name).strip().lower()
    return SPLITS.index(text) if text in SPLITS else _SPELLINGS.get(text)


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
        """Return the indices of one client's rows, (n,)."""
        return self.start[client] + np.arange(self.count[client])

    def all_rows(self) -> np.ndarray:
        """Return the indices of all clients' rows, client after client, (Σn,) int32."""
        before = np.cumsum(self.count, dtype=np.int32) - self.count
        shift = np.repeat(self.start - before, self.count)
        return np.add(shift, np.arange(len(shift), dtype=np.int32), out=shift)


def consecutive(train: Any, validation: Any, test: Any) -> dict[str, Ranges]:
    """Return the splits of consecutive clients from numbers of rows, (m,) each, in this order."""
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


def check_ranges(splits: Mapping[str, Ranges], names: np.ndarray, rows: int) -> None:
    """Check that clients (m,) and their splits follow one another, as in `consecutive`."""
    if set(splits) != set(SPLITS):
        raise ValueError(f"splits must be exactly {SPLITS}, got {tuple(splits)}")
    for name, ranges in splits.items():
        for part in (ranges.start, ranges.count):
            if part.shape != names.shape or part.dtype != np.int32:
                raise ValueError(
                    f"the ranges of {name!r} must be int32 of shape {names.shape}, "
                    f"got {part.dtype} of {part.shape}"
                )
    parts = [splits[name] for name in SPLITS]
    train, validation, test = parts
    if np.any(train.count < 1):
        k = int(np.argmax(train.count < 1))
        raise ValueError(f"client {str(names[k])!r} has no training rows; each needs at least one")
    total = sum(int(part.count.sum(dtype=np.int64)) for part in parts)
    if total != rows:
        raise ValueError(f"counts must sum to the {rows} rows, got {total}")
    following = (validation.start, test.start, np.append(train.start[1:], np.int32(rows)))
    if train.start[0] != 0 or not all(
        np.all(part.count >= 0) and np.array_equal(part.start + part.count, start)
        for part, start in zip(parts, following, strict=True)
    ):
        raise ValueError(
            "clients must follow one another, each with its training, validation and test rows "
            "in this order"
        )
