"""`fedjaxsim bench`, from its input to its files."""

import contextlib
import json
import os
import select as waiting
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from problems import HANGS

from fedjaxsim.bench.children import in_child
from fedjaxsim.bench.figure import growth_figure, systems_figure
from fedjaxsim.bench.report import compare
from fedjaxsim.bench.results import Results
from fedjaxsim.bench.workloads import GROWTH, select
from fedjaxsim.cli import main
from fedjaxsim.cli.work import bench as command
from fedjaxsim.cli.work.bench import _data, _plan

MACHINE = {
    "name": "here",
    "processor": "some",
    "cores": 2,
    "platform": "cpu",
    "device_kind": "cpu",
    "devices": 2,
    "versions": {"jax": "0.10.2"},
}


def numbers(speed, peak=500.0, gemm=0.25, memory=0.5):
    return {
        "rounds_per_second": speed,
        "updates_per_second": 100 * speed,
        "compile_seconds": 2.0,
        "gemm_fraction": gemm,
        "memory_fraction": memory,
        "peak_mb": peak + 30,
        "running_mb": peak,
        "device_peak_mb": None,
        "state_mb": 40.0,
        "data_mb": 10.0,
        "data": "synthetic",
    }


def results(**speeds) -> Results:
    found = Results(dict(MACHINE), idle_mb=400.0)
    for name, values in speeds.items():
        for value in values:
            found.add(name.replace("_", "-"), numbers(value))
    return found


@pytest.fixture
def files(tmp_path):
    old = results(tiny_round=[10.0, 12.0, 11.0], softmax_1k=[5.0, 7.0], mlp_pmtl=[4.0, 4.0])
    new = results(tiny_round=[24.0, 22.0, 20.0], softmax_1k=[6.0, 4.0], mlp_local=[1.0])
    old.write(tmp_path / "old.json")
    new.write(tmp_path / "new.json")
    return tmp_path / "old.json", tmp_path / "new.json"


def test_results_come_back_from_their_file_as_they_were(files):
    old = Results.read(files[0])
    assert old == results(tiny_round=[10, 12, 11], softmax_1k=[5, 7], mlp_pmtl=[4, 4])
    record = json.loads(files[0].read_text())
    assert record["machine"] == MACHINE
    tiny = record["workloads"]["tiny-round"]
    assert tiny["summary"]["rounds_per_second"] == {"median": 11, "least": 10, "greatest": 12}
    # 500 MB, of which 400 are those of an idle process, 40 state and 10 data.
    assert tiny["summary"]["memory_mb"]["median"] == 100
    assert tiny["summary"]["compiling_memory_mb"]["median"] == 130
    assert tiny["summary"]["rest_mb"]["median"] == 50
    assert tiny["bound"] == "memory"
    assert "device_peak_mb" not in tiny["summary"]


def test_the_nearer_ceiling_is_the_bound():
    found = Results({})
    found.add("a", numbers(1.0, gemm=0.6, memory=0.5))
    found.add("b", numbers(1.0, gemm=0.0, memory=0.0))
    found.add("c", {**numbers(1.0), "gemm_fraction": None})
    assert [found.bound(name) for name in "abc"] == ["gemm", None, None]
    assert found.fraction("a") == (0.6, 0.6, 0.6)


def test_a_comparison_says_what_is_faster_beyond_the_spread(files):
    old, new = map(Results.read, files)
    tiny, softmax = compare(new, old)
    assert tiny == {
        "workload": "tiny-round",
        "rounds/s old": "11",
        "rounds/s new": "22",
        "rounds/s ratio": "2 (1.667–2.4)",
        "speed is": "faster",
        "MB old": "100",
        "MB new": "100",
        "MB ratio": "1 (1–1)",
        "memory is": "",
        "compile s old": "2",
        "compile s new": "2",
        "compile s ratio": "1 (1–1)",
        "compiling is": "",
    }
    # 4 to 6 against 5 to 7.
    assert (softmax["workload"], softmax["speed is"]) == ("softmax-1k", "")
    [slower, _] = compare(old, new)
    assert slower["speed is"] == "slower"


