"""`fedjaxsim compare`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional


@dataclasses.dataclass(frozen=True)
class Compare:
    """Compare finished runs in a table and, with --out, in one figure."""

    runs: Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="DIR")]]
    """The directories of the runs."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png")] = None
    """Where to draw the runs together."""
    json: bool = False
    """Print JSON instead of a table."""

    def prepare(self) -> Callable[[], int]:
        """Reads the runs; what is returned compares them.

        Raises:
          FileNotFoundError, ValueError: for bad input.
        """
        from fedjaxsim.report.files import print_json
        from fedjaxsim.report.progress import print_table
        from fedjaxsim.runs.directory import RunDirectory

        if not self.runs:
            raise ValueError("compare needs at least one run directory, got none")
        if self.out is not None:
            from fedjaxsim.report import plots

            plots.check_path(self.out)
        distinct = len({path.name for path in self.runs}) == len(self.runs)
        rows, records = [], {}
        for path in self.runs:
            directory = RunDirectory(path)
            name = path.name if distinct else str(path)
            rows.append({"run": name, **directory.summary()})
            records[name] = directory.metrics()

        def work() -> int:
            if self.json:
                print_json(rows)
            else:
                print_table(rows)
            if self.out is not None:
                from fedjaxsim.report import plots

                figure = plots.comparison_figure(plots.curves(records), "Comparison of runs")
                plots.save(figure, self.out)
            return 0

        return work
