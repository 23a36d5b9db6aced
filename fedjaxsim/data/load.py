"""One name for every source of data, for the command line."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from fedjaxsim.data.digits import digits
from fedjaxsim.data.leaf import load_leaf
from fedjaxsim.data.matlab import load_matlab
from fedjaxsim.data.npz import assemble, has_clients, read_arrays
from fedjaxsim.data.partition import by_column, dirichlet, iid, shards
from fedjaxsim.data.population import Population, check_fractions, check_seed, split
from fedjaxsim.data.synthetic import regression_stream, synthetic_regression
from fedjaxsim.data.transforms import first_classes

_SOURCES = "digits, leaf:PATH, mat:PATH, npz:PATH, synthetic or synthetic-stream"
_PARTITIONS = "dirichlet, iid, shards or column:NAME"
_DEFAULT_TEST = 0.2


def load(
    spec: str,
    *,
    partition: str | None = None,
    num_clients: int | None = None,
    alpha: float = 0.5,
    shards_per_client: int = 2,
    min_rows: int = 5,
    classes: int | None = None,
    offset_scale: float = 0.1,
    seed: int = 0,
    validation: float = 0.0,
    test: float | None = None,
) -> Population:
    """Load the data a specification names and split every client's rows.

    The clients of `leaf`, `mat`, `synthetic` and of an `npz` with owners are given: options of
    partitions do not touch them, only `num_clients` sizes `synthetic`. `digits` and an `npz`
    without owners are one data set, divided among 100 clients by label-Dirichlet unless told
    otherwise.

    Args:
        spec: digits, leaf:PATH, mat:PATH, npz:PATH, synthetic, or synthetic-stream, which makes
            fresh examples in every round and has one test row a client, its true parameters.
        partition: dirichlet, iid, shards or column:NAME; by default dirichlet.
        num_clients: m; by default 100, and 1000 for synthetic.
        alpha: concentration of dirichlet, positive.
        shards_per_client: of shards.
        min_rows: the least rows of a client, of dirichlet.
        classes: keep rows with labels 0 … classes − 1 only, and the clients that have some.
        offset_scale: of the synthetic data, see `synthetic_regression`.
        seed: of the partition, the split and the synthetic data; a non-negative integer.
        validation: fraction of each client's training rows, in [0, 1).
        test: the same for testing. None keeps the test rows that the source brought, or takes
            0.2 where it brought none; a number pools all rows and splits them afresh.

    Raises:
        FileNotFoundError: there is nothing at PATH.
        ValueError: the specification is unknown, an option is out of range, or a partition is
            given for data that has its own clients.
    """
    kind, colon, path = spec.partition(":")
    if kind not in ("digits", "leaf", "mat", "npz", "synthetic", "synthetic-stream"):
        raise ValueError(f"data must be {_SOURCES}, got {spec!r}")
    whole = kind in ("digits", "synthetic", "synthetic-stream")
    if whole == bool(colon) or whole == bool(path):
        raise ValueError(f"data must be {_SOURCES}, with a path or without, got {spec!r}")
    check_fractions(validation, test or 0.0)
    check_seed(seed)
    if kind == "synthetic-stream":
        if partition is not None or validation or test is not None:
            raise ValueError(
                "synthetic-stream has no rows to divide: leave partition and the fractions for "
                f"validation and testing out, got {partition!r}, {validation} and {test}"
            )
        return regression_stream(num_clients or 1000, offset_scale=offset_scale, seed=seed)
    source = _read(kind, path, num_clients, offset_scale, seed)
    if isinstance(source, Population):
        if partition is not None:
            raise ValueError(
                f"{spec} has its own clients, so partition must be None: {partition!r}"
            )
        population = source
    else:
        clients = 100 if num_clients is None else num_clients
        population = _divide(
            source, partition or "dirichlet", clients, alpha, shards_per_client, min_rows, seed
        )
    if classes is not None:
        population = first_classes(population, classes)
    return _split(population, validation, test, seed)


def _read(
    kind: str, path: str, num_clients: int | None, offset_scale: float, seed: int
) -> Population | dict[str, np.ndarray]:
    """A population where the source has clients of its own, otherwise flat fields."""
    if kind == "digits":
        return digits()
    if kind == "synthetic":
        clients = 1000 if num_clients is None else num_clients
        return synthetic_regression(clients, offset_scale=offset_scale, seed=seed)[0]
    if kind == "npz":
        arrays = read_arrays(path)
        return assemble(arrays, path) if has_clients(arrays) else arrays
    return load_leaf(path) if kind == "leaf" else load_matlab(path)


def _divide(
    fields: Mapping[str, np.ndarray],
    partition: str,
    num_clients: int,
    alpha: float,
    shards_per_client: int,
    min_rows: int,
    seed: int,
) -> Population:
    kind, _, column = partition.partition(":")
    if kind == "column" and column:
        return by_column(fields, column)
    if partition == "dirichlet":
        return dirichlet(fields, num_clients, alpha, seed, min_rows=min_rows)
    if partition == "iid":
        return iid(fields, num_clients, seed)
    if partition == "shards":
        return shards(fields, num_clients, shards_per_client, seed)
    raise ValueError(f"partition must be {_PARTITIONS}, got {partition!r}")


def _split(population: Population, validation: float, test: float | None, seed: int) -> Population:
    if test is None:
        test = 0.0 if population.splits["test"].count.any() else _DEFAULT_TEST
    elif population.splits["test"].count.any():
        clients = [population.rows(k) for k in range(population.num_clients)]
        pooled = Population.from_clients(clients, population.names)
        population = dataclasses.replace(pooled, public=population.public)
    return split(population, validation=validation, test=test, seed=seed)
