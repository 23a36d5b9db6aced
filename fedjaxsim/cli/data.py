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
    """Show what clients a run would have: how many, their rows and labels, who has what."""

    what: Positional[Literal["show"]]
    """The only thing there is to do."""
    settings: OmitArgPrefixes[DataSettings]
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png")] = None
    """Where to draw who has what."""
    json: bool = False
    """Print JSON instead of text."""

    @property
    def config(self) -> RunConfig:
        """The settings of a run on these data, which any loss and model suits."""
        return RunConfig(**vars(self.settings), loss="squared")

    def prepare(self) -> Callable[[], int]:
        """Reads the data; what is returned describes them.

        Raises:
          FileNotFoundError, ValueError: for bad input.
        """
        from fedjaxsim.data.describe import describe
        from fedjaxsim.report.files import print_json
        from fedjaxsim.report.plots import check_path
        from fedjaxsim.runs.build import population_of

        if self.out is not None:
            check_path(self.out)
        population = population_of(self.config)

        def work() -> int:
            from fedjaxsim.report import plots
            from fedjaxsim.report.population import in_words, population_figure

            found = describe(population)
            if self.json:
                print_json(found)
            else:
                print(in_words(found))
            if self.out is not None:
                plots.save(population_figure(population), self.out)
            return 0

        return work
