"""`fedjaxsim run`."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from fedjaxsim.cli.machines import Machines, Saving
from fedjaxsim.runs.settings import RunConfig

LOGGERS = Literal["tensorboard", "wandb", "mlflow", "trackio"]


def run(
    config: Path | None = None,
    *,
    settings: RunConfig,
    from_: Path | None = None,
    explain: bool = False,
    log: LOGGERS | None = None,
    saving: Saving,
    machines: Machines,
) -> Callable[[], int]:
    """Run one federated simulation.

    Args:
      config: TOML file with the same settings; flags win over it.
      settings: The settings of the run.
      from_: Start from the state of the run in this directory, on its data, settings and charges.
      explain: Print the whole guarantee.
      log: Logger of every evaluation, an extra: pip install 'fedjaxsim[NAME]'.
      saving: What is kept.
      machines: Devices.
    """
    del config
    if settings.streamed and (machines.count or 1) > 1:
        raise ValueError(f"a streamed run takes one device, got devices {machines.devices}")
    machines.start()
    from fedjaxsim.cli.multiprocess import in_all_processes
    from fedjaxsim.cli.running import prepare_run

    return in_all_processes(
        lambda: prepare_run(
            settings,
            from_,
            checkpoint_every=saving.checkpoint_every,
            log=log,
            explain=explain,
        ),
        machines.count,
    )
