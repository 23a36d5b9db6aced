"""What a target means: classes by the names that were given, counts, numbers, and what is asked."""

import dataclasses

import jax
import numpy as np
import pandas as pd
import pytest

import fedjaxsim as fjs
from fedjaxsim.cli import main
from fedjaxsim.cli.program import parse
from fedjaxsim.runs.assemble import check_data, data_warnings, population_of, simulation_of
from fedjaxsim.runs.build import Experiment, hparams_of

CLIENTS, ROWS = 6, 20


@pytest.fixture(autouse=True)
def table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng, rows = np.random.default_rng(0), CLIENTS * ROWS
    frame = pd.DataFrame(
        {
            "who": np.arange(rows) // ROWS,
            "age": rng.uniform(20, 80, rows).round(1),
            "days": rng.poisson(9, rows) + 1,
            "grade": rng.choice([1, 2, 5], rows),
            "status": rng.choice([1, 2], rows),
            "years": rng.uniform(0.5, 2, rows).round(2),
        }
    )
    frame.to_csv("t.csv", index=False)
    return frame


def flags(target, *more):
    others = {"days", "grade", "status", "years"} - {target, *more}
    table = f"run --data csv:t.csv --client who --target {target} --range age=20:80 --rounds 2"
    return [*table.split(), "--drop", ",".join(sorted(others)), *more]


def experiment(target, *more):
    """An experiment of which nothing is traced, as targets are read before."""
    config = parse(flags(target, *more)).settings
    population = population_of(config)
    check_data(config, population)
    simulation = simulation_of(config, population)
    return Experiment(config, simulation, hparams_of(config, simulation), 1e-3)


@pytest.mark.parametrize("target", ["days", "grade"])
def test_whole_numbers_that_may_be_counts_need_a_loss(target, table, capsys):
    assert main(flags(target)) == 2
    error = capsys.readouterr().err
    first, last = table[target].min(), table[target].max()
    assert f"'{target}' holds {table[target].nunique()} different" in error
    assert f"from {first} to {last}" in error
    for choice in ("--loss squared", "--loss poisson", "--loss softmax"):
        assert choice in error
    assert len(error.splitlines()) == 1


def test_classes_keep_the_names_that_were_given(table):
    status = experiment("status")  # two classes are not asked for
    assert status.simulation.population.categories["y"] == ("1", "2")
    grade = experiment("grade", "--loss", "softmax")
    population = grade.simulation.population
    named = np.array(population.categories["y"], int)[population.fields["y"]]
    assert sorted(named) == sorted(table.grade)
    with pytest.raises(ValueError, match="0 and 1, got the classes '1', '2', '5'"):
        experiment("grade", "--loss", "logistic")
    frame = table.drop(columns=["days", "status", "years"])
    given = fjs.data.from_dataframe(frame, client="who", target="grade")
    task = fjs.tasks.softmax(fjs.models.linear((1,), 3), 3)
    with pytest.raises(ValueError, match=r"\(1, 2, 5\): fjs.data.as_classes numbers them"):
        fjs.Simulation(fjs.fedavg(task), given, fjs.full_participation())
    numbered = fjs.data.as_classes(given)
    fjs.Simulation(fjs.fedavg(task), numbered, fjs.full_participation())
    assert numbered.categories == population.categories


def test_counts_are_counts(table):
    days = experiment("days", "--loss", "poisson", "--exposure", "years")
    fields = days.simulation.population.fields
    assert sorted(fields["y"]) == sorted(table.days)
    years = fields["exposure"].astype(float).round(2)
    pairs = sorted(zip(fields["y"].tolist(), years.tolist(), strict=True))
    assert pairs == sorted(zip(table.days.tolist(), table.years.tolist(), strict=True))
    with pytest.raises(ValueError, match="exposure is for loss poisson and negative-binomial"):
        experiment("days", "--loss", "squared", "--exposure", "years")


def test_a_public_range_of_the_target_asks_for_a_loss_of_numbers(table):
    with pytest.raises(ValueError, match=r"'days' holds fractions: .* --loss squared"):
        experiment("days", "--range", "days=0:40")
    scaled = experiment("days", "--range", "days=0:40", "--loss", "squared").simulation.population
    days = scaled.columns["y"].original(scaled.fields["y"])
    np.testing.assert_allclose(sorted(days), sorted(table.days), atol=1e-4)


