"""The division of a population: each client's rows into splits, and its clients into two groups."""

import dataclasses
from typing import Literal, get_args

import numpy as np

from fedjaxsim import checks
from fedjaxsim.data.arrays import SPLITS, Ranges
from fedjaxsim.data.population import Population
from fedjaxsim.data.windows import rows_between, window_step
from fedjaxsim.keys import Stream

SplitBy = Literal["random", "time"]
_BLOCK = 1 << 20
"""Rows that are shuffled at once."""
_DROPPED = -1


def split(
    population: Population,
    *,
    validation: float = 0.0,
    test: float = 0.0,
    seed: int = 0,
    by: SplitBy = "random",
    gap: int | None = None,
) -> Population:
    """Move training rows of every client to its validation and test splits: random or last ones.

    The order of a client's rows depends on the seed, the client's index and the row's number alone:
    its split depends on no other client's data. Fractions are rounded to whole rows per client;
    where no training row would be left, validation gives up rows first, then test. With both
    fractions 0 the population stays as it is.

    By time, a client's last training rows, in the order of their source, are its test rows, and
    those before them its validation rows. `gap` rows before either are left out, so that windows of
    a series, which overlap with their neighbours, share nothing with windows of another split.

    Args:
      population: clients with the training rows to divide.
      validation: fraction of each client's training rows, in [0, 1); 0 if the split has rows.
      test: the same for the test split; both together less than 1.
      seed: a non-negative integer.
      by: Choice of the rows for testing: random ones, or the last ones of each client in "time".
      gap: rows of a client that are left out before each of the last splits, if by time. By
        default what overlapping windows in "x" need, and 0 for other rows.

    Returns:
      The same rows, but for gaps, reordered so that every split of a client is one range.

    Raises:
      ValueError: a fraction, the seed or the gap is out of range, the split it fills has rows, or
        no client has rows enough for a gap.
    """
    if not isinstance(population, Population):
        raise ValueError(f"split needs a Population, got a {type(population).__name__}")
    check_fractions(validation, test)
    checks.count(0, seed=seed, gap=gap or 0)
    checks.one_of(get_args(SplitBy), by=by)
    if gap and by == "random":
        raise ValueError(f"a gap needs by='time': random rows have neighbours, got gap {gap}")
    for name, fraction in (("validation", validation), ("test", test)):
        if fraction > 0 and population.has(name):
            raise ValueError(
                f"the population has {name} rows already, so {name} must be 0, got {fraction}"
            )
    if validation == test == 0:
        return population
    if by == "time":
        step = window_step(population) if gap is None else None
        needed = 0 if step is None else rows_between(population, step)
        return _in_time(population, validation, test, needed if gap is None else gap)
    train = population.splits["train"]
    index = _shuffled(train, population.num_rows, seed)
    tests = np.minimum(_rounded(test * train.count), train.count - 1)
    validations = np.minimum(_rounded(validation * train.count), train.count - 1 - tests)
    counts = np.stack([train.count - tests - validations, validations, tests], axis=1)
    other_counts = population.counts.copy()
    other_counts[:, 0] = 0
    if population.has("validation"):  # new test rows, still before these, move behind them
        splits = np.arange(population.num_clients)[:, None] * 3 + [0, 1, 2, 1, 2]
        of_row = np.repeat(splits.ravel(), np.hstack([counts, other_counts[:, 1:]]).ravel())
        index = index[np.argsort(of_row, kind="stable")]
    return population.of_rows(index, counts + other_counts)


def _in_time(population: Population, validation: float, test: float, gap: int) -> Population:
    """Split by time: of a client's training rows the last are for testing."""
    n = population.splits["train"].count
    tests = np.minimum(_rounded(test * n), np.maximum(n - 1 - gap, 0))
    left = n - tests - gap * (tests > 0)
    validations = np.minimum(_rounded(validation * n), np.maximum(left - 1 - gap, 0))
    for name, fraction, rows in (("test", test, tests), ("validation", validation, validations)):
        if fraction > 0 and not rows.any():
            raise ValueError(
                f"no client has rows enough for {name} rows after a gap of {gap}: split by 'random'"
            )
    train = left - validations - gap * (validations > 0)
    # Of each client: training rows, a gap, validation rows, a gap, test rows, then those of others.
    parts = [train, left - validations - train, validations, n - tests - left, tests]
    parts += [population.counts[:, 1], population.counts[:, 2]]
    place = np.array([0, _DROPPED, 1, _DROPPED, 2, 1, 2])
    m = population.num_clients
    split_of_row = np.repeat(np.tile(place, m), np.stack(parts, axis=1).ravel())
    of_row = np.repeat(np.arange(m), population.counts.sum(axis=1)) * len(SPLITS) + split_of_row
    index = np.flatnonzero(split_of_row != _DROPPED)
    index = index[np.argsort(of_row[index], kind="stable")].astype(np.int32)
    counts = np.bincount(of_row[index], minlength=len(SPLITS) * m).reshape(m, len(SPLITS))
    return population.of_rows(index, counts.astype(population.counts.dtype))


