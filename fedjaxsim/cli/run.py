"""`fedjaxsim run`."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import OmitArgPrefixes

from fedjaxsim.cli.shared_flags import (
    CheckpointEvery,
    ConfigFile,
    Log,
    Machines,
    OnFullDisk,
    WithSettings,
)
from fedjaxsim.runs.settings import RunConfig


@dataclasses.dataclass(frozen=True)
class Run(WithSettings):
    """Run one federated simulation.

    The flags of several processes are shown by `run --devices all --help`.
    """

    settings: OmitArgPrefixes[RunConfig]
    config: ConfigFile = None
    """TOML file with the same settings; flags win over it."""
    from_: Annotated[
        Path | None, tyro.conf.arg(name="from", metavar="DIR", help_behavior_hint="(default: none)")
    ] = None
    """Start from the state of the run in DIR, on its data, settings and charges."""
    explain: bool = False
    """Print the whole guarantee."""

    checkpoint_every: CheckpointEvery = None
    """Rounds (10) or time (30s, 5min, 2h) between checkpoints."""
    on_full_disk: OnFullDisk = "stop"
    """End with the last checkpoint, or wait until there is space."""
    log: Log = None
    """Logger of every evaluation, an extra: pip install 'fedjaxsim[NAME]'."""
    machines: OmitArgPrefixes[Machines] = Machines()  # noqa: RUF009 - it is frozen
    """Devices of this process, or of several."""

    def check(self, flags: Iterable[str]) -> None:
        """Check the settings against the devices."""
        super().check(flags)
        if self.settings.streamed and (self.machines.count or 1) > 1:
            raise ValueError(
                f"a streamed run takes one device, got devices {self.machines.devices}"
            )

    def prepare(self) -> Callable[[], int]:
        """Check all input; return a function that runs."""
        self.machines.start()
        from fedjaxsim.commands.multiprocess import in_all_processes
        from fedjaxsim.commands.run import prepare_run

        return in_all_processes(
            lambda: prepare_run(
                self.settings,
                self.from_,
                checkpoint_every=self.checkpoint_every,
                on_full_disk=self.on_full_disk,
                log=self.log,
                explain=self.explain,
            ),
            self.machines.count,
        )
