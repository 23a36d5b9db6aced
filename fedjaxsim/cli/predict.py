"""`fedjaxsim predict`, `fedjaxsim evaluate` and `fedjaxsim coefficients`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedjaxsim.cli.devices import LocalDevices
from fedjaxsim.cli.flags import Directory, Quiet, Work

if TYPE_CHECKING:
    import pandas as pd

    from fedjaxsim.runs.finished import FinishedRun

_FORMATS = (".csv", ".parquet")
_SHOWN = 20
"""Rows of a table that are printed."""


def predict(
    directory: Directory,
    *,
    data: str | None = None,
    client: str | None = None,
    out: Path | None = None,
    quiet: Quiet = False,
) -> Work:
    """Predict rows by the personal models of a run, in the order of the rows.

    Beside it stand the row's split, or new, and its target, which new rows need not have. Rows of a
    client that took no part are predicted by the model that the run published, if it did. The
    probability is the predicted class's, but after loss logistic the positive (second) class's.

    Args:
      data: Source of new rows, as csv:new.csv; by default the run's own rows.
      client: Column with the client of each new row; by default the run's.
      out: Table of the predictions (.csv or .parquet); by default the first rows are printed.
    """
    from fedjaxsim.cli.messages import say
    from fedjaxsim.data.aligned import numbers_of

    def predicted(run: "FinishedRun") -> "pd.DataFrame":
        table = run.predict(data, client=client)
        names = table["client"].drop_duplicates().to_numpy()
        strangers = names[numbers_of(run.sim.population, names) < 0]
        if len(strangers):
            who = f"{strangers[0]}" + f" and {len(strangers) - 1} more" * (len(strangers) > 1)
            say(f"rows of clients who took no part ({who}) are predicted by the published model")
        return table

    return _table_of(directory, predicted, "predicting", out, quiet=quiet)


def evaluate(
    directory: Directory,
    *,
    data: str | None = None,
    client: str | None = None,
    split: Literal["train", "validation", "test"] = "test",
    by: str | None = None,
    out: Path | None = None,
    quiet: Quiet = False,
) -> Work:
    """Judge a run's personal models and the published one on the same rows.

    New rows belong to the run's clients, or are a central test set without a column of clients; a
    client who took no part is judged by the published model alone. No guarantee covers the numbers.

    Args:
      data: Source of new rows with their targets, as csv:new.csv; by default the run's own rows.
      client: Column with the client of each new row; by default the run's.
      split: The run's own rows that are judged.
      by: class for precision and recall of each class, or a table (.csv or .parquet) of clients
        and their groups in its first two columns, for a line for each group.
      out: Table of the results (.csv or .parquet); by default the first rows are printed.
    """
    groups = by if by in (None, "class") else _groups_in(Path(by))

    def judge(run: "FinishedRun") -> "pd.DataFrame":
        return run.evaluate(data, client=client, split=split, by=groups)

    return _table_of(directory, judge, "judging its models", out, quiet=quiet)


def coefficients(
    directory: Directory,
    *,
    standard_errors: Literal["published", "personal"] | None = None,
    out: Path | None = None,
    quiet: Quiet = False,
) -> Work:
    """Show the coefficients of a run's linear models, in the units of the table.

    A client's coefficients are its own: a guarantee covers them against other clients, and
    publishing them is another release.

    Args:
      standard_errors: Show standard errors by source: sampling, noise and cohorts; of the published
        model, or of each client's. They are computed from private rows.
      out: Table of the coefficients (.csv or .parquet); by default the first rows are printed.
    """
    return _table_of(
        directory,
        lambda run: run.standard_errors(standard_errors) if standard_errors else run.coefficients(),
        "reading its models",
        out,
        quiet=quiet,
    )


def _table_of(
    directory: Path,
    make: Callable[["FinishedRun"], "pd.DataFrame"],
    doing_what: str,
    out: Path | None,
    *,
    quiet: bool,
) -> Work:
    """Make a table of a run; return the work, which writes the table or prints its first rows."""
    if out is not None and out.suffix not in _FORMATS:
        raise ValueError(f"out must end in {' or '.join(_FORMATS)}, got {out}")
    if out is not None and not out.parent.is_dir():
        raise ValueError(f"out must be in a folder that exists, got {out}")
    LocalDevices("1").start(quiet=quiet)
    from fedjaxsim.report.progress import doing
    from fedjaxsim.runs.finished import load_run

    with doing(f"reading {directory} and {doing_what}", quiet=quiet):
        table = make(load_run(directory))

    return lambda: _print(table, out, quiet=quiet)


def _groups_in(path: Path) -> dict[str, str]:
    """Return the group of each client from the first two columns of a table."""
    from fedjaxsim.data.tables.table import read_table, texts

    if path.suffix not in _FORMATS:
        raise ValueError(f"by must be class, or a table ending in {' or '.join(_FORMATS)}: {path}")
    names = read_table(path, None).column_names[:2]
    if len(names) < 2:
        raise ValueError(f"{path} must have two columns: clients and their groups")
    table = read_table(path, names[0])  # whose names stay text
    clients, groups = (texts(table[name]).tolist() for name in names)
    return dict(zip(clients, groups, strict=True))


def _print(table: "pd.DataFrame", out: Path | None, *, quiet: bool) -> None:
    """Write a table, or print its first rows; warn of rows that were clipped."""
    from fedjaxsim import store
    from fedjaxsim.cli.messages import say
    from fedjaxsim.cli.printing import print_rows
    from fedjaxsim.report.progress import number

    if "clipped" in table and (count := sum(table["clipped"])):
        of = f"{count} of {len(table)} rows"
        say(f"warning: {of} have a feature beyond its range, and were clipped")
    if out is not None:
        content = table.to_csv(index=False).encode() if out.suffix == ".csv" else table.to_parquet()
        store.write(out, content)
        if not quiet:
            print(f"{len(table)} rows in {out}")
        return
    rows = [
        [number(cell) if isinstance(cell, float) else str(cell) for cell in row]
        for row in table.head(_SHOWN).itertuples(index=False)
    ]
    print_rows([*map(str, table)], rows)
    if len(table) > _SHOWN:
        print(f"… and {len(table) - _SHOWN} more rows: --out FILE.csv writes all of them")
