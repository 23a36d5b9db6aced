"""The measurement of a run, in this process."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from fedjaxsim.bench import measure
from fedjaxsim.bench.measure import Rounds
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.settings import run_config

SETTINGS = {
    "data": "random", "clients": 4, "shape": (3,), "rows": (5,), "labels": 2, "clip": 1.0,
    "noise_multiplier": 1.0, "sampling": "full", "rounds": 20, "eval_every": 2,
}  # fmt: skip


@pytest.fixture
def clock(monkeypatch):
    """A clock on which every call takes half a second."""
    now = [0.0]

    def tick():
        now[0] += 0.5
        return now[0]

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=tick))


def test_a_measurement_divides_rounds_by_time(clock, monkeypatch):
    monkeypatch.setattr(measure, "LONG_ENOUGH", 1.5)
    found = measure.measure(prepare(run_config(**SETTINGS)))
    # Three segments of two rounds are long enough, as one takes half a second on this clock.
    assert found["rounds_per_second"] == 6 / 0.5
    assert found["evaluation_seconds"] == 0.5
    assert found["compile_seconds"] == 0
    assert found["clients_per_round"] == 4


@pytest.mark.thorough
def test_the_rounds_that_are_measured_are_those_of_a_run():
    experiment = prepare(run_config(**SETTINGS))
    simulation, hparams = experiment.simulation, experiment.hparams
    rounds = Rounds(simulation, hparams)
    ours = rounds.advance(rounds.advance(rounds.start(3), 2), 2)
    theirs, history = simulation.run(simulation.init(3, hparams), hparams, 4, eval_every=2)
    for mine, other in zip(*map(jax.tree.leaves, (ours.personal, theirs.personal)), strict=True):
        np.testing.assert_array_equal(mine, other)
    expected = history[-1].evaluation.summary()
    np.testing.assert_equal(rounds.evaluate(ours).summary(), expected)
