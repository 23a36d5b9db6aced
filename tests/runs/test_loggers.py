"""Trackers of experiments: fakes in place of their packages, and a run that resumes."""

import contextlib
import json
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import jax
import pytest
from support.usual_runs import DIGITS

from fedjaxsim.callbacks import Log
from fedjaxsim.cli import main
from fedjaxsim.runs import loggers

pytestmark = pytest.mark.usual_runs
SETTINGS = {"algorithm": "pmtl", "lam": 0.1, "range": []}


class Fake(types.ModuleType):
    """A package that notes what is called, and with what."""

    def __init__(self, name):
        super().__init__(name)
        self.calls: list[tuple[str, tuple, dict]] = []

    def __getattr__(self, name) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self

        return call

    @property
    def info(self):
        """A run of MLflow has its id here."""
        return types.SimpleNamespace(run_id="run-1")

    def of(self, name):
        """The calls of one function."""
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


@pytest.fixture
def fake(monkeypatch):
    def install(package):
        module = Fake(package)
        monkeypatch.setitem(sys.modules, package, module)
        return module

    return install


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_settings_and_records_under_one_name(fake, tmp_path, name):
    package = fake(name)
    for _ in range(2):  # the second time it resumes
        write: Any = loggers.find_loggers(name)[name](SETTINGS, tmp_path)
        write({"test_accuracy": 0.5}, 3)
        write.close()
    [(_, first), (_, second)] = package.of("init")
    assert first == second
    assert (first["config"], first["resume"]) == (SETTINGS, "allow")
    assert package.of("log")[0] == (({"test_accuracy": 0.5},), {"step": 3})
    assert len(package.of("finish")) == 2


def test_the_runs_of_a_sweep_are_a_group_of_its_name(fake, tmp_path):
    package = fake("wandb")
    for path in (tmp_path / "digits", tmp_path / "digits" / "loggers" / "digits-3"):
        loggers.find_loggers("wandb")["wandb"](SETTINGS, path)
    named = [(kwargs["name"], kwargs["group"]) for _, kwargs in package.of("init")]
    assert named == [("digits", None), ("digits-3", "digits")]


def test_mlflow_goes_on_with_the_run_that_it_began(fake, tmp_path):
    package = fake("mlflow")
    for _ in range(2):
        write: Any = loggers.find_loggers("mlflow")["mlflow"](SETTINGS, tmp_path)
        write({"test_accuracy": 0.5}, 3)
        write.close()
    assert [kwargs["run_id"] for _, kwargs in package.of("start_run")] == [None, "run-1"]
    [((params,), _)] = package.of("log_params")
    assert params == {"algorithm": "pmtl", "lam": "0.1", "range": "[]"}
    [(args, kwargs), _] = package.of("log_metrics")
    assert (args, kwargs["step"]) == (({"test_accuracy": 0.5},), 3)


def test_tensorboard_gets_a_scalar_for_each_number(fake, tmp_path):
    package = fake("tensorboardX")
    write: Any = loggers.find_loggers("tensorboard")["tensorboard"](SETTINGS, tmp_path)
    write({"test_accuracy": 0.5, "epsilon": 1.25}, 3)
    write.close()
    scalars = [args for args, _ in package.of("add_scalar")]
    assert scalars == [("test_accuracy", 0.5, 3), ("epsilon", 1.25, 3)]
    assert package.of("SummaryWriter") == [((str(tmp_path / "loggers"),), {})]
    assert len(package.of("close")) == 1


def test_a_logger_without_its_package_or_name_is_refused_before_a_run(tmp_path, capsys):
    out = ["--out", str(tmp_path / "run")]
    for name, said in (("wandbb", "wandb, mlflow"), ("wandb", "pip install wandb")):
        if name in sys.modules:
            continue
        assert main(["run", "--logger", name, *out]) == 2
        assert said in capsys.readouterr().err
    assert main(["run", "--logger", "wandb"]) == 2
    assert not (tmp_path / "run").exists()


