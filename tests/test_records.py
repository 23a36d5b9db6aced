"""The table of runs from Python: the command line's, of the `Records` of finished runs."""

from typing import Any

import numpy as np
import pytest
from support.problems import least_squares, read_by

import fedjaxsim as fjs
from fedjaxsim.callbacks import Records, compare_records

pytestmark = pytest.mark.exact_keys
SIZES = [4, 3]


def recorded(sim, seed):
    hparams = read_by(sim, clip=1.0, noise_multiplier=1.0, sampling_rate=0.5)
    records = Records()
    sim.run(sim.init(seed, hparams), hparams, 4, eval_every=2, callbacks=[records], delta=0.01)
    return records


@pytest.mark.thorough
def test_records_by_label_are_one_table_with_seeds_as_means_and_their_epsilon():
    population, task = least_squares(SIZES)
    population = fjs.data.split(population, test=0.5)
    batches = fjs.Minibatches(2, steps=1)
    private = fjs.Simulation(fjs.fedavg(task), population, fjs.poisson(0.5), batches)
    local = fjs.Simulation(
        fjs.local(task), population, fjs.full_participation(), batches, fjs.no_release()
    )
    seeds = [recorded(private, seed) for seed in (0, 1)]
    alone = recorded(local, 0)
    both = [[row["test_loss"] for row in each.rows] for each in seeds]
    # Differences are tested on the seeds that both have.
    table = compare_records({"mine: alone": alone, "fedavg": seeds}, "test_loss")
    one, other = table.rows
    last = [each[-1] for each in both]
    assert other["mean"] == pytest.approx(np.mean(last))
    assert (other["seeds"], other["paired_seeds"]) == (2, 1)
    assert (one["epsilon"], other["epsilon"]) == (
        0,
        max(each.rows[-1]["epsilon"] for each in seeds),
    )
    assert str(table).splitlines()[1].startswith("mine: alone  1 ")


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ({}, "got {}"),
        ({"a": Records()}, "'a' needs Records .* got a Records"),
        ({"a": ["runs/a"]}, "got a str"),
    ],
)
def test_what_is_no_finished_run_is_refused(runs: Any, words):
    with pytest.raises(ValueError, match=words):
        compare_records(runs)
