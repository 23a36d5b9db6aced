"""One run of several processes over loopback, from the command line: all of it, or none."""

import shutil
import signal
import socket

import pytest
from support.problems import HANGS
from support.several import free_port, start, start_as_slurm, start_commands

from fedjaxsim.cli.program import main
from fedjaxsim.engine import processes
from fedjaxsim.runs import execute
from fedjaxsim.runs.directory import RunDirectory

THOROUGH = pytest.mark.thorough
RUN = [
    "run", "--quiet", "--data", "synthetic", "--clients", "10", "--loss", "squared",
    "--sampling-rate", "0.4", "--learning-rate", "0.01", "--local-steps", "1", "--eval-every", "2",
    "--noise-multiplier", "1",
]  # fmt: skip
WATCHED = [flag for flag in RUN if flag != "--quiet"]
pytestmark = pytest.mark.usefixtures("exact_noise")  # as in processes that tests start
ALL_END = 120
"""Seconds in which all processes end after one of them has."""
IMPATIENT = """
import sys
from fedjaxsim.cli import main
from fedjaxsim.engine import processes
processes.WAIT = 2
sys.exit(main(sys.argv[1:]))
"""
"""The program, with less patience for processes that never come."""


def ends(running):
    """The exit codes of processes, what they printed, and what they said was wrong."""
    both = [each.communicate(timeout=HANGS) for each in running]
    return [each.returncode for each in running], *zip(*both, strict=True)


def interrupt(running, which, line="ε"):
    """Sends a signal to some processes once the first has printed a line of progress."""
    assert running[0].stderr is not None
    next(each for each in running[0].stderr if line in each and " 0/" not in each)
    for index, number in which.items():
        running[index].send_signal(number)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--processes 2 --process 2 --coordinator h:1", "process"),
        ("--processes 0 --process 0 --coordinator h:1", "processes"),
        ("--processes a", "processes"),
        ("--processes 2 --process 0", "--coordinator"),
        ("--coordinator h:1", "--processes"),
        ("--processes 2 --process 0 --coordinator h", "HOST:PORT"),
        ("--processes 2 --process 0 --coordinator h:70000", "65535"),
        ("--cluster --process 0", "cluster"),
        ("--devices 0", "devices"),
        ("--devices many", "devices"),
        ("--devices 999", "devices"),
    ],
)
def test_flags_that_name_no_processes_or_devices_are_refused(refused, flags, words):
    assert words in refused(" ".join([*RUN, flags]))


def test_a_port_in_use_is_refused(refused):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = f"--coordinator 127.0.0.1:{port} --processes 2 --process 0"
        assert f"port {port}" in refused(" ".join([*RUN, flags]))


@THOROUGH
def test_a_process_to_whom_nobody_comes_ends():
    waiting = []
    for process in ("0", "1"):
        address = f"127.0.0.1:{free_port()}"
        where = ["--coordinator", address, "--processes", "2", "--process", process]
        waiting.append(start("-c", IMPATIENT, *RUN, "--devices", "1", *where))
    for alone in waiting:
        _, errors = alone.communicate(timeout=ALL_END)
        assert alone.returncode not in (0, None)
        assert "do not meet" in errors or alone.returncode < 0


@THOROUGH
def test_own_code_that_fails_ends_every_process_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "theirs.py").write_text(
        "import fedjaxsim as fjs\n"
        "from fedjaxsim.hyperparameters import declared_by\n"
        "@fjs.reads(*declared_by(fjs.fedavg))\n"
        "def typo(task):\n"
        "    return fjs.fedavg(task)._replace(predict=lambda w, v, hparams, client_id: absent)\n"
    )
    monkeypatch.chdir(tmp_path)
    codes, _, errors = ends(start_commands(*[[*RUN, "--algorithm", "theirs:typo"]] * 2))
    assert codes == [2, 2]
    for each in errors:
        assert each.splitlines()[-1].startswith("fedjaxsim: error: your code fails at ")
        assert f"{tmp_path}/theirs.py:5: NameError: name 'absent' is not defined" in each
        assert "Traceback" not in each


UNLIKE = """import jax
import fedjaxsim as fjs
from fedjaxsim.hyperparameters import declared_by

@fjs.reads(*declared_by(fjs.gaussian))
def less():
    "A thousandth of the noise in the second process, whose ledger no report reads."
    base = fjs.gaussian()
    def release(accumulator, denominator, key, state, hparams, round_):
        z = hparams.noise_multiplier * (1 if jax.process_index() == 0 else 1e-3)
        hparams = hparams.replace(noise_multiplier=z)
        return base.release(accumulator, denominator, key, state, hparams, round_)
    return base._replace(release=release)
"""


@THOROUGH
def test_code_that_differs_by_process_is_refused(tmp_path, monkeypatch):
    """Once clients of the second process had a billboard without noise, at ε 0.502."""
    (tmp_path / "unlike.py").write_text(UNLIKE)
    monkeypatch.chdir(tmp_path)
    codes, _, errors = ends(start_commands(*[[*RUN, "--mechanism", "unlike:less"]] * 2))
    assert codes == [2, 2]
    assert all("process 1 has other code of a round than process 0" in each for each in errors)


