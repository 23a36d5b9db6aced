"""Settings over their seeds: against scipy and numbers by hand, and as a table."""

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from fedjaxsim.cli import main
from fedjaxsim.report.seeds import FinishedRun, compared, estimate, mean_records, systems

ACCURACIES = {"pmtl": [0.5, 0.6, 0.8], "fedavg": [0.4, 0.5, 0.5], "local": [0.45, 0.65, 0.7]}
EPSILON = {"pmtl": 2.0, "fedavg": 2.0, "local": None}


def run(algorithm, seed, accuracy, **settings):
    config = {"algorithm": algorithm, "seed": seed, "versions": {"jax": "1"}, **settings}
    config["resolved"] = {"rounds": 4}
    spent = EPSILON.get(algorithm)
    records = [
        {"round": 0, "test_accuracy": 0.1, "epsilon": 0.0},
        {"round": 4, "test_accuracy": accuracy, "epsilon": spent},
    ]
    summary = {"test_accuracy": accuracy, "epsilon": spent, "epsilon_replace": spent,
               "rounds": 4, "rounds_planned": 4, "interrupted": False, "delta": 0.1,
               "rounds_per_second": 1.0}  # fmt: skip
    return FinishedRun(config, summary, records)


@pytest.fixture
def runs():
    return {
        f"{name}-{seed}": run(name, seed, accuracy)
        for name, values in ACCURACIES.items()
        for seed, accuracy in enumerate(values)
    }


def test_seeds_of_one_setting_are_one_system(runs):
    found = systems(runs)
    assert [(each.label, sorted(each.runs)) for each in found] == [
        (name, [0, 1, 2]) for name in ACCURACIES
    ]
    # Another setting is another system, named by it; so is a run that is there twice, by its name.
    more = {f"twice-{seed}": run("pmtl", seed, 0.3, lam=0.2) for seed in (0, 1)}
    other = {"again": runs["pmtl-0"]}
    assert [each.label for each in systems({**runs, **more, **other})][3:] == [
        "pmtl, lam 0.2", "again",
    ]  # fmt: skip


def test_means_intervals_and_paired_tests_are_those_of_scipy(runs):
    rows = compared(systems(runs))
    first = np.array(ACCURACIES["pmtl"])
    p_values = {}
    for row, (name, given) in zip(rows, ACCURACIES.items(), strict=True):
        values = np.array(given)
        assert (row["system"], row["metric"], row["seeds"]) == (name, "test_accuracy", 3)
        expected = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert row["mean"] - row["half"] == pytest.approx(expected.low)
        assert row["mean"] + row["half"] == pytest.approx(expected.high)
        if name != "pmtl":
            test = scipy.stats.ttest_rel(values, first)
            low, high = test.confidence_interval(0.95)
            assert row["difference"] - row["difference_half"] == pytest.approx(low)
            assert row["difference"] + row["difference_half"] == pytest.approx(high)
            p_values[name] = test.pvalue
    # Holm: the smaller of two p values counts twice, and the larger is no smaller than that.
    small, large = sorted(p_values, key=lambda name: p_values[name])
    by_name = {row["system"]: row["p"] for row in rows}
    assert by_name[small] == pytest.approx(2 * p_values[small])
    assert by_name[large] == pytest.approx(max(2 * p_values[small], p_values[large]))
    assert by_name["pmtl"] is None


def test_only_seeds_that_both_have_are_paired(runs):
    del runs["fedavg-0"]
    row = compared(systems(runs))[1]
    assert (row["seeds"], row["paired_seeds"]) == (2, 2)
    assert row["difference"] == pytest.approx(np.mean([0.5 - 0.6, 0.5 - 0.8]))
    elsewhere = {name: run._replace(config=run.config | {"data": "csv:b.csv"})
                 if "fedavg" in name else run for name, run in runs.items()}  # fmt: skip
    row = compared(systems(elsewhere))[1]
    assert (row["seeds"], row["paired_seeds"], row["difference"]) == (2, 0, None)
    del runs["fedavg-1"]
    row = compared(systems(runs))[1]
    assert (row["paired_seeds"], row["difference"], row["p"]) == (1, None, None)
    assert np.isnan(estimate(np.array([0.3]))[1])


def test_a_curve_is_the_mean_with_its_interval(runs):
    start, end = mean_records(systems(runs)[0], ["test_accuracy"])
    assert start["test_accuracy_low"] == pytest.approx(0.1)
    assert start["test_accuracy_high"] == pytest.approx(0.1)
    mean, half = estimate(np.array(ACCURACIES["pmtl"]))
    assert (end["test_accuracy"], end["test_accuracy_high"]) == (mean, mean + half)
    assert end["epsilon"] == 2.0
    assert mean_records(systems(runs)[2], ["test_accuracy"])[-1]["epsilon"] is None


def test_the_command_prints_systems_below_runs(runs, tmp_path, capsys):
    paths = []
    for name, (config, summary, records, *_) in runs.items():
        path = tmp_path / name
        path.mkdir()
        (path / "config.toml").write_text(
            f'algorithm = "{config["algorithm"]}"\nseed = {config["seed"]}\n'
        )
        (path / "summary.json").write_text(json.dumps(summary))
        (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
        draws = {"digest": f"seed {config['seed']}", "rounds": 4}
        (path / "guarantee.json").write_text(json.dumps({"draws": [draws]}))
        paths.append(str(path))
    picture = str(tmp_path / "all.svg")
    assert main(["compare", *paths, "--out", picture, "--draw", "test_accuracy", "epsilon"]) == 0
    out = capsys.readouterr().out
    assert Path(picture).read_text().count('id="axes_') == 2
    assert "minus pmtl" in out
    row = next(line for line in out.splitlines() if line.startswith(" fedavg ") and "±" in line)
    assert "0.467 ± 0.143" in row
    assert "-0.167 ± 0.287" in row
    # Those without privacy have nothing to add up.
    shared = "pmtl-0, fedavg-0; pmtl-1, fedavg-1; pmtl-2, fedavg-2."
    assert out.splitlines()[-1].endswith(f"published under its own: {shared}")
    assert main(["compare", *paths, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["runs"]) == 9
    assert [each["system"] for each in found["systems"]] == list(ACCURACIES)
