"""Other rows in the terms of a run: its columns, units and classes, and its clients."""

import dataclasses

import numpy as np

from fedjaxsim.checks import Name, SettingError
from fedjaxsim.data.arrays import SPLITS
from fedjaxsim.data.columns import Columns
from fedjaxsim.data.population import Population
from fedjaxsim.data.source import listed


def aligned_with(population: Population, trained: Population) -> Population:
    """Return a population whose columns, units and classes are `trained`'s.

    Columns of x are found by their names, and clipped to the ranges of the run. Classes are found
    by their names. Targets are converted to the run's units, and not clipped.

    Raises:
      ValueError: a column is missing or unknown, a class or token is not of the run.
    """
    fields, columns = dict(population.fields), {**population.columns}
    ours, theirs = trained.columns.get("x"), population.columns.get("x")
    if ours is not None and theirs is not None and ours != theirs:
        fields["x"], columns["x"] = ours.aligned(fields["x"], theirs), ours
    if trained.categories.get("x") != population.categories.get("x"):
        raise ValueError(
            "'x' must have the run's names, in their order: "
            f"{listed(trained.categories.get('x', ()))}, got "
            f"{listed(population.categories.get('x', ()))}"
        )
    if "y" in fields:
        fields["y"] = _targets(population, trained)
        columns |= {"y": trained.columns["y"]} if "y" in trained.columns else {}
    categories = {**population.categories}
    categories.pop("y", None)
    if "y" in trained.categories and "y" in fields:
        categories["y"] = trained.categories["y"]
    return dataclasses.replace(population, fields=fields, columns=columns, categories=categories)


def with_test_rows(trained: Population, rows: Population) -> Population:
    """Return the clients of a run, with its training rows and, for testing, `rows`.

    Rows are aligned; see `aligned_with`. Clients are found by their names, and rows of others are
    left out. Training rows are those that a model reads to predict.
    """
    owner = numbers_of(trained, rows.names)
    train_ranges, row_owners = trained.splits["train"], np.repeat(owner, rows.counts.sum(axis=1))
    in_run = np.flatnonzero(row_owners >= 0)
    fields = {
        name: np.concatenate([values[train_ranges.all_rows()], rows.fields[name][in_run]])
        for name, values in trained.fields.items()
        if name in rows.fields
    }
    clients = np.concatenate(
        [np.repeat(np.arange(trained.num_clients), train_ranges.count), row_owners[in_run]]
    )
    split = np.repeat([0, SPLITS.index("test")], [train_ranges.count.sum(), len(in_run)])
    return Population.from_rows(
        fields,
        clients,
        trained.names,
        split,
        categories=trained.categories,
        columns=trained.columns,
        voids_epsilon=trained.voids_epsilon,
        preparations=trained.preparations,
    )


def numbers_of(trained: Population, names: np.ndarray) -> np.ndarray:
    """Return the number of the trained client of each name, or −1, (m,) int32."""
    numbers = {str(name): number for number, name in enumerate(trained.names.tolist())}
    return np.array([numbers.get(str(name), -1) for name in names.tolist()], np.int32)


def stranger_of(trained: Population) -> str:
    """Return the name for the client of rows without one: no client of the run has it."""
    name, names = "new", {*map(str, trained.names.tolist())}
    while name in names:
        name += "'"
    return name


def no_model_for(trained: Population, names: np.ndarray, what: str) -> SettingError:
    """Return the error that a run has no model for clients who took no part, among `names`."""
    absent = [str(name) for name in names[numbers_of(trained, names) < 0].tolist()]
    words = [f"client {absent[0]!r} took no part in the run ({len(absent)} such in all), which"]
    if absent == [stranger_of(trained)]:
        new = f" names it) belong to a new client, {absent[0]!r}, and the run"
        words = ["rows without a column of clients (", Name("client"), new]
    return SettingError(
        *words,
        f" published no model that {what}: a run that does, as with ",
        Name('algorithm="ditto"'),
        ", tells of new clients",
    )


def rows_of(population: Population, split: str) -> Population:
    """Return the rows of a split, as training rows, of the clients that have some."""
    ranges = population.splits[split]
    clients = np.flatnonzero(ranges.count)
    counts = np.zeros((len(clients), len(SPLITS)), np.int32)
    counts[:, 0] = ranges.count[clients]
    return population.of_rows(ranges.all_rows(), counts, clients)


def _targets(population: Population, trained: Population) -> np.ndarray:
    """Return targets as numbers of the run's classes, or in its units."""
    y, classes = population.fields["y"], trained.categories.get("y")
    named = population.categories.get("y")
    if classes is not None:
        numbers, where = np.unique(y, return_inverse=True)
        names = [str(number) if named is None else named[number] for number in numbers.tolist()]
        if unknown := [name for name in names if name not in classes]:
            raise ValueError(f"the run has no class {unknown[0]!r}, only {listed(classes)}")
        of_names = np.array([classes.index(name) for name in names], np.int32)
        return of_names[where].reshape(y.shape)
    if named is not None:
        raise ValueError(f"the run's target is a number, got the classes {listed(named)}")
    ours, theirs = trained.columns.get("y"), population.columns.get("y", Columns(("y",)))
    if ours is None or (not ours.scaled and not theirs.scaled):
        return y
    centre, half_range = np.array(ours.centre), np.array(ours.half_range)
    return ((theirs.original(y) - centre) / half_range).astype(np.float32)
