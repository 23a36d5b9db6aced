"""One name for every source of data, for the command line."""

from collections.abc import Callable, Mapping

import numpy as np

from fedjaxsim.data.digits import digits
from fedjaxsim.data.files import in_file
from fedjaxsim.data.folder import load_folder
from fedjaxsim.data.images import arrays_of_folder
from fedjaxsim.data.leaf import load_leaf
from fedjaxsim.data.matlab import load_matlab
from fedjaxsim.data.npz import assemble, described, fields_of, has_clients, read_arrays
from fedjaxsim.data.partition import by_column, dirichlet, feature_noise, iid, quantity, shards
from fedjaxsim.data.population import (
    Population,
    check_fractions,
    check_seed,
    in_order,
    split,
)
from fedjaxsim.data.synthetic import (
    Pattern,
    regression_stream,
    related_regression,
    synthetic_regression,
)
from fedjaxsim.data.table import Columns, arrays_of, read_csv, read_parquet
from fedjaxsim.data.transforms import first_classes

_PATTERNS: dict[str, Pattern] = {
    "synthetic-low-rank": "low-rank",
    "synthetic-group-sparse": "group-sparse",
}
_WHOLE = ("digits", "synthetic", *_PATTERNS, "synthetic-stream")
_IN_FILES = ("csv", "folder", "images", "leaf", "mat", "npz", "parquet")
_SOURCES = f"{', '.join(_WHOLE)}, or one of {', '.join(_IN_FILES)} with a path as in csv:PATH"
_PARTITIONS = "dirichlet, feature-noise, iid, quantity, shards or column:NAME"
_DEFAULT_TEST = 0.2


def load(
    spec: str,
    *,
    partition: str | None = None,
    num_clients: int | None = None,
    alpha: float = 0.5,
    noise_variance: float = 0.1,
    shards_per_client: int = 2,
    min_rows: int = 5,
    classes: int | None = None,
    offset_scale: float = 0.1,
    columns: Columns | None = None,
    cells: tuple[str, str] | None = None,
    seed: int = 0,
    validation: float = 0.0,
    test: float | None = None,
) -> Population:
    """Load the data a specification names and split every client's rows.

    The clients of `folder`, `leaf`, `mat`, the `synthetic` ones, of an `npz` with owners and of a
    table with a column of clients are given: options of partitions do not touch them, only
    `num_clients` sizes the `synthetic` ones. `digits`, an `npz` without owners, a table without
    clients and, where a partition is given, a folder of images are one data set, divided among 100
    clients, by label-Dirichlet unless told otherwise.

    Args:
        spec: csv:PATH, digits, folder:PATH (see `save_folder`), images:PATH, leaf:PATH, mat:PATH,
            npz:PATH, parquet:PATH, synthetic, synthetic-low-rank or synthetic-group-sparse, which
            bring test rows (see `related_regression`), or synthetic-stream, which makes fresh
            examples in every round and has one test row a client, its true parameters.
        partition: dirichlet, feature-noise, iid, quantity, shards or column:NAME; by default
            dirichlet.
        num_clients: m; by default 100; 320 for the patterns of synthetic data, 1000 for the others.
        alpha: concentration of dirichlet and quantity, positive.
        noise_variance: of feature-noise, that of the last client.
        shards_per_client: of shards.
        min_rows: the least rows of a client, of dirichlet and quantity.
        classes: keep rows with labels 0 … classes − 1 only, and the clients that have some.
        offset_scale: of the synthetic data, see `synthetic_regression`.
        columns: of csv and parquet, what their columns are. Where none is the client, a partition
            must be given, lest the clients of a table be forgotten.
        cells: of mat, the names of the features and the labels; see `load_matlab`.
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
    known = not colon if kind in _WHOLE else kind in _IN_FILES and path
    if not known:
        raise ValueError(f"data must be {_SOURCES}, got {spec!r}")
    check_fractions(validation, test or 0.0)
    check_seed(seed)
    if kind == "synthetic-stream":
        if partition is not None or validation or test is not None:
            raise ValueError(
                "synthetic-stream has no rows to divide: leave partition and the fractions for "
                f"validation and testing out, got {partition!r}, {validation} and {test}"
            )
        return regression_stream(num_clients or 1000, offset_scale=offset_scale, seed=seed)

    def divided(fields: Mapping[str, np.ndarray]) -> Population:
        m = 100 if num_clients is None else num_clients
        how = partition or "dirichlet"
        if how.startswith("column:"):
            return by_column(fields, how.removeprefix("column:"))
        deals: dict[str, Callable[[], Population]] = {
            "dirichlet": lambda: dirichlet(fields, m, alpha, seed, min_rows=min_rows),
            "feature-noise": lambda: feature_noise(fields, m, noise_variance, seed),
            "iid": lambda: iid(fields, m, seed),
            "quantity": lambda: quantity(fields, m, alpha, seed, min_rows=min_rows),
            "shards": lambda: shards(fields, m, shards_per_client, seed),
        }
        if how not in deals:
            raise ValueError(f"partition must be {_PARTITIONS}, got {how!r}")
        return deals[how]()

    if kind == "digits":
        population = divided(digits())
    elif kind in ("csv", "images", "npz", "parquet"):
        population = _of_arrays(kind, path, columns, partition, divided)
    elif partition is not None:
        raise _own_clients(spec, partition)
    elif kind == "synthetic":
        clients = 1000 if num_clients is None else num_clients
        population = synthetic_regression(clients, offset_scale=offset_scale, seed=seed)[0]
    elif kind in _PATTERNS:
        clients = 320 if num_clients is None else num_clients
        population = related_regression(_PATTERNS[kind], clients, seed=seed)[0]
    elif kind == "folder":
        population = load_folder(path)
    else:
        population = load_leaf(path) if kind == "leaf" else load_matlab(path, *(cells or ()))
    if classes is not None:
        population = first_classes(population, classes)
    return _split(population, validation, test, seed)


def _of_arrays(
    kind: str,
    path: str,
    columns: Columns | None,
    partition: str | None,
    divided: Callable[[Mapping[str, np.ndarray]], Population],
) -> Population:
    """The population in a file of arrays or a table; where nobody owns the rows, divided."""
    if kind == "npz":
        arrays = read_arrays(path)
    elif kind == "images":
        with in_file(path):
            arrays = arrays_of_folder(path, has_clients=partition is None)
    else:
        arrays = _arrays_of_table(kind, path, columns, partition)
    if has_clients(arrays):
        if partition is not None:
            raise _own_clients(f"{kind}:{path}", partition)
        with in_file(path):
            return assemble(arrays)
    return described(divided(fields_of(arrays)), arrays)


def _arrays_of_table(
    kind: str, path: str, columns: Columns | None, partition: str | None
) -> dict[str, np.ndarray]:
    if columns is None:
        raise ValueError(f"{kind} needs the column that is to be predicted (target)")
    if columns.client is None and partition is None:
        raise ValueError(
            f"{kind} needs the column that says whose a row is (client), or a partition of rows "
            "that are nobody's"
        )
    if columns.client is None and columns.split is not None:
        raise ValueError("a column of splits needs one of clients: rows of no client are dealt")
    with in_file(path):
        table = read_csv(path, columns) if kind == "csv" else read_parquet(path)
        return arrays_of(table, columns)


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
