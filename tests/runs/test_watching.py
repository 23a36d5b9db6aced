"""Loggers of runs, and stops without progress.

wandb is stood in for by a module that notes how it is called.
"""

import contextlib
import importlib
import importlib.machinery
import json
import re
import struct
import sys
import types
from typing import Any

import numpy as np
import pytest

from fedjaxsim.callbacks import Logger
from fedjaxsim.cli import main
from fedjaxsim.privacy.assumptions import STOPPING
from fedjaxsim.runs.sweep_runs import read_sweep

SMALL = ["--clients", "6", "--local-steps", "1", "--eval-every", "2", "--sampling-rate", "1"]
SMALL += ["--noise-multiplier", "2"]


Event: Any = importlib.import_module("tensorboardX.proto.event_pb2").Event


def scalars(path):
    """Read an event file: (tag, step) -> value. A record is its length, a checksum, itself."""
    [file] = path.iterdir()
    content, found, at = file.read_bytes(), {}, 0
    while at < len(content):
        [length] = struct.unpack_from("<Q", content, at)
        event = Event.FromString(content[at + 12 : at + 12 + length])
        found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        at += length + 16
    return found


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run with learning rate 0, and its output."""
    out = tmp_path_factory.mktemp("runs") / "run"
    flags = "--learning-rate 0 --lam 0 --rounds 40 --patience 2 --validation-fraction 0.2"
    command = ["run", *SMALL, "--log", "tensorboard", *flags.split(), "--out", str(out)]
    assert main(command) == 0
    return out


def test_a_run_stops_where_validation_rows_get_no_better(stopped):
    summary = json.loads((stopped / "summary.json").read_text())
    assert (summary["rounds"], summary["rounds_planned"]) == (4, 40)
    assert (summary["interrupted"], summary["stopped_early"]) == (False, True)
    lines = [json.loads(line) for line in (stopped / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 2, 4]
    assert len({line["validation_accuracy"] for line in lines}) == 1


def test_its_guarantee_is_of_the_rounds_done_and_does_not_cover_the_choice(stopped, capsys):
    guarantee = json.loads((stopped / "guarantee.json").read_text())
    [found] = guarantee["zero_out"]["joint_dp"].values()
    assert "It does not cover when to stop" in " ".join(found["assumptions"])
    lines = (stopped / "metrics.jsonl").read_text().splitlines()
    assert 0 < found["epsilon"] <= json.loads(lines[-1])["epsilon"]  # by RDP on the way
    assert main(["resume", str(stopped), "--rounds", "50"]) == 2
    assert "ran out of patience after 4 rounds: continue it" in capsys.readouterr().err


def test_a_comparison_says_what_the_guarantee_does_not_cover(stopped, capsys):
    assert main(["compare", str(stopped)]) == 0
    assert f"\n{STOPPING}\n" in capsys.readouterr().out
    assert main(["compare", str(stopped), "--json"]) == 0
    assert STOPPING in json.loads(capsys.readouterr().out)[0]["assumed"]


def test_tensorboard_gets_every_evaluation(stopped):
    logged = scalars(stopped / "tensorboard")
    for line in (stopped / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name in ("test_accuracy", "test_loss_p10", "epsilon"):
            assert logged[name, record["round"]] == np.float32(record[name])
    assert logged["rounds/participants", 4] == 6
    assert ("rounds/participants", 0) not in logged


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--patience 0 --validation-fraction 0.2", "patience"),
        ("--patience 1", "patience"),
        ("--log tensorboard", "tensorboard .*out"),
        ("--log wandb", r"wandb.*'fedjaxsim\[wandb\]'"),
    ],
)
def test_what_cannot_be_watched_is_refused_in_one_line(flags, message, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["run", *SMALL, "--rounds", "2", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error


def test_the_runs_of_a_sweep_have_no_patience(tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text("patience = 2\nvalidation-fraction = 0.2\n[sweep]\nlam = [0.1, 1.0]\n")
    with pytest.raises(ValueError, match="patience"):
        read_sweep(path, None)


class Calls(types.ModuleType):
    """A module that notes the calls of its functions, and of what they return."""

    def __init__(self, name):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.seen: list[Any] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.seen.append((name, *args, kwargs))
            return self

        return call


class Segment:
    """An evaluation after two rounds, with a metric that has no value."""

    round = 7
    metrics = {"loss": np.array([1.0, 3.0]), "nothing": np.zeros(0)}  # noqa: RUF012


class Run:
    """A run whose record has a number that is missing and one that is not finite."""

    def __init__(self):
        self.closing = contextlib.ExitStack()

    def record(self, state, segment):
        return {"round": 7, "train_loss": None, "test_accuracy": 0.5, "test_auc": np.nan,
                "epsilon": 1.5}  # fmt: skip


VALUES = {"rounds/loss": 2.0, "test_accuracy": 0.5, "epsilon": 1.5}


def test_a_logger_gets_settings_and_finite_numbers(monkeypatch):
    module = Calls("wandb")
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    log: Any = Logger("wandb", "t", {"seed": 3})
    log.run = Run()
    with log.run.closing:
        log.start(None)
        log.segment(None, Segment())
    assert module.seen == [
        ("init", {"project": "fedjaxsim", "name": "t", "config": {"seed": 3}}),
        ("log", VALUES, {"step": 7}),
        ("finish", {}),
    ]
