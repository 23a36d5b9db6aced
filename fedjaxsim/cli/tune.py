"""`fedjaxsim tune`."""

from pathlib import Path

from fedjaxsim.cli.flags import Work, without
from fedjaxsim.cli.machines import Machines
from fedjaxsim.cli.question import Question
from fedjaxsim.runs.settings import RunConfig


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

    Settings are those of `run`; tuned ones start there. Without --held-out-clients or
    --public-data, tuning uses validation rows of the run's own clients, which no ε covers: 0.2 of
    the training rows, unless --validation-fraction says otherwise. `run` with the tuned.toml in
    --out runs with the result.

    Args:
      settings: The settings of the run.
      out: Directory for the results.
      overwrite: Replace the tuning in the directory.
      quiet: Print the result and errors only.
      question: What is tuned, and how.
    """
    Machines().start()
    from fedjaxsim.cli.tuning import prepare_tune

    return prepare_tune(settings, out, question, overwrite=overwrite, quiet=quiet)
