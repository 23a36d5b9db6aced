"""Rows of clients and splits as ranges of one flat array."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedjaxsim.data.arrays import shareable

SPLITS = ("train", "validation", "test")
MOST_ROWS = int(np.iinfo(np.int32).max)
"""Most rows of a population: row numbers are int32."""


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

    def owners(self) -> np.ndarray:
        """Return the client of each of `all_rows`, (Σn,) int32."""
        return np.repeat(np.arange(len(self.count), dtype=np.int32), self.count)


def consecutive(train: Any, validation: Any, test: Any) -> dict[str, Ranges]:
    """Return the splits of consecutive clients, each with its splits in this order.

    Args:
        train: number of training rows of each client, (m,).
        validation: number of validation rows, (m,).
        test: number of test rows, (m,).

    Raises:
        ValueError: there are more than `MOST_ROWS` rows.
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
    """Return the rows client after client, each client's in the order of `SPLITS`.

    Returns:
        The rows, (N,) int32, and the number of rows of each client in each split, (m, 3).
    """
    counts = np.stack([parts[name].count for name in SPLITS])
    counts.flags.writeable = False  # so that `consecutive` does not copy them
    counts = counts.T
    rows = int(counts.sum(dtype=np.int64))
    if are_consecutive(parts, rows):
        return np.arange(rows, dtype=np.int32), counts
    index = np.empty(rows, np.int32)
    for name, ranges in consecutive(*counts.T).items():
        index[ranges.all_rows()] = parts[name].all_rows()
    return index, counts


def are_consecutive(splits: Mapping[str, Ranges], rows: int) -> bool:
    """Return whether clients and their splits follow one another up to the last row."""
    if any(np.any(ranges.count < 0) for ranges in splits.values()):
        return False
    if sum(int(ranges.count.sum(dtype=np.int64)) for ranges in splits.values()) != rows:
        return False
    # One array for all splits: it holds where each of them must begin.
    begin = functools.reduce(np.add, (splits[name].count for name in SPLITS))
    np.cumsum(begin, out=begin)
    for name in reversed(SPLITS):
        count = splits[name].count
        begin -= count
        if np.any((begin != splits[name].start) & (count > 0)):
            return False
    return True


def check_ranges(splits: Mapping[str, Ranges], names: np.ndarray, rows: int) -> None:
    """Check that `splits` give every row to exactly one client and split.

    Args:
        splits: the ranges by name.
        names: names of the clients, (m,).
        rows: number of rows N.
    """
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
    if are_consecutive(splits, rows):
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
