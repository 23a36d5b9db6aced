"""`fedjaxsim demo`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from fedjaxsim.cli.shared_flags import Machines

DEMO = Path(__file__).parents[1] / "runs" / "demo.toml"


@dataclasses.dataclass(frozen=True)
class Demo:
    """Compare Ditto, PMTL, FedAvg and Local on digits over 100 clients, private and not."""

    out: Path
    """Directory of the results; an interrupted demo resumes in it."""
    seed: int = 0
    """First seed; the others follow it."""
    seeds: int = 3
    """Seeds per method, each with another partition, other test rows and other noise."""
    overwrite: bool = False
    """Replace the results in the directory."""
    quiet: bool = False
    """Print one plain line per evaluation, no progress bars."""

    def prepare(self) -> Callable[[], int]:
        """Check all input; return a function that runs the demo."""
        Machines().start()
        from fedjaxsim.commands.sweep import prepare_sweep

        if self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {self.seeds}")
        return prepare_sweep(
            DEMO, self.out, seeds=range(self.seed, self.seed + self.seeds), checkpoint_every=None,
            on_full_disk="stop", overwrite=self.overwrite, quiet=self.quiet,
        )  # fmt: skip
