"""`fedjaxsim run`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from fedjaxsim.cli.start import CheckpointEvery, Log, Machines, start_jax
from fedjaxsim.runs.finetuning import Finetuning
from fedjaxsim.runs.settings import RunConfig


@dataclasses.dataclass(frozen=True)
class Run:
    """Run one federated simulation."""

    settings: OmitArgPrefixes[RunConfig]
    config: Positional[Annotated[Path | None, tyro.conf.arg(metavar="[CONFIG.toml]")]] = None
    """A TOML file with the same settings; flags win over it."""
    from_: Annotated[
        Path | None, tyro.conf.arg(name="from", metavar="DIR", help_behavior_hint="(default: none)")
    ] = None
    """Start from the state of the run in DIR, on the same data; its settings hold where no flag and
    no file says otherwise, and its charges go along."""
    finetuning: OmitArgPrefixes[Finetuning] = Finetuning()  # noqa: RUF009 - it is frozen
    """A stage after the run, on its own."""
    explain: bool = False
    """Print all of the guarantee, and what it rests on."""

    checkpoint_every: CheckpointEvery = None
    """Rounds (10) or time (30s, 5min, 2h) between checkpoints, each at the next evaluation."""
    log: Log = None
    """Where else every evaluation goes; each is an extra: pip install 'fedjaxsim[NAME]'."""
    machines: OmitArgPrefixes[Machines] = Machines()  # noqa: RUF009 - it is frozen
    """On what it computes: the devices of this process, or of several."""

    def require_devices(self) -> None:
        """Checks that devices are asked for where the run can use them.

        Raises:
          ValueError: several, and it streams.
        """
        if self.settings.streamed and (self.machines.wanted or 1) > 1:
            raise ValueError(
                f"a streamed run takes one device, got devices {self.machines.devices}"
            )

    def prepare(self) -> Callable[[], int]:
        """As `prepare_run`."""
        start_jax(self.machines)
        from fedjaxsim.cli.work.run import prepare_run
        from fedjaxsim.cli.work.together import together

        return together(lambda: prepare_run(self), self.machines)
