"""`fedjaxsim predict` and `fedjaxsim models`: what a run leaves, used."""

from pathlib import Path
from typing import Any

from fedjaxsim.cli.flags import Work


def predict(run: Path, *, out: Path, data: str | None = None) -> Work:
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
    experiment, simulation = found.experiment, found.experiment.simulation
    rows, unsplit = simulation.population, {"test_fraction": 0, "validation_fraction": 0}
    if data is not None:
        rows = population_of(experiment.config.replace(data=data, **unsplit))

    def seven_digits(values: Any) -> Any:
        """Round numbers to the digits that float32 has, so that a target is as it was read."""
        if values.dtype.kind != "f":
            return values
        return np.char.mod("%.7g", values.astype(np.float64)).astype(np.float64)

    def work() -> int:
        said = simulation.predict(found.state, experiment.hparams, rows)
        counts = rows.counts.sum(axis=1)
        targets, own, y = rows.fields["y"], rows.categories.get("y"), rows.columns.get("y")
        if y is not None and y.scaled:
            targets = y.original(targets)
        first = np.concatenate([[0], np.cumsum(counts)[:-1]])
        splits = np.repeat(np.tile(SPLITS, rows.num_clients), rows.counts.ravel())
        table: dict[str, Any] = {
            "client": np.repeat(rows.names, counts),
            **({"split": splits} if data is None else {}),
            "row": np.arange(rows.num_rows) - np.repeat(first, counts),
            "target": targets if own is None else np.array(own)[targets],
            # Beside the prediction: what else a row has, such as probabilities.
            **{k: each for k, each in said.items() if k == "prediction" or each.ndim == 1},
        }
        classes = simulation.population.categories.get("y")
        if classes is not None:
            numbers = said["prediction"]
            table["prediction"] = np.where(numbers < 0, "", np.array(classes)[numbers])
        write_table(out, {name: seven_digits(each) for name, each in table.items()})
        new = len(set(rows.names.tolist()) - set(simulation.population.names.tolist()))
        print(f"{rows.num_rows} predictions for {rows.num_clients} clients in {out}")
        if new:
            print(f"{new} of them took no part in the run: the published model predicts their rows")
        print(found.whose)
        return 0

    return work


def models(run: Path, *, out: Path) -> Work:
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
