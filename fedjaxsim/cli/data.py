"""`fedjaxsim data`."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from fedjaxsim.cli.shared_flags import WithSettings
from fedjaxsim.runs.settings import DataSettings, RunConfig, flag, run_config


@dataclasses.dataclass(frozen=True)
class Data(WithSettings):
    """Show the clients of a run with their rows and labels, or keep them in a folder.

    A converted population is split already and kept on disk; a run maps it into memory with --data
    folder:PATH, and every load compares its sizes. check reads all of it and compares it with the
    digests taken at writing. The flags of a source or a partition are shown once it is named, as by
    `data --data csv --help`.
    """

    what: Positional[Literal["show", "convert", "check"]]
    """Action."""
    settings: OmitArgPrefixes[DataSettings]
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE|FOLDER")] = None
    """Figure of rows and labels per client (.png, .pdf or .svg), or the folder to write."""
    json: bool = False
    """Print JSON instead of text."""

    @property
    def config(self) -> RunConfig:
        """Settings of a run on these data, with a loss that any model suits."""
        return run_config(**self.settings.given(), loss="squared")

    def check(self, flags: Iterable[str]) -> None:
        """Check the settings."""
        del flags
        self.config.validate()

    def prepare(self) -> Callable[[], int]:
        """Read, write or check the data; return a function that prints a description.

        Raises:
          OSError, ValueError: for bad input, and where data cannot be written.
        """
        from fedjaxsim.commands import data as command

        if self.what == "show":
            return command.prepare_show(self.config, self.out, json=self.json)
        if self.what == "convert":
            if self.out is None:
                raise ValueError("out must be a new folder to convert into, got None")
            return command.prepare_convert(self.config, self.out, json=self.json)
        kind, _, path = self.settings.data.partition(":")
        if kind != "folder" or not path:
            raise ValueError(f"check takes data folder:PATH, got {self.settings.data!r}")
        others = sorted(self.settings.given().keys() - {"data"})
        if self.out is not None or others:
            raise ValueError(f"{flag((others or ['out'])[0])} has no effect with check")
        return command.prepare_check(path, json=self.json)
