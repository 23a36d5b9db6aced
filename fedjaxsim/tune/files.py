"""The files of one tuning: written whole or not at all, and the path after every step.

A tuning's directory holds

    path.json   every step, the grid, and the statement on what the guarantee covers
    path.csv    every step, one line each
    path.png    the picture of both
    tuned.toml  the settings of the final run, which `fedjaxsim run` takes
    run/        the final run, as `fedjaxsim run` writes it
    report.html all of it for people, where it was asked for
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjaxsim.report.files import (
    Record,
    make_directory,
    read_json,
    write_csv,
    write_json,
    write_tables,
)
from fedjaxsim.runs.directory import PAGE, RunDirectory
from fedjaxsim.runs.settings import RunConfig
from fedjaxsim.tune.descent import NOT_FINITE, Measured, Point, Step

PATH_JSON = "path.json"
PATH_CSV = "path.csv"
PICTURE = "path.png"
TUNED = "tuned.toml"
RUN = "run"


@dataclasses.dataclass(frozen=True)
class TuneDirectory:
    """Where one tuning puts its files.

    Attributes:
      path: the directory.
      fingerprint: of all that the tuning follows from.
    """

    path: Path
    fingerprint: str

    @classmethod
    def open(cls, path: Path, fingerprint: str, *, overwrite: bool = False) -> "TuneDirectory":
        """Makes the directory, or goes on with the same tuning in it if it is not finished.

        Args:
          path: the directory; its parents are made too.
          fingerprint: of all that the tuning follows from.
          overwrite: start anew, without the files of the tuning that the directory holds.

        Raises:
          ValueError: if the path is a file, cannot be made, or holds a finished or another tuning
            and may not be overwritten.
        """
        directory = cls(path, fingerprint)
        if overwrite or not directory._goes_on():
            names = (PATH_JSON, PATH_CSV, TUNED)
            make_directory(path, names, "tuning", overwrite=overwrite, pictures=[PICTURE, PAGE])
            RunDirectory.create(directory.run.path, overwrite=overwrite)
        return directory

    @property
    def run(self) -> RunDirectory:
        """That of the final run."""
        return RunDirectory(self.path / RUN)

    def _goes_on(self) -> bool:
        if not (self.path / PATH_JSON).is_file():
            return False
        record = read_json(self.path / PATH_JSON)
        ended = self.run.is_finished() or record.get("stopped") == NOT_FINITE
        return record.get("fingerprint") == self.fingerprint and not ended

    def known(self) -> tuple[list[tuple[Point, Measured]], tuple[np.ndarray, int] | None]:
        """What was measured before: at the points of the descent, and on the grid."""
        if not (self.path / PATH_JSON).is_file():
            return [], None
        record = read_json(self.path / PATH_JSON)
        grid = record.get("grid")
        steps = [
            (
                step["point"],
                Measured(
                    _numbers(step["values"]), {k: _numbers(v) for k, v in step["slopes"].items()}
                ),
            )
            for step in record["steps"]
        ]
        return steps, grid and (_numbers(grid["values"]), grid["runs"])

    def write_path(
        self, record: Record, steps: Sequence[Step], measured: Sequence[Measured]
    ) -> None:
        """Writes the path so far, as JSON and as CSV, where what is not finite stays empty."""
        rows = [
            _step_record(index, *step)
            for index, step in enumerate(zip(steps, measured, strict=True))
        ]
        whole = {"fingerprint": self.fingerprint, **record, "steps": rows}
        write_json(self.path / PATH_JSON, whole)
        flat = [_flat(row) for row in rows]
        write_csv(self.path / PATH_CSV, {name: [row[name] for row in flat] for name in flat[0]})

    def write_tuned(self, config: RunConfig, statement: str) -> None:
        """Writes the settings of the final run, with the statement as a comment."""
        write_tables(self.path / TUNED, config.settings(), statement)


def _numbers(values: Any) -> np.ndarray:
    """Numbers from JSON, where null was not finite."""
    return np.asarray(values, np.float64)


def _step_record(index: int, step: Step, measured: Measured) -> Record:
    """A step, with its values and its derivatives (in the hyperparameters themselves) by seed."""
    return {
        "step": index,
        "runs": step.runs,
        "accepted": step.accepted,
        "radius": step.radius,
        "value": step.value,
        "standard_error": step.standard_error,
        "values": step.values,
        "point": step.point,
        "gradient": step.gradient,
        "gradient_error": step.gradient_error,
        "slopes": measured.gradients,
    }


def _flat(row: Record) -> Record:
    """A step without its numbers by seed, and with one column for each of the others."""
    flat: Record = {}
    for key, value in row.items():
        if key == "point":
            flat |= value
        elif key in ("gradient", "gradient_error"):
            flat |= {f"{key}_{name}": each for name, each in value.items()}
        elif key not in ("values", "slopes"):
            flat[key] = value
    return flat
