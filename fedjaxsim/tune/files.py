"""The files of one tuning: written whole or not at all, and the path after every step.

A tuning's directory holds

    path.json   every step, the grid, and the statement on what the guarantee covers
    path.csv    every step, one line each
    path.png    the picture of both
    tuned.toml  the settings of the final run, which `fedjaxsim run` takes
    run/        the final run, as `fedjaxsim run` writes it
"""

import csv
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path

import tomli_w

from fedjaxsim.report.files import Record, strict, write_atomically, write_json
from fedjaxsim.runs.directory import RunDirectory
from fedjaxsim.runs.settings import RunConfig
from fedjaxsim.tune.descent import Step

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
      run: that of the final run.
    """

    path: Path
    run: RunDirectory

    @classmethod
    def create(cls, path: Path, *, overwrite: bool = False) -> "TuneDirectory":
        """Makes the directory, and with `overwrite` removes the files of the tuning it holds.

        Raises:
          ValueError: if the path is a file, cannot be made, or holds a tuning and may not be
            overwritten.
        """
        names = (PATH_JSON, PATH_CSV, TUNED)
        present = [name for name in names if (path / name).exists()]
        if present and not overwrite:
            raise ValueError(
                f"{path} already holds a tuning ({', '.join(present)}): choose another directory "
                "or say --overwrite"
            )
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} must be a directory, and is a file")
        run = RunDirectory.create(path / RUN, overwrite=overwrite)
        for name in (*names, PICTURE):
            (path / name).unlink(missing_ok=True)
        return cls(path, run)

    def write_path(self, record: Record, steps: Sequence[Step]) -> None:
        """Writes the path so far, as JSON and as CSV, where what is not finite stays empty."""
        rows = [_step_record(index, step) for index, step in enumerate(steps)]
        write_json(self.path / PATH_JSON, {**record, "steps": rows})
        text = io.StringIO(newline="")
        flat = [_flat(row) for row in rows]
        writer = csv.DictWriter(text, flat[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(strict(flat))
        write_atomically(self.path / PATH_CSV, text.getvalue().encode())

    def write_tuned(self, config: RunConfig, statement: str) -> None:
        """Writes the settings of the final run, with the statement as a comment."""
        text = f"# {statement}\n{tomli_w.dumps(config.settings())}"
        write_atomically(self.path / TUNED, text.encode())


def _step_record(index: int, step: Step) -> Record:
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
    }


def _flat(row: Record) -> Record:
    """A step without its values by seed, and with one column for each number."""
    flat: Record = {}
    for key, value in row.items():
        if key == "point":
            flat |= value
        elif isinstance(value, dict):
            flat |= {f"{key}_{name}": each for name, each in value.items()}
        elif key != "values":
            flat[key] = value
    return flat