@pytest.mark.parametrize(
    ("new", "old", "verdict"),
    [
        ([3, 4], [1, 2], "faster"),
        ([1, 2], [3, 4], "slower"),
        ([1, 3], [2, 4], ""),
        ([1, 2], [2, 3], ""),
        ([1, 1], [1, 1], ""),
    ],
)
def test_only_processes_that_all_lie_apart_differ(new, old, verdict):
    [row] = compare(results(a=new), results(a=old))
    assert row["speed is"] == verdict


def test_more_memory_is_told():
    old, new = results(a=[1.0, 1.0]), Results(dict(MACHINE), idle_mb=400.0)
    for peak in (610.0, 590.0):
        new.add("a", numbers(1.0, peak=peak))
    [line] = compare(new, old)
    assert (line["MB ratio"], line["memory is"]) == ("2 (1.9–2.1)", "more")


def test_longer_compilation_is_told_and_may_be_missing_in_old_files(tmp_path):
    old, new = results(a=[1.0, 1.0]), results(a=[1.0])
    for process, took in zip(old.processes["a"], (0.5, 0.0), strict=True):
        process["compile_seconds"] = took
    # 2 s against 0.25 in the median, 0.5, and less than 0.1, which is not told apart from none.
    [line] = compare(new, old)
    assert (line["compile s ratio"], line["compiling is"]) == ("8 (4–20)", "longer")
    for process in old.processes["a"]:
        del process["compile_seconds"]
    old.write(tmp_path / "old.json")
    [line] = compare(new, Results.read(tmp_path / "old.json"))
    assert (line["compile s old"], line["compiling is"], line["rounds/s ratio"]) == (
        "–",
        "",
        "1 (1–1)",
    )


def test_two_files_are_compared_without_measuring(files, capsys, monkeypatch):
    monkeypatch.setattr(command, "in_child", None)
    assert main(["bench", "--compare", *map(str, files)]) == 0
    printed = capsys.readouterr().out
    assert "2 (1.667–2.4)" in printed
    assert "faster" in printed
    assert "not the same machine" not in printed


