import math

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from fedjaxsim.metrics import METRICS, Metric, judged_by, label, of_column
from fedjaxsim.report.envelopes import default_metric, envelope, last, metric_columns, records

SETTINGS = ("learning_rate", "noise_multiplier", "seed")


def table(rows: list[tuple]) -> pa.Table:
    """Rows of η, z, seed, round, accuracy and, optionally, whether the run has diverged."""
    full = [row if len(row) == 6 else (*row, False) for row in rows]
    rate, noise, seed, round_, accuracy, diverged = zip(*full, strict=True)
    rounds = np.array(round_, np.int32)
    return pa.table(
        {
            "run": pa.array(range(len(full)), pa.int32()),
            "learning_rate": pa.array(rate, pa.float64()),
            "noise_multiplier": pa.array(noise, pa.float64()),
            "seed": pa.array(seed, pa.int64()),
            "round": rounds,
            "train_loss": np.ones(len(full)),
            "test_accuracy": pa.array(accuracy, pa.float64()),
            "test_loss": 1 - np.array([math.nan if a is None else a for a in accuracy]),
            "epsilon": pa.array(
                [None if not z else t / z for z, t in zip(noise, round_, strict=True)], pa.float64()
            ),
            "epsilon_replace": pa.nulls(len(full), pa.float64()),
            "delta": np.full(len(full), 0.01),
            "diverged": list(diverged),
        }
    )


ROWS = [
    # At round 0 the small η is best, at round 5 the large one, whose seeds differ more.
    (0.1, 1.0, 0, 0, 0.5), (0.1, 1.0, 1, 0, 0.7), (0.1, 1.0, 0, 5, 0.5), (0.1, 1.0, 1, 5, 0.5),
    (0.3, 1.0, 0, 0, 0.1), (0.3, 1.0, 1, 0, 0.2), (0.3, 1.0, 0, 5, 0.2), (0.3, 1.0, 1, 5, 1.0),
    # With more noise, one seed of the large η has no value and one of the largest has diverged.
    (0.1, 2.0, 0, 5, 0.25), (0.1, 2.0, 1, 5, 0.25), (0.3, 2.0, 0, 5, math.nan),
    (0.3, 2.0, 1, 5, 0.9), (1.0, 2.0, 0, 5, 0.9), (1.0, 2.0, 1, 5, 0.9, True),
]  # fmt: skip


def test_the_best_is_taken_after_the_mean_over_seeds():
    found = envelope(table(ROWS), SETTINGS, ["learning_rate"], "test_accuracy")
    assert list(found.columns) == [
        "noise_multiplier", "round", "metric", "value", "standard_error", "seeds",
        "learning_rate", "epsilon", "epsilon_replace", "delta",
    ]  # fmt: skip
    rows = records(found)
    assert [(row["noise_multiplier"], row["round"]) for row in rows] == [(1, 0), (1, 5), (2, 5)]
    assert [row["learning_rate"] for row in rows] == [0.1, 0.3, 0.1]
    np.testing.assert_allclose([row["value"] for row in rows], [0.6, 0.6, 0.25])
    # The standard error of two values is half their distance.
    np.testing.assert_allclose([row["standard_error"] for row in rows], [0.1, 0.4, 0], atol=1e-15)
    assert [row["epsilon"] for row in rows] == [0, 5, 2.5]
    assert [row["seeds"] for row in rows] == [2, 2, 2]
    assert {row["metric"] for row in rows} == {"test_accuracy"}


def test_losses_are_best_where_they_are_smallest():
    found = envelope(table(ROWS), SETTINGS, ["learning_rate"], "test_loss")
    assert found["learning_rate"].tolist() == [0.1, 0.3, 0.1]
    np.testing.assert_allclose(found["value"], [0.4, 0.4, 0.75])


def test_where_every_setting_fails_there_is_no_best():
    rows = [(0.1, 2.0, 0, 5, math.inf), (0.3, 2.0, 0, 5, None), (1.0, 2.0, 0, 5, 0.5, True)]
    [row] = records(envelope(table(rows), SETTINGS, ["learning_rate"], "test_accuracy"))
    for name in ("value", "standard_error", "learning_rate", "epsilon", "delta"):
        assert row[name] is None
    assert (row["noise_multiplier"], row["round"]) == (2.0, 5)


