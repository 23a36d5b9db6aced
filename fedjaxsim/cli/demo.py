"""`fedjaxsim demo`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from fedjaxsim.cli.start import start_jax


@dataclasses.dataclass(frozen=True)
class Demo:
    """Compare Ditto, PMTL, FedAvg and Local on digits over 100 clients, private and not."""

    out: Path
    """Directory for the runs, the table and the curves."""
    seed: int = 0
    """The first seed; the others follow it."""
    seeds: int = 3
    """How many seeds each system runs with: another partition, other test rows, other noise."""
    overwrite: bool = False
    """Replace the runs that the directory already holds."""
    quiet: bool = False
    """No progress bars: one plain line per evaluation."""
    explain: bool = False
    """Print all of each run's guarantee, and what it rests on."""

    def prepare(self) -> Callable[[], int]:
        """As `prepare_demo`."""
        start_jax()
        from fedjaxsim.runs.demo import prepare_demo

        return prepare_demo(
            self.out,
            range(self.seed, self.seed + self.seeds),
            overwrite=self.overwrite,
            quiet=self.quiet,
            explain=self.explain,
        )
