"""`fedjaxsim resume`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from fedjaxsim.cli.shared_flags import CheckpointEvery, Log, Machines, OnFullDisk
from fedjaxsim.runs.settings import optional


@dataclasses.dataclass(frozen=True)
class Resume:
    """Resume an interrupted or killed run, or extend a finished one."""

    directory: Positional[Annotated[Path, tyro.conf.arg(metavar="DIR")]]
    """Directory of the run; its config.toml holds the settings."""
    rounds: Annotated[int | None, optional("INT", "as planned")] = None
    """Total rounds, finished ones included; rounds beyond the plan spend more epsilon."""
    checkpoint_every: CheckpointEvery = None
    """Rounds (10) or time (30s, 5min, 2h) between checkpoints, each at the next evaluation."""
    on_full_disk: OnFullDisk = "stop"
    """End with the last checkpoint, or wait until there is space."""
    log: Log = None
    """Logger of every evaluation, an extra: pip install 'fedjaxsim[NAME]'."""
    machines: OmitArgPrefixes[Machines] = Machines()  # noqa: RUF009 - it is frozen
    """Devices of this process, or of several."""
    quiet: bool = False
    """Print one plain line per evaluation, no progress bar."""
    explain: bool = False
    """Print the whole guarantee and its assumptions."""

    def prepare(self) -> Callable[[], int]:
        """Check that the run can resume; return a function that resumes it."""
        self.machines.start()
        from fedjaxsim.commands.multiprocess import in_all_processes
        from fedjaxsim.commands.run import prepare_resume

        return in_all_processes(
            lambda: prepare_resume(
                self.directory,
                self.rounds,
                checkpoint_every=self.checkpoint_every,
                on_full_disk=self.on_full_disk,
                log=self.log,
                quiet=self.quiet,
                explain=self.explain,
            ),
            self.machines.count,
        )
