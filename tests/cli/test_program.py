"""The program: which settings win, and its version."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from problems import HANGS

from fedjaxsim.cli import main
from fedjaxsim.cli.program import parse
from fedjaxsim.runs.settings import run_config


def test_flags_win_over_the_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("clients = 8\nrounds = 50\nnoise-multiplier = 1\nalgorithm = 'fedavg'\n")
    command = parse(["run", str(path), "--rounds", "2", "--epsilon", "3"])
    expected = run_config(clients=8, rounds=2, epsilon=3.0, algorithm="fedavg")
    assert command.settings == expected


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"fedjaxsim \d+\.\d+\.\d+\n", capsys.readouterr().out)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is full")
def test_output_that_cannot_be_written_is_an_error_of_one_line():
    command = [sys.executable, "-m", "fedjaxsim", "privacy", "--delta", "1e-3", "--rounds", "1"]
    command += ["--noise-multiplier", "1", "--sampling", "full"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=HANGS, check=False
        )
    assert done.returncode == 4
    said = done.stderr.removeprefix("computing …\n")  # which a slow machine says
    assert re.fullmatch(r"fedjaxsim: error: the output is cut: .*\n", said)


@pytest.mark.thorough
def test_the_package_is_the_program():
    command = [sys.executable, "-m", "fedjaxsim", "rnu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=False)
    assert done.returncode == 2
    assert "did you mean 'run'?" in done.stderr
