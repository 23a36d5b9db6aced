"""`fedjaxsim demo`."""

from collections.abc import Callable
from pathlib import Path

from fedjaxsim import checks
from fedjaxsim.cli.machines import Machines

DEMO = Path(__file__).parents[1] / "runs" / "demo.toml"


def demo(
    *,
    out: Path,
    seed: int = 0,
    seeds: int = 3,
    overwrite: bool = False,
    quiet: bool = False,
) -> Callable[[], int]:
    """Compare Ditto, PMTL, FedAvg and Local on digits over 100 clients, private and not.

    Args:
      out: Directory of the results; an interrupted demo resumes in it.
      seed: First seed; the others follow it.
      seeds: Seeds per method, each with another partition, other test rows and other noise.
      overwrite: Replace the results in the directory.
      quiet: Print the result and errors only.
    """
    checks.count(seeds=seeds)
    Machines().start()
    from fedjaxsim.cli.sweeping import prepare_sweep

    return prepare_sweep(
        DEMO, out, seeds=range(seed, seed + seeds), checkpoint_every=None,
        overwrite=overwrite, quiet=quiet,
    )  # fmt: skip
