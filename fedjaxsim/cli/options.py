"""Flags of several commands: devices and processes, and how a run is watched and kept."""

import dataclasses
import gc
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fedjaxsim import checks
from fedjaxsim.factories import Count, flag

if TYPE_CHECKING:
    from fedjaxsim.clock import Axis


@dataclasses.dataclass(frozen=True)
class FigureAxis:
    """The horizontal axis of curves, and the simulated clock of its seconds."""

    over: Annotated[
        Literal["rounds", "bytes", "seconds"],
        "Horizontal axis of curves: rounds, the bytes that clients sent, or the seconds that this "
        "would take by a simulated clock.",
    ] = "rounds"
    speed: Annotated[float, "Multiplications of a median client in a simulated second."] = 1e9
    bandwidth: Annotated[float, "Bytes that a median client sends in a simulated second."] = 1e6
    spread: Annotated[
        float, "Standard deviation of the logarithm of clients' times; 0 if all are alike."
    ] = 0.5

    @property
    def axis(self) -> "Axis":
        """The axis; raise a ValueError for a clock that it does not read."""
        from fedjaxsim.clock import Axis, Clock

        clock = Clock(self.speed, self.bandwidth, self.spread)
        if self.over != "seconds" and clock != Clock():
            raise ValueError("speed, bandwidth and spread set the clock of --over seconds")
        return Axis(self.over, clock)


@dataclasses.dataclass(frozen=True)
class RunOutput(FigureAxis):
    """Options of a run's report, progress and checkpoints.

    Attributes:
      explain: Print the whole guarantee and its assumptions.
      checkpoint_every: Rounds between checkpoints, each at the next evaluation; by default one a
        minute, in at most a twentieth of the time.
      no_client_table: Write no table of metrics per client.
      quiet: Print the result and errors only.
      logger: Trackers of the run's records: wandb, mlflow, tensorboard, trackio or MODULE:FACTORY.
      profile: Directory for a profile of the rounds by JAX, as for TensorBoard.
      format: Format of the picture of its curves.
    """

    explain: bool = False
    checkpoint_every: Count | None = None
    no_client_table: bool = False
    quiet: bool = False
    logger: tuple[str, ...] = ()
    profile: Path | None = None
    format: Literal["png", "pdf", "svg"] = "png"

    def validate(self, out: Path | None, **of_files: Any) -> None:
        """Check the flags; flags of files, with `of_files`, need `out`."""
        of_files |= {"checkpoint_every": self.checkpoint_every}
        of_files |= {"no_client_table": self.no_client_table, "format": self.format != "png"}
        of_files |= {"over": self.axis.over != "rounds"}
        without_effect = [flag(name) for name, value in of_files.items() if value]
        if out is None and without_effect:
            raise ValueError(f"{without_effect[0]} has no effect without out")
        folder = self.profile
        if folder is not None and any(path.is_file() for path in (folder, *folder.parents)):
            raise ValueError(f"profile must be a directory, got {folder}")


@dataclasses.dataclass(frozen=True)
class LocalDevices:
    """The devices of this process."""

    devices: Annotated[
        str, "Devices that share the work, all or a number; of a CPU, its cores."
    ] = "all"

    @property
    def count(self) -> int | None:
        """Number of devices; None for all."""
        return None if self.devices == "all" else int(self.devices)

    def start(self, *, quiet: bool = False, exact: bool = False) -> None:
        """Check the flags, and start JAX before it computes; `exact` refuses other devices."""
        self.validate()
        # Tracing makes many small objects that live: to look for garbage among them again and
        # again took a seventh of the time of a sweep whose programs were compiled before.
        gc.set_threshold(50_000, 20, 50)
        from fedjaxsim.report.progress import doing

        with doing("starting JAX", quiet=quiet):
            from fedjaxsim.cli.process import keep_compiled_programs
            from fedjaxsim.engine import processes

            processes.use_devices(self.count)
            self.join()
            keep_compiled_programs()
            if exact:
                processes.require(self.count)

    def validate(self) -> None:
        """Check the flags."""
        if self.devices != "all" and not (self.devices.isdecimal() and int(self.devices) > 0):
            raise ValueError(f"devices must be all or a positive number, got {self.devices!r}")

    def join(self) -> None:
        """Join other processes; here there are none."""


@dataclasses.dataclass(frozen=True)
class Devices(LocalDevices):
    """The devices of a run, of this process or of several.

    Attributes:
      coordinator: HOST:PORT of the first of several processes; start each with the same settings.
      processes: Number of processes.
      process: Number of this process, from 0; the first writes all files.
      cluster: Take the three above from Slurm, Open MPI or another cluster.
    """

    coordinator: str | None = None
    processes: Count | None = None
    process: int | None = None
    cluster: bool = False

    def start(self, *, quiet: bool = False, exact: bool = False) -> None:
        """Start JAX; only the first of several processes says so."""
        super().start(quiet=quiet or self.cluster or bool(self.process), exact=exact)

    def join(self) -> None:
        """Join the other processes, unless reading a user's own part has done so."""
        import jax

        from fedjaxsim.engine import processes

        joined = jax.distributed.is_initialized()
        if not joined and (self.cluster or self.coordinator is not None):
            processes.join(self.coordinator, self.processes, self.process)

    def validate(self) -> None:
        """Check the flags against each other."""
        super().validate()
        three = (self.coordinator, self.processes, self.process)
        if three == (None, None, None):
            return
        if self.cluster:
            raise ValueError("cluster and coordinator, processes, process exclude each other")
        coordinator, processes, process = three
        if coordinator is None or processes is None or process is None:
            needed = "--coordinator HOST:PORT, --processes N and --process I, or --cluster alone"
            raise ValueError(f"several processes need {needed}")
        port = re.fullmatch(r"\S+:(\d+)", coordinator)
        if port is None or not 0 < int(port[1]) < 2**16:
            raise ValueError(f"coordinator must be HOST:PORT, port 1 to 65535, got {coordinator!r}")
        checks.count(0, processes - 1, process=process)
