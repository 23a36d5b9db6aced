"""Personal models beside the published one, on the run's rows, new ones and central test sets."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support import simulations
from support.problems import after, coefficients, designs, read_by

import fedjaxsim as fjs
from fedjaxsim.cli import main
from fedjaxsim.data.population import Population
from fedjaxsim.engine.evaluation import Evaluation
from fedjaxsim.runs.judging import _by_class, _lines, judged, precision_and_recall

RUN = (
    "run --data csv:rows.csv --client who --target grade --loss softmax --algorithm pmtl --lam 0.1 "
    "--range x=0:10 --rounds 20 --eval-every 20 --sampling full --quiet --out run"
)


EVALUATE = ("evaluate", "run", "--quiet")


@pytest.fixture
def ended(shared_pmtl):
    hparams = read_by(shared_pmtl, **simulations.VALUES)
    return shared_pmtl, after(shared_pmtl, hparams, 2), hparams


def table(ended, population=None, by=None):
    sim, state, hparams = ended
    return judged(sim, state, hparams, population, split="test", by=by)


def mean_squared_errors(models, population, split):
    pairs = zip(models, designs(population, split), strict=True)
    return np.array([np.mean((x @ w - y) ** 2) for w, (x, y) in pairs])


def test_both_models_are_judged_on_the_rows_of_the_run_and_of_groups(ended):
    sim, state, hparams = ended
    personal = coefficients(sim.models(state, hparams))
    shared = coefficients(state.shared.params)
    m, count = sim.num_clients, sim.population.splits["test"].count
    errors = {
        "personal": mean_squared_errors(personal, sim.population, "test"),
        "published": mean_squared_errors([shared] * m, sim.population, "test"),
    }
    found = table(ended)
    assert [*found.model] == ["personal", "published"]
    assert [*found.rows] == [count.sum()] * 2
    means = [np.mean(errors[model]) for model in found.model]
    np.testing.assert_allclose(found.squared_error, means, rtol=1e-5)
    worst = [np.max(errors[model]) for model in found.model]  # a tenth of five clients is one
    np.testing.assert_allclose(found.squared_error_worst_tenth, worst, rtol=1e-5)
    groups = {name: "even" if k % 2 == 0 else "odd" for k, name in enumerate(sim.population.names)}
    lines = table(ended, by=groups)
    assert [*lines.group] == ["even", "odd"] * 2
    halves = [np.mean(of_model[k::2]) for of_model in errors.values() for k in (0, 1)]
    np.testing.assert_allclose(lines.squared_error, halves, rtol=1e-5)
    with pytest.raises(ValueError, match=r"has no group \(1 such"):
        table(ended, by=dict.fromkeys(sim.population.names[1:], "a"))


def test_new_rows_are_judged_by_their_clients_models_and_strangers_by_the_published_one(ended):
    sim, state, hparams = ended
    rng, names = np.random.default_rng(3), sim.population.names[[4, 1]]
    fields = {"x": rng.normal(size=(9, 3)), "y": rng.normal(size=9)}
    new = Population.from_flat(fields, [2, 3, 4], names=[*map(str, names), "eve"])
    personal, shared = coefficients(sim.models(state, hparams)), coefficients(state.shared.params)
    found = table(ended, new)
    assert [*found.clients] == [2, 3]
    assert [*found.rows] == [5, 9]
    own = mean_squared_errors(personal[[4, 1]], new.of_clients([0, 1]), "train")
    all_three = mean_squared_errors([shared] * 3, new, "train")
    np.testing.assert_allclose(found.squared_error, [own.mean(), all_three.mean()], rtol=1e-5)
    strangers = table(ended, new.of_clients([2]))
    assert [*strangers.model] == ["published"]
    np.testing.assert_allclose(strangers.squared_error, all_three[2], rtol=1e-5)
    unlabelled = dataclasses.replace(new, fields={"x": new.fields["x"]}, columns={})
    with pytest.raises(ValueError, match="need their targets"):
        table(ended, unlabelled)
    with pytest.raises(ValueError, match="predicts one class"):
        table(ended, by="class")


def test_new_clients_of_a_run_that_published_nothing_have_no_model(shared_local):
    hparams = shared_local.hyperparameters()
    state = shared_local.init(0, hparams)
    assert [*judged(shared_local, state, hparams, None, split="test", by=None).model] == [
        "personal"
    ]
    stranger = Population.from_flat({"x": np.ones((2, 3)), "y": np.ones(2)}, [2], names=["eve"])
    with pytest.raises(ValueError, match="'eve' took no part"):
        judged(shared_local, state, hparams, stranger, split="test", by=None)


def test_a_pooled_metric_is_that_of_all_rows_and_another_the_mean_over_clients():
    values = np.array([0.2, 0.6])
    evaluation = Evaluation("test", np.array([1, 3]), {"nmse": values, "accuracy": values})
    (line,) = _lines(evaluation, None)
    assert (line["clients"], line["rows"]) == (2, 4)
    assert line["nmse"] == pytest.approx((0.2 + 3 * 0.6) / 4)
    assert line["accuracy"] == pytest.approx((0.2 + 0.6) / 2)
    assert (line["nmse_worst_tenth"], line["accuracy_worst_tenth"]) == (0.6, 0.2)


def test_precision_and_recall_by_hand():
    labels, predicted = np.array(["a", "a", "a", "b", "c"]), np.array(["a", "a", "b", "b", "b"])
    found = precision_and_recall(labels, predicted)
    assert [*found["class"]] == ["a", "b", "c"]
    assert [*found["rows"]] == [3, 1, 1]
    np.testing.assert_allclose(found["precision"], [1, 1 / 3, np.nan])
    np.testing.assert_allclose(found["recall"], [2 / 3, 1, 0])
    np.testing.assert_allclose(found["f1"], [0.8, 0.5, 0])


def test_labels_by_class_are_in_the_order_of_the_rows_as_predictions_are():
    # Rows lie in memory by client: the last one first.
    labels = np.array([1, 1, 0])
    rows = Population.from_rows({"x": np.ones((3, 1)), "y": labels}, np.array([1, 1, 0]), 2)
    assert [*rows.fields["y"]] == [0, 1, 1]
    said = {"prediction": labels, "probability": np.ones(3)}
    sim: Any = SimpleNamespace(population=rows, predict=lambda *_, **__: said)
    state: Any = None
    found = _by_class(sim, state, state, rows, ["personal", "published"])
    np.testing.assert_array_equal(found["precision"], np.ones(4))
    np.testing.assert_array_equal(found["recall"], np.ones(4))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run on text classes, in which commands run."""
    folder, rng = tmp_path_factory.mktemp("evaluate"), np.random.default_rng(0)
    frame = pd.DataFrame({"who": np.repeat(["007", "01", "b"], 30), "x": rng.uniform(0, 10, 90)})
    frame["grade"] = np.where(frame.x > 5, "good", "bad")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        frame.to_csv("rows.csv", index=False)
        assert main(RUN.split()) == 0
        yield folder


