"""Records of metrics, and the columns that belong to them."""

from fedjaxsim import metrics
from fedjaxsim.metrics import Metric


def test_a_column_belongs_to_the_longest_name_that_begins_it(monkeypatch):
    top = Metric("top five", larger_is_better=True)
    monkeypatch.setitem(metrics.METRICS, "loss_top", top)
    assert metrics.of_column("test_loss_top") is top
    assert metrics.of_column("test_loss_top_p10") is top
    assert metrics.of_column("test_loss_p10") is metrics.METRICS["loss"]


def test_a_metric_without_a_record_is_titled_by_its_name():
    assert metrics.metric("squared_error").title == "squared error"
    assert metrics.of_column("test_squared_error").title == "squared error"
