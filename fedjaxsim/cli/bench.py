"""`fedjaxsim bench`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tyro


@dataclasses.dataclass(frozen=True)
class Bench:
    """Measure speed and memory of named workloads against this machine's ceilings."""

    workloads: Annotated[
        str | None, tyro.conf.arg(metavar="NAME[,NAME...]", help_behavior_hint="(default: all)")
    ] = None
    """Which workloads; the name of a growth curve stands for all its points."""
    list: bool = False
    """Only say which workloads there are."""
    processes: int = 5
    """Processes per workload, each of them new (at most 3 per point of a growth curve)."""
    data: Annotated[
        str | None,
        tyro.conf.arg(metavar="leaf:PATH", help_behavior_hint="(default: from FEDJAXSIM_DATA)"),
    ] = None
    """FEMNIST, for the workloads that take it; random images where there is none."""
    out: Annotated[
        Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: none)")
    ] = None
    """Directory for bench.json, bench.png and growth.png; without it only the terminal shows
    results."""
    overwrite: bool = False
    """Replace the results that the directory already holds."""
    compare: Annotated[
        tuple[Path, ...],
        tyro.conf.arg(metavar="OLD.json [NEW.json]", help_behavior_hint="(default: none)"),
    ] = ()
    """Earlier results to compare with. Given two files, nothing is measured: the second is
    compared with the first."""

    def prepare(self) -> Callable[[], int]:
        """As `prepare_bench`."""
        from fedjaxsim.cli.work.bench import prepare_bench

        return prepare_bench(self)
