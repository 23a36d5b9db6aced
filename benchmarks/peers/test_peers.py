"""The parts of the comparison that need no peer: its files and its arithmetic."""

import json
from pathlib import Path
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


def test_a_report_counts_the_timed_rounds_alone():
    args = child.parse(["plain", "--warm", "2", "--rounds", "3"])
    found = child.report(args, [0.0, 10.0, 20.0, 21.0, 22.0, 26.0], 0.5, {"jax": "1"})
    assert (found["rounds_per_s"], found["warm_seconds"]) == (0.5, 20.0)
    assert found["learned"] == {"accuracy": 0.5}
    assert found["versions"]["jax"] == "1"


def test_the_fastest_setting_that_ran_is_taken(monkeypatch):
    rates = {"jit": 1.0, "pmap": 2.0}

    def start(run, way, *_, **rounds):
        return {"rounds_per_s": rates[way.name]} if way.name in rates else {"error": "no"}

    monkeypatch.setattr(compare, "start", start)
    chosen, trials = compare.fastest("fedjax", Path(), Path())
    assert chosen.name == "pmap"
    assert len(trials) == 4
    rates.clear()
    with pytest.raises(RuntimeError, match="jit: no"):
        compare.fastest("fedjax", Path(), Path())


def report(rate, accuracy=0.5):
    learned, setting = {"accuracy": accuracy}, "jit"
    numbers = {"rounds_per_s": rate, "warm_seconds": 2.0, "peak_mb": 100.0}
    return numbers | {"learned": learned, "setting": setting}


def test_ratios_are_taken_within_a_repetition():
    # Medians first would give 2/2; the machine was slow in the second repetition and fast in the
    # third, for both.
    pairs = [("a", "b"), ("a", "c")]
    repetitions = [
        {"a": report(2.0), "b": report(1.0), "c": {"error": "no"}},
        {"a": report(1.0), "b": report(2.0), "c": {"error": "no"}},
        {"a": report(9.0), "b": report(3.0), "c": {"error": "no"}},
        {"a": report(9.0), "b": {"error": "no"}, "c": {"error": "no"}},
    ]
    found = compare.ratios(repetitions, pairs)
    assert found == {"a / b": {"median": 2.0, "least": 0.5, "greatest": 3.0}}


def test_the_table_has_medians_and_says_what_failed():
    failed = {"error": "Traceback\n  File x\njax.errors.SomeError: no\nmore on it"}
    repetitions = [
        {"a": report(1.0, 0.2), "b": failed, "c": {"error": "not done"}},
        {"a": report(4.0, 0.4), "b": failed, "c": {"error": "not done"}},
        {"a": report(2.0, 0.3), "b": failed, "c": {"error": "not done"}},
    ]
    summary = compare.summarize(repetitions)
    lines = compare.table(json.loads(json.dumps(summary)), {}).splitlines()
    assert lines[2] == "| a | 2 (1 to 4) | 2.0 | 100 | accuracy 0.3 | jit |"
    assert lines[3] == "| b | failed |  |  |  | jax.errors.SomeError: no |"
    assert lines[4] == "| c | failed |  |  |  | not done |"


def test_every_ratio_is_of_runs_and_every_run_has_its_files():
    assert {name for pair in compare.RATIOS for name in pair} == set(compare.RUNS)
    for run in compare.RUNS.values():
        assert (compare.HERE / run.script).exists()
        assert run.peer == "" or (compare.HERE / f"requirements-{run.peer}.txt").exists()
        assert run.peer in compare.settings(2)


def test_the_picture_of_the_committed_results_has_a_bar_for_each_median():
    results = json.loads(compare.RESULTS.read_text())
    figure: Any = compare.draw(results)
    (axes,) = figure.axes
    medians = [results["summary"][name]["rounds_per_s"]["median"] for name in compare.RUNS]
    assert [bar.get_width() for bar in axes.patches] == medians
    assert sum("times slower" in text.get_text() for text in axes.texts) == 3
