"""Flags of several commands."""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from fedjaxsim.runs.settings import optional

CheckpointEvery = Annotated[str | None, optional("N|TIME", "1min, at most a twentieth of the time")]
"""Flag of commands that write checkpoints."""
OnFullDisk = Literal["stop", "wait"]
"""Flag of commands that write for long: end at a full disk, or wait until there is space."""
Log = Annotated[
    Literal["tensorboard", "wandb", "mlflow", "trackio"] | None,
    optional("{tensorboard,wandb,mlflow,trackio}", "none"),
]
"""Flag of commands that do a single run."""
ConfigFile = Positional[Annotated[Path | None, tyro.conf.arg(metavar="[CONFIG.toml]")]]
"""Argument of commands that take the settings of a run."""


class WithSettings:
    """A command that takes the settings of a run."""

    settings: Any

    def check(self, flags: Iterable[str]) -> None:
        """Check the settings; `flags` are the names of those given.

        Raises:
          ValueError: for a wrong setting, or one without effect.
        """
        del flags
        self.settings.validate()


@dataclasses.dataclass(frozen=True)
class Machines:
    """The devices of a run, of this process or of several."""

    devices: Annotated[str, optional("all|N", "all")] = "all"
    """Devices that share the clients; of a CPU, its cores."""
    coordinator: Annotated[str | None, optional("HOST:PORT", "one process")] = None
    """Address of the first of several processes; start each with the same settings."""
    processes: Annotated[int | None, optional("INT", "one process")] = None
    """Number of processes."""
    process: Annotated[int | None, optional("INT", "one process")] = None
    """Number of this process, from 0; the first writes all files."""
    cluster: bool = False
    """Take the three above from Slurm, Open MPI or another cluster."""

    @property
    def count(self) -> int | None:
        """Number of devices; None for all."""
        return None if self.devices == "all" else int(self.devices)

    def start(self) -> None:
        """Check the flags, and start JAX before it computes.

        Raises:
          ValueError: for a bad flag, or if the processes fail to connect.
        """
        self.validate()
        from fedjaxsim.commands.multiprocess import start_jax

        start_jax(self.count, self.coordinator, self.processes, self.process, cluster=self.cluster)

    def validate(self) -> None:
        """Check the flags against each other.

        Raises:
          ValueError: naming the flag, its value and what is allowed.
        """
        if self.devices != "all" and not (self.devices.isdecimal() and int(self.devices) > 0):
            raise ValueError(f"devices must be all or a positive number, got {self.devices!r}")
        three: dict[str, Any] = {
            "coordinator": self.coordinator, "processes": self.processes, "process": self.process
        }  # fmt: skip
        missing = [f"--{name}" for name, value in three.items() if value is None]
        if len(missing) == len(three):
            return
        if self.cluster:
            raise ValueError("cluster and coordinator, processes, process exclude each other")
        if missing:
            raise ValueError(
                "several processes need --coordinator HOST:PORT, --processes N and --process I, or "
                f"--cluster alone: {' and '.join(missing)} not given"
            )
        coordinator, processes, process = three.values()
        port = re.fullmatch(r"\S+:(\d+)", coordinator)
        if port is None or not 0 < int(port[1]) < 2**16:
            raise ValueError(f"coordinator must be HOST:PORT, port 1 to 65535, got {coordinator!r}")
        if processes < 1:
            raise ValueError(f"processes must be at least 1, got {processes}")
        if not 0 <= process < processes:
            raise ValueError(
                f"process must be 0 to {processes - 1} of {processes} processes, got {process}"
            )