def test_steps_of_losses_on_bounded_rows_are_bounded_by_default():
    # ‖x‖² ≤ 1 and an intercept: L = 2/4 for two classes by log-odds, 2/2 for softmax.
    for loss, bound in (("logistic", 1 / 2), ("softmax", 1.0), ("squared", 2.0)):
        found = experiment("status", "--loss", loss, "--algorithm", "fedavg")
        assert float(found.hparams.learning_rate) == pytest.approx(1 / bound)
    # Rates of counts are at most e times the prior; no bound on counts, so none on messages.
    counts = ["--loss", "poisson", "--algorithm", "fedavg", "--noise-multiplier", "1"]
    with_prior = experiment("days", *counts, "--prior", "5")
    assert float(with_prior.hparams.learning_rate) == pytest.approx(1 / (5 * np.e * 2))
    assert float(with_prior.hparams.clip) == 1
    assert not data_warnings(with_prior.config, with_prior.simulation.population)
    for more in ([], ["--prior", "5", "--exposure", "years"]):
        run = experiment("days", *counts, *more)
        assert float(run.hparams.learning_rate) == pytest.approx(0.1)
        [warning] = data_warnings(run.config, run.simulation.population)
        assert "compare --learning-rate 0.1, 0.01 and 0.001" in warning
        assert ("--prior" in warning) == (not more)
    rare = experiment("status", "--loss", "logistic", "--algorithm", "fedavg", "--prior", "0.01")
    start = rare.simulation.task.init(jax.random.key(0))
    np.testing.assert_allclose(start["bias"], [np.log(0.01 / 0.99)])


def test_the_default_clip_norm_follows_from_the_bounds_of_rows():
    scaled = ["--loss", "squared", "--range", "days=0:40", "--algorithm"]
    ditto = experiment("days", *scaled, "ditto", "--noise-multiplier", "1")
    # L = 1 + 1 for one column in [-1, 1] and an intercept; a gradient is L times an update.
    assert float(ditto.hparams.clip) == pytest.approx(0.1 / 2**0.5)
    population = ditto.simulation.population

    def clip(*flags_):
        config = parse(flags("days", *flags_)).settings
        return hparams_of(config, simulation_of(config, population)).clip

    assert clip(*scaled, "ppsgd", "--noise-multiplier", "1") == pytest.approx(0.1 * 2**0.5)
    assert clip(*scaled, "ditto", "--noise-multiplier", "1", "--clip", "3") == 3
    assert clip(*scaled, "ditto") == np.inf
    assert clip(*scaled, "mpmtl", "--noise-multiplier", "1") == 1  # sends models, no changes
    # A loss of unbounded curvature, and targets without a range, bound nothing.
    assert clip("--loss", "quantile", "--algorithm", "ditto", "--noise-multiplier", "1") == 1
    population = dataclasses.replace(population, columns={"x": population.columns["x"]})
    assert clip(*scaled, "ditto", "--noise-multiplier", "1") == 1


@pytest.mark.thorough
def test_a_run_that_noise_makes_useless_names_a_clip_norm(capsys):
    noise = ["--noise-multiplier", "50", "--algorithm", "fedavg", "--sampling", "full", "--quiet"]
    scaled = ["--loss", "squared", "--range", "days=0:40", *noise]
    assert main(flags("days", *scaled)) == 0
    told = capsys.readouterr().err
    assert "the models are of no use yet: nMSE" in told
    assert "a smaller --clip, a larger --sampling-rate" in told
    assert main(flags("days", *scaled, "--clip", "1")) == 0
    # L = 1 + 1 for one column in [-1, 1] and an intercept: 0.1/√2.
    assert "a smaller --clip such as 0.071" in capsys.readouterr().err


def test_times_are_compared_within_minibatches_that_should_be_whole_clients(table):
    run = experiment("years", "--loss", "cox", "--algorithm", "fedavg")
    assert float(run.hparams.learning_rate) == 1  # 1/R² for one column in [-1, 1]
    [warning] = data_warnings(run.config, run.simulation.population)
    assert "10 of up to 16 of a client: give --batch-size 16" in warning


def test_an_own_loss_may_have_the_names_of_classes_numbered(tmp_path):
    code = "import fedjaxsim as fjs\ndef loss(model, outputs):\n    return fjs.tasks.{}\n"
    (tmp_path / "own.py").write_text(code.format("softmax(model, outputs)"))
    own = ["--loss", "own.py:loss", "--algorithm", "fedavg"]
    population = experiment("status", *own, "--as-classes").simulation.population
    assert population.categories["y"] == ("1", "2")
    assert {*np.unique(population.fields["y"])} == {0, 1}
    (tmp_path / "own.py").write_text(code.format("squared(model)"))
    population = population_of(parse(flags("status", *own)).settings)
    assert {*np.unique(population.fields["y"])} == {1, 2}


def test_only_a_run_without_noise_estimates_how_clients_shrink(table, tmp_path):
    scaled = ["--loss", "squared", "--range", "days=0:40", "--algorithm", "ditto", "--pull", "rows"]
    run = experiment("days", *scaled)
    want = fjs.data.variance_ratios(run.simulation.population)
    assert float(run.hparams.lam) == pytest.approx(want["lam"])
    assert run.resolved()["resolved"]["lam_intercept"] == pytest.approx(want["lam_intercept"])
    (tmp_path / "own_noise.py").write_text("import fedjaxsim as fjs\nmechanism = fjs.gaussian\n")
    for noise in (["--noise-multiplier", "1"], ["--mechanism", "own_noise.py:mechanism"]):
        config = parse(flags("days", *scaled, *noise)).settings
        private = hparams_of(config, run.simulation)  # no ε would cover an estimate
        assert (float(private.lam), float(private.lam_intercept)) == (1, 1)
