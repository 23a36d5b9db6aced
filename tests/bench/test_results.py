"""Spreads and the file of results."""

import json

from fedjaxsim.bench.results import Results, spread

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
