"""All sources of data by one specification, for the command line."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedjaxsim import checks
from fedjaxsim.checks import Name, SettingError
from fedjaxsim.data.population import Population
from fedjaxsim.data.readers import GENERATED, PARTITIONS, READERS, TABLES, DataSpec
from fedjaxsim.data.source import Source
from fedjaxsim.data.splitting import SplitBy, check_fractions, split
from fedjaxsim.data.windows import window_step
from fedjaxsim.factories import flag, import_factory, make, settings_of, taken_by

_DEFAULT_TEST = 0.2
_MIN_ROWS = 5
"""Least number of rows of a client in a partition."""
DEALT = "dirichlet"
"""The partition of data without clients, by default."""
_CLIENTS = {
    "npz": "save the array `client`, (N,), with it",
    "images": "save their folders or column with it",
}
"""How to give rows their clients."""
_OF_USER_CODE = "name a data frame's column (--client) or return the array `client`"


def load(
    spec: str,
    *,
    partition: str | None = None,
    seed: int = 0,
    validation: float = 0.0,
    test: float | None = None,
    split_by: SplitBy | None = None,
    max_rows: int | None = None,
    **settings: Any,
) -> Population:
    """Load the data a specification names and split every client's rows.

    Data with clients (`folder`, `leaf`, `mat`, `random`, `synthetic…`, an `npz` or a table that
    names the clients of rows) take no partition. Others (`digits`, an `npz` or a table without
    clients) are divided among clients.

    Args:
      spec: csv:PATH, digits, folder:PATH (see `save_folder`), hf:NAME (see `from_hf`),
        images:PATH (see `read_images`), leaf:PATH, mat:PATH, npz:PATH, parquet:PATH, random (see
        `random_rows`), synthetic, synthetic-low-rank or synthetic-group-sparse, which have test
        rows (see `low_rank_regression`), or synthetic-stream (see `regression_stream`).
      partition: a name from `readers.PARTITIONS`; by default dirichlet.
      seed: seed of the partition, the split and synthetic data; a non-negative integer.
      validation: fraction of each client's training rows, in [0, 1).
      test: fraction for testing. None keeps the test rows of the source, or takes 0.2 if there
        are none; a number pools all rows and splits them afresh.
      split_by: rows for testing and validation: "random" ones, or the last ones of each client in
        "time", with a gap before them if rows are overlapping windows of text or a series. None is
        "time" for such windows, and "random" otherwise.
      max_rows: `Population.max_rows`; None keeps the data's.
      **settings: arguments of the reader and of the partition, such as `num_clients`.

    Raises:
      FileNotFoundError: there is nothing at PATH.
      ValueError: the specification is unknown, an option is out of range or has no effect, a client
        has more than `max_rows` rows in a split, or a partition is given for data with clients.
    """
    if not isinstance(spec, str):
        raise ValueError(f"load needs the name of data, as csv:PATH, got a {type(spec).__name__}")
    named = DataSpec(spec).require_known()
    kind = named.kind
    if named.is_user_code:
        raise ValueError(f"load reads files and data by name: call your own reader {spec} instead")
    check_fractions(validation, test or 0.0)
    how = partition or DEALT
    checks.one_of(PARTITIONS, partition=how)
    explicit = {name: value for name, value in settings.items() if value is not None}
    taken = taken_by(import_factory(READERS[kind]))
    _, *settings_of_partition = inspect.signature(import_factory(PARTITIONS[how])).parameters
    taken += settings_of_partition
    for name in explicit:
        checks.one_of(taken, **{f"a setting of data {kind} with partition {how}": name})
    has_roles = "target" in explicit and ("client" in explicit or partition is not None)
    if kind in (*TABLES, "hf") and not has_roles:
        raise ValueError(
            f"data {kind} need --target, the column to predict, and --client, the column with the "
            "client of each row, or --partition for rows without clients"
        )
    source = read(named, explicit | {"seed": seed})
    of_partition = {name: explicit[name] for name in settings_of_partition if name in explicit}
    return populate(
        source, named, partition=partition, seed=seed, validation=validation, test=test,
        split_by=split_by, max_rows=max_rows, **of_partition,
    )  # fmt: skip


def populate(
    source: Source,
    named: DataSpec,
    *,
    partition: str | None,
    seed: int,
    validation: float,
    test: float | None,
    split_by: SplitBy | None,
    max_rows: int | None,
    **of_partition: Any,
) -> Population:
    """Divide rows among clients, if they have none, and each client's into splits; see `load`."""
    path = named.path or (named if named.is_user_code else None)
    if not source.has_clients:
        if partition is None and named.kind not in GENERATED:
            how = _CLIENTS.get(named.kind, _OF_USER_CODE)
            raise ValueError(
                f"{path or named} holds no client of its rows: {how}, or give --partition, such as "
                "--partition dirichlet"
            )
        supplied = {"seed": seed, "min_rows": _MIN_ROWS} | of_partition
        dealt = make(PARTITIONS[partition or DEALT], source.fields, supplied=supplied)
        client = np.zeros(dealt.num_rows, np.int64)
        client[dealt.source_row] = np.repeat(np.arange(dealt.num_clients), dealt.counts.sum(axis=1))
        about = {**source.about, "public": (*dealt.public, *source.about.get("public", ()))}
        source = dataclasses.replace(source, client=client, names=dealt.names, about=about)
    elif partition is not None:
        raise ValueError(f"{named} has its own clients: leave out partition, got {partition!r}")
    population = source.population(path)
    # It bounds the splits that are made here, and not those of the source.
    most = population.max_rows if max_rows is None else max_rows
    if population.max_rows is not None:
        population = dataclasses.replace(population, max_rows=None)
    if source.in_time:
        if split_by == "random" or population.has("test"):
            raise SettingError(
                "time sorts rows, so that the last ones are for testing: leave it out if ",
                Name("split_by"),
                " is 'random' or the data have test rows",
            )
        split_by = "time"
    population = _split(population, named, validation, test, split_by, seed)
    return population if most is None else dataclasses.replace(population, max_rows=most)


