"""The program: which settings win, and its version."""

import gc
import itertools
import logging
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from support.problems import HANGS
from support.refusals import check_refusals, parsed

from fedjaxsim.cli import main, program
from fedjaxsim.cli.program import parse
from fedjaxsim.runs.settings import run_config
from fedjaxsim.runs.sweep_runs import read_sweep


def test_flags_win_over_the_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("clients = 8\nrounds = 50\nnoise-multiplier = 1\nalgorithm = 'fedavg'\n")
    command = parse(["run", str(path), "--rounds", "2", "--epsilon", "3"])
    expected = run_config(clients=8, rounds=2, epsilon=3.0, algorithm="fedavg")
    assert command.settings == expected


def test_a_flag_of_a_sweep_with_a_list_is_an_axis(tmp_path):
    words = "sweep --clients 8 --lam 0.1,1 --algorithm pmtl,ditto --seeds 2 --metric loss --out x"
    asked = parse(words.split()).arguments
    axes = {"clients": 8, "lam": [0.1, 1.0], "algorithm": ["pmtl", "ditto"], "metric": "loss"}
    assert asked["axes"] == axes
    plan = read_sweep(None, asked["axes"], asked["seeds"])
    runs = {(run.lam, run.algorithm, run.seed) for run in plan.runs}
    assert runs == set(itertools.product((0.1, 1.0), ("pmtl", "ditto"), (0, 1)))
    assert {run.clients for run in plan.runs} == {8}
    assert {run.metric for run in plan.runs} == {"loss"}
    # Flags win over a file, in its tables, too.
    path = tmp_path / "s.toml"
    path.write_text("rounds = 5\nepsilon = 1\n[sweep]\nlam = [3]\nlearning-rate = [0.1, 0.3]\n")
    words = f"sweep {path} --lam 0.1,1 --noise-multiplier 2 --rounds 7 --out x"
    plan = read_sweep(path, parse(words.split()).arguments["axes"])
    assert {(run.lam, run.learning_rate) for run in plan.runs} == {
        (0.1, 0.1), (0.1, 0.3), (1.0, 0.1), (1.0, 0.3),
    }  # fmt: skip
    assert {(run.rounds, run.noise_multiplier, run.epsilon) for run in plan.runs} == {(7, 2, None)}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lam 0.1", "needs an axis"),
        ("--lamb 0.1,1", "did you mean 'lam'"),
        ("--mu 0.1,1", "only with fedprox"),
        ("--seed 1,2 --seeds 2", "seeds need one seed to begin at"),
        ("--patience 1,2", "for single runs"),
        ("--algorithm pmtl,dito", "did you mean 'ditto'"),
        ("--lam 1,1", "lists 1.0 twice"),
    ],
)
def test_bad_flags_of_a_sweep_are_refused(words, said, capsys):
    assert main(["sweep", *words.split(), "--out", "absent/x"]) == 2
    assert said in capsys.readouterr().err


def test_a_flag_is_given_once_unless_it_holds_a_list():
    check_refusals(
        parsed,
        {
            "run --lam 1 --lam 2": "give --lam once, got 1 and 2",
            "sweep --lam 1 --lam=2 --out o": "give --lam once, got 1 and 2",
            "run --algorithm fedavg --algorithm pmtl": "once, got fedavg and pmtl",
            "run --streamed --no-streamed": "give --streamed once",
            "compare a --json --json": "give --json once",
            "run —rounds 3": "—rounds is no flag: a flag is like --rounds 100",
        },
    )
    assert parse(["tune", "--wrt", "lam", "--wrt=clip", "--out", "o"]).arguments["options"].wrt == (
        "lam",
        "clip",
    )


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"fedjaxsim \d+\.\d+\.\d+\n", capsys.readouterr().out)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is full")
@pytest.mark.parametrize("words", [["ls", "."], ["run", "--help"]])
def test_output_that_cannot_be_written_is_an_error_of_one_line(words, tmp_path):
    command = [sys.executable, "-m", "fedjaxsim", *words]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, cwd=tmp_path, text=True, timeout=HANGS,
            check=False,
        )  # fmt: skip
    assert done.returncode == 4
    assert re.fullmatch(r"fedjaxsim: error: the output is cut: .*\n", done.stderr)


@pytest.mark.thorough
def test_the_package_is_the_program():
    command = [sys.executable, "-m", "fedjaxsim", "rnu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=False)
    assert done.returncode == 2
    assert "did you mean 'run'?" in done.stderr


def test_a_command_leaves_the_process_as_it_found_it(tmp_path, capsys):
    before = sys.stdout, warnings.showwarning, gc.get_threshold(), [*logging.getLogger().handlers]
    logger = logging.getLogger("fedjaxsim")
    handlers = [*logger.handlers]
    assert main(["predict", str(tmp_path), "--quiet"]) == 2  # JAX has started by then
    after = sys.stdout, warnings.showwarning, gc.get_threshold(), [*logging.getLogger().handlers]
    assert after == before
    assert logger.handlers == handlers
    assert "config.toml" in capsys.readouterr().err


def logs():
    """Log as the library does."""
    return lambda: logging.getLogger("fedjaxsim.callbacks").warning("a file\nis %s", "damaged")


def warns():
    """Warn as the library does."""

    def work():
        for text in ("one\nline", "one\nline", "two"):
            warnings.showwarning(UserWarning(text), UserWarning, "fedjaxsim/simulation.py", 1)

    return work


def test_what_the_library_logs_is_a_line_of_the_program(monkeypatch, capsys):
    monkeypatch.setitem(program.COMMANDS, "logs", f"{__name__}:logs")
    assert main(["logs"]) == 0
    assert capsys.readouterr().err == "fedjaxsim: warning: a file is damaged\n"


def test_a_warning_of_the_package_is_one_line_said_once(monkeypatch, capsys):
    monkeypatch.setitem(program.COMMANDS, "warns", f"{__name__}:warns")
    assert main(["warns"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["fedjaxsim: warning: one line", "fedjaxsim: warning: two"]
