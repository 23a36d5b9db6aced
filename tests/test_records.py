"""The picture of runs from Python: the command line's, of the `Records` of finished runs."""

from typing import Any

import numpy as np
import pytest
from problems import least_squares, read_by

import fedjaxsim as fjs
from fedjaxsim.callbacks import Records, comparison, report

SIZES = [4, 3]


def recorded(sim, seed):
    hparams = read_by(sim, clip=1.0, noise_multiplier=1.0, sampling_rate=0.5)
    records = Records()
    sim.run(sim.init(seed, hparams), hparams, 4, eval_every=2, callbacks=[records], delta=0.01)
    return records


@pytest.mark.thorough
def test_records_by_label_are_one_picture_with_seeds_as_means_and_their_epsilon():
    population, task = least_squares(SIZES)
    population = fjs.data.split(population, test=0.5)
    batches = fjs.Minibatches(2, steps=1)
    private = fjs.Simulation(fjs.fedavg(task), population, fjs.poisson(0.5), batches)
    local = fjs.Simulation(
        fjs.local(task), population, fjs.full_participation(), batches, fjs.no_release()
    )
    seeds = [recorded(private, seed) for seed in (0, 1)]
    alone = recorded(local, 0)
    figure = comparison({"fedavg": seeds, "mine: alone": alone}, ["test_loss"])
    spent = seeds[0].rows[-1]["epsilon"]
    assert figure.get_suptitle() == "ε: zero-out, joint DP, δ = 0.01"
    first, second = (text.get_text() for text in figure.legends[0].get_texts())
    assert first.startswith("FedAvg, ε ≤ ")
    assert float(first.split()[-1]) == pytest.approx(spent, abs=0.01)
    assert second == "mine: alone, ε = 0"
    mean, single = (line.get_ydata() for line in figure.axes[0].get_lines())
    both = [[row["test_loss"] for row in each.rows] for each in seeds]
    np.testing.assert_allclose(np.asarray(mean), np.mean(both, axis=0))
    np.testing.assert_allclose(np.asarray(single), [row["test_loss"] for row in alone.rows])
    # The table has the same means, and tests differences on seeds that both have.
    table = report({"mine: alone": alone, "fedavg": seeds}, "test_loss")
    one, other = table.rows
    last = [each[-1] for each in both]
    assert other["mean"] == pytest.approx(np.mean(last))
    assert (other["seeds"], other["paired_seeds"]) == (2, 1)
    assert (one["epsilon"], other["epsilon"]) == (
        0,
        max(each.rows[-1]["epsilon"] for each in seeds),
    )
    assert str(table).splitlines()[1].startswith("mine: alone  1 ")


@pytest.mark.parametrize("picture", [comparison, report])
@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ({}, "got none"),
        ({"a": Records()}, "'a' needs Records .* got unused Records"),
        ({"a": ["runs/a"]}, "got a str"),
    ],
)
def test_what_is_no_finished_run_is_refused(runs: Any, words, picture):
    with pytest.raises(ValueError, match=words):
        picture(runs)
