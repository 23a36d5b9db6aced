"""The harness of experiments/multi_task on a problem of a few clients: its arithmetic, and that it
goes on where it stopped."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

import fedjaxsim as fjs
from fedjaxsim.models import linear
from fedjaxsim.tasks import squared

SCRIPTS = Path(__file__).parent


def read(folder, seed, validation):
    del folder
    rng = np.random.default_rng(seed)
    clients = [{"x": rng.normal(size=(8, 2)), "y": rng.normal(size=8)} for _ in range(4)]
    whole = fjs.Population.from_clients(clients)
    return fjs.data.split(whole, validation=validation, test=0.25, seed=seed)


@pytest.fixture(scope="module")
def compared(script, tmp_path_factory):
    """FedAvg at two points, two seeds of each kind, ε = 1 and ∞; and how to do it again."""
    problem = script("data_sets").Problem(
        "tiny, linear regression",
        read,
        lambda population: squared(linear((2,), 1)),
        rate=1.0,
        rounds=2,
        epsilons=(1.0, math.inf),
        metric="nmse",
        points=2,
        seeds=2,
        tuning_seeds=2,
    )
    folder = tmp_path_factory.mktemp("parts")
    methods = {"fedavg": script("methods").METHODS["fedavg"]}

    def run():
        parts = script("harness").Parts(folder)
        return script("equal_privacy").compare(problem, methods, folder, parts)

    return run(), run, folder


@pytest.mark.thorough
def test_what_is_finished_is_not_computed_again(script, compared, monkeypatch):
    result, run, _ = compared
    monkeypatch.setattr(script("harness").Trial, "simulation", None)
    assert json.dumps(run()) == json.dumps(result)


@pytest.mark.thorough
def test_the_best_mean_of_the_validation_scores_chooses(compared):
    result, _, folder = compared
    files = [folder / f"fedavg-validation-{seed}-0.json" for seed in (1000, 1001)]
    runs = [json.loads(file.read_text()) for file in files]
    scores = np.mean([[one["validation_nmse"] for one in run["part"]] for run in runs], axis=0)
    plan = runs[0]["of"][-1]
    for row, at in zip(result["methods"]["fedavg"], (slice(0, 2), slice(2, 4)), strict=True):
        best = int(np.argmin(scores[at]))
        assert row["score"] == scores[at][best]
        assert row["point"].items() <= plan[at][best].items()
        assert len(row["test"]) == 2


def test_epsilon_is_met_and_there_is_a_row_for_each(script, compared):
    result, _, _ = compared
    private, free = result["levels"]
    assert 0.99 < private["zero_out"] <= 1
    assert private["replace"] > private["zero_out"]
    assert (free["epsilon"], free["noise_multiplier"]) == (None, 0)
    head, _, *rows = script("equal_privacy").table(result).splitlines()
    assert "FedAvg" in head
    assert len(rows) == 2


def test_differences_are_paired_and_positive_where_the_first_is_better(script):
    difference = script("tables").difference
    # Gains 1, 2, 3: mean 2, standard deviation 1, t = 2√3 = 3.46 below 4.30.
    found = difference([2.0, 12.0, 23.0], [1.0, 10.0, 20.0], larger=True)
    assert found == (2.0, pytest.approx(1 / math.sqrt(3)), False)
    # Losses 1, 1.1, 1.2 where smaller is better.
    found = difference([2.0, 3.1, 4.2], [1.0, 2.0, 3.0], larger=False)
    assert found == (pytest.approx(-1.1), pytest.approx(0.1 / math.sqrt(3)), True)


def test_points_are_spread_over_their_box(script):
    methods = script("methods")
    # Steps of the golden ratio, and of the plastic number, x³ = x + 1.
    assert methods.spread(2, 1)[:, 0] == pytest.approx([0.1180339887, 0.7360679775])
    assert methods.spread(1, 2)[0] == pytest.approx(
        0.5 + np.array([0.7548776662, 0.5698402910]) - 1
    )
    box = {"learning_rate": (0.01, 1.0), "clip_norm": (0.1, 1.0), "lam": (0.001, 1.0)}
    pulls = [one["lam"] * one["learning_rate"] for one in methods.METHODS["pmtl"].points(32, box)]
    assert min(pulls) > 0.00099
    assert max(pulls) < 1.01


def test_a_method_may_fix_a_hyperparameter_and_have_a_box_of_its_own(script):
    methods = script("methods")
    box = {"learning_rate": (0.01, 1.0), "clip_norm": (0.1, 1.0), "lam": (0.001, 1.0)}
    points = methods.METHODS["stl"].points(8, box)
    assert all(list(one) == ["learning_rate", "ridge", "lam"] for one in points)
    assert {one["lam"] for one in points} == {0.0}
    of_mpmtl = methods.METHODS["mpmtl-low-rank"].points(8, box)
    assert max(one["clip_norm"] for one in of_mpmtl) > 1


def test_a_choice_at_an_end_of_its_box_is_named(script):
    methods = script("methods")
    box = {"learning_rate": (0.01, 1.0), "clip_norm": (0.1, 1.0), "lam": (0.001, 1.0)}
    point = {"learning_rate": 0.1, "lam": 10.0, "clip_norm": 0.1}
    assert methods.at_edge(point, box, private=True) == ["lam high", "clip_norm low"]
    assert methods.at_edge(point, box, private=False) == ["lam high"]


def test_speakers_of_shakespeare_predict_the_next_character(script, tmp_path):
    text = "A:\n" + "xyZ?" * 300 + "\n\nB:\nGo!\n\nA:\nxyz?"
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "input.txt").write_text(text)
    population = script("data_sets").PROBLEMS["shakespeare"].read(tmp_path, 0, 0.2)
    assert (population.num_clients, population.num_rows) == (1, 60)
    x, y = population.fields["x"].reshape(-1, 2, 28), population.fields["y"]
    found = {
        (*np.argmax(row, axis=1).tolist(), int(label)) for row, label in zip(x, y, strict=True)
    }
    # x, y and z are 24 to 26, and ? is the symbol for all but letters and space.
    assert found == {(24, 25, 26), (25, 26, 27), (26, 27, 24), (27, 24, 25)}
