"""`fedjaxsim data`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from fedjaxsim.runs.settings import DataSettings, RunConfig


@dataclasses.dataclass(frozen=True)
class Data:
    """Show what clients a run would have: rows, labels, who has what. Or keep them in a folder."""

    what: Positional[Literal["show", "convert"]]
    """What to do. A converted population is split already and kept on disk; a run maps it into
    memory with --data folder:PATH."""
    settings: OmitArgPrefixes[DataSettings]
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png|FOLDER")] = None
    """Where to draw who has what, or the folder to write."""
    json: bool = False
    """Print JSON instead of text."""

    @property
    def config(self) -> RunConfig:
        """The settings of a run on these data, which any loss and model suits."""
        return RunConfig(**vars(self.settings), loss="squared")

    def prepare(self) -> Callable[[], int]:
        """Reads the data, and writes them where they are to be; what is returned describes them.

        Raises:
          OSError, ValueError: for bad input, and where data cannot be written.
        """
        from fedjaxsim.data.describe import describe
        from fedjaxsim.data.folder import save_folder
        from fedjaxsim.report.files import print_json
        from fedjaxsim.report.plots import check_path
        from fedjaxsim.runs.build import population_of

        picture = self.out if self.what == "show" else None
        if picture is not None:
            check_path(picture)
        if self.what == "convert" and (self.out is None or self.out.exists()):
            raise ValueError(f"out must be a new folder to convert into, got {self.out}")
        population = population_of(self.config)
        if self.what == "convert" and self.out is not None:
            save_folder(self.out, population)

        def work() -> int:
            from fedjaxsim.report import plots
            from fedjaxsim.report.population import in_words, population_figure

            found = describe(population)
            if self.json:
                print_json(found)
            else:
                print(in_words(found))
            if picture is not None:
                plots.save(population_figure(population), picture)
            return 0

        return work
