"""The studies of experiments/mpmtl on a few clients: repetitions are the runs of each alone."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

import fedjaxsim as fjs
from fedjaxsim.data import related_regression
from fedjaxsim.privacy.accounting import kov
from fedjaxsim.privacy.calibration import spent
from fedjaxsim.privacy.events import Entry

SCRIPTS = Path(__file__).parent


@pytest.fixture(scope="module")
def problem(script):
    def read(seed):
        return related_regression("low-rank", 40, 10, 15, 10, seed=seed)[0]

    synthetic = script("data_problems").PROBLEMS["low-rank"]
    return dataclasses.replace(
        synthetic, read=read, learning_rate=2.0, clip_norm=30.0, ridges=(1e-3,),
        shrinkages=(0.0, 1.0), alone=10, repetitions=5,
    )  # fmt: skip


@pytest.fixture(scope="module")
def study(script, problem, tmp_path_factory):
    return script("study").Study(problem, tmp_path_factory.mktemp("parts"))


def test_repetitions_are_the_runs_of_each_alone(script, study):
    method = script("contenders").METHODS["low-rank"]
    populations = [study.problem.read(seed) for seed in (3, 4)]
    simulation = study.simulation(
        method.make(study.task, 40), method.mechanism(), populations[0], None
    )
    points = [study.point(lam=2.0, clip_norm=30.0, noise_multiplier=z) for z in (0.0, 0.5)]
    found, _ = script("study").Repetitions(simulation).run(populations, points, 3, [7, 8])
    for population, seed, summary in zip(populations, (7, 8), found, strict=True):
        one = simulation.with_population(population)
        for index, point in enumerate(points):
            hparams = script("study").read_by(one, point)
            state, _ = one.run(one.init(seed, hparams), hparams, 3)
            alone = one.evaluate(state, hparams).summary()["test_nmse"]
            assert summary["test_nmse"][index] == pytest.approx(alone, rel=1e-5)


def test_every_training_row_is_in_one_fold(script, problem):
    population = problem.read(0)
    folds = script("data_problems").folded(population, 1)
    for client in (0, 39):
        held = np.concatenate([fold.rows(client, "validation")["y"] for fold in folds])
        np.testing.assert_array_equal(np.sort(held), np.sort(population.rows(client, "train")["y"]))
        for fold in folds:
            assert len(fold.rows(client, "train")["y"]) == 12
            np.testing.assert_array_equal(
                fold.rows(client, "test")["y"], population.rows(client, "test")["y"]
            )


def test_rounds_lambda_and_k_are_chosen_for_every_epsilon(script, problem, tmp_path, monkeypatch):
    # A stand-in for runs, whose error is the distance from λ and K of its own for every noise level
    # and from three rounds.
    study = script("study")
    method = script("contenders").METHODS["low-rank"]
    problem = dataclasses.replace(
        problem, read=lambda seed: related_regression("low-rank", 4, 3, 5, 2, seed=seed)[0],
        shrinkages=(0.0, 1.0, 2.0), clips=(1.0, 2.0, 4.0), repetitions=3,
    )  # fmt: skip
    wanted = {0.5: (2.0, 1.0), 8.0: (1.0, 4.0), math.inf: (0.0, 1.0)}
    one = study.Study(problem, tmp_path, together=2)
    levels = {}

    def run(self, populations, settings, rounds, seeds, split="test", own=None):
        if rounds != problem.alone:
            levels.update({
                method.noise(method.mechanism(), epsilon, one.delta, rounds, 4): epsilon
                for epsilon in wanted
            })  # fmt: skip
        scores = []
        for point in settings:
            z = point.get("noise_multiplier", 0.0)
            shrinkage, clip = wanted[levels.get(z, math.inf)]
            k = point.get("clip_norm", math.inf)
            found = point["lam"] / one.unit(method), k / problem.clip_norm
            scores.append(abs(found[0] - shrinkage) + abs(rounds - 3))
            scores[-1] += abs(found[1] - clip) if z else 0
        every = np.array(scores)
        return [{f"{split}_nmse": every} for _ in populations], {"kernel": np.zeros((1, 1, 4, 3))}

    monkeypatch.setattr(study.Repetitions, "run", run)
    rows = one.compare("low-rank", method, list(wanted))
    for row, (shrinkage, clip) in zip(rows, wanted.values(), strict=True):
        assert (row["rounds"], row["shrinkage"]) == (3, shrinkage)
        assert row["clip_norm"] == clip * problem.clip_norm
        assert row["test"] == [0] * 3
        assert row["single"] == [shrinkage] * 3


@pytest.mark.thorough
def test_figures_of_percentages_pair_repetitions(script, tmp_path, monkeypatch, capsys):
    # Scores of 10 less those of 1, 2, 3 alone: 8 on average, with a standard error of √(2/3)/√3.
    percentages, trade_off = script("percentages"), script("trade_off")

    def compare(name, study, methods):
        rows = [{"epsilon": str(epsilon), "test": [10, 10, 10]} for epsilon in trade_off.EPSILONS]
        alone = {"test": {"ridge": [1, 2, 3], "lasso": [4, 4, 4]}}
        return {"problem": name, "alone": alone, "methods": dict.fromkeys(methods, rows)}

    monkeypatch.setattr(percentages, "compare", compare)
    monkeypatch.setattr(percentages, "Study", lambda *_: None)
    for data in ("school", "landmine"):
        picture = tmp_path / f"{data}.png"
        arguments = ["percentages", data, "--parts", str(tmp_path), "--figure", str(picture)]
        monkeypatch.setattr("sys.argv", arguments)
        percentages.main()
        assert picture.exists()
        rows = [row for row in capsys.readouterr().out.splitlines() if "less that alone" in row]
        assert all(row.count("+8.0000±0.4714") == 7 for row in rows)
        assert len(rows) == 4 * len(percentages.METHODS)


@pytest.mark.thorough
def test_with_a_lambda_of_0_to_choose_noise_does_no_harm(script, study):
    # Proposition 1: at every ε not worse than single-task learning by more than its standard error.
    method = dataclasses.replace(script("contenders").METHODS["low-rank"], rounds=(1, 12))
    rows = study.compare("low-rank", method, (0.01, 1.0, 100.0, math.inf))
    for row in rows:
        against = np.subtract(row["test"], row["single"])
        assert np.mean(against) <= np.std(row["single"]) / math.sqrt(len(against))
    assert np.mean(rows[-1]["test"]) < np.mean(rows[-1]["single"])  # and without noise it helps


def test_noise_is_charged_what_it_should_be(script):
    methods = script("contenders").METHODS
    z = methods["low-rank"].noise(methods["low-rank"].mechanism(), 2.0, 1e-3, 5, 40)
    scheme = fjs.full_participation().for_clients(40).scheme
    event = methods["low-rank"].mechanism().event
    assert spent(z, 1.0, 5, 1e-3, scheme, event, "replace") == pytest.approx(2.0, rel=1e-3)
    # One release of the published noise, or of pure ε: no composition.
    assert methods["low-rank-published"].noise(None, 0.5, 1e-9, 1, 40) == pytest.approx(2.0)
    assert methods["dp-aggr"].noise(methods["dp-aggr"].mechanism(), 0.5, 1e-3, 1, 40) == 4.0


@pytest.mark.thorough
def test_a_large_model_shows_in_all_others_unless_there_is_noise(script):
    leakage = script("leakage")
    w = leakage.models()
    large = w[:, -1] / np.linalg.norm(w[:, -1])
    for method, epsilon, shown in (("low-rank", math.inf, True), ("low-rank", 0.1, False)):
        found = leakage.published(w, method, epsilon)[:, :-1]
        cosines = large @ (found / np.linalg.norm(found, axis=0))
        assert (cosines.min() > 0.999) == shown


@pytest.mark.thorough
def test_allocations_cost_what_their_targets_say(script, study, monkeypatch):
    allocation = script("allocation")
    z = allocation.published(allocation.Budget("power", 1.0), 2.0, 1e-3, 5)
    np.testing.assert_allclose(z[0] / z, [1, 2, 3, 4, 5], rtol=1e-6)
    planned = [Entry(float(1 / each), 1.0, 1) for each in z]
    assert kov.compose(planned, 1e-3) == pytest.approx(2.0, rel=1e-6)
    monkeypatch.setattr(allocation, "ROUNDS", 3)
    monkeypatch.setattr(allocation, "POWERS", (0.0, 2.0))
    monkeypatch.setattr(allocation, "EXPONENTS", (0.0,))
    for name in allocation.SHOWN:
        found = allocation.scores(study, name, "convex", 0)
        # t^0 and Q^0 are the same allocation.
        assert found["t^0"] == pytest.approx(found["Q0^0"], rel=1e-6)
        assert found["t^2"] != found["t^0"]
        assert len(found["t^2"]) == len(allocation.EPSILONS)


@pytest.mark.thorough
def test_the_cost_of_a_round_is_measured(script, monkeypatch):
    cost = script("cost")
    found = cost.measure(50)
    assert found["clients"] == 50
    assert len(found["seconds"]) == cost.REPETITIONS
    assert found["beside"] is None or found["beside"] < 4 * 50 * cost.FEATURES**2
