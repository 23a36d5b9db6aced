"""`fedjaxsim resume`."""

from collections.abc import Callable
from pathlib import Path

from fedjaxsim.cli.machines import Machines, Saving
from fedjaxsim.cli.run import LOGGERS


def resume(
    directory: Path,
    *,
    rounds: int | None = None,
    quiet: bool = False,
    explain: bool = False,
    log: LOGGERS | None = None,
    saving: Saving,
    machines: Machines,
) -> Callable[[], int]:
    """Resume an interrupted or killed run, or extend a finished one.

    Args:
      directory: Directory of the run; its config.toml holds the settings.
      rounds: Total rounds, finished ones included; rounds beyond the plan spend more epsilon.
      quiet: Print the result and errors only.
      explain: Print the whole guarantee and its assumptions.
      log: Logger of every evaluation, an extra: pip install 'fedjaxsim[NAME]'.
      saving: What is kept.
      machines: Devices.
    """
    machines.start()
    from fedjaxsim.cli.multiprocess import in_all_processes
    from fedjaxsim.cli.running import prepare_resume

    return in_all_processes(
        lambda: prepare_resume(
            directory,
            rounds,
            checkpoint_every=saving.checkpoint_every,
            log=log,
            quiet=quiet,
            explain=explain,
        ),
        machines.count,
    )
