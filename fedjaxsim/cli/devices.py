"""Flags of several commands: the devices of this process, and of several processes."""

import dataclasses
import gc
import re
from typing import Annotated

from fedjaxsim import checks
from fedjaxsim.factories import Count, Options


@dataclasses.dataclass(frozen=True)
class LocalDevices(Options):
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
            from fedjaxsim.engine import processes
            from fedjaxsim.engine.compilation_cache import keep_compiled_programs

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
