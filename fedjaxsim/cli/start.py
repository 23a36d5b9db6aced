"""What a command does before the first computation, and how programs end."""

import dataclasses
import re
from typing import Annotated, Literal

from fedjaxsim.runs.settings import optional

CheckpointEvery = Annotated[str | None, optional("N|TIME", "1min, at most a twentieth of the time")]
"""Of the commands that write checkpoints; `Cadence.parse` reads it."""

Log = Annotated[
    Literal["tensorboard", "wandb", "mlflow", "trackio"] | None,
    optional("{tensorboard,wandb,mlflow,trackio}", "none"),
]
"""Of the commands that run a single run; `report/loggers.py` has them."""

INTERRUPTED = 130
"""The exit code of a program that Ctrl-C ended."""


@dataclasses.dataclass(frozen=True)
class Machines:
    """The devices of a run, of this process or of several."""

    devices: Annotated[str, optional("all|N", "all")] = "all"
    """Devices over which clients are divided; of a CPU, its cores."""
    coordinator: Annotated[str | None, optional("HOST:PORT", "one process")] = None
    """Where the first of several processes listens; each is started with the same settings."""
    processes: Annotated[int | None, optional("INT", "one process")] = None
    """How many processes there are."""
    process: Annotated[int | None, optional("INT", "one process")] = None
    """The number of this one, from 0; the first writes all files."""
    cluster: bool = False
    """Several processes, of which Slurm, Open MPI or another cluster tells the above."""

    @property
    def wanted(self) -> int | None:
        """How many devices; None for all."""
        return None if self.devices == "all" else int(self.devices)

    def validate(self) -> None:
        """Checks the flags as far as they say.

        Raises:
          ValueError: naming the flag, its value and what is allowed.
        """
        if self.devices != "all" and not (self.devices.isdecimal() and int(self.devices) > 0):
            raise ValueError(f"devices must be all or a positive number, got {self.devices!r}")
        three = {"coordinator": self.coordinator, "processes": self.processes,
                 "process": self.process}  # fmt: skip
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
        assert self.coordinator is not None
        assert self.processes is not None
        assert self.process is not None
        found = re.fullmatch(r"\S+:(\d+)", self.coordinator)
        if found is None or not 0 < int(found[1]) < 2**16:
            raise ValueError(
                f"coordinator must be HOST:PORT, port 1 to 65535, got {self.coordinator!r}"
            )
        if self.processes < 1:
            raise ValueError(f"processes must be at least 1, got {self.processes}")
        if not 0 <= self.process < self.processes:
            raise ValueError(
                f"process must be 0 to {self.processes - 1} of {self.processes} processes, "
                f"got {self.process}"
            )


def start_jax(machines: Machines = Machines()) -> None:
    """Imports JAX and sets it up as a program wants it; to be called before it computes.

    Raises:
      ValueError: if a flag is not as it must be, or processes do not come together.
    """
    machines.validate()
    import jax

    from fedjaxsim.commands.compiled import keep_compiled_programs
    from fedjaxsim.engine import devices, processes

    devices.use_devices(machines.wanted)
    # Reading a user's own part starts JAX before the command does.
    joined = jax.distributed.is_initialized()
    if not joined and (machines.cluster or machines.coordinator is not None):
        processes.join(machines.coordinator, machines.processes, machines.process)
    keep_compiled_programs()
