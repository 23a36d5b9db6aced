"""`fedjaxsim compare`."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional


@dataclasses.dataclass(frozen=True)
class Compare:
    """Compare finished runs, and settings over their seeds, in tables and in a figure."""

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
        from fedjaxsim import metrics
        from fedjaxsim.report import seeds
        from fedjaxsim.report.files import print_json
        from fedjaxsim.report.progress import number, print_rows, print_table
        from fedjaxsim.runs.directory import drawn_twice, named

        if not self.runs:
            raise ValueError("compare needs at least one run directory, got none")
        if self.out is not None:
            from fedjaxsim.report import plots

            plots.check_path(self.out)
        rows, runs, directories = [], {}, named(self.runs)
        for name, directory in directories.items():
            rows.append({"run": name, **directory.summary()})
            config = directory.config() if len(self.runs) > 1 else {}
            runs[name] = seeds.Run(config, directory.summary(), directory.metrics())
        found = seeds.systems(runs)
        several = len(found) < len(runs)
        twice = drawn_twice(directories)

        def work() -> int:
            compared = seeds.compared(found) if several else []
            if self.json:
                print_json({"runs": rows, "systems": compared} if several else rows)
            else:
                print_table(rows)
            if several and not self.json:
                label = metrics.label(compared[0]["metric"])
                headings = ["system", "seeds", label, f"minus {found[0].label}", "p (Holm)"]
                print_rows(headings, [seeds.cells(row, number) for row in compared])
                print("means over seeds with 95 % intervals; differences on seeds that both have")
            if twice:
                print(twice, file=sys.stderr if self.json else None)
            if self.out is not None:
                from fedjaxsim.report import plots

                figure = plots.comparison_figure(plots.of_systems(found), "Comparison of runs")
                plots.save(figure, self.out)
            return 0

        return work
