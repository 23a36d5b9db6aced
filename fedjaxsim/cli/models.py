"""`fedjaxsim models`."""

from collections.abc import Callable
from pathlib import Path


def models(run: Path, *, out: Path) -> Callable[[], int]:
    """Write the linear models of a run's clients: a row per client and feature.

    Coefficients and the intercept are in the units of the data as they were read, whatever scaled
    them; with several classes there is a row for each class, too.

    Args:
      run: Directory of the run.
      out: Table to write: .parquet or .csv.
    """
    from fedjaxsim.report.rows import check_table, write_table
    from fedjaxsim.runs.trained import trained

    check_table(out)
    found = trained(run)

    def work() -> int:
        experiment = found.experiment
        table = experiment.simulation.coefficients(found.state, experiment.hparams)
        write_table(out, table)
        clients = experiment.simulation.num_clients
        print(f"{len(table['client'])} coefficients of {clients} clients in {out}")
        print(found.whose)
        return 0

    return work