def test_a_single_seed_has_no_standard_error_and_ties_go_to_the_first_setting():
    rows = [(1.0, 0.0, 0, 5, 0.5), (0.3, 0.0, 0, 5, 0.5), (0.1, 0.0, 0, 5, 0.4)]
    shuffled = table(rows).select([name for name in table(rows).column_names if name != "seed"])
    tuned = ["learning_rate", "noise_multiplier"]
    [row] = records(envelope(shuffled, tuned, ["learning_rate"], "test_accuracy"))
    assert row["standard_error"] is None
    assert (row["learning_rate"], row["seeds"], row["epsilon"]) == (0.3, 1, None)


def test_without_a_key_to_be_best_over_all_means_are_kept():
    found = envelope(table(ROWS), SETTINGS, [], "test_accuracy")
    assert len(found) == 7
    keys = ("learning_rate", "noise_multiplier", "round")
    values = {tuple(row[key] for key in keys): row["value"] for row in records(found)}
    assert values[1.0, 2.0, 5] is None
    assert values[0.3, 1.0, 5] == pytest.approx(0.6)


def test_what_a_table_does_not_set_is_a_setting_of_its_own():
    rows = [(0.1, None, 0, 5, 0.5), (None, None, 0, 5, 0.9), (0.1, math.inf, 0, 5, 0.1)]
    found = records(envelope(table(rows), SETTINGS, ["learning_rate"], "test_accuracy"))
    assert [(row["noise_multiplier"], row["learning_rate"], row["value"]) for row in found] == [
        (math.inf, 0.1, 0.1), (None, None, 0.9),
    ]  # fmt: skip


def test_the_last_envelope_is_that_of_each_final_round():
    found = envelope(table(ROWS[:-6]), SETTINGS, ["learning_rate"], "test_accuracy")
    more = envelope(table([(0.1, 0.0, 0, 3, 0.5)]), SETTINGS, ["learning_rate"], "test_accuracy")
    ends = last(pd.concat([found, more]))
    assert ends["noise_multiplier"].tolist() == [0.0, 1.0]
    assert ends["round"].tolist() == [3, 5]
    every = ["learning_rate", "noise_multiplier"]
    whole = last(envelope(table(ROWS), SETTINGS, every, "test_accuracy"))
    assert records(whole[["round", *every]]) == [
        {"round": 5, "learning_rate": 0.3, "noise_multiplier": 1.0}
    ]


def test_a_swept_delta_is_a_key_and_no_result():
    deltas = table(ROWS).rename_columns(
        [{"noise_multiplier": "delta", "delta": "z"}.get(n, n) for n in table(ROWS).column_names]
    )
    found = envelope(deltas, ("learning_rate", "delta", "seed"), ["learning_rate"], "test_accuracy")
    assert found.columns[0] == "delta"
    assert found["delta"].tolist() == [1, 1, 2]


def test_the_metric_is_excess_risk_or_accuracy_before_loss():
    results = table(ROWS)
    assert metric_columns(results, SETTINGS) == ["train_loss", "test_accuracy", "test_loss"]
    assert default_metric(results, SETTINGS) == "test_accuracy"
    assert default_metric(results.drop(["test_accuracy"]), SETTINGS) == "test_loss"
    known = results.append_column("test_excess_risk", results["test_loss"])
    assert default_metric(known, SETTINGS) == "test_excess_risk"
    with pytest.raises(ValueError, match="train_loss"):
        default_metric(results.drop(["test_accuracy", "test_loss"]), SETTINGS)
    up = [of_column(f"test_{name}").larger_is_better for name in ("accuracy_p10", "nmse", "loss")]
    assert up == [True, False, False]


def test_a_metric_of_ones_own_works_with_and_without_a_record(monkeypatch):
    columns = ["train_loss", "test_own_score", "test_own_score_p10"]
    assert judged_by(columns) == "test_own_score"
    assert not of_column("test_own_score").larger_is_better
    assert label("test_own_score") == "test own score"
    monkeypatch.setitem(METRICS, "own_score", Metric("score", "points", larger_is_better=True))
    assert of_column("test_own_score_p10").larger_is_better
    assert label("test_own_score") == "test score (points)"
    assert judged_by([*columns, "test_loss"]) == "test_loss"


@pytest.mark.parametrize(
    ("best_over", "metric", "message"),
    [
        (["lam"], "test_accuracy", "best_over.*'lam'"),
        (["seed"], "test_accuracy", "got 'seed'"),
        ([], "accuracy", "metric"),
        ([], "epsilon", "metric"),
    ],
)
def test_unknown_keys_and_metrics_are_refused(best_over, metric, message):
    with pytest.raises(ValueError, match=message):
        envelope(table(ROWS), SETTINGS, best_over, metric)
