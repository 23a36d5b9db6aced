"""`fedjaxsim sweep` and `fedjaxsim demo`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedjaxsim.cli.flags import Work
from fedjaxsim.cli.machines import Machines
from fedjaxsim.factories import Count

DEMO = Path(__file__).parents[1] / "runs" / "demo.toml"


def sweep(
    config: Path | None = None,
    *,
    axes: Mapping[str, Any],
    out: Path,
    seeds: Count | None = None,
    overwrite: bool = False,
    select_privately: str | None = None,
    score_noise: float | None = None,
    score_largest: float = 1.0,
    quiet: bool = False,
    checkpoint_every: Count | None = None,
    devices: str = "all",
) -> Work:
    """Run a grid of settings as one program, and draw the best of each family.

    All flags of `run` are settings of its runs, and a list is an axis: --algorithm pmtl,ditto
    --lam 0.1,1 --seeds 3 are twelve runs.

    Args:
      config: Settings of a run and, in tables [sweep], the values to combine; flags win over it.
      axes: Settings in flags.
      out: Directory of the results; an interrupted sweep resumes in it.
      seeds: Seeds of each setting, from --seed on.
      overwrite: Replace the results in the directory.
      select_privately: Publish the best of a random number of runs: geometric:10 are 10 on average,
        with an ε of the whole.
      score_noise: z of the noise on the validation metric by which it is selected.
      score_largest: Public bound to which clients' metrics are clipped for that.
      quiet: Print the result and errors only.
      checkpoint_every: Rounds between checkpoints, as for `run`.
      devices: Devices that share the runs, all or a number; of a CPU, its cores.
    """
    chooses = select_privately is not None
    if chooses != (score_noise is not None) or (score_largest != 1 and not chooses):
        others = "score-noise and score-largest need select-privately"
        raise ValueError(f"select-privately needs score-noise, and {others}")
    machines = Machines(devices)
    machines.start(quiet=quiet)
    from fedjaxsim.cli.sweeping import prepare_selection, prepare_sweep
    from fedjaxsim.engine.processes import require
    from fedjaxsim.report.progress import doing

    require(machines.count)
    how = {"checkpoint_every": checkpoint_every, "overwrite": overwrite, "quiet": quiet}
    with doing(f"reading the data and checking the runs of {config or out}", quiet=quiet):
        if select_privately is None or score_noise is None:
            return prepare_sweep(config, out, axes, seeds, **how)
        score = score_noise, score_largest
        return prepare_selection(
            config, out, axes, seeds, select_privately, score, overwrite=overwrite
        )


def demo(
    *,
    out: Path = Path("runs/demo"),
    seed: int = 0,
    seeds: Count = 3,
    overwrite: bool = False,
    quiet: bool = False,
) -> Work:
    """Compare Ditto, PMTL, FedAvg and Local on digits over 100 clients, private and not.

    Args:
      out: Directory of the results; an interrupted demo resumes in it.
      seed: First seed; the others follow it.
      seeds: Seeds per method, each with another partition, other test rows and other noise.
      overwrite: Replace the results in the directory.
      quiet: Print the result and errors only.
    """
    Machines().start(quiet=quiet)
    from fedjaxsim.cli.sweeping import prepare_sweep
    from fedjaxsim.report.progress import doing

    of_seeds = {"seed": list(range(seed, seed + seeds))}
    with doing("reading digits and checking the runs", quiet=quiet):
        return prepare_sweep(DEMO, out, of_seeds, overwrite=overwrite, quiet=quiet)
