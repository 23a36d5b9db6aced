"""`fedjaxsim tune`."""

import dataclasses
from pathlib import Path
from typing import Annotated

from fedjaxsim.cli.flags import Work, without
from fedjaxsim.cli.machines import Machines
from fedjaxsim.factories import Count
from fedjaxsim.runs.settings import RunConfig


@dataclasses.dataclass(frozen=True)
class Question:
    """Options that a tuning depends on, besides the settings of a run.

    Attributes:
      wrt: Positive hyperparameters to tune, as learning-rate,clip; without it, the error lists
        those of the algorithm.
      seeds: S, runs per point, whose mean is minimized; all points share the seeds.
      steps: Most points to try besides the start.
      metric: Smooth metric to improve; by default loss.
    """

    wrt: tuple[str, ...] = ()
    seeds: Annotated[int, range(2, 2**31)] = 4
    steps: Count = 20
    metric: str | None = None


@without(
    "audit_canaries", "budget_epsilon", "clients_used", "evaluate_privately", "evaluation_largest",
    "streamed",
)  # fmt: skip
def tune(
    *,
    settings: RunConfig,
    out: Path,
    overwrite: bool = False,
    quiet: bool = False,
    question: Question,
) -> Work:
    """Tune hyperparameters by gradient descent through whole runs, at a fixed guarantee.

    Settings are those of `run`; tuned ones start there. Without --held-out-clients, tuning uses
    validation rows of the clients, which no ε covers: 0.2 of the training rows, unless
    --validation-fraction says otherwise. `run` with the tuned.toml in --out runs with the result,
    on other data if --data names them.

    Args:
      settings: The settings of the run.
      out: Directory for the results.
      overwrite: Replace the tuning in the directory.
      quiet: Print the result and errors only.
      question: What is tuned, and how.
    """
    Machines().start(quiet=quiet)
    from fedjaxsim.cli.tuning import prepare_tune
    from fedjaxsim.report.progress import doing

    asked = dataclasses.asdict(question)
    with doing(f"reading {settings.data} and checking the tuning", quiet=quiet):
        return prepare_tune(settings, out, asked, overwrite=overwrite, quiet=quiet)
