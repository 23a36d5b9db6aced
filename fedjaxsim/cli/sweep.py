"""`fedjaxsim sweep` and `fedjaxsim demo`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedjaxsim import checks
from fedjaxsim.cli.devices import LocalDevices
from fedjaxsim.cli.flags import Overwrite, Quiet, Work
from fedjaxsim.factories import Count
from fedjaxsim.privacy.entries import LARGEST_NOISE, SMALLEST_NOISE
from fedjaxsim.runs.output import FigureAxis

if TYPE_CHECKING:
    from fedjaxsim.runs.selecting import PrivateSelection
    from fedjaxsim.runs.sweeping import SearchedSweep, Sweep

DEMO = Path(__file__).parents[1] / "runs" / "demo.toml"


def sweep(
    config: Path | None = None,
    *,
    axes: Mapping[str, Any],
    out: Path,
    seeds: Count | None = None,
    overwrite: Overwrite = False,
    select_privately: str | None = None,
    score_noise: float | None = None,
    score_largest: float = 1.0,
    quiet: Quiet = False,
    checkpoint_every: Count | None = None,
    logger: tuple[str, ...] = (),
    devices: LocalDevices,
    figure: FigureAxis,
) -> Work:
    """Run a grid of settings as one program, and draw the best of each family.

    All flags of `run` are settings of its runs, and a list is an axis: --algorithm pmtl,ditto
    --lam 0.1,1 --seeds 3 are twelve runs.

    Args:
      config: Settings of a run and, in tables [sweep], the values to combine; flags win over it.
      out: Directory of the results; an interrupted sweep resumes in it.
      seeds: Seeds of each setting, from --seed on.
      select_privately: Publish the best of a random number of runs: geometric:10 are 10 on average,
        with one ε for all of it (zero-out).
      score_noise: z of the noise on the validation metric by which it is selected.
      score_largest: Public bound to which clients' metrics are clipped for that.
      checkpoint_every: Rounds between checkpoints, as for `run`.
      logger: Trackers, as for `run`; each finished run is a separate run there.
    """
    chooses = select_privately is not None
    if chooses != (score_noise is not None) or (score_largest != 1 and not chooses):
        needs = "score-noise and score-largest need select-privately"
        raise ValueError(f"select-privately needs score-noise, and {needs}")
    if score_noise is not None:
        checks.in_range(f"[{SMALLEST_NOISE}, {LARGEST_NOISE}]", score_noise=score_noise)
    checks.positive(score_largest=score_largest)
    axis = figure.axis
    if chooses and axis.over != "rounds":
        raise ValueError("over has no effect with select-privately, which draws no curves")
    if chooses and logger:
        raise ValueError("select-privately excludes logger: its runs that lose stay secret")
    devices.start(quiet=quiet, exact=True)
    from fedjaxsim.report.progress import doing
    from fedjaxsim.runs.loggers import find_loggers
    from fedjaxsim.runs.selecting import prepare_selection
    from fedjaxsim.runs.sweep_runs import read_plan, read_sweep
    from fedjaxsim.runs.sweeping import prepare_sweep

    what = f"reading the data and checking the runs of {config or out}"
    with doing(what, quiet=quiet) as say_how_far:
        if select_privately is None or score_noise is None:
            how: Any = {"checkpoint_every": checkpoint_every, "overwrite": overwrite}
            how |= {"quiet": quiet, "say_how_far": say_how_far, "axis": axis}
            how |= {"loggers": find_loggers(logger)}
            return _work(prepare_sweep(read_plan(config, axes, seeds), out, **how))
        plan, score = read_sweep(config, axes, seeds), (score_noise, score_largest)
        how = {"overwrite": overwrite, "say_how_far": say_how_far}
        return _select(prepare_selection(plan, out, select_privately, score, **how))


def demo(
    *,
    out: Path = Path("runs/demo"),
    seed: int = 0,
    seeds: Count = 3,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> Work:
    """Compare Ditto, PMTL, FedAvg and Local on digits over 100 clients, private and not.

    Args:
      out: Directory of the results; an interrupted demo resumes in it.
      seed: First seed; the others follow it.
      seeds: Seeds per method, each with another partition, other test rows and other noise.
    """
    LocalDevices().start(quiet=quiet)
    from fedjaxsim.report.progress import doing
    from fedjaxsim.runs.sweep_runs import read_plan
    from fedjaxsim.runs.sweeping import prepare_sweep

    with doing("reading digits and checking the runs", quiet=quiet):
        plan = read_plan(DEMO, {"seed": seed}, seeds)
        return _work(prepare_sweep(plan, out, overwrite=overwrite, quiet=quiet))


def _work(prepared: "Sweep | SearchedSweep") -> Work:
    """Return the work of a sweep, which prints its report."""
    from fedjaxsim.cli.messages import say
    from fedjaxsim.cli.printing import print_sweep, warn_if_no_matplotlib
    from fedjaxsim.cli.process import end_stopped, stoppable

    def work() -> int:
        if prepared.remark:
            say(f"warning: {prepared.remark}")
        warn_if_no_matplotlib()
        hint = "finished runs and checkpoints are kept; the same command continues"
        with stoppable(lambda: hint) as stop:
            done = prepared.run(stop)
        if done.best is not None:
            print_sweep(done, done.best)
        print(f"files in {done.path}")
        if not done.left:
            return 0
        unfinished = f"{done.left} of {len(done.plan.runs)} runs to finish"
        again = "run the same command again to resume"
        return end_stopped([stop.number], f" with {unfinished}; {again}")

    return work


def _select(prepared: "PrivateSelection") -> Work:
    """Return the work of a private selection, which prints its result."""
    from fedjaxsim.cli.printing import print_guarantee
    from fedjaxsim.cli.process import end_stopped, stoppable
    from fedjaxsim.runs.directory import GUARANTEE

    def work() -> int:
        with stoppable(lambda: "nothing was selected") as stop:
            content = prepared.run(stop)
        if content is None:
            nothing = ": nothing was selected; run the same command again"
            return end_stopped([stop.number], nothing)
        print("  ".join(f"{key} {value}" for key, value in content.items()))
        print_guarantee(prepared.report, prepared.path / GUARANTEE, explain=False)
        print(f"files in {prepared.path}")
        return 0

    return work