def test_a_process_with_another_setting_is_refused(refused, monkeypatch):
    def from_all(value):
        return [value, {"facts": value["facts"] | {"lam": "another"}}]

    monkeypatch.setattr(processes, "several", lambda: True)
    # Had the command imported `execute` now, it would keep this function for later tests.
    for module in (processes, execute):
        monkeypatch.setattr(module, "from_all", from_all)
    said = refused(" ".join([*RUN, "--out", "out"]))
    assert "process 1 has other lam than process 0" in said


@THOROUGH
def test_what_one_process_refuses_none_does(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    (first / "config.toml").touch()
    codes, _, errors = ends(
        start_as_slurm([*RUN, "--out", str(first)], [*RUN, "--out", str(second)])
    )
    assert codes == [2, 2]
    assert "already holds a run" in errors[0]
    assert "process 0 refuses" in errors[1]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Two processes of one run, of which the other than the first got a signal: all about them."""
    out = RunDirectory(tmp_path_factory.mktemp("ended") / "two")
    running = start_commands(*[[*WATCHED, "--rounds", "1000000", "--out", str(out.path)]] * 2)
    interrupt(running, {1: signal.SIGTERM})
    return out, *ends(running)


@THOROUGH
def test_a_signal_to_any_of_them_ends_all_with_a_checkpoint(ended):
    out, codes, printed, errors = ended
    assert codes == [128 + signal.SIGTERM] * 2, errors
    assert "files in" in printed[0]
    assert not [line for line in printed[1].splitlines() if not line.startswith("[Gloo]")]
    summary = out.summary()
    assert summary["interrupted"]
    kept = out.checkpoints().last()
    assert kept is not None
    assert kept.round == summary["rounds"] > 0


@THOROUGH
def test_two_processes_write_what_one_does_and_either_goes_on(ended, tmp_path):
    whole, two, one = (RunDirectory(tmp_path / name) for name in ("whole", "two", "one"))
    rounds = str(ended[0].summary()["rounds"] + 2)
    assert main([*RUN, "--devices", "all", "--rounds", rounds, "--out", str(whole.path)]) == 0
    for each in (two, one):
        shutil.copytree(ended[0].path, each.path)
    again = ["resume", str(two.path), "--rounds", rounds, "--quiet"]
    assert ends(start_commands(again, again))[0] == [0, 0]
    assert main(["resume", str(one.path), "--rounds", rounds, "--quiet"]) == 0
    for each in (two, one):
        assert_same_files(each, whole)
    assert two.summary()["rounds"] == int(rounds)


def assert_same_files(one, other):
    """The same guarantee bit for bit, and metrics up to rounding."""
    assert one.guarantee() == other.guarantee()
    for mine, wanted in zip(one.metrics(), other.metrics(), strict=True):
        assert measured(mine) == pytest.approx(measured(wanted), rel=1e-5)
    here, there = ((each.path / "clients.csv").read_text().splitlines() for each in (one, other))
    for mine, wanted in zip(here[1:], there[1:], strict=True):
        assert numbers(mine) == pytest.approx(numbers(wanted), rel=1e-5)


def measured(record):
    return {name: value for name, value in record.items() if value is not None}


def numbers(line):
    return [float(cell) for cell in line.split(",")[1:]]


LOST = [(0, signal.SIGKILL), (1, signal.SIGSTOP)]
"""The index of a process, and the signal by which the other loses it."""


@pytest.fixture(scope="module")
def losing(tmp_path_factory):
    """The folder and the processes of a run for each way to lose one: all wait at once."""
    often = ["--rounds", "1000000", "--checkpoint-every", "2"]
    runs = {}
    for which, _ in LOST:
        out = tmp_path_factory.mktemp("losing") / "out"
        runs[which] = out, start_commands(*[[*WATCHED, *often, "--out", str(out)]] * 2)
    for which, number in LOST:
        interrupt(runs[which][1], {which: number}, " 20/")
    return runs


@THOROUGH
@pytest.mark.parametrize("which", [which for which, _ in LOST])
def test_a_process_that_is_lost_ends_the_other_and_the_last_checkpoint_resumes(losing, which):
    out, running = losing[which]
    other = 1 - which
    running[other].communicate(timeout=ALL_END)
    running[which].kill()
    running[which].communicate()
    assert running[other].returncode not in (0, None)
    last = RunDirectory(out).checkpoints().last()
    assert last is not None
    assert last.round > 0
    assert main(["resume", str(out), "--rounds", str(last.round + 4), "--quiet"]) == 0
    assert RunDirectory(out).summary()["rounds"] == last.round + 4


def test_a_sweep_takes_the_flag_of_devices(refused):
    assert "devices" in refused("sweep --lam 0.1,1 --out out --devices 999")
