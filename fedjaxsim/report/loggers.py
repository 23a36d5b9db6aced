"""Loggers: callbacks for `Simulation.run(..., on_segment=…)` and for `fedjaxsim run --log`.

A callback of one's own is a function of (state, segment); these are such functions.
"""

import importlib
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fedjaxsim import extras

if TYPE_CHECKING:
    from fedjaxsim.engine.segments import Segment
    from fedjaxsim.engine.state import SimulationState

Values = dict[str, float]
Epsilon = Callable[["SimulationState"], float | None]

PROJECT = "fedjaxsim"


class Logger:
    """Writes the numbers of each evaluation; closes at the end of a `with` block.

    Logged are the metrics of the evaluation (`test_accuracy`, …), `rounds/NAME`, the mean over the
    segment's rounds of each metric of a round, and `epsilon`, where it is finite.

    Args:
      write: `(round, values)`.
      close: what ends the log.
      epsilon: `(state) -> ε so far`; None logs none.
    """

    def __init__(
        self,
        write: Callable[[int, Values], Any],
        close: Callable[[], Any],
        epsilon: Epsilon | None = None,
    ):
        self._write, self._close, self._epsilon = write, close, epsilon

    def __call__(self, state: "SimulationState", segment: "Segment") -> None:
        """Logs one evaluation."""
        rounds = {name: value for name, value in segment.metrics.items() if len(value)}
        values = {f"rounds/{name}": value.mean() for name, value in rounds.items()}
        values |= segment.evaluation.summary()
        if self._epsilon is not None and (spent := self._epsilon(state)) is not None:
            values["epsilon"] = spent
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        self._write(segment.round, finite)

    def __enter__(self) -> Self:
        """The logger."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the log."""
        self._close()


def require(name: str, directory: Path | None) -> None:
    """Check that a logger can be opened.

    Args:
      name: of the logger, and of the extra that installs its library.
      directory: of the run.

    Raises:
      MissingExtraError: if its library is not installed.
      ValueError: if there is no directory for files.
    """
    extras.require(name)
    if name == "tensorboard" and directory is None:
        raise ValueError("log tensorboard writes files: say where with out")


def open_logger(
    name: str,
    title: str,
    settings: Mapping[str, Any],
    directory: Path | None,
    epsilon: Epsilon | None = None,
) -> Logger:
    """Begins a log.

    Args:
      name: tensorboard, wandb, mlflow or trackio.
      title: of the run.
      settings: of the run, by name.
      directory: of the run; TensorBoard's events go to `tensorboard` in it.
      epsilon: as of `Logger`.

    Raises:
      MissingExtraError, ValueError: as `require`.
    """
    require(name, directory)
    if name == "tensorboard":
        assert directory is not None
        return tensorboard(directory / "tensorboard", epsilon)
    make = {"wandb": wandb, "mlflow": mlflow, "trackio": trackio}[name]
    return make(title, settings, epsilon)


def tensorboard(directory: Path | str, epsilon: Epsilon | None = None) -> Logger:
    """Event files for TensorBoard, written by tensorboardX."""
    with extras.importing("tensorboard"):
        from tensorboardX import SummaryWriter

    writer = SummaryWriter(str(directory))

    def write(round_: int, values: Values) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, round_)
        writer.flush()

    return Logger(write, writer.close, epsilon)


def wandb(title: str, settings: Mapping[str, Any], epsilon: Epsilon | None = None) -> Logger:
    """A run of Weights & Biases; its own variables (WANDB_MODE, WANDB_PROJECT) hold."""
    with extras.importing("wandb"):
        library = importlib.import_module("wandb")
    project = os.environ.get("WANDB_PROJECT", PROJECT)
    run = library.init(project=project, name=title, config=dict(settings))
    return Logger(lambda round_, values: run.log(values, step=round_), run.finish, epsilon)


def mlflow(title: str, settings: Mapping[str, Any], epsilon: Epsilon | None = None) -> Logger:
    """A run of MLflow; its own variables (MLFLOW_TRACKING_URI, …) hold."""
    with extras.importing("mlflow"):
        library = importlib.import_module("mlflow")
    library.start_run(run_name=title)
    library.log_params(dict(settings))
    return Logger(
        lambda round_, values: library.log_metrics(values, step=round_), library.end_run, epsilon
    )


def trackio(title: str, settings: Mapping[str, Any], epsilon: Epsilon | None = None) -> Logger:
    """A run of trackio, which keeps its files on this machine."""
    with extras.importing("trackio"):
        library = importlib.import_module("trackio")
    library.init(project=PROJECT, name=title, config=dict(settings))
    return Logger(lambda round_, values: library.log(values, step=round_), library.finish, epsilon)
