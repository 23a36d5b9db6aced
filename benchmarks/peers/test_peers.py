"""The parts of the comparison that need no peer: its files and its arithmetic."""

import json
import os
import subprocess
import sys
from typing import Any

import child
import compare
import numpy as np
import pytest

import fedjaxsim as fjs
from fedjaxsim.data.npz import save_npz


def test_children_read_the_split_that_was_written(tmp_path):
    rng = np.random.default_rng(2)
    data = [{"x": rng.normal(size=(n, 5)), "y": rng.integers(0, 3, n)} for n in (3, 9, 4)]
    population = fjs.data.split(fjs.Population.from_clients(data), test=0.3, seed=0)
    save_npz(tmp_path / "clients.npz", population)
    read = child.read_clients(tmp_path / "clients.npz")
    for k in range(3):
        for name, rows in (("train", read.train), ("test", read.test)):
            expected = population.rows(k, name)
            np.testing.assert_array_equal(rows[k][0], expected["x"])
            np.testing.assert_array_equal(rows[k][1], expected["y"])
    assert read.all_tests()[0].shape == (1 + 3 + 1, 5)


def test_generated_clients_have_the_workload_s_shapes(tmp_path):
    compare.data_of("gru", tmp_path, tmp_path / "gru.npz")
    clients = child.read_clients(tmp_path / "gru.npz")
    assert [len(y) for _, y in clients.train] == [20] * 100
    x, y = clients.all_tests()
    assert x.shape == y.shape == (500, 80)
    np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
    following = {tuple(pair) for pair in np.stack([x.ravel(), y.ravel()], axis=1).tolist()}
    assert len(following) <= 5 * 80


def test_a_clock_times_the_rounds_after_the_warm_ones():
    now, cpu = iter([0.0, 20.0, 26.0]), iter([5.0, 11.0])
    clock = child.Clock(2, 3, now.__next__, cpu.__next__)
    for rounds in (1, 1, 1, 2):
        clock.tick(rounds)
    args = child.parse(["cnn", "fedavg", "--data", "x", "--rounds", "3", "--setting", "jit"])
    found = clock.report(args, 0.5, {"jax": "1"})
    assert (found["rounds_per_s"], found["warm_seconds"], found["cpu_ms"]) == (0.5, 20.0, 2000.0)
    assert (found["accuracy"], found["setting"], found["versions"]["jax"]) == (0.5, "jit", "1")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_child_counts_its_tagged_processes_alone(tmp_path):
    wait = [sys.executable, "-c", "input()"]
    tagged = {**os.environ, child.TAG: "a"}
    both = [
        subprocess.Popen(wait, env=env, stdin=subprocess.PIPE) for env in (tagged, dict(os.environ))
    ]
    try:
        assert [int(folder.name) for folder in child.processes("a")] == [both[0].pid]
        assert child.processes("") == []
    finally:
        for process in both:
            process.communicate(b"\n")


def test_the_fastest_setting_that_ran_is_taken():
    trials = {"jit": {"rounds_per_s": 1.0}, "pmap": {"rounds_per_s": 2.0}, "old": {"error": "no"}}
    assert compare.fastest(trials) == "pmap"
    assert compare.fastest({"old": {"error": "no"}}) is None


def report(rate, accuracy=0.5):
    numbers = {"rounds_per_s": rate, "cpu_ms": 2000 / rate, "warm_seconds": 2.0, "peak_mb": 100.0}
    return numbers | {"accuracy": accuracy, "setting": "jit"}


def test_a_second_call_measures_only_what_the_file_lacks(tmp_path, monkeypatch):
    started = []

    def start(library, workload, system, setting, python, *options):
        started.append((library, options[options.index("--seed") + 1]))
        return report(1.0)

    monkeypatch.setattr(compare, "start", start)
    monkeypatch.setattr(compare, "ready", lambda *_: "python")
    (tmp_path / "cnn.npz").touch()
    (tmp_path / "femnist.npz").touch()
    parts = tmp_path / "out.json", tmp_path, tmp_path, tmp_path
    compare.Comparison(*parts).measure("fluke", "cnn", "ditto", 1.0, 0)
    assert started == [("fluke", 0)] * 3  # two trials and the cell
    again = compare.Comparison(*parts)
    again.measure("fluke", "cnn", "ditto", 1.0, 0)
    again.measure("fluke", "cnn", "ditto", 1.0, 1)
    assert started[3:] == [("fluke", 1)]


def test_ratios_are_taken_within_a_repetition():
    # Medians first would give 2/2; the machine was slow in the second repetition and fast in the
    # third, for both.
    cells = {
        "cnn fedjaxsim fedavg": [report(2.0), report(1.0), report(9.0), report(9.0)],
        "cnn pfl fedavg": [report(1.0), report(2.0), report(3.0), {"error": "no"}],
    }
    found = compare.summarize(cells)["cnn pfl fedavg"]
    expected = {"median": 2.0, "least": 0.5, "greatest": 3.0}
    assert found["rounds_per_s_ratio"] == expected
    assert found["cpu_ms_ratio"] == pytest.approx(expected)


def test_the_table_has_medians_and_says_what_failed():
    failed = {"error": "Traceback\n  File x\njax.errors.SomeError: no\nmore on it"}
    cells = {
        "cnn fedjaxsim fedavg": [report(1.0, 0.2), report(4.0, 0.4), report(2.0, 0.3)],
        "cnn flower fedavg": [failed, failed, failed],
        "gru fluke ditto": [{"error": "not done"}],
    }
    lines = compare.table(json.loads(json.dumps(compare.summarize(cells)))).splitlines()
    assert lines[2] == "| fedjaxsim FedAvg | 2 (1 to 4) |  | 1e+03 |  | 100 | 2.0 | 0.30 | jit |"
    assert lines[3].startswith("| Flower FedAvg | failed |")
    assert lines[3].endswith("| jax.errors.SomeError: no |")
    assert lines[7] == "| fluke Ditto, no noise | failed |  |  |  |  |  |  | not done |"


def test_every_library_has_its_files_and_settings():
    assert set(compare.LIBRARIES) == set(compare.settings(2))
    assert list(compare.TITLES) == list(compare.TRIALS) == list(child.WORKLOADS)
    for library, about in compare.LIBRARIES.items():
        assert (compare.HERE / about.script).exists()
        requirements = compare.HERE / f"requirements-{library}.txt"
        assert requirements.exists() == (library != compare.OURS)


def test_the_picture_has_a_bar_for_each_median():
    cells = {
        f"{workload} {library} fedavg": [report(10.0 * n + k)]
        for k, workload in enumerate(compare.TITLES)
        for n, library in enumerate(compare.LIBRARIES, 1)
    }
    figure: Any = compare.draw(compare.summarize(cells), 2)
    for k, axes in enumerate(figure.axes):
        assert [bar.get_width() for bar in axes.patches] == [10.0 * n + k for n in range(6, 0, -1)]
        assert sum("× faster" in text.get_text() for text in axes.texts) == 5


def test_ratios_are_said_in_words():
    assert compare.slower(12.3) == "12× slower"
    assert compare.slower(0.5) == "2.0× faster"