def test_the_command_judges_by_class_and_by_a_table_of_groups(finished, capsys):
    # Units and classes are the run's: other numbers of classes, no client, another order.
    central = pd.DataFrame({"grade": ["good", "good", "bad"], "x": [9.0, 0.1, 0.2]})
    central.to_csv("central.csv", index=False)
    line = "evaluate run --data csv:central.csv --by class --out said.csv"
    assert main(line.split()) == 0
    said = pd.read_csv("said.csv")
    assert [*said.model] == ["published"] * 2
    assert [*said["class"]] == ["bad", "good"]
    np.testing.assert_allclose(said.precision, [0.5, 1])
    np.testing.assert_allclose(said.recall, [1, 0.5])
    pd.DataFrame({"id": ["007", "01", "b"], "area": ["rural", "urban", "urban"]}).to_csv(
        "areas.csv", index=False
    )
    capsys.readouterr()
    assert main([*EVALUATE, "--by", "areas.csv", "--split", "train", "--out", "areas.parquet"]) == 0
    areas = pd.read_parquet("areas.parquet")
    assert [*areas.group] == ["rural", "urban"] * 2
    assert [*areas.clients] == [1, 2] * 2
    run = fjs.load_run("run")
    own = run.sim.evaluate(run.state, run.hparams, "train")
    np.testing.assert_allclose(areas.accuracy[0], own.values["accuracy"][0])
    assert main([*EVALUATE, "--by", "rural"]) == 2
    assert "by must be class" in capsys.readouterr().err
    central.assign(grade="best").to_csv("other.csv", index=False)
    assert main([*EVALUATE, "--data", "csv:other.csv"]) == 2
    assert "no class 'best', only 'bad', 'good'" in capsys.readouterr().err
