"""One name for every source of data, for the command line."""

import contextlib
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedjaxsim.data.files import in_file
from fedjaxsim.data.npz import assemble, described, fields_of, has_clients
from fedjaxsim.data.population import (
    Population,
    check_fractions,
    check_seed,
    in_order,
    split,
)
from fedjaxsim.data.readers import GENERATED, IN_FILES, PARTITIONS, READERS
from fedjaxsim.data.transforms import first_classes
from fedjaxsim.factories import make, resolve

_SOURCES = f"{', '.join(GENERATED)}, or one of {', '.join(IN_FILES)} with a path as in csv:PATH"
_UNNAMED = ("csv", "parquet", "images")
"""Readers whose errors do not name the file."""
_DEFAULT_TEST = 0.2
_MIN_ROWS = 5
"""The least rows of a client that a partition makes."""


def load(
    spec: str,
    *,
    partition: str | None = None,
    classes: int | None = None,
    seed: int = 0,
    validation: float = 0.0,
    test: float | None = None,
    **settings: Any,
) -> Population:
    """Load the data a specification names and split every client's rows.

    The clients of `folder`, `leaf`, `mat`, `random`, the `synthetic` ones, of an `npz` with owners
    and of a table with a column of clients are given, and no partition touches them. `digits`, an
    `npz` without owners, a table without clients and, where a partition is given, a folder of
    images are one data set, divided among 100 clients, by label-Dirichlet unless told otherwise.

    Args:
        spec: csv:PATH, digits, folder:PATH (see `save_folder`), images:PATH, leaf:PATH, mat:PATH,
            npz:PATH, parquet:PATH, random (see `random_rows`), synthetic, synthetic-low-rank or
            synthetic-group-sparse, which bring test rows (see `related_regression`), or
            synthetic-stream, which makes fresh examples in every round and has one test row a
            client, its true parameters.
        partition: a name from `readers.PARTITIONS`, or column:NAME; by default dirichlet.
        classes: keep rows with labels 0 … classes − 1 only, and the clients that have some.
        seed: of the partition, the split and the synthetic data; a non-negative integer.
        validation: fraction of each client's training rows, in [0, 1).
        test: the same for testing. None keeps the test rows that the source brought, or takes
            0.2 where it brought none; a number pools all rows and splits them afresh.
        **settings: arguments of the reader and of the partition, by name, such as `num_clients`.

    Raises:
        FileNotFoundError: there is nothing at PATH.
        ValueError: the specification is unknown, an option is out of range or has no effect, or a
            partition is given for data that has its own clients.
    """
    kind, colon, path = spec.partition(":")
    known = not colon if kind in GENERATED else kind in IN_FILES and path
    if not known:
        raise ValueError(f"data must be {_SOURCES}, got {spec!r}")
    check_fractions(validation, test or 0.0)
    check_seed(seed)
    if kind == "synthetic-stream" and (partition is not None or validation or test is not None):
        raise ValueError(
            "synthetic-stream has no rows to divide: leave partition and the fractions for "
            f"validation and testing out, got {partition!r}, {validation} and {test}"
        )
    how, _, column = (partition or "dirichlet").partition(":")
    if how not in PARTITIONS or (how == "column") != bool(column):
        names = [name for name in PARTITIONS if name != "column"]
        raise ValueError(f"partition must be {', '.join(names)} or column:NAME, got {partition!r}")
    given = {name: value for name, value in settings.items() if value is not None}
    supplied = given | {"seed": seed, "column": column, "min_rows": _MIN_ROWS}
    taken = [*inspect.signature(resolve(READERS[kind])).parameters]
    taken += [*inspect.signature(resolve(PARTITIONS[how])).parameters][1:]  # besides the arrays
    for name in given:
        if name not in taken:
            raise ValueError(f"{name} has no effect on data {kind} with partition {how}")
    if kind in ("csv", "parquet"):
        _check_table(kind, given, partition)
    of_reader = supplied | {"has_clients": partition is None}
    read = functools.partial(make, READERS[kind], *([path] if path else []), supplied=of_reader)
    with in_file(path) if kind in _UNNAMED else contextlib.nullcontext():
        found = read()
    if isinstance(found, Population):
        if partition is not None:
            raise _own_clients(spec, partition)
        population = found
    elif has_clients(found):
        if partition is not None:
            raise _own_clients(spec, partition)
        with in_file(path):
            population = assemble(found)
    else:
        divided = make(PARTITIONS[how], fields_of(found), supplied=supplied)
        population = described(divided, found)
    if population.generate is not None:
        return population
    if classes is not None:
        population = first_classes(population, classes)
    return _split(population, validation, test, seed)


def _check_table(kind: str, given: Mapping[str, Any], partition: str | None) -> None:
    if "target" not in given:
        raise ValueError(f"{kind} needs the column that is to be predicted (target)")
    if "client" not in given and partition is None:
        raise ValueError(
            f"{kind} needs the column that says whose a row is (client), or a partition of rows "
            "that are nobody's"
        )
    if "client" not in given and "split" in given:
        raise ValueError("a column of splits needs one of clients: rows of no client are dealt")


def _own_clients(spec: str, partition: str) -> ValueError:
    return ValueError(f"{spec} has its own clients, so partition must be None: {partition!r}")


def _split(population: Population, validation: float, test: float | None, seed: int) -> Population:
    if test is None:
        test = 0.0 if population.splits["test"].count.any() else _DEFAULT_TEST
    elif population.splits["test"].count.any():
        index, counts = in_order(population.splits)
        none = np.zeros(population.num_clients, np.int32)
        population = population.of_rows(index, np.stack([counts.sum(axis=1), none, none], axis=1))
    return split(population, validation=validation, test=test, seed=seed)
