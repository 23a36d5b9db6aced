"""`fedjaxsim data`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from fedjaxsim.runs.settings import DataSettings, RunConfig, flag, run_config


@dataclasses.dataclass(frozen=True)
class Data:
    """Show what clients a run would have: rows, labels, who has what. Or keep them in a folder.

    A converted population is split already and kept on disk; a run maps it into memory with --data
    folder:PATH. Its sizes are compared whenever it is loaded; check reads it all, and compares it
    with the digests taken while it was written. The flags of a source or a partition are shown once
    it is named, as by `data --data csv --help`.
    """

    what: Positional[Literal["show", "convert", "check"]]
    """What to do."""
    settings: OmitArgPrefixes[DataSettings]
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png|FOLDER")] = None
    """Where to draw who has what, or the folder to write."""
    json: bool = False
    """Print JSON instead of text."""

    @property
    def config(self) -> RunConfig:
        """The settings of a run on these data, which any loss and model suits."""
        return run_config(**self.settings.given(), loss="squared")

    def prepare(self) -> Callable[[], int]:
        """Reads the data, and writes or checks them; what is returned says what they are.

        Raises:
          OSError, ValueError: for bad input, and where data cannot be written.
        """
        if self.what == "check":
            return self._prepare_check()
        from fedjaxsim.data.describe import describe, in_words
        from fedjaxsim.data.folder import save_folder
        from fedjaxsim.report.files import print_json
        from fedjaxsim.runs.assemble import population_of

        picture = self.out if self.what == "show" else None
        if picture is not None:
            from fedjaxsim.report.plots import check_path

            check_path(picture)
        if self.what == "convert" and (self.out is None or self.out.exists()):
            raise ValueError(f"out must be a new folder to convert into, got {self.out}")
        population = population_of(self.config)
        if self.what == "convert" and self.out is not None:
            save_folder(self.out, population)

        def work() -> int:
            found = describe(population)
            if self.json:
                print_json(found)
            else:
                print(in_words(found))
                if self.what == "convert":
                    print(f"written to {self.out}, for --data folder:{self.out}")
            if picture is not None:
                from fedjaxsim.report import plots
                from fedjaxsim.report.population import population_figure

                plots.save(population_figure(population), picture)
            return 0

        return work

    def _prepare_check(self) -> Callable[[], int]:
        """Compares a folder with what was written; what is returned says that it is the same."""
        from fedjaxsim.data.folder import check_folder
        from fedjaxsim.report.files import print_json
        from fedjaxsim.report.progress import Bar

        kind, _, path = self.settings.data.partition(":")
        if kind != "folder" or not path:
            raise ValueError(f"check takes data folder:PATH, got {self.settings.data!r}")
        others = sorted(self.settings.given().keys() - {"data"})
        if self.out is not None or others:
            raise ValueError(f"{flag((others or ['out'])[0])} has no effect with check")
        with Bar("checking", 1, words="") as bar:
            size = check_folder(
                path,
                lambda done, size: bar.show(
                    completed=done / size, words=f"{done / 1e9:.2f} of {size / 1e9:.2f} GB"
                ),
            )

        def work() -> int:
            if self.json:
                print_json({"bytes": size})
            else:
                print(f"{path} holds what was written: {size:,} bytes")
            return 0

        return work