def test_torch_alone_is_no_tensorboard(monkeypatch):
    monkeypatch.setattr(loggers, "_is_there", lambda package: package == "torch")
    with pytest.raises(ValueError, match="pip install tensorboardX"):
        loggers.find_loggers("tensorboard")
    monkeypatch.setattr(loggers, "_is_there", lambda package: package in ("torch", "tensorboard"))
    assert loggers.find_loggers("tensorboard") == {"tensorboard": loggers.tensorboard}
    with pytest.raises(ValueError, match=r"logger <lambda> must take \(settings, path\)"):
        loggers.find_loggers([lambda: None])  # type: ignore[list-item]


MINE = """
import json

def tracker(settings, path):
    def write(record, step):
        with open("log.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "seed": settings.get("seed"), **record}) + chr(10))
    return write

def broken(settings, path):
    def write(record, step):
        raise OSError("no network")
    return write
"""


def test_a_run_that_resumes_writes_no_record_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("my_tracker.py").write_text(MINE)
    profiled = []

    @contextlib.contextmanager
    def trace(path):
        profiled.append((path, Path("log.jsonl").exists()))
        yield
        profiled.append((path, Path("log.jsonl").exists()))

    monkeypatch.setattr(jax.profiler, "trace", trace)  # which takes seconds
    small = f"{' '.join(DIGITS)} --partition-seed 0 --noise-multiplier 1 --quiet"
    mine = "--logger my_tracker:tracker,my_tracker:broken"
    command = f"run {small} --rounds 4 --seed secret {mine} --format svg --profile trace --out run"
    with warnings.catch_warnings(action="always"):
        assert main(command.split()) == 0
    assert "goes on without it: OSError: no network" in capsys.readouterr().err
    resume = "resume run --rounds 6 --quiet --logger my_tracker:tracker"
    assert main(resume.split()) == 0
    rows = [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 2, 4, 6]
    own = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    for row, record in zip(rows, own, strict=True):
        assert row["seed"] is None  # a secret seed leaves no trace elsewhere
        assert row["epsilon"] == record["epsilon"]
        assert row["test_accuracy"] == record["test_accuracy"]
        assert row["seconds/rounds"] >= 0
    assert Path("run/curves.svg").exists()
    assert profiled == [("trace", False), ("trace", True)]  # all rounds are inside


def test_a_step_that_was_written_before_a_kill_is_not_written_again(tmp_path):
    """The checkpoint is older than the log: its rounds are computed again, and logged once."""
    written = []
    log = Log(lambda record, step: written.append(step), tmp_path / "x.step")
    (tmp_path / "x.step").write_text("4")
    log.run = types.SimpleNamespace(  # type: ignore[assignment]
        records=lambda state, segment: [{"round": segment, "test_loss": 1.0}],
        phase_times=types.SimpleNamespace(seconds={}),
        closing=None,
    )
    log.start(None)  # type: ignore[arg-type]
    for round_ in (2, 4, 6):
        log.segment(None, round_)  # type: ignore[arg-type]
    assert written == [6]
    assert (tmp_path / "x.step").read_text() == "6"


def test_a_run_that_is_killed_while_a_logger_writes_logs_no_step_twice(tmp_path):
    """The tracker may have the step; one that fails gets it again when the run resumes."""

    def ends_with(error):
        def write(record, step):
            written.append(step)
            raise error

        return write

    def goes_on(write):
        log = Log(write, tmp_path / "x.step")
        with contextlib.ExitStack() as closing:
            log.open(closing)
            log.add({"round": 2, "test_loss": 1.0})

    written: list[int] = []
    with pytest.warns(UserWarning, match="OSError: no network"):
        goes_on(ends_with(OSError("no network")))
    with pytest.raises(KeyboardInterrupt):
        goes_on(ends_with(KeyboardInterrupt))
    goes_on(lambda record, step: written.append(step))
    assert written == [2, 2]


def test_a_logger_that_cannot_be_closed_ends_no_run(tmp_path):
    def write(record, step):
        pass

    def close():
        raise OSError("no network")

    vars(write)["close"] = close
    log, closing = Log(write), contextlib.ExitStack()
    log.run = types.SimpleNamespace(closing=closing)  # type: ignore[assignment]
    log.start(None)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="goes on without it: OSError: no network"):
        closing.close()
