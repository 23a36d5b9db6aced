"""Records of metrics, which one reads without importing JAX."""

import json

import pytest

from fedjaxsim.metrics import (
    METRICS,
    Metric,
    column_metric,
    find_metric,
    merge_metrics,
    metric_name,
    metrics_from_tables,
    metrics_to_tables,
    resolve_metrics,
)

OWN = Metric("gap", "points", False, (0.0, 2.0), smooth=False, power=1, in_tables=("", "_std"))


def test_a_column_is_of_the_metric_whose_whole_name_it_has():
    records = METRICS | {"loss_top": Metric("top five", larger_is_better=True)}
    assert column_metric("test_loss_top", records).title == "top five"
    assert column_metric("test_loss_top_p10", records).title == "top five"
    assert column_metric("validation_loss_p10", records) is METRICS["loss"]
    for column in ("test_accuracy_gap", "test_loss_ratio", "round"):
        assert metric_name(column, records) is None
        assert column_metric(column, records).larger_is_better is None


def test_a_squared_error_has_its_words():
    assert find_metric("squared_error", {}).title == "squared error"
    assert column_metric("test_squared_error").title == "squared error"


def test_records_are_decided_once_and_contradictions_are_refused():
    records = resolve_metrics(["accuracy_gap", "loss", "accuracy"], {"accuracy_gap": OWN})
    assert [*records] == ["accuracy", "accuracy_gap", "loss"]
    assert records["accuracy_gap"] is OWN
    with pytest.raises(ValueError, match=r"'f2'.*has f1"):
        resolve_metrics(["f1"], {"f2": OWN})
    with pytest.raises(ValueError, match=r"must hold.*0.5"):
        resolve_metrics(["f1"], {"f1": 0.5})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"'f1_std' must have another name"):
        resolve_metrics(["f1", "f1_std"], {})
    # Runs are judged by the first: one that tables show and that has a direction, or as asked.
    below, pinball = Metric("below"), Metric("pinball", larger_is_better=False)
    stated = {"below": below, "pinball": pinball}
    assert [*resolve_metrics(["below", "loss", "pinball"], stated)] == ["pinball", "loss", "below"]
    assert [*resolve_metrics(["below", "loss"], {"below": below})] == ["loss", "below"]
    # Tables show by what runs are judged.
    asked = resolve_metrics(["pinball", "loss"], {"pinball": pinball}, judged_by="loss")
    assert [*asked] == ["loss", "pinball"]
    assert asked["loss"].in_tables == ("",)
    with pytest.raises(ValueError, match=r"metric must be one of loss, got 'los'"):
        resolve_metrics(["loss"], {}, judged_by="los")
    # A dash in the name of a metric stays; in a word it may stand for an underscore.
    assert next(iter(resolve_metrics(["loss", "a-b"], {}, judged_by="a-b"))) == "a-b"
    assert next(iter(resolve_metrics(["loss", "a_b"], {}, judged_by="a-b"))) == "a_b"
    with pytest.raises(ValueError, match=r"'failed' must have another name"):
        resolve_metrics(["loss", "failed"], {})
    words = OWN._replace(title="another title")
    assert merge_metrics([{"gap": OWN}, {"gap": words}]) == {"gap": OWN}
    with pytest.raises(ValueError, match=r"contradict.*'gap'.*larger_is_better is False"):
        merge_metrics([{"gap": OWN}, {"gap": OWN._replace(larger_is_better=True)}])


def test_records_come_back_from_their_file_as_they_were():
    records = METRICS | {"gap": OWN, "plain": Metric("plain")}
    text = json.dumps(metrics_to_tables(records), allow_nan=False)
    assert metrics_from_tables(json.loads(text)) == records
    for damaged in ({"gap": 1}, {"gap": {}}, {"gap": {"title": "gap", "unknown": 1}}):
        with pytest.raises(ValueError, match=r"damaged"):
            metrics_from_tables(damaged)  # type: ignore[arg-type]
