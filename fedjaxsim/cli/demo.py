"""`fedjaxsim demo`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from fedjaxsim.cli.shared_flags import Machines


@dataclasses.dataclass(frozen=True)
class Demo:
    """Compare Ditto, PMTL, FedAvg and Local on digits over 100 clients, private and not."""

    out: Path
    """Directory of the runs, the table and the curves."""
    seed: int = 0
    """First seed; the others follow it."""
    seeds: int = 3
    """Seeds per system, each with another partition, other test rows and other noise."""
    overwrite: bool = False
    """Replace the runs in the directory."""
    quiet: bool = False
    """Print one plain line per evaluation, no progress bars."""
    explain: bool = False
    """Print the whole guarantee of each run and its assumptions."""

    def prepare(self) -> Callable[[], int]:
        """Check all input; return a function that runs the demo."""
        Machines().start()
        from fedjaxsim.runs.demo import prepare_demo

        return prepare_demo(
            self.out,
            range(self.seed, self.seed + self.seeds),
            overwrite=self.overwrite,
            quiet=self.quiet,
            explain=self.explain,
        )
