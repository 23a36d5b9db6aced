"""`fedjaxsim plan`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from fedjaxsim.cli.start import start_jax
from fedjaxsim.privacy.hypothetical import OptionalInt
from fedjaxsim.runs.numbers import integers
from fedjaxsim.runs.settings import RunConfig, flag, optional

_READ = {"clients", "classes", "test_fraction", "validation_fraction", "seed"}
"""Settings of the data that a plan without data reads."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Say what memory a run would need, wherever its rows and states lie; nothing is run."""

    settings: OmitArgPrefixes[RunConfig]
    config: Positional[Annotated[Path | None, tyro.conf.arg(metavar="[CONFIG.toml]")]] = None
    """A TOML file with the same settings; flags win over it."""
    features: Annotated[str | None, optional("INT[,INT...]", "those of the data")] = None
    """The shape of one example, as 784 or 28,28,1: then no data are read, and there are --clients
    with --rows-per-client each, and --classes."""
    rows_per_client: OptionalInt = None
    """Rows that each client has where no data are read, those for testing among them."""
    devices: OptionalInt = None
    """Plan for so many accelerators, too, each with --device-memory."""
    device_memory: Annotated[float | None, optional("GB", "none")] = None
    """Memory of one accelerator, in GB (10⁹ bytes)."""
    host_memory: Annotated[float | None, optional("GB", "this machine's")] = None
    """Memory of their host, in GB."""
    json: bool = False
    """Print JSON instead of tables."""

    def prepare(self) -> Callable[[], int]:
        """Plans; what is returned prints it.

        Raises:
          FileNotFoundError, ValueError: for bad input.
        """
        self._check()
        start_jax()
        from fedjaxsim.cli.work.plan import prepare_plan

        return prepare_plan(self)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Of one example, where no data are read."""
        if self.features is None:
            return None
        try:
            shape = integers(self.features)
        except ValueError:
            shape = ()
        if min(shape, default=0) < 1:
            raise ValueError(f"features must be positive whole numbers, got {self.features!r}")
        return shape

    def _check(self) -> None:
        """Checks the flags as far as they say.

        Raises:
          ValueError: naming the flag, its value and what is allowed.
        """
        config = self.settings
        if config.out is not None:
            raise ValueError(f"out must not be given, as a plan writes no files, got {config.out}")
        if self.shape is None and self.rows_per_client is not None:
            raise ValueError("rows-per-client is for a plan without data: give features, too")
        if self.shape is not None:
            if self.rows_per_client is None:
                raise ValueError("a plan without data needs clients and rows-per-client")
            if unread := sorted(config.given().keys() & config.data_settings() - _READ):
                raise ValueError(f"{flag(unread[0])} has no effect where features are given")
        for name in ("devices", "device_memory", "host_memory"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{flag(name)} must be a positive number, got {value}")
        if (self.devices is None) != (self.device_memory is None):
            raise ValueError("accelerators need both --devices N and --device-memory GB")
        if self.host_memory is not None and self.devices is None:
            raise ValueError("host-memory is that of accelerators: give devices, too")
