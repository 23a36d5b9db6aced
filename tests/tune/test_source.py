"""The data of a tuning, and its statement on the guarantee."""

import dataclasses

import numpy as np
import pytest
from problems import least_squares

from fedjaxsim.data.hold_out import hold_out
from fedjaxsim.data.splitting import split
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.settings import run_config
from fedjaxsim.tune.source import find_source, metric_of

SMALL = run_config(clients=12, rounds=5, sampling_rate=0.5, epsilon=2.0, clip=0.3)


def test_clients_are_held_out_whole_and_whatever_their_data_are():
    population = split(least_squares([5, 9, 6, 8, 7, 10])[0], validation=0.2, test=0.2)
    left, held = hold_out(population, 1 / 3, seed=4)
    assert sorted([*left.names, *held.names]) == sorted(population.names)
    assert held.num_clients == 2
    for part in (left, held):
        for index, name in enumerate(part.names):
            for which in ("train", "validation", "test"):
                own = population.rows(list(population.names).index(name), which)
                for field, values in part.rows(index, which).items():
                    np.testing.assert_array_equal(values, own[field])
    other = {name: -values for name, values in population.fields.items()}
    changed = dataclasses.replace(population, fields=other)
    assert hold_out(changed, 1 / 3, seed=4)[1].names.tolist() == held.names.tolist()
    chosen = {tuple(hold_out(population, 1 / 3, seed=seed)[1].names) for seed in range(20)}
    assert len(chosen) > 5


@pytest.mark.parametrize(
    ("fraction", "message"),
    [(1.0, r"must lie in \(0, 1\), got 1"), (0.2, "are 1"), (0.9, "are 5")],
)
def test_too_few_clients_on_either_side_are_refused(fraction, message):
    population, _ = least_squares([5, 9, 6, 8, 7, 10])
    with pytest.raises(ValueError, match=message):
        hold_out(population, fraction, seed=0)


@pytest.mark.thorough
def test_a_run_leaves_held_out_clients_out_and_tuning_takes_them():
    config = SMALL.replace(held_out_clients=0.25)
    source = find_source(config, None, clips=False)
    final, tuned_on = source.final.simulation.population, source.simulation.population
    assert (final.num_clients, tuned_on.num_clients) == (9, 3)
    assert not set(final.names) & set(tuned_on.names)
    assert prepare(config).simulation.population.names.tolist() == final.names.tolist()
    # δ and ε are about the nine clients of the run.
    assert source.final.delta == pytest.approx(1 / 90)
    # Both have noise of the same size on the mean: z C / (p m).
    z = float(np.asarray(source.hparams.noise_multiplier))
    assert z / 3 == pytest.approx(source.final.noise_multiplier / 9)
    assert "9 clients, of whose data the choice read nothing" in source.statement
    assert "3 held-out clients have NO protection" in source.statement


def test_validation_rows_are_the_same_clients_and_not_covered():
    source = find_source(SMALL, None, clips=False)
    assert source.simulation is source.final.simulation
    assert source.final.config.validation_fraction == 0.2
    assert source.split == "validation"
    assert "the choice is NOT covered by the run's ε" in source.statement
    kept = find_source(SMALL.replace(validation_fraction=0.4), None, clips=False)
    assert kept.final.config.validation_fraction == 0.4


def test_public_data_are_other_data_that_suit_the_model(tmp_path):
    rng = np.random.default_rng(0)
    owners = np.repeat(np.arange(4), 10)
    x, y = rng.normal(size=(40, 64)), rng.integers(0, 10, 40)
    np.savez(tmp_path / "fits.npz", x=x, y=y, client=owners)
    np.savez(tmp_path / "wide.npz", x=np.ones((40, 65)), y=y, client=owners)
    np.savez(tmp_path / "more.npz", x=x, y=y + 1, client=owners)
    source = find_source(SMALL, f"npz:{tmp_path}/fits.npz", clips=False)
    assert (source.simulation.num_clients, source.final.simulation.num_clients) == (4, 12)
    assert "is taken to be public" in source.statement
    for data, message in (
        (f"npz:{tmp_path}/wide.npz", "fields of the shapes"),
        (f"npz:{tmp_path}/more.npz", "do not suit the model: labels must lie in"),
        ("digits", "must be other data than those of the run"),
    ):
        with pytest.raises(ValueError, match=message):
            find_source(SMALL, data, clips=False)


def test_at_infinite_epsilon_there_is_no_noise_and_clipping_only_where_it_is_tuned():
    config = SMALL.replace(epsilon=None, held_out_clients=0.25)
    for clips, norm in ((False, np.inf), (True, 0.3)):
        hparams = find_source(config, None, clips=clips).hparams
        assert np.asarray(hparams.noise_multiplier) == 0
        assert np.asarray(hparams.clip_norm) == norm


def test_a_metric_is_minimized_where_it_is_smooth():
    simulation = prepare(SMALL).simulation
    task, population = simulation.task, simulation.population
    assert metric_of(task, population, None) == "loss"
    with pytest.raises(ValueError, match="accuracy has no derivative"):
        metric_of(task, population, "accuracy")
    with pytest.raises(ValueError, match="metric must be one of loss, got 'los'"):
        metric_of(task, population, "los")
    stream = SMALL.replace(data="synthetic-stream", loss="squared", held_out_clients=0.25)
    simulation = find_source(stream, None, clips=False).simulation
    assert metric_of(simulation.task, simulation.population, None) == "excess_risk"
    with pytest.raises(ValueError, match="synthetic-stream has no validation rows"):
        find_source(stream.replace(held_out_clients=0.0), None, clips=False)
