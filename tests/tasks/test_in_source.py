"""Metrics, predictions and coefficients in the units of several targets, each with its own."""

import numpy as np
import pytest

from fedjaxsim import Population, data
from fedjaxsim.metrics import metrics_from_tables, metrics_to_tables
from fedjaxsim.models import linear
from fedjaxsim.tasks import squared_targets
from fedjaxsim.tasks.in_source import TaskInSource

X = np.array([[0.0, 2.0], [4.0, 6.0], [10.0, 10.0]])
Y = np.array([[100.0, -5.0], [120.0, 5.0], [110.0, 0.0]])
RANGES = {"x0": (0, 10), "x1": (2, 10), "y0": (100, 120), "y1": (-5, 5)}
MODELS = {"kernel": np.array([[[0.5, -1.0], [0.25, 2.0]]]), "bias": np.array([[0.1, -0.3]])}
"""A model of each output in stored numbers, of one client: W (1, 2, 2) and b (1, 2)."""


@pytest.fixture
def scaled():
    return data.scale(Population.from_flat({"x": X, "y": Y}, [3]), RANGES)


@pytest.fixture
def reported(scaled):
    return TaskInSource.of(squared_targets(linear((2,), 2), 2), scaled)


def stored_outputs(scaled):
    return scaled.fields["x"] @ MODELS["kernel"][0].T + MODELS["bias"]


def test_coefficients_give_the_predictions_of_each_target(scaled, reported):
    table = reported.coefficients(MODELS, np.array(["Ada"]))
    assert table["target"].tolist() == ["y0", "y1"]
    slopes = np.stack([table["x0"], table["x1"]], axis=1)
    said = reported.predicted({"prediction": stored_outputs(scaled)})["prediction"]
    np.testing.assert_allclose(X @ slopes.T + table["intercept"], said, rtol=1e-5)


def test_errors_are_in_the_unit_of_their_target_and_their_mean_is_the_tables(scaled, reported):
    outputs = stored_outputs(scaled)
    first, second = np.mean((outputs - scaled.fields["y"]) ** 2, axis=0)
    values = {"loss": (first + second) / 2, "squared_error": (first + second) / 2}
    values |= {"squared_error_0": first, "squared_error_1": second}
    records = reported.metric_records(values)
    assert records["squared_error_1"].title == "squared error of y1"
    found = reported.in_units(values, records)
    errors = (reported.predicted({"prediction": outputs})["prediction"] - Y) ** 2
    assert found["squared_error_0"] == pytest.approx(np.mean(errors[:, 0]), rel=1e-5)
    assert found["squared_error_1"] == pytest.approx(np.mean(errors[:, 1]), rel=1e-5)
    assert found["squared_error"] == pytest.approx(np.mean(errors), rel=1e-5)
    assert found["loss"] == values["loss"]  # what is trained on is in stored numbers
    np.testing.assert_allclose(reported.variances(scaled.fields["y"]), np.var(Y, axis=0), rtol=1e-5)
    assert metrics_from_tables(metrics_to_tables(records)) == records
