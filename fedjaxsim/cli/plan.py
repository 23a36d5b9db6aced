"""`fedjaxsim plan`."""

import dataclasses
from collections.abc import Callable
from typing import Annotated

import tyro
from tyro.conf import OmitArgPrefixes

from fedjaxsim.cli.shared_flags import ConfigFile, Machines, WithSettings
from fedjaxsim.privacy.hypothetical import OptionalInt
from fedjaxsim.runs.fields import listed, optional
from fedjaxsim.runs.numbers import integers
from fedjaxsim.runs.settings import RunConfig, flag

_READ = {"clients", "classes", "test_fraction", "validation_fraction", "seed"}
"""Settings of the data that a plan without data reads."""


def _positive(text: str) -> tuple[int, ...]:
    """Read one or more positive whole numbers between commas."""
    found = integers(text)
    if min(found, default=0) < 1:
        raise ValueError(f"must be positive whole numbers, got {text!r}")
    return found


@dataclasses.dataclass(frozen=True)
class Plan(WithSettings):
    """Estimate the memory of a run for every placement, without running it."""

    settings: OmitArgPrefixes[RunConfig]
    config: ConfigFile = None
    """TOML file with the same settings; flags win over it."""
    features: Annotated[
        tuple[int, ...],
        listed("INT", _positive),
        tyro.conf.arg(help_behavior_hint="(default: those of the data)"),
    ] = ()
    """Shape of one example, as 784 or 28,28,1, in place of data: --clients with
    --rows-per-client each, and --classes."""
    rows_per_client: OptionalInt = None
    """Rows of each client in place of data, test rows included."""
    devices: OptionalInt = None
    """Number of accelerators to plan for, each with --device-memory."""
    device_memory: Annotated[float | None, optional("GB", "none")] = None
    """Memory of one accelerator, in GB (10⁹ bytes)."""
    host_memory: Annotated[float | None, optional("GB", "this machine's")] = None
    """Memory of their host, in GB."""
    json: bool = False
    """Print JSON instead of tables."""

    def prepare(self) -> Callable[[], int]:
        """Plan; return a function that prints the tables."""
        self._check()
        Machines().start()
        from fedjaxsim.commands.plan import prepare_plan

        return prepare_plan(
            self.settings,
            self.features or None,
            self.rows_per_client or 0,
            devices=self.devices or 0,
            device_memory=self.device_memory or 0.0,
            host_memory=self.host_memory,
            json=self.json,
        )

    def _check(self) -> None:
        config = self.settings
        if config.out is not None:
            raise ValueError(f"out must not be given, as a plan writes no files, got {config.out}")
        if not self.features and self.rows_per_client is not None:
            raise ValueError("rows-per-client is for a plan without data: give features, too")
        if self.features:
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
            raise ValueError("host-memory needs accelerators: give devices, too")
