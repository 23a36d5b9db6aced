"""`fedjaxsim bench`, from its flags to its file."""

import contextlib
import json
import os
import select as waiting
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from problems import HANGS

from fedjaxsim.bench import results as command
from fedjaxsim.bench.results import in_child
from fedjaxsim.cli import main
from fedjaxsim.cli.bench import named
from fedjaxsim.cli.program import parse

TINY = [
    *("--data", "random", "--clients", "4", "--shape", "3", "--labels", "2"),
    *("--rounds", "4", "--eval-every", "2", "--noise-multiplier", "1"),
]
MACHINE = {"name": "here", "processor": "some", "cores": 2, "device_kind": "cpu", "devices": 2}


@pytest.fixture
def files(tmp_path):
    """Two files of settings, with other parts."""
    (tmp_path / "one.toml").write_text('data = "random"\nclients = 4\nlam = 0.5\n')
    (tmp_path / "two.toml").write_text('algorithm = "fedavg"\nrounds = 7\n')
    return [str(tmp_path / name) for name in ("one.toml", "two.toml")]


def written(folder):
    return json.loads((folder / "bench.json").read_text())


@pytest.fixture
def answers(monkeypatch):
    """Children that take no time: each gives the next answer, or raises it; and their requests."""
    left, requests = [], []

    def child(settings, devices):
        requests.append((settings, devices))
        answer = left.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return {"machine": dict(MACHINE), "rounds_per_second": answer}

    monkeypatch.setattr(command, "in_child", child)
    return left, requests


def runs_of(*arguments):
    parsed = parse(["bench", *arguments])
    return named(parsed.arguments["files"], parsed.settings)


def test_flags_describe_the_run_and_files_one_each():
    [(name, config)] = runs_of(*TINY, "--algorithm", "fedavg").items()
    assert name == "fedavg-linear-random"
    assert (config.algorithm, config.clients, config.rounds) == ("fedavg", 4, 4)


def test_flags_win_over_every_file(files):
    runs = runs_of(*files, "--rounds", "5", "--clip", "2")
    assert list(runs) == ["one", "two"]
    assert [config.algorithm for config in runs.values()] == ["pmtl", "fedavg"]
    assert [config.rounds for config in runs.values()] == [5, 5]
    assert [config.get("lam") for config in runs.values()] == [0.5, None]
    assert [config.get("clip") for config in runs.values()] == [2, 2]


def test_every_run_has_its_first_process_before_any_has_its_second(files, answers, tmp_path):
    left, requests = answers
    left += [3.0, 5.0, 4.0, 7.0]
    out = tmp_path / "out"
    flags = ["--repeats", "2", "--devices", "1", "--out", str(out)]
    assert main(["bench", *files, *flags]) == 0
    assert [settings["algorithm"] for settings, _ in requests] == ["pmtl", "fedavg"] * 2
    assert {devices for _, devices in requests} == {1}
    assert written(out)["machine"] == MACHINE
    one, two = (written(out)["workloads"][name] for name in ("one", "two"))
    assert [*one["summary"]["rounds_per_second"].values()] == [3.5, 3.0, 4.0]
    assert [*two["summary"]["rounds_per_second"].values()] == [6.0, 5.0, 7.0]
    assert two["settings"]["rounds"] == 7


def test_results_name_a_file_of_data_without_its_folder(answers, tmp_path):
    answers[0].append(1.0)
    given = f"--data npz:{tmp_path}/clients.npz --repeats 1 --out {tmp_path}/out"
    assert main(["bench", *given.split()]) == 0
    [run] = written(tmp_path / "out")["workloads"].values()
    assert run["settings"]["data"] == "npz:clients.npz"


def test_an_interrupt_keeps_what_was_measured(files, answers, tmp_path, capsys):
    answers[0].extend([3.0, KeyboardInterrupt()])
    out = tmp_path / "out"
    assert main(["bench", *files, "--out", str(out)]) == 130
    assert list(written(out)["workloads"]) == ["one"]
    printed = capsys.readouterr()
    assert f"stopped by Ctrl-C; {out / 'bench.json'} has what was measured" in printed.err
    assert "one" in printed.out


@pytest.mark.parametrize(
    ("error", "code"), [(ChildProcessError("out of memory"), 1), (ValueError("no data"), 2)]
)
def test_a_run_that_fails_stops_no_other(error, code, files, answers, capsys):
    answers[0].extend([error, 4.0, 5.0])
    assert main(["bench", *files, "--repeats", "2"]) == code
    printed = capsys.readouterr()
    assert printed.err == f"fedjaxsim: error: one: {error}\n"
    assert "4.5 (4–5)" in printed.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--repeats 0", "repeats"),
        ("--devices none", "devices"),
        ("nowhere", "nowhere"),
        ("nowhere.toml", "nowhere.toml"),
        ("nowhere.json", "nowhere.json"),
        ("one.toml there/one.toml", "one"),
        ("--rounds 0", "rounds"),
        ("--algorithm fedavg --lam 1", "lam"),
        ("--roundz 3", "roundz"),
        ("--out .", "bench.json"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, words, answers, refused, tmp_path):
    (tmp_path / "there").mkdir()
    for name in ("one.toml", "there/one.toml", "bench.json"):
        (tmp_path / name).touch()
    assert words in refused(f"bench {arguments}")
    assert answers[1] == []


@pytest.mark.thorough
def test_a_child_measures_a_tiny_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    out = str(tmp_path / "out")
    assert main(["bench", *TINY, "--repeats", "1", "--out", out]) == 0
    found = written(tmp_path / "out")
    assert found["machine"]["cores"] == os.cpu_count() == found["machine"]["devices"]
    assert found["machine"]["versions"].keys() >= {"python", "jax", "fedjaxsim"}
    [run] = found["workloads"].values()
    [numbers] = run["processes"]
    positive = {
        "rounds_per_second", "evaluation_seconds", "rounds_mb", "clients_per_round", "chunk_size",
        "devices",
    }  # fmt: skip
    assert numbers.keys() == positive | {"compile_seconds", "device_peak_mb"}
    assert min(numbers[name] for name in positive) > 0
    assert "fedjaxsim" not in capsys.readouterr().err


@pytest.mark.thorough
def test_a_child_refuses_in_one_line_and_a_late_one_is_ended(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(ValueError, match="absent"):
        in_child({"data": "leaf:absent"})
    with pytest.raises(ValueError, match="devices"):
        in_child({}, devices=10**6)
    with pytest.raises(subprocess.TimeoutExpired):
        in_child({}, seconds=0.01)


def children_of(parent: int) -> list[int]:
    """File descriptors of its children, each readable once the child has ended."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            # pid (name) state parent …, where a name may hold blanks and brackets
            _, _, rest = (process / "stat").read_text().rpartition(")")
            if int(rest.split()[1]) == parent:
                found.append(os.pidfd_open(int(process.name)))
    return found


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for processes as Linux can")
def test_ctrl_c_leaves_no_child():
    with subprocess.Popen(
        [sys.executable, "-m", "fedjaxsim.cli", "bench", *TINY],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    ) as process:
        deadline = time.monotonic() + HANGS
        while not (children := children_of(process.pid)):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=HANGS)
    assert process.returncode == 130, errors
    assert "stopped by Ctrl-C" in errors
    for child in children:  # which see the end of their parent a moment later
        assert waiting.select([child], [], [], HANGS)[0]
        os.close(child)
