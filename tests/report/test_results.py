"""The table of results: its statistic against scipy and by hand, and the best over settings."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from fedjaxsim.cli import main
from fedjaxsim.divergence import diverging_from, failures
from fedjaxsim.metrics import (
    Metric,
    column_label,
    column_metric,
    primary_metric,
    resolve_metrics,
)
from fedjaxsim.report.files import lines
from fedjaxsim.report.results import (
    Run,
    compared,
    curve,
    default_metric,
    envelope,
    estimate,
    holm,
    last,
    metric_columns,
    selection_column,
    systems,
)
from fedjaxsim.runs.directory import settings_of_system

pytestmark = pytest.mark.usefixtures("drawn")
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
    rows = [{**row, "delta": 0.1, "failed": False} for row in records]
    name = f"{algorithm}-{seed}"
    return Run(name, settings_of_system(config), seed, rows, config, summary)


@pytest.fixture
def runs():
    return {
        f"{name}-{seed}": run(name, seed, accuracy)
        for name, values in ACCURACIES.items()
        for seed, accuracy in enumerate(values)
    }


def test_a_users_algorithm_is_told_from_a_system_and_from_another_of_its_name():
    names = ("fedavg", "mine:fedavg", "mine:own", "other:own")
    told = systems([run(name, seed, 0.5) for name in names for seed in (0, 1)])
    assert [system.label for system in told] == [*names]
    assert systems([run("mine:own", seed, 0.5) for seed in (0, 1)])[0].label == "own"


def test_seeds_of_one_setting_are_one_system(runs):
    found = systems([*runs.values()])
    assert [(each.label, sorted(each.runs)) for each in found] == [
        (name, [0, 1, 2]) for name in ACCURACIES
    ]
    # Another setting is another system, named by it; so is a run that is there twice, by its name.
    # A long list has its first values, and how a run is evaluated makes no other system.
    more = [run("pmtl", seed, 0.3, lam=0.2, eval_every=seed, metrics=["f1"]) for seed in (1, 2)]
    drop = [f"c{k}" for k in range(9)]
    listed = systems([run("pmtl", seed, 0.3, drop=of) for of in ([], drop) for seed in (0, 1)])
    assert listed[1].label == "pmtl, drop = c0, c1, … (9)"
    private = systems(
        [run("pmtl", seed, 0.3, epsilon=e) for e in (1.0, math.inf) for seed in (0, 1)]
    )
    assert [system.label for system in private] == ["pmtl, ε = 1", "pmtl, ε = ∞ (no noise)"]
    again = dataclasses.replace(runs["pmtl-0"], name="again")
    assert [each.label for each in systems([*runs.values(), *more, again])][3:] == [
        "pmtl, lam = 0.2", "again",
    ]  # fmt: skip


def test_means_intervals_and_paired_tests_are_those_of_scipy(runs):
    rows = compared(systems([*runs.values()]))
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
    row = compared(systems([*runs.values()]))[1]
    assert (row["seeds"], row["paired_seeds"]) == (2, 2)
    assert row["difference"] == pytest.approx(np.mean([0.5 - 0.6, 0.5 - 0.8]))
    # A table of one name in another folder is the same if its rows are known to be.
    # At one path, other rows that are read with the same settings are the rows of another file.
    for place, digest, reading, paired in (
        ("csv:b.csv", "f", "r", 0), ("csv:other/a.csv", "g", "r", 0),
        ("csv:other/a.csv", "f", "r", 2), ("csv:a.csv", "g", "r", 0), ("csv:a.csv", "g", "s", 2),
    ):  # fmt: skip
        places = {"pmtl": ("csv:a.csv", "f", "r"), "fedavg": (place, digest, reading)}
        elsewhere = []
        for name, run in runs.items():
            data, known, how = places.get(name[:-2], ("", "", ""))
            facts = {"data_fingerprint": known, "data_settings_fingerprint": how}
            config = run.config | {"data": data, "resolved": facts}
            elsewhere.append(dataclasses.replace(run, config=config))
        row = compared(systems(elsewhere))[1]
        assert (row["seeds"], row["paired_seeds"]) == (2, paired)
        assert (row["difference"] is None) == (paired == 0)
    del runs["fedavg-1"]
    row = compared(systems([*runs.values()]))[1]
    assert (row["paired_seeds"], row["difference"], row["p"]) == (1, None, None)
    assert estimate([0.3]) == (0.3, None, None, 1, 0)


def test_a_run_that_failed_is_counted_and_in_no_mean_or_rank(runs):
    assert estimate([0.5, math.nan, math.inf]) == (None, None, None, 3, 2)
    assert estimate([0.5, None]) == (None, None, None, 2, 0)
    bad = run("pmtl", 3, 0.9)
    bad.rows[-1]["failed"] = True  # it diverged, though its accuracy is finite
    rows = compared(systems([*runs.values(), bad]))
    assert rows[0]["mean"] is None
    assert (rows[0]["seeds"], rows[0]["failed"]) == (4, 1)
    # The seeds that both have are still compared.
    assert rows[1]["difference"] == pytest.approx(np.mean([-0.1, -0.1, -0.3]))
    end = curve([*systems([*runs.values(), bad])[0].runs.values()], "test_accuracy")[-1]
    assert (end["mean"], end["half"], end["failed"], end["runs"]) == (None, None, 1, 4)


def test_holm_multiplies_by_what_is_left_and_never_falls():
    assert holm([0.04, None, 0.01, 0.03]) == [0.06, None, 0.03, 0.06]
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_a_curve_is_the_mean_with_its_interval(runs):
    first = [*systems([*runs.values()])[0].runs.values()]
    start, end = curve(first, "test_accuracy")
    assert (start["mean"], start["half"]) == (pytest.approx(0.1), pytest.approx(0))
    mean, half, deviation, *_ = estimate(ACCURACIES["pmtl"])
    assert (end["mean"], end["half"], end["deviation"]) == (mean, half, deviation)
    assert deviation == pytest.approx(np.std(ACCURACIES["pmtl"], ddof=1))
    assert end["epsilon"] == 2.0
    assert (
        curve([*systems([*runs.values()])[2].runs.values()], "test_accuracy")[-1]["epsilon"] is None
    )


def test_the_command_prints_systems_below_runs(runs, tmp_path, capsys):
    paths = []
    for name, each in runs.items():
        config, summary, records = each.config, each.summary, each.rows
        path = tmp_path / name
        path.mkdir()
        (path / "config.toml").write_text(
            f'algorithm = "{config["algorithm"]}"\nseed = {config["seed"]}\n'
        )
        (path / "summary.json").write_text(json.dumps(summary))
        (path / "metrics.jsonl").write_bytes(lines(records))
        draws = {"digest": f"seed {config['seed']}", "rounds": 4}
        (path / "guarantee.json").write_text(json.dumps({"draws": [draws], "assumed": []}))
        paths.append(str(path))
    picture = str(tmp_path / "all.svg")
    assert main(["compare", *paths, "--out", picture]) == 0
    out = capsys.readouterr().out
    assert Path(picture).read_text().count('id="axes_') == 1
    assert "minus pmtl" in out
    row = next(line for line in out.splitlines() if line.startswith("fedavg ") and "±" in line)
    assert "0.467 ± 0.143" in row
    assert "-0.167 ± 0.287" in row
    # Those without privacy have nothing to add up.
    shared = "pmtl-0, fedavg-0; pmtl-1, fedavg-1; pmtl-2, fedavg-2."
    assert out.splitlines()[-2].endswith(f"published under its own: {shared}")
    assert main(["compare", *paths, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["runs"]) == 9
    assert [each["system"] for each in found["systems"]] == list(ACCURACIES)


# --- failures -------------------------------------------------------------------------------------


def test_a_value_that_is_not_finite_is_a_failure_from_there_on():
    def found(*losses):
        return list(failures([{"train_loss": loss} for loss in losses]))

    assert found(None) == [False]
    assert found(None, 2.0, 0.5, 20.1) == [False] * 4
    assert found(2.0, math.nan, 2.0) == found(2.0, math.inf, 2.0) == [False, True, True]
    # JSON has null for a number that is not finite; a metric without any value says nothing.
    rows = [{"test_loss": 1.0, "test_auc": None}, {"test_loss": None, "test_auc": None}]
    assert list(failures(rows)) == [False, True]


def test_a_run_that_ends_with_ten_times_its_loss_or_none_diverges_from_there_on():
    def since(*losses):
        return diverging_from([{"round": 5 * k, "train_loss": v} for k, v in enumerate(losses)])

    assert since(None) is since(None, 2.0, 0.5, 19.9) is since(None, 2.0, 50.0, 1.0) is None
    assert since(None, 2.0, 50.0, 1.0, 50.0, 60.0) == 20
    assert since(None, 2.0, 50.0, None, 60.0) == 10
    assert since(None, 2.0, math.inf, 1.0) == 10


# --- the best over settings -----------------------------------------------------------------------

KEYS = ("learning_rate", "noise_multiplier")


def table(rows: list[tuple]) -> list[Run]:
    """Runs from rows of η, z, seed, round, accuracy and, optionally, a mark that the run failed."""
    found: dict[tuple, Run] = {}
    for rate, noise, seed, round_, accuracy, *failed in rows:
        settings = {"learning_rate": rate, "noise_multiplier": noise}
        run = found.setdefault((rate, noise, seed), Run("", settings, seed, []))
        run.rows.append({  # type: ignore[attr-defined]
            "round": round_, "train_loss": 1.0, "test_accuracy": accuracy,
            "test_loss": None if accuracy is None else 1 - accuracy,
            "epsilon": round_ / noise if noise else None, "epsilon_replace": None,
            "delta": 0.01, "failed": bool(failed),
        })  # fmt: skip
    return [*found.values()]


ROWS = [
    # At round 0 the small η is best, at round 5 the large one, whose seeds differ more.
    (0.1, 1.0, 0, 0, 0.5), (0.1, 1.0, 1, 0, 0.7), (0.1, 1.0, 0, 5, 0.5), (0.1, 1.0, 1, 5, 0.5),
    (0.3, 1.0, 0, 0, 0.1), (0.3, 1.0, 1, 0, 0.2), (0.3, 1.0, 0, 5, 0.2), (0.3, 1.0, 1, 5, 1.0),
    # With more noise, one seed of the large η has no number and one of the largest has failed.
    (0.1, 2.0, 0, 0, 0.1), (0.1, 2.0, 1, 0, 0.1), (0.3, 2.0, 0, 0, 0.1), (0.3, 2.0, 1, 0, 0.1),
    (1.0, 2.0, 0, 0, 0.1), (1.0, 2.0, 1, 0, 0.1),
    (0.1, 2.0, 0, 5, 0.25), (0.1, 2.0, 1, 5, 0.25), (0.3, 2.0, 0, 5, math.nan),
    (0.3, 2.0, 1, 5, 0.9), (1.0, 2.0, 0, 5, 0.9), (1.0, 2.0, 1, 5, 0.9, True),
]  # fmt: skip


def test_the_best_is_taken_after_the_mean_over_seeds():
    rows = envelope(table(ROWS), KEYS, ["learning_rate"], "test_accuracy")
    rows = [row for row in rows if (row["noise_multiplier"], row["round"]) != (2, 0)]
    assert list(rows[0]) == [
        "noise_multiplier", "round", "metric", "mean", "half", "deviation", "seeds", "failed",
        "runs", "epsilon", "epsilon_replace", "delta", "learning_rate",
    ]  # fmt: skip
    assert [(row["noise_multiplier"], row["round"]) for row in rows] == [(1, 0), (1, 5), (2, 5)]
    assert [row["learning_rate"] for row in rows] == [0.1, 0.3, 0.1]
    np.testing.assert_allclose([row["mean"] for row in rows], [0.6, 0.6, 0.25])
    # The deviation of two values is their distance over √2; t of one degree of freedom is 12.706.
    np.testing.assert_allclose([row["deviation"] for row in rows], np.array([0.2, 0.8, 0]) / 2**0.5)
    np.testing.assert_allclose(
        [row["half"] for row in rows], 12.7062 * np.array([0.1, 0.4, 0]), rtol=1e-5
    )
    assert [row["epsilon"] for row in rows] == [0, 5, 2.5]
    assert [(row["seeds"], row["failed"], row["runs"]) for row in rows] == [
        (2, 0, 4), (2, 0, 4), (2, 2, 6),
    ]  # fmt: skip
    losses = envelope(table(ROWS), KEYS, ["learning_rate"], "test_loss")
    assert [row["learning_rate"] for row in losses if row["round"] == 5] == [0.3, 0.1]


def test_the_best_is_chosen_on_validation_rows_and_shown_on_test_rows():
    runs = table([(0.1, 1.0, 0, 5, 0.9), (0.3, 1.0, 0, 5, 0.4)])
    assert selection_column(runs, "test_accuracy") == "test_accuracy"
    for run, validation in zip(runs, (0.2, 0.6), strict=True):
        run.rows[0]["validation_accuracy"] = validation
    assert selection_column(runs, "test_accuracy") == "validation_accuracy"
    [row] = envelope(runs, KEYS, ["learning_rate"], "test_accuracy")
    assert (row["learning_rate"], row["mean"]) == (0.3, 0.4)


def test_where_every_setting_fails_there_is_no_best():
    rows = [(0.1, 2.0, 0, 5, 0.1, True), (1.0, 2.0, 0, 5, 0.5, True)]
    [row] = envelope(table(rows), KEYS, ["learning_rate"], "test_accuracy")
    for name in ("mean", "half", "learning_rate", "epsilon", "delta"):
        assert row[name] is None
    assert (row["noise_multiplier"], row["round"], row["failed"]) == (2.0, 5, 2)


def test_a_single_seed_has_no_interval_and_ties_go_to_the_first_setting():
    rows = [(1.0, 0.0, 0, 5, 0.5), (0.3, 0.0, 0, 5, 0.5), (0.1, 0.0, 0, 5, 0.4)]
    [row] = envelope(table(rows), KEYS, ["learning_rate"], "test_accuracy")
    assert row["half"] is None
    assert (row["learning_rate"], row["seeds"], row["epsilon"]) == (1.0, 1, None)


def test_without_a_key_to_be_best_over_all_means_are_kept():
    rows = last(envelope(table(ROWS), KEYS, [], "test_accuracy"), KEYS)
    values = {tuple(row[key] for key in KEYS): row["mean"] for row in rows}
    assert len(values) == 5
    assert values[1.0, 2.0] is None
    assert values[0.3, 1.0] == pytest.approx(0.6)


def test_what_a_table_does_not_set_is_a_setting_of_its_own():
    rows = [(0.1, None, 0, 5, 0.5), (None, None, 0, 5, 0.9), (0.1, math.inf, 0, 5, 0.1)]
    found = envelope(table(rows), KEYS, ["learning_rate"], "test_accuracy")
    assert [(row["noise_multiplier"], row["learning_rate"], row["mean"]) for row in found] == [
        (math.inf, 0.1, 0.1), (None, None, 0.9),
    ]  # fmt: skip


def test_a_swept_delta_is_a_key():
    runs = [
        dataclasses.replace(each, settings={"delta": each.settings["noise_multiplier"]})
        for each in table([(0.1, 1.0, 0, 5, 0.1, True), (0.1, 2.0, 0, 5, 0.1)])
    ]
    assert [row["delta"] for row in envelope(runs, ["delta"], [], "test_accuracy")] == [1, 2]


def test_the_metric_is_excess_risk_or_accuracy_before_loss():
    runs = table(ROWS)
    assert metric_columns(runs) == ["train_loss", "test_accuracy", "test_loss"]
    assert default_metric(runs) == "test_accuracy"
    with pytest.raises(ValueError, match="train_loss"):
        default_metric([Run("", {}, 0, [{"round": 0, "train_loss": 1.0}])])
    assert primary_metric(["test_loss", "test_accuracy", "test_excess_risk"]) == "test_excess_risk"
    names = "accuracy_p10", "nmse", "loss"
    up = [column_metric(f"test_{name}").larger_is_better for name in names]
    assert up == [True, False, False]


def test_a_metric_of_ones_own_works_with_and_without_a_record():
    columns = ["train_loss", "test_own_score", "test_own_score_p10"]
    assert primary_metric(columns) == "test_own_score"
    assert not column_metric("test_own_score").larger_is_better
    assert column_label("test_own_score") == "test own score"
    own = {"own_score": Metric("score", "points", larger_is_better=True)}
    records = resolve_metrics(["loss", "own_score"], own)
    assert column_metric("test_own_score_p10", records).larger_is_better
    assert column_label("test_own_score", records) == "test score (points)"
    assert primary_metric(["test_loss", *columns], records) == "test_own_score"


def test_the_best_follows_the_record_of_the_metric_and_never_its_name():
    # A larger reduction of the loss is better, though the name begins like the loss.
    records = {"loss_reduction": Metric("reduction", larger_is_better=True)}
    runs = [
        Run(str(i), {"learning_rate": lr}, 0, [{"round": 1, "test_loss_reduction": x}], {}, {}, m)
        for i, (lr, x, m) in enumerate([(0.1, 1.0, records), (0.3, 2.0, records)])
    ]
    best = envelope(runs, ["learning_rate"], ["learning_rate"], "test_loss_reduction")
    assert [(row["learning_rate"], row["mean"]) for row in best] == [(0.3, 2.0)]
    opposed = {"loss_reduction": Metric("reduction", larger_is_better=False)}
    other = [runs[0], dataclasses.replace(runs[1], metrics=opposed)]
    with pytest.raises(ValueError, match="contradict"):
        envelope(other, ["learning_rate"], ["learning_rate"], "test_loss_reduction")
    undirected = {"loss_reduction": Metric("reduction")}
    runs = [dataclasses.replace(each, metrics=undirected) for each in runs]
    with pytest.raises(ValueError, match="whether larger is better"):
        envelope(runs, ["learning_rate"], ["learning_rate"], "test_loss_reduction")


@pytest.mark.parametrize(
    ("best_over", "metric", "message"),
    [(["lam"], "test_accuracy", "best_over.*'lam'"), ([], "accuracy", "metric")],
)
def test_unknown_keys_and_metrics_are_refused(best_over, metric, message):
    with pytest.raises(ValueError, match=message):
        envelope(table(ROWS), KEYS, best_over, metric)
