"""`fedjaxsim bench`."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import OmitArgPrefixes, Positional, Suppress

from fedjaxsim.cli.start import Machines
from fedjaxsim.runs.settings import RunConfig, optional


@dataclasses.dataclass(frozen=True)
class Bench:
    """Measure the speed and memory of runs against this machine's ceilings."""

    settings: OmitArgPrefixes[RunConfig]
    files: Annotated[tuple[Path, ...], Positional] = ()
    """TOML files with the settings of a run each; flags win over them. Without a file the flags
    describe the run. One file of results, bench.json, is shown and nothing measured."""
    repeats: int = 5
    """New processes that measure each run."""
    devices: Annotated[str, optional("all|N", "all")] = "all"
    """Devices over which clients are divided; of a CPU, its cores."""
    compare: Annotated[Path | None, optional("bench.json", "none")] = None
    """Earlier results to compare with."""
    runs: Annotated[Mapping[str, Any], Suppress] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the run: its file's, or that of its parts."""
        parts = self.settings.algorithm, self.settings.model, self.settings.data.partition(":")[0]
        return self.files[0].stem if self.files else "-".join(parts).replace(":", ".")

    def prepare(self) -> Callable[[], int]:
        """Check the flags; the returned function measures and returns the exit code.

        Raises:
          FileNotFoundError, ValueError: for bad input.
        """
        Machines(devices=self.devices).validate()
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")
        from fedjaxsim.commands.bench import prepare_bench

        return prepare_bench(self)