def limit_training_rows(population: Population, most: int, seed: int = 0) -> Population:
    """Leave out training rows of clients with more than `most`, but for random ones.

    Which ones are left depends on the seed, the client's index and the row's number alone; they
    keep their order, and fewer are a part of more. Validation and test rows stay.
    Clients held out are limited, too.

    Raises:
      ValueError: `most` is not a positive integer, or the seed is negative.
    """
    checks.count(most=most)
    checks.count(0, seed=seed)
    train = population.splits["train"]
    left = Ranges(train.start, np.minimum(train.count, most).astype(np.int32))
    stays = np.ones(population.num_rows, bool)
    stays[train.all_rows()] = False
    stays[_shuffled(train, population.num_rows, seed)[left.all_rows()]] = True
    counts = population.counts.copy()
    counts[:, 0] = left.count
    limited = population.of_rows(np.flatnonzero(stays).astype(np.int32), counts)
    if population.held_out is None:
        return limited
    held_out = limit_training_rows(population.held_out, most, seed)
    return dataclasses.replace(limited, held_out=held_out)


def hold_out(population: Population, fraction: float, seed: int) -> tuple[Population, Population]:
    """Divide clients at random, independently of their data, into those left and those held out.

    Hyperparameters are chosen on the clients held out. Both groups keep their order.
    """
    checks.count(0, seed=seed)
    checks.in_range("(0, 1)", **{"the fraction of held-out clients": fraction})
    clients = population.num_clients
    count = int(np.floor(fraction * clients + 0.5))
    if count < 2 or clients - count < 2:
        raise ValueError(
            f"at least 2 clients must be held out and 2 be left, but {fraction} of {clients} "
            f"clients are {count}"
        )
    order = np.random.default_rng((seed, Stream.HELD_OUT)).permutation(clients)
    left, held_out = np.sort(order[count:]), np.sort(order[:count])
    return population.of_clients(left), population.of_clients(held_out)


def with_held_out(population: Population) -> Population:
    """Return the population with the clients held out of it, who follow the others."""
    held_out = population.held_out
    if held_out is None:
        return population
    fields = {
        name: np.concatenate([v, held_out.fields[name]]) for name, v in population.fields.items()
    }
    rows = [np.arange(part.num_rows) if part.source_row is None else part.source_row
            for part in (population, held_out)]  # fmt: skip
    return dataclasses.replace(
        population,
        fields=fields,
        counts=np.concatenate([population.counts, held_out.counts]),
        names=np.concatenate([population.names, held_out.names]),
        source_row=np.concatenate(rows),
        held_out=None,
    )


def check_fractions(validation: float, test: float) -> None:
    """Check that both are in [0, 1) and leave some rows to train on."""
    checks.in_range("[0, 1)", validation=validation, test=test)
    if validation + test >= 1:
        raise ValueError(
            "the fractions for validation and testing must be less than 1 together, got "
            f"{validation} + {test}"
        )


def _rounded(rows: np.ndarray) -> np.ndarray:
    """Round to whole rows, halves upwards."""
    return np.floor(rows + 0.5).astype(np.int32)


def _shuffled(ranges: Ranges, num_rows: int, seed: int) -> np.ndarray:
    """Return all rows, (N,) int32, in random order within each client's range.

    Clients with equally many rows are sorted together, a block of them at a time.
    """
    index = np.arange(num_rows, dtype=np.int32)
    [origin] = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    by_count = np.argsort(ranges.count, kind="stable")
    sizes, first = np.unique(ranges.count[by_count], return_index=True)
    for size, same in zip(sizes, np.split(by_count, first[1:]), strict=True):
        for clients in np.array_split(same, -(-len(same) * size // _BLOCK)):
            rows = ranges.start[clients, None] + np.arange(size, dtype=np.int32)
            words = _split_mix(_split_mix(origin, clients)[:, None], np.arange(size))
            order = np.argsort(words, axis=1, kind="stable")
            index[rows] = np.take_along_axis(rows, order, axis=1)
    return index


def _split_mix(origin: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Return uint64 words at any place of the SplitMix64 stream that starts at `origin`.

    Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    words = np.asarray(origin + (number + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words ^ (words >> np.uint64(31))
