"""The data of a tuning, and its statement on the guarantee."""

import numpy as np
import pytest

from fedjaxsim.metrics import METRICS, Metric
from fedjaxsim.runs.assemble import population_of, simulation_of
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.settings import run_config
from fedjaxsim.tuning.setup import set_up, tuned_metric

SMALL = run_config(clients=12, rounds=5, sampling_rate=0.5, epsilon=2.0, clip=0.3)


@pytest.mark.thorough
def test_a_run_leaves_held_out_clients_out_and_tuning_takes_them():
    config = SMALL.replace(held_out_clients=0.25)
    setup = set_up(config, clips=False)
    final, tuned_on = setup.final.simulation.population, setup.simulation.population
    assert (final.num_clients, tuned_on.num_clients) == (9, 3)
    assert not set(final.names) & set(tuned_on.names)
    assert prepare(config).simulation.population.names.tolist() == final.names.tolist()
    # δ and ε are about the nine clients of the run.
    assert setup.final.delta == pytest.approx(1 / 90)
    # Both have noise of the same size on the mean: z C / (p m).
    z = float(np.asarray(setup.hparams.noise_multiplier))
    assert z / 3 == pytest.approx(setup.final.noise_multiplier / 9)
    assert "9 clients, because the choice read none of their data" in setup.statement
    assert "3 held-out clients have NO protection" in setup.statement


def test_validation_rows_are_the_same_clients_and_not_covered():
    setup = set_up(SMALL, clips=False)
    assert setup.simulation is setup.final.simulation
    assert setup.final.config.validation_fraction == 0.2
    assert setup.split == "validation"
    assert "the choice is NOT covered by" in setup.statement
    kept = set_up(SMALL.replace(validation_fraction=0.4), clips=False)
    assert kept.final.config.validation_fraction == 0.4


def test_at_infinite_epsilon_there_is_no_noise_and_clipping_only_where_it_is_tuned():
    config = SMALL.replace(epsilon=None, clip=None, held_out_clients=0.25)
    for clips, norm in ((False, np.inf), (True, 1.0)):
        hparams = set_up(config, clips=clips).hparams
        assert np.asarray(hparams.noise_multiplier) == 0
        assert np.asarray(hparams.clip) == norm


def test_a_metric_is_minimized_where_it_is_smooth():
    simulation = simulation_of(SMALL, population_of(SMALL))
    task, population = simulation.task, simulation.population
    assert tuned_metric(task, population, None) == ("loss", METRICS["loss"])
    with pytest.raises(ValueError, match="accuracy"):
        tuned_metric(task, population, "accuracy")
    with pytest.raises(ValueError, match="metric"):
        tuned_metric(task, population, "los")
    gap = task._replace(  # of one's own, whose record does not say that it is a step function
        metrics=lambda params, batch: {"gap": 1 - task.metrics(params, batch)["accuracy"]},
        streaming_metrics={},
        records={"gap": Metric("gap", larger_is_better=False)},
    )
    with pytest.raises(ValueError, match="'gap' is constant between jumps"):
        tuned_metric(gap, population, "gap")
    stream = SMALL.replace(data="synthetic-stream", loss="squared")
    simulation = simulation_of(stream, population_of(stream))
    for asked in (None, "excess-risk"):
        metric, _ = tuned_metric(simulation.task, simulation.population, asked)
        assert metric == "excess_risk"
    with pytest.raises(ValueError, match="validation"):
        set_up(stream, clips=False)
