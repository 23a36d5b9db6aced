"""`fedjaxsim sweep`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from fedjaxsim.cli.shared_flags import CheckpointEvery, Machines, OnFullDisk
from fedjaxsim.runs.fields import optional


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Run a grid of settings as one program, and draw the best of each family."""

    config: Positional[Annotated[Path, tyro.conf.arg(metavar="CONFIG.toml")]]
    """Settings of a run and, in tables [sweep], the values to combine."""
    out: Path
    """Directory of the results; an interrupted sweep resumes in it."""
    data: Annotated[str | None, tyro.conf.arg(metavar="SPEC")] = None
    """Source of the clients; wins over the file."""
    overwrite: bool = False
    """Replace the results in the directory."""
    select_privately: Annotated[str | None, optional("DISTRIBUTION", "run all")] = None
    """Publish the best of a random number of runs: geometric:10 are 10 on average, with an ε of the
    whole."""
    score_noise: Annotated[float | None, optional("Z", "none")] = None
    """z of the noise on the validation metric by which it is selected."""
    score_largest: float = 1.0
    """Public bound to which clients' metrics are clipped for that."""
    quiet: bool = False
    """Print one plain line per evaluation, no progress bar."""
    checkpoint_every: CheckpointEvery = None
    """Rounds (10) or time (30s, 5min, 2h) between checkpoints, each at the next evaluation."""
    on_full_disk: OnFullDisk = "stop"
    """End with the last checkpoint, or wait until there is space."""
    machines: OmitArgPrefixes[Machines] = Machines()  # noqa: RUF009 - it is frozen
    """Devices of this process, or of several."""

    def prepare(self) -> Callable[[], int]:
        """Check all input; return a function that runs the sweep."""
        self.machines.start()
        from fedjaxsim.commands.multiprocess import in_all_processes
        from fedjaxsim.commands.sweep import prepare_sweep

        if (self.select_privately is None) != (self.score_noise is None):
            raise ValueError("select-privately needs score-noise, and score-noise select-privately")
        if self.select_privately is not None and self.score_noise is not None:
            from fedjaxsim.commands.select import prepare_selection

            return prepare_selection(
                self.config,
                self.out,
                self.data,
                spec=self.select_privately,
                noise=self.score_noise,
                largest=self.score_largest,
                on_full_disk=self.on_full_disk,
                overwrite=self.overwrite,
                quiet=self.quiet,
            )
        return in_all_processes(
            lambda: prepare_sweep(
                self.config,
                self.out,
                self.data,
                checkpoint_every=self.checkpoint_every,
                on_full_disk=self.on_full_disk,
                overwrite=self.overwrite,
                quiet=self.quiet,
            ),
            self.machines.count,
        )