def test_another_machine_is_pointed_out(files, capsys):
    other = Results.read(files[1])
    other.machine["cores"] = 64
    other.write(files[1])
    assert main(["bench", "--compare", *map(str, files)]) == 0
    assert "not the same machine: cores was 2 and is 64" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"workloads": {}}', '{"machine": {}, "idle_mb": 1, "workloads": 3}']
)
def test_a_file_that_holds_no_results_is_refused(text, tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text(text)
    assert main(["bench", "--compare", str(path)]) == 2
    assert "does not hold results of fedjaxsim bench" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workloads", "sofmax-1k"], "did you mean 'softmax-1k'"),
        (["--processes", "0"], "processes must be at least 1, got 0"),
        (["--data", "digits"], "data must be leaf:PATH, got 'digits'"),
        (["--data", "leaf:nowhere"], "no data nowhere"),
        (["--compare", "nowhere.json"], "no results nowhere.json"),
        (["--compare", "a", "b", "c"], "compare takes one file or two, got 3"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr(command, "in_child", None)
    assert main(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_results_are_not_overwritten_unless_asked_to(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "in_child", None)
    (tmp_path / "bench.json").write_text("{}")
    assert main(["bench", "--out", str(tmp_path)]) == 2
    assert "already holds a benchmark (bench.json)" in capsys.readouterr().err


def test_the_list_has_every_workload_and_measures_nothing(capsys, monkeypatch):
    monkeypatch.setattr(command, "in_child", None)
    assert main(["bench", "--list"]) == 0
    printed = capsys.readouterr().out
    assert "tiny-round" in printed
    assert "growth-steps " in printed
    assert "1, 10, 100, 1,000" in printed


def test_femnist_is_found_in_the_folder_that_the_environment_names(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDJAXSIM_DATA", str(tmp_path))
    assert _data(None) is None
    file = tmp_path / "femnist" / "mytest.json.zip"
    file.parent.mkdir()
    file.touch()
    assert _data(None) == f"leaf:{file}"
    monkeypatch.delenv("FEDJAXSIM_DATA")
    assert _data(None) is None
    assert _data(f"leaf:{file}") == f"leaf:{file}"


def test_every_workload_has_its_first_process_before_any_has_its_second():
    plan = [workload.name for workload in _plan(select("tiny-round,growth-steps-1"), 4)]
    assert plan == ["tiny-round", "growth-steps-1"] * 3 + ["tiny-round"]


def fake_child(answers):
    """Children that take no time; an exception among the answers is raised."""
    idle = {"peak_mb": 400.0, "machine": dict(MACHINE)}
    left = iter([idle, *answers])

    def child(workload, data, repeats):
        answer = next(left)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return child


def test_an_interrupt_keeps_what_was_measured(tmp_path, capsys, monkeypatch):
    answers = [numbers(3.0), numbers(4.0), KeyboardInterrupt()]
    monkeypatch.setattr(command, "in_child", fake_child(answers))
    arguments = ["--workloads", "tiny-round,growth-steps", "--out", str(tmp_path / "out")]
    assert main(["bench", *arguments]) == 130
    found = Results.read(tmp_path / "out" / "bench.json")
    assert list(found.processes) == ["tiny-round", "growth-steps-1"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "bench.json", "bench.png", "growth.png",
    }  # fmt: skip
    assert "stopped by Ctrl-C" in capsys.readouterr().err


def test_a_workload_that_fails_stops_no_other(tmp_path, capsys, monkeypatch):
    answers = [ChildProcessError("out of memory"), numbers(4.0), numbers(5.0)]
    monkeypatch.setattr(command, "in_child", fake_child(answers))
    arguments = ["--workloads", "softmax-10k,tiny-round", "--processes", "2"]
    assert main(["bench", *arguments]) == 1
    printed = capsys.readouterr()
    assert "softmax-10k failed: out of memory" in printed.err
    assert "4.5 (4–5)" in printed.out


def test_figures_show_every_workload():
    found = results(tiny_round=[10.0, 12.0], softmax_1k=[5.0, 7.0])
    [speed, ceiling, compilation] = systems_figure(found, ["softmax-1k", "tiny-round"]).axes
    assert [label.get_text() for label in speed.get_yticklabels()] == ["softmax-1k", "tiny-round"]
    assert [text.get_text() for text in ceiling.texts] == ["50%", "50%"]
    assert [text.get_text() for text in compilation.texts] == ["2", "2"]
    points = [workload for workload in GROWTH if workload.curve == "growth-cohort"]
    for point in points:
        found.add(point.name, numbers(1.0))
    panels = growth_figure(found, points).axes
    assert [panel.get_xscale() for panel in panels] == ["log", "log"]
    memory = panels[1].lines[-1]
    assert np.asarray(memory.get_xdata()).tolist() == [10, 100, 1000, 10_000]
    assert np.asarray(memory.get_ydata()).tolist() == [50.0] * 4


@pytest.mark.thorough
def test_a_child_measures_the_smallest_workload(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    idle = in_child(None, None, 0)
    found = Results(idle["machine"], idle["peak_mb"])
    assert found.machine["cores"] == os.cpu_count() == found.machine["devices"]
    found.add("tiny-round", in_child("tiny-round", None, 1))
    [tiny] = found.processes["tiny-round"]
    assert tiny["updates_per_second"] == pytest.approx(10 * tiny["rounds_per_second"])
    assert tiny["compiling_memory_mb"] > tiny["memory_mb"] > tiny["state_mb"] + tiny["data_mb"]
    assert 0 < tiny["gemm_fraction"] < 1
    assert 0 < tiny["memory_fraction"] < 1
    assert "evaluation_share" not in tiny


@pytest.mark.thorough
def test_a_child_that_fails_tells_why(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(ChildProcessError, match="KeyError: 'unknown'"):
        in_child("unknown", None, 1)


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
        [sys.executable, "-m", "fedjaxsim.cli", "bench", "--workloads", "tiny-round"],
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
