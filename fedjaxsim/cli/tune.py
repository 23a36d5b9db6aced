"""`fedjaxsim tune`."""

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fedjaxsim.cli.devices import LocalDevices
from fedjaxsim.cli.flags import Overwrite, Quiet, Work
from fedjaxsim.factories import Count, Options
from fedjaxsim.runs.settings import RunConfig

if TYPE_CHECKING:
    from fedjaxsim.tuning.run import TuningResult


@dataclasses.dataclass(frozen=True)
class TuneOptions(Options):
    """Options that a tuning depends on, besides the settings of a run.

    Attributes:
      wrt: Positive hyperparameters to tune, as learning-rate,clip; without it, the error lists
        the algorithm's.
      seeds: S, runs per point, whose mean is minimized; all points share the seeds.
      steps: Most points to try besides the start.
      metric: Smooth metric to improve; by default loss.
    """

    wrt: tuple[str, ...] = ()
    seeds: Annotated[int, range(2, 2**31)] = 4
    steps: Count = 20
    metric: str | None = None


def tune(
    *,
    settings: RunConfig,
    out: Path,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    logger: tuple[str, ...] = (),
    options: TuneOptions,
) -> Work:
    """Tune hyperparameters by gradient descent through whole runs, at a fixed guarantee.

    Settings are `run`'s; tuned ones start there. Without --held-out-clients, tuning uses
    validation rows of the clients, which no ε covers: 0.2 of the training rows, unless
    --validation-fraction says otherwise. `run` with the tuned.toml in --out runs with the result,
    on other data if --data names them.

    Args:
      out: Directory for the results; the same command goes on there.
      logger: Trackers of the points that are tried, as for `run`.
    """
    LocalDevices().start(quiet=quiet)
    from fedjaxsim.cli.messages import say
    from fedjaxsim.cli.process import end_stopped, stoppable
    from fedjaxsim.privacy.assumptions import SHARED_SEED
    from fedjaxsim.report.progress import doing
    from fedjaxsim.runs.loggers import find_loggers
    from fedjaxsim.tuning.descent import NOT_FINITE
    from fedjaxsim.tuning.run import TUNED, prepare_tuning

    asked, loggers = dataclasses.asdict(options), find_loggers(logger)
    how: dict[str, Any] = {"loggers": loggers, "overwrite": overwrite, "quiet": quiet}
    with doing(f"reading {settings.data} and checking the tuning", quiet=quiet):
        tuning = prepare_tuning(settings, out, asked, **how)

    def work() -> int:
        with stoppable(lambda: "the steps so far are kept; the same command continues") as stop:
            done = tuning.run(stop)
        if done.ended == NOT_FINITE:
            wrong = " and ".join(done.trace.steps[-1].objective.not_finite)
            say(f"{done.ended} ({wrong}): start elsewhere")
            return 1
        _print(done)
        print(done.statement)
        print(SHARED_SEED)
        again = f"fedjaxsim run {shlex.quote(str(out / TUNED))} --out DIR"
        print(f"files in {out}; {again} runs with the result")
        if not stop.is_set():
            return 0
        hint = "the path so far is kept; run the same command again to resume"
        return end_stopped([stop.number], f"; {hint}")

    return work


def _print(done: "TuningResult") -> None:
    """Print the start and the result, on the seeds of the tuning and on fresh ones."""
    from fedjaxsim.cli.printing import print_rows
    from fedjaxsim.factories import flag
    from fedjaxsim.report.progress import number
    from fedjaxsim.report.results import Estimate, estimate
    from fedjaxsim.tuning.run import shown

    trace, test, metric = done.trace, done.test, done.title
    first = trace.steps[0]
    rows = [
        [name, *map(shown, step.point.values()), str(step.objective.estimate),
         str(estimate([*(test or {}).get(name, ())]))]
        for name, step in (("start", first), ("tuned", trace.best))
    ]  # fmt: skip
    names = [f"{metric} on the tuning's seeds", "on fresh ones"]
    print_rows(["", *map(flag, first.point), *names], rows)
    if test is None:
        print(f"{metric} was not tested on fresh seeds; ended: {done.ended}")
        return
    gain = Estimate(test["gain"], test["half"], None, len(test["start"]))
    moved = "rose" if trace.larger_is_better else "fell"
    change = f"{metric} {moved} by {gain} on {gain.seeds} fresh seeds"
    print(f"{change} (95 %; paired t test, p = {number(test['p'])}); ended: {done.ended}")
