"""Spreads, and the file of results of processes."""

import json
import subprocess
import sys
from unittest.mock import MagicMock

import processes
import pytest
from processes import Results, in_child

from fedjaxsim.bench.measure import spread

MACHINE = {"name": "here", "processor": "some", "cores": 2, "device_kind": "cpu", "devices": 2}


def numbers(speed, rounds_mb=100.0, compiling=2.0):
    return {
        "rounds_per_second": speed,
        "compile_seconds": compiling,
        "rounds_mb": rounds_mb,
        "device_peak_mb": None,
    }


def results(**processes) -> Results:
    """The results of runs: a speed for each process, or all its numbers."""
    return Results(
        dict(MACHINE),
        {run: {"algorithm": "pmtl"} for run in processes},
        {
            run: [each if isinstance(each, dict) else numbers(each) for each in values]
            for run, values in processes.items()
        },
    )


def test_a_spread_is_a_median_with_its_range():
    assert spread([4.0, 1.0, 10.0]) == (4.0, 1.0, 10.0)
    assert spread([1.0, 2.0]).median == 1.5
    assert [str(spread(values)) for values in ([3.0], [2.0, 4.0])] == ["3", "3 (2–4)"]


def test_a_file_has_all_processes_and_their_spread(tmp_path):
    path, found = tmp_path / "bench.json", results(a=[10.0, 12.0, 11.0], b=[1.0])
    found.write(path)
    record = json.loads(path.read_text())
    assert record["machine"] == MACHINE
    run = record["workloads"]["a"]
    assert run["settings"] == {"algorithm": "pmtl"}
    assert run["summary"]["rounds_per_second"] == {"median": 11, "least": 10, "greatest": 12}
    assert "device_peak_mb" not in run["summary"]


def test_a_run_that_is_refused_is_a_line_of_json(monkeypatch, capsys):
    request = {"settings": {"data": "leaf:absent"}, "devices": None}
    monkeypatch.setattr(sys, "argv", ["", json.dumps(request)])
    for name in ("_end_with_parent", "use_devices", "require", "jax"):
        monkeypatch.setattr(processes, name, MagicMock())
    processes.main()
    assert "absent" in json.loads(capsys.readouterr().out)["refused"]


@pytest.mark.thorough
def test_a_child_measures_or_refuses_in_one_line_and_a_late_one_is_ended(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    tiny = {"data": "random", "clients": 4, "shape": [3], "rounds": 4, "eval_every": 2}
    assert in_child(tiny)["rounds_per_second"] > 0
    with pytest.raises(ValueError, match="devices"):
        in_child({}, devices=10**6)
    with pytest.raises(subprocess.TimeoutExpired):
        in_child({}, seconds=0.01)
