"""The published model on everybody's rows and on a central test set, and metrics of groups."""

import dataclasses

import numpy as np
import pytest
from support import simulations
from support.problems import after, coefficients, designs, read_by

from fedjaxsim.data.columns import Columns
from fedjaxsim.data.population import Population
from fedjaxsim.engine.evaluation import Evaluation


@pytest.fixture
def ended(shared_pmtl):
    hparams = read_by(shared_pmtl, **simulations.VALUES)
    return shared_pmtl, after(shared_pmtl, hparams, 2), hparams


def squared_errors(w, population, split):
    return [np.mean((x @ w - y) ** 2) for x, y in designs(population, split)]


def test_the_published_model_is_judged_beside_the_personal_ones(ended):
    sim, state, hparams = ended
    w = coefficients(state.shared.params)
    found = sim.evaluate_published(state, hparams)
    expected = squared_errors(w, sim.population, "test")
    np.testing.assert_allclose(found.values["squared_error"], expected, rtol=1e-5)
    np.testing.assert_array_equal(found.count, sim.population.splits["test"].count)
    own = sim.evaluate(state, hparams).values["squared_error"]
    assert not np.any(np.isclose(own, expected))


def test_a_central_test_set_is_one_client(ended):
    sim, state, hparams = ended
    rng = np.random.default_rng(5)
    fields = {"x": rng.normal(size=(30, 3)), "y": rng.normal(size=30)}
    central = Population.from_flat(fields, [30])
    found = sim.evaluate_published(state, hparams, central, "train")
    expected = squared_errors(coefficients(state.shared.params), central, "train")
    np.testing.assert_allclose(found.values["squared_error"], expected, rtol=1e-5)
    np.testing.assert_array_equal(found.count, [30])
    # Columns are found by their names, in the run's order and units.
    columns = {"x": Columns(("a", "b", "c"), half_range=(1.0, 2.0, 1.0))}
    named = sim.with_population(dataclasses.replace(sim.population, columns=columns))
    other = {"x": fields["x"][:, ::-1] * np.array([1.0, 2.0, 1.0]), "y": fields["y"]}
    turned = Population.from_flat(other, [30], columns={"x": Columns(("c", "b", "a"))})
    again = named.evaluate_published(state, hparams, turned, "train")
    np.testing.assert_allclose(again.values["squared_error"], expected, rtol=1e-5)
    with pytest.raises(ValueError, match="lack column"):
        sim.evaluate_published(state, hparams, turned, "train")
    # Targets in other units: here they stand for 1 + 2 times the numbers that are kept.
    half = Population.from_flat(
        {"x": fields["x"], "y": (fields["y"] - 1) / 2}, [30],
        columns={"y": Columns(("y",), centre=(1.0,), half_range=(2.0,))},
    )  # fmt: skip
    of_half = sim.evaluate_published(state, hparams, half, "train")
    np.testing.assert_allclose(of_half.values["squared_error"], expected, rtol=1e-5)
    words = {"x": fields["x"], "y": np.arange(30, dtype=np.int32) % 2}
    classes = Population.from_flat(words, [30], categories={"y": ("no", "yes")})
    with pytest.raises(ValueError, match="target is a number, got the classes 'no', 'yes'"):
        sim.evaluate_published(state, hparams, classes, "train")
    with pytest.raises(ValueError, match="split"):
        sim.evaluate_published(state, hparams, central, "tests")


def test_a_run_that_publishes_nothing_has_no_such_model(shared_local):
    sim = shared_local
    hparams = sim.hyperparameters()
    with pytest.raises(ValueError, match="publishes no model"):
        sim.evaluate_published(sim.init(0, hparams), hparams)


def test_groups_of_clients_have_their_own_summaries():
    values = {"accuracy": np.array([0.2, 0.4, np.nan, 1.0])}
    whole = Evaluation("test", np.array([1, 3, 0, 2]), values)
    groups = whole.by_group(["rural", "urban", "urban", "rural"])
    assert [*groups] == ["rural", "urban"]
    assert groups["rural"].mean("accuracy") == pytest.approx(0.6)
    assert groups["rural"].weighted_mean("accuracy") == pytest.approx((0.2 + 2 * 1.0) / 3)
    assert groups["urban"].mean("accuracy") == pytest.approx(0.4)
    np.testing.assert_array_equal(groups["urban"].clients, [1, 2])
    with pytest.raises(ValueError, match="one entry for each of the 4 clients"):
        whole.by_group(["rural"])
