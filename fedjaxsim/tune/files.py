"""Files of one tuning, written by `fedjaxsim.store`, with the trace after every step.

A tuning's directory holds

    path.json   every step, the test of the result on fresh seeds, and the privacy statement
    path.png    the picture of both
    tuned.toml  the settings of the final run, for `fedjaxsim run`
    run/        the final run, as `fedjaxsim run` writes it
    report.html the final run for people, if asked for
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
    write_json,
    write_tables,
)
from fedjaxsim.runs.directory import PAGE, RunDirectory
from fedjaxsim.runs.settings import RunConfig
from fedjaxsim.tune.descent import NOT_FINITE, ObjectiveValue, Point, Step

PATH_JSON = "path.json"
PICTURE = "path.png"
TUNED = "tuned.toml"
RUN = "run"


@dataclasses.dataclass(frozen=True)
class TuneDirectory:
    """The directory of one tuning.

    Attributes:
      path: the directory.
      fingerprint: digest of everything that the tuning follows from.
      saved: record of the same tuning if it was interrupted; else empty.
    """

    path: Path
    fingerprint: str
    saved: Record

    @classmethod
    def open(cls, path: Path, fingerprint: str, *, overwrite: bool = False) -> "TuneDirectory":
        """Make the directory and its parents, or open an unfinished one of the same tuning.

        With `overwrite`, the files of the tuning that the directory holds are removed.

        Raises:
          ValueError: if the path is a file, cannot be made, or holds a finished or another tuning
            and may not be overwritten.
        """
        make_directory(path, (), "tuning", overwrite=False)
        run = RunDirectory(path / RUN)
        if (path / PATH_JSON).is_file() and not overwrite:
            opened = cls(path, fingerprint, read_json(path / PATH_JSON))
            ended = run.is_finished() or opened.saved.get("stopped") == NOT_FINITE
            if opened.saved.get("fingerprint") == fingerprint and not ended:
                return opened
        names = (PATH_JSON, TUNED)
        make_directory(path, names, "tuning", overwrite=overwrite, pictures=[PICTURE, PAGE])
        RunDirectory.create(run.path, overwrite=overwrite)
        return cls(path, fingerprint, {})

    def measured(self) -> list[tuple[Point, ObjectiveValue]]:
        """Return the points that the interrupted tuning measured."""
        found = []
        for step in self.saved.get("steps", ()):
            gradients = {name: array_of(values) for name, values in step["slopes"].items()}
            found.append((step["point"], ObjectiveValue(array_of(step["values"]), gradients)))
        return found

    def write_path(self, record: Record, steps: Sequence[Step]) -> None:
        """Write the trace so far."""
        names = ("runs", "accepted", "radius", "value", "point", "gradient", "gradient_error")
        rows = [
            {"step": index, **{name: getattr(step, name) for name in names},
             "values": step.objective.values, "slopes": step.objective.gradients}
            for index, step in enumerate(steps)
        ]  # fmt: skip
        write_json(
            self.path / PATH_JSON, {"fingerprint": self.fingerprint, **record, "steps": rows}
        )

    def write_tuned(self, config: RunConfig) -> None:
        """Write the settings of the final run."""
        write_tables(self.path / TUNED, config.settings())


def array_of(values: Any) -> np.ndarray:
    """Return numbers from JSON, with NaN for null."""
    return np.asarray(values, np.float64)
