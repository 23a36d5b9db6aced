"""`fedjaxsim predict` and `fedjaxsim models`: what a run leaves, used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def predict(run: Path, *, out: Path, data: str | None = None) -> Callable[[], int]:
    """Predict rows, each by its client's model: client, split, row, target, prediction.

    A client is known by its name; one who took no part gets the model that the run published, if
    there is one. `row` counts a client's rows, those of the run in its order: train, validation,
    test. Rows of --data have no split and keep the order of the data.

    Args:
      run: Directory of the run.
      out: Table to write: .parquet or .csv.
      data: Rows to predict, as csv:PATH, read as the run's; by default all rows of the run.
    """
    import numpy as np

    from fedjaxsim.data.arrays import SPLITS
    from fedjaxsim.report.files import check_table, write_table
    from fedjaxsim.runs.assemble import population_of
    from fedjaxsim.runs.execute import trained

    check_table(out)
    found = trained(run)
    experiment = found.experiment
    rows, unsplit = experiment.simulation.population, {"test_fraction": 0, "validation_fraction": 0}
    if data is not None:
        rows = population_of(experiment.config.replace(data=data, **unsplit))

    def work() -> int:
        simulation = experiment.simulation
        said = simulation.predict(found.state, experiment.hparams, rows)
        counts = rows.counts.sum(axis=1)
        classes = simulation.population.categories.get("y")
        targets, own = rows.fields["y"], rows.categories.get("y")
        y = rows.columns.get("y")
        if y is not None and y.scaled:
            targets = y.original(targets)
        first = np.concatenate([[0], np.cumsum(counts)[:-1]])
        splits = np.tile(SPLITS, rows.num_clients)
        table: dict[str, Any] = {
            "client": np.repeat(rows.names, counts),
            **({"split": np.repeat(splits, rows.counts.ravel())} if data is None else {}),
            "row": np.arange(rows.num_rows) - np.repeat(first, counts),
            "target": targets if own is None else np.array(own)[targets],
        }
        prediction = said["prediction"]
        if classes is not None:
            prediction = np.where(prediction < 0, "", np.array(classes)[prediction])
        table |= {"prediction": prediction} | _rest(said)
        write_table(out, {name: _seven_digits(each) for name, each in table.items()})
        new = len(set(rows.names.tolist()) - set(simulation.population.names.tolist()))
        print(f"{rows.num_rows} predictions for {rows.num_clients} clients in {out}")
        if new:
            print(f"{new} of them took no part in the run: the published model predicts their rows")
        print(found.whose)
        return 0

    return work


def _seven_digits(values: Any) -> Any:
    """Round numbers to the digits that float32 has, so that a target is as it was read."""
    import numpy as np

    if values.dtype.kind != "f":
        return values
    return np.char.mod("%.7g", values.astype(np.float64)).astype(np.float64)


def _rest(said: dict[str, Any]) -> dict[str, Any]:
    """Return what predictions say besides, such as probabilities."""
    return {name: each for name, each in said.items() if name != "prediction" and each.ndim == 1}


def models(run: Path, *, out: Path) -> Callable[[], int]:
    """Write the linear models of a run's clients: a row per client and feature.

    Coefficients and the intercept are in the units of the data as they were read, whatever scaled
    them; with several classes there is a row for each class, too.

    Args:
      run: Directory of the run.
      out: Table to write: .parquet or .csv.
    """
    from fedjaxsim.report.files import check_table, write_table
    from fedjaxsim.runs.execute import trained

    check_table(out)
    found = trained(run)
    simulation = found.experiment.simulation
    table = simulation.coefficients(found.state, found.experiment.hparams)

    def work() -> int:
        write_table(out, table)
        print(f"{len(table['client'])} coefficients of {simulation.num_clients} clients in {out}")
        print(found.whose)
        return 0

    return work