def read(named: DataSpec, supplied: Mapping[str, Any]) -> Source:
    """Return what a reader finds; it takes what it can of `supplied`."""
    factory = import_factory(READERS[named.require_known().kind])
    required = [name for name, of in settings_of(factory, ("path",)).items() if of.required]
    missing = [flag(name) for name in required if name not in supplied]
    if missing:
        raise ValueError(f"rows of {named.kind} need {' and '.join(missing)}, which the run lacks")
    return make(factory, *([named.path] if named.path else []), supplied=supplied)


def _split(
    population: Population,
    spec: str,
    validation: float,
    test: float | None,
    split_by: SplitBy | None,
    seed: int,
) -> Population:
    """Set aside rows for testing and validation."""
    if population.generate is not None:
        if validation or test is not None:
            raise ValueError(
                f"{spec} has no rows to divide: leave out the fractions for validation and "
                f"testing, got {validation} and {test}"
            )
        return population

    has_tests = population.has("test")
    if test is None:
        test = 0.0 if has_tests else _DEFAULT_TEST
    elif has_tests:  # all rows are training rows again
        counts = np.zeros_like(population.counts)
        counts[:, 0] = population.counts.sum(axis=1)
        population = dataclasses.replace(population, counts=counts)
        if split_by == "time" and population.source_row is not None:
            owner = np.repeat(np.arange(population.num_clients), counts[:, 0])
            index = np.lexsort((population.source_row, owner)).astype(np.int32)
            population = population.of_rows(index, counts)
    if validation == test == 0:
        if split_by is not None:
            raise SettingError(
                Name("split_by"),
                f" {split_by!r} has no effect: the data have test rows, and no fraction "
                "for testing or validation is given",
            )
        return population
    if split_by is None:
        split_by = "random" if window_step(population) is None else "time"
    return split(population, validation=validation, test=test, seed=seed, by=split_by)
