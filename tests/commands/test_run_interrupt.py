"""Ctrl-C ends a run with all its files."""

import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.problems import HANGS
from support.several import start
from support.usual_runs import DIGITS

from fedjaxsim.cli import main
from fedjaxsim.runs import execute
from fedjaxsim.runs.directory import RunDirectory

pytestmark = pytest.mark.usual_runs
LONG = [*DIGITS, "--rounds", "100000000"]
"""A run of hours."""
FILES = {
    "config.toml", "metrics.jsonl", "guarantee.json", "summary.json", "clients.csv", "checkpoints",
    "curves.png",
}  # fmt: skip


def evaluations(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def test_a_signal_ends_a_run_with_all_its_files(tmp_path, capfd):
    out = tmp_path / "run"
    over = threading.Event()

    def press_ctrl_c():
        while not over.wait(0.05) and evaluations(out) < 2:
            pass
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor() as pool:
        pool.submit(press_ctrl_c)
        code = main(["run", *LONG, "--out", str(out)])
        over.set()
    output, errors = capfd.readouterr()
    assert code == 128 + signal.SIGINT, errors
    assert "stopping after the rounds in flight" in errors
    assert re.search(rf"Ctrl-C after \d+ rounds; to resume: fedjaxsim resume {out}", errors)
    assert {path.name for path in out.iterdir()} == FILES
    summary = RunDirectory(out).summary()
    assert summary["interrupted"] is True
    assert 0 < summary["rounds"] < summary["rounds_planned"] == 100_000_000
    assert summary["rounds"] == RunDirectory(out).metrics()[-1]["round"]
    assert f"{summary['rounds']} of 100000000" in output


@pytest.mark.thorough
def test_a_signal_while_results_are_written_leaves_all_of_them(tmp_path, capfd, monkeypatch):
    out, write, said = tmp_path / "run", execute.write_csv, []

    def interrupted(*arguments):
        capfd.readouterr()  # progress
        os.kill(os.getpid(), signal.SIGTERM)
        while not (errors := capfd.readouterr().err):
            time.sleep(0.01)
        said.append(errors)
        write(*arguments)

    monkeypatch.setattr(execute, "write_csv", interrupted)
    command = ["run", *DIGITS, "--rounds", "2", "--out", str(out)]
    assert main(command) == 0
    assert said == [
        "\nthe run is over and ends once its results are written; SIGTERM again ends at once\n"
    ]
    assert {path.name for path in out.iterdir()} == FILES
    assert RunDirectory(out).summary()["interrupted"] is False


@pytest.mark.thorough
def test_a_second_ctrl_c_aborts_in_the_middle_of_a_segment(tmp_path):
    out = tmp_path / "run"
    evaluates = LONG.index("--eval-every") + 1
    words = [*LONG[:evaluates], "100000000", *LONG[evaluates + 1 :]]
    command = ["run", *words, "--out", str(out)]
    with start("-m", "fedjaxsim", *command) as process:
        deadline = time.monotonic() + HANGS
        while evaluations(out) < 1:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        while "stopping" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=HANGS) == 130
    assert not (out / "summary.json").exists()
