"""Runs of the table of results, from the folders that hold their rows."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedjaxsim.data.files import read_tables
from fedjaxsim.divergence import failures
from fedjaxsim.report.files import Record, read_json
from fedjaxsim.report.results import Run, without_seed
from fedjaxsim.runs.directory import RunDirectory

if TYPE_CHECKING:
    import pyarrow as pa


def runs_of(directories: Mapping[str, RunDirectory], *, whole: bool = False) -> list[Run]:
    """Read runs by their names; with `whole` their clients and reports, too.

    Raises:
      FileNotFoundError: if a directory holds no finished run.
      ValueError: if a file is damaged.
    """
    found = []
    for name, each in directories.items():
        config, summary, rows = each.config(), each.summary(), each.metrics()
        of_all = {"delta": summary["delta"]}
        table = [
            row | of_all | {"failed": bad} for row, bad in zip(rows, failures(rows), strict=True)
        ]
        table[-1]["epsilon_replace"] = summary["epsilon_replace"]
        more: dict[str, Any] = {}
        if whole:
            more = {"clients": each.clients(), "report": each.report()}
        seed = config.get("seed", 0)
        found.append(Run(name, without_seed(config), seed, table, config, summary, **more))
    return found


def read_runs(path: Path) -> tuple[list[Run], list[str], Record]:
    """Read the finished runs of a sweep's directory, its swept columns and its report.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if a file is damaged.
    """
    from fedjaxsim.runs import sweep_directory
    from fedjaxsim.runs.sweep_runs import SWEEP, column_of

    config = read_tables(path / SWEEP)
    keys = dict.fromkeys(key for table in config["sweep"] for key in table)
    columns = [column_of(key.replace("-", "_")) for key in keys]
    table = sweep_directory.read_results(path / sweep_directory.RESULTS)
    report = read_json(path / sweep_directory.REPORT)
    return runs_of_sweep(table, columns, config), columns, report


def runs_of_sweep(table: "pa.Table", columns: Sequence[str], config: Record) -> list[Run]:
    """Return the runs of a sweep.

    Args:
      table: its results, by run and round.
      columns: the columns of all swept keys, `seed` included if it is swept.
      config: the settings that all runs start from, with the seed if it is not swept.
    """
    found = []
    for number, rows in itertools.groupby(table.to_pylist(), key=lambda row: row["run"]):
        rows = list(rows)
        swept = {name: rows[0][name] for name in columns}
        given = {name: value for name, value in swept.items() if value is not None}
        swept.pop("seed", None)
        seed = given.get("seed", config.get("seed", 0))
        found.append(Run(str(number), swept, seed, rows, {**config, **given}))
    return found
