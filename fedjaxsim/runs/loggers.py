"""Trackers of experiments: a factory gets a run's settings and directory, and returns a writer.

A writer is `write(record, step)`; its attribute `close`, if it has one, is called after the run. A
user's factory, "module:factory", is the same. The trackers themselves are no dependencies.
"""

import importlib
import importlib.util
import json
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjaxsim import checks, store
from fedjaxsim.divergence import Record
from fedjaxsim.factories import is_user_code
from fedjaxsim.runs.parts import check_takes, find_user_code

Write = Callable[[Record, int], None]
Factory = Callable[[Mapping[str, Any], Path], Write]

FOLDER = "loggers"
"""The folder of a run's directory with what loggers keep."""
_PROJECT = "fedjaxsim"


def wandb(settings: Mapping[str, Any], path: Path) -> Write:
    """Write to Weights & Biases; its environment variables choose project and mode."""
    run = importlib.import_module("wandb").init(
        project=os.environ.get("WANDB_PROJECT", _PROJECT), name=path.name, dir=str(path),
        config=dict(settings), id=_identity(path, "wandb"), resume="allow",
        group=path.parent.parent.name if path.parent.name == FOLDER else None,  # a sweep's runs
    )  # fmt: skip
    return _closing(lambda record, step: run.log(record, step=step), run.finish)


def trackio(settings: Mapping[str, Any], path: Path) -> Write:
    """Write to trackio."""
    package = importlib.import_module("trackio")
    name = f"{path.name}-{_identity(path, 'trackio')[:6]}"
    run = package.init(project=_PROJECT, name=name, config=dict(settings), resume="allow")
    return _closing(lambda record, step: run.log(record, step=step), run.finish)


def mlflow(settings: Mapping[str, Any], path: Path) -> Write:
    """Write to MLflow; MLFLOW_TRACKING_URI says where."""
    package = importlib.import_module("mlflow")
    saved = path / FOLDER / "mlflow"
    run_id = saved.read_text("utf-8") if saved.exists() else None
    run = package.start_run(run_id=run_id, run_name=None if run_id else path.name, nested=True)
    if run_id is None:
        package.log_params({name: str(value)[:500] for name, value in settings.items()})
        _keep(saved, run.info.run_id)
    return _closing(
        lambda record, step: package.log_metrics(record, step=step, run_id=run.info.run_id),
        package.end_run,
    )


def tensorboard(settings: Mapping[str, Any], path: Path) -> Write:
    """Write event files of TensorBoard, to the folder `loggers` of the run."""
    package = "tensorboardX" if _is_there("tensorboardX") else "torch.utils.tensorboard"
    writer = importlib.import_module(package).SummaryWriter(str(path / FOLDER))
    writer.add_text("settings", f"```\n{json.dumps(dict(settings), indent=2, default=str)}\n```")

    def write(record: Record, step: int) -> None:
        for name, value in record.items():
            writer.add_scalar(name, value, step)

    return _closing(write, writer.close)


LOGGERS: dict[str, tuple[Factory, tuple[tuple[str, ...], ...]]] = {
    "wandb": (wandb, (("wandb",),)),
    "mlflow": (mlflow, (("mlflow",),)),
    "tensorboard": (tensorboard, (("tensorboardX",), ("torch", "tensorboard"))),
    "trackio": (trackio, (("trackio",),)),
}
"""Named factories, each with sets of packages that it can use; one set is enough."""


def find_loggers(loggers: "str | Factory | Sequence[str | Factory]") -> dict[str, Factory]:
    """Return the factories that loggers name; a factory itself stays.

    Raises:
      ValueError: for an unknown name, one without its package, or what is no factory.
    """
    every = [loggers] if isinstance(loggers, str) or callable(loggers) else loggers
    return dict(map(_named_factory, every))


def _named_factory(logger: str | Factory) -> tuple[str, Factory]:
    name = logger if isinstance(logger, str) else getattr(logger, "__name__", "logger")
    if callable(logger) or is_user_code(name):
        factory = logger if callable(logger) else find_user_code("logger", name)
        check_takes("logger", name, factory, {}, Path())
        return name, factory
    if name not in LOGGERS:
        hint = checks.did_you_mean(name, LOGGERS)
        allowed = f"{', '.join(LOGGERS)} or MODULE:FACTORY"
        raise ValueError(f"logger must be {allowed}, got {name!r}{hint}")
    factory, packages = LOGGERS[name]
    if not any(all(map(_is_there, needed)) for needed in packages):
        raise ValueError(f"logger {name} needs a package: pip install {packages[0][0]}")
    return name, factory


def _is_there(package: str) -> bool:
    return package in sys.modules or importlib.util.find_spec(package) is not None


def _closing(write: Write, close: Callable[[], Any]) -> Write:
    """Return a writer that can be closed."""

    def writer(record: Record, step: int) -> None:
        write(record, step)

    vars(writer)["close"] = close
    return writer


def _identity(path: Path, name: str) -> str:
    """Return the name under which a tracker knows the run in a directory, also if it resumes."""
    saved = path / FOLDER / name
    if not saved.exists():
        _keep(saved, uuid.uuid4().hex)
    return saved.read_text("utf-8")


def _keep(path: Path, text: str) -> None:
    store.make_folder(path.parent)
    store.write(path, text.encode())
