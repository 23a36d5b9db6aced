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
    """Run one federated simulation.

    The flags of a stage after the run are shown by `run --finetune mean --help`, those of several
    processes by `run --devices all --help`.
    """

    settings: OmitArgPrefixes[RunConfig]
    config: Positional[Annotated[Path | None, tyro.conf.arg(metavar="[CONFIG.toml]")]] = None
    """A TOML file with the same settings; flags win over it."""
    from_: Annotated[
        Path | None, tyro.conf.arg(name="from", metavar="DIR", help_behavior_hint="(default: none)")
    ] = None
    """Start from the state of the run in DIR, on its data, settings and charges."""
    finetuning: OmitArgPrefixes[Finetuning] = Finetuning()  # noqa: RUF009 - it is frozen
    """A stage after the run."""
    explain: bool = False
    """Print the whole guarantee."""

    checkpoint_every: CheckpointEvery = None
    """Rounds (10) or time (30s, 5min, 2h) between checkpoints."""
    log: Log = None
    """Logger of every evaluation, an extra: pip install 'fedjaxsim[NAME]'."""
    machines: OmitArgPrefixes[Machines] = Machines()  # noqa: RUF009 - it is frozen
    """Devices of this process, or of several."""

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
        from fedjaxsim.commands.multiprocess import together
        from fedjaxsim.commands.run import prepare_run

        return together(lambda: prepare_run(self), self.machines)
