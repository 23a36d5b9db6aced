"""`fedjaxsim resume`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from fedjaxsim.cli.start import CheckpointEvery, Log, Machines, start_jax
from fedjaxsim.runs.settings import optional


@dataclasses.dataclass(frozen=True)
class Resume:
    """Go on with a run that was interrupted or killed, or extend a finished one."""

    directory: Positional[Annotated[Path, tyro.conf.arg(metavar="DIR")]]
    """Where the run has put its files; the settings are those of its config.toml."""
    rounds: Annotated[int | None, optional("INT", "as many as planned")] = None
    """Rounds in all, those that are done included; beyond the plan, more epsilon is spent."""
    checkpoint_every: CheckpointEvery = None
    """Rounds (10) or time (30s, 5min, 2h) between checkpoints, each at the next evaluation."""
    log: Log = None
    """Where else every evaluation goes; each is an extra: pip install 'fedjaxsim[NAME]'."""
    machines: OmitArgPrefixes[Machines] = Machines()  # noqa: RUF009 - it is frozen
    """On what it computes: the devices of this process, or of several."""
    quiet: bool = False
    """No progress bar: one plain line per evaluation."""
    explain: bool = False
    """Print all of the guarantee, and what it rests on."""

    def prepare(self) -> Callable[[], int]:
        """As `prepare_resume`."""
        start_jax(self.machines)
        from fedjaxsim.commands.multiprocess import together
        from fedjaxsim.commands.run import prepare_resume

        return together(lambda: prepare_resume(self), self.machines)
