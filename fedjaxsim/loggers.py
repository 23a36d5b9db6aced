"""Loggers of runs: tensorboard, wandb, mlflow, trackio."""

import contextlib
import importlib
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedjaxsim import checks, extras
from fedjaxsim.engine.loop import Callback, Segment
from fedjaxsim.engine.state import SimulationState

LOGGERS = "tensorboard", "wandb", "mlflow", "trackio"
PROJECT = "fedjaxsim"
"""Project of the runs that are sent."""


class Logger(Callback):
    """Send each evaluation to a logger.

    It gets the finite numbers of the record (see `RunLoop.records`), and `rounds/NAME`, the mean of
    each per-round metric over the segment.

    Args:
      name: One of `LOGGERS`. Environment variables of wandb (WANDB_MODE,
        WANDB_PROJECT) and mlflow (MLFLOW_TRACKING_URI) apply.
      title: name of the run.
      settings: settings of the run, by name.
      directory: parent of tensorboard's folder `tensorboard`; the others need none.

    Raises:
      MissingExtraError: if the library is not installed.
      ValueError: for another name, or if tensorboard has no directory.
    """

    everywhere, initial = False, True

    def __init__(
        self,
        name: str,
        title: str = "run",
        settings: Mapping[str, Any] | None = None,
        directory: Path | str | None = None,
    ):
        checks.one_of(LOGGERS, log=name)
        extras.require(name)
        if name == "tensorboard" and directory is None:
            raise ValueError("log tensorboard needs a directory for its files (out)")
        self._name, self._title = name, title
        self._settings, self._directory = dict(settings or {}), Path(directory or ".")

    def start(self, state: SimulationState) -> None:
        """Open the log."""
        self._write = self._opened(self.run.closing)

    def segment(self, state: SimulationState, segment: Segment) -> None:
        """Log an evaluation."""
        record = self.run.record(state, segment)
        values = {name: value for name, value in record.items() if name != "round"}
        values |= {f"rounds/{k}": each.mean() for k, each in segment.metrics.items() if len(each)}
        known = {name: float(value) for name, value in values.items() if value is not None}
        finite = {name: value for name, value in known.items() if math.isfinite(value)}
        self._write(finite, step=segment.round)

    def _opened(self, closing: contextlib.ExitStack) -> Callable[..., Any]:
        """Open a log; return the function that writes values by name at a `step`."""
        if self._name == "tensorboard":
            from tensorboardX import SummaryWriter

            writer = SummaryWriter(str(self._directory / "tensorboard"))
            closing.callback(writer.close)

            def write(values: Mapping[str, float], step: int) -> None:
                for name, value in values.items():
                    writer.add_scalar(name, value, step)
                writer.flush()

            return write
        library = importlib.import_module(self._name)
        if self._name == "mlflow":
            library.start_run(run_name=self._title)
            library.log_params(self._settings)
            closing.callback(library.end_run)
            return library.log_metrics
        project = os.environ.get("WANDB_PROJECT", PROJECT) if self._name == "wandb" else PROJECT
        library.init(project=project, name=self._title, config=self._settings)
        closing.callback(library.finish)
        return library.log
