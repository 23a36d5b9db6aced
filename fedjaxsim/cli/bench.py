"""`fedjaxsim bench`."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import OmitArgPrefixes, Positional, Suppress

from fedjaxsim.cli.shared_flags import Machines, WithSettings
from fedjaxsim.runs.settings import RunConfig, flag, optional


@dataclasses.dataclass(frozen=True)
class Bench(WithSettings):
    """Measure the speed and memory of runs against this machine's ceilings."""

    settings: OmitArgPrefixes[RunConfig]
    files: Annotated[tuple[Path, ...], Positional] = ()
    """TOML files, each with the settings of a run; flags win over them. Without a file the flags
    describe the run. A single bench.json is shown, and nothing is measured."""
    repeats: int = 5
    """Processes that measure each run."""
    devices: Annotated[str, optional("all|N", "all")] = "all"
    """Devices that share the clients; of a CPU, its cores."""
    compare: Annotated[Path | None, optional("bench.json", "none")] = None
    """Earlier results to compare with."""
    runs: Annotated[Mapping[str, Any], Suppress] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the run: that of its file, or the names of its parts."""
        parts = self.settings.algorithm, self.settings.model, self.settings.data.partition(":")[0]
        return self.files[0].stem if self.files else "-".join(parts).replace(":", ".")

    def prepare(self) -> Callable[[], int]:
        """Check the flags; return a function that measures.

        Raises:
          FileNotFoundError, ValueError: for bad input.
        """
        machines = Machines(devices=self.devices)
        machines.validate()
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")
        from fedjaxsim.commands.bench import prepare_bench, prepare_show

        if not self.runs:
            if self.files[1:]:
                raise ValueError(
                    "results are shown alone: give one bench.json, or files of settings"
                )
            if given := self.settings.given():
                raise ValueError(f"{flag(next(iter(given)))} has no effect where results are shown")
            return prepare_show(self.files[0], self.compare)
        return prepare_bench(
            self.runs, self.settings.out, self.compare, repeats=self.repeats,
            devices=machines.count, overwrite=self.settings.overwrite, quiet=self.settings.quiet,
        )  # fmt: skip
