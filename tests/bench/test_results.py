"""Spreads, ratios, the file of results and the comparison of two."""

import json
from pathlib import Path

import pytest

from fedjaxsim.bench.results import Results, Spread, compare, print_comparison, spread

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


def test_a_ratio_ranges_over_all_pairs_of_processes():
    new, old = [3.0, 4.0, 8.0], [1.0, 2.0, 5.0]
    pairs = [a / b for a in new for b in old]
    assert spread(new).over(spread(old)) == (4.0 / 2.0, min(pairs), max(pairs))
    assert spread([0.0]).over(Spread(0.05, 0.0, 0.2), equal=0.1) == (1.0, 0.5, 1.0)


def test_results_come_back_from_their_file_as_they_were(tmp_path):
    path, found = tmp_path / "bench.json", results(a=[10.0, 12.0, 11.0], b=[1.0])
    found.write(path)
    assert Results.read(path) == found
    record = json.loads(path.read_text())
    assert record["machine"] == MACHINE
    run = record["workloads"]["a"]
    assert run["settings"] == {"algorithm": "pmtl"}
    assert run["summary"]["rounds_per_second"] == {"median": 11, "least": 10, "greatest": 12}
    assert "device_peak_mb" not in run["summary"]


@pytest.mark.parametrize(
    ("new", "old", "ratio", "verdict"),
    [
        ([24, 22, 20], [10, 12, 11], "2 (1.667–2.4)", "faster"),
        ([3, 4], [1, 2], "2.333 (1.5–4)", "faster"),
        ([1, 2], [3, 4], "0.4286 (0.25–0.6667)", "slower"),
        ([1, 3], [2, 4], "0.6667 (0.25–1.5)", ""),
        ([1, 2], [2, 3], "0.6 (0.3333–1)", ""),
        ([1, 1], [1, 1], "1", ""),
    ],
)
def test_only_processes_that_all_lie_apart_differ(new, old, ratio, verdict):
    [[run, speed, judged, *_]] = compare(results(a=new, b=[1.0]), results(a=old, c=[1.0]))
    assert (run, speed, judged) == ("a", ratio, verdict)


def test_memory_and_compilation_are_judged_too():
    old = results(a=[numbers(1.0, 50.0, compiling=0.5), numbers(1.0, 50.0, compiling=0.0)])
    new = results(a=[numbers(1.0, 110.0), numbers(1.0, 90.0)])
    # 2 s against 0.25 in the median, 0.5, and less than 0.1, which counts as 0.1.
    assert compare(new, old) == [["a", "1", "", "8 (4–20)", "longer", "2 (1.8–2.2)", "more"]]
    for process in old.processes["a"]:
        del process["compile_seconds"]
    assert compare(new, old)[0][3:5] == ["–", ""]


def test_a_comparison_names_what_is_slower_and_what_is_not_the_same(capsys):
    old, new = results(a=[2.0], b=[1.0]), results(a=[1.0], b=[1.0])
    new.machine["cores"] = 64
    new.settings["b"] = {"algorithm": "pmtl", "rounds": 3}
    print_comparison(new, old, "old.json")
    printed = capsys.readouterr().out
    assert "slower: a\n" in printed
    assert "not the same machine: cores was 2 and is 64" in printed
    assert "not the same run: b has other rounds" in printed
    print_comparison(new, results(c=[1.0]), "old.json")
    assert capsys.readouterr().out == "no run of old.json was measured here\n"


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", '{"workloads": {}}', '{"machine": {}, "workloads": 3}',
        '{"machine": {}, "workloads": {"a": {"processes": []}}}',
        '{"machine": {}, "workloads": {"a": {"processes": [{"rounds_per_second": 0}]}}}',
        '{"machine": {}, "workloads": {"a": {"processes": [{"rounds_per_second": "fast"}]}}}',
    ],
)  # fmt: skip
def test_a_file_that_holds_no_results_is_refused(text, tmp_path):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match="other"):
        Results.read(tmp_path / "other.json")


def test_results_of_older_versions_are_read():
    path = Path(__file__).parents[2] / "benchmarks/results/bench.json"
    found = Results.read(path)
    assert found.spread("femnist-cnn-fedavg", "rounds_per_second") is not None
