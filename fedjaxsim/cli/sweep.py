"""`fedjaxsim sweep`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from fedjaxsim.cli.start import CheckpointEvery, start_jax


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Run a grid of settings as one program, and draw the best of each family."""

    config: Positional[Annotated[Path, tyro.conf.arg(metavar="CONFIG.toml")]]
    """The settings of a run and, in tables [sweep], the values to run with each other."""
    out: Path
    """Directory for the results. A sweep that was interrupted goes on in it."""
    data: Annotated[str | None, tyro.conf.arg(metavar="SPEC")] = None
    """Where the clients come from; wins over the file."""
    overwrite: bool = False
    """Start anew, without the results that the directory already holds."""
    quiet: bool = False
    """No progress bar: one plain line per evaluation."""
    checkpoint_every: CheckpointEvery = None
    """Rounds (10) or time (30s, 5min, 2h) between checkpoints, each at the next evaluation."""

    def prepare(self) -> Callable[[], int]:
        """As `prepare_sweep`."""
        start_jax()
        from fedjaxsim.commands.sweep import prepare_sweep

        return prepare_sweep(self)
