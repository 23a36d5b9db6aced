"""The program: which settings win, and its version."""

import re
import subprocess
import sys

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


@pytest.mark.thorough
def test_the_package_is_the_program():
    command = [sys.executable, "-m", "fedjaxsim", "rnu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=False)
    assert done.returncode == 2
    assert "did you mean 'run'?" in done.stderr
