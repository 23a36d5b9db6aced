"""The measurement of a run, in this process."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from fedjaxsim.bench import ceilings, measure
from fedjaxsim.bench.ceilings import Ceilings
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

    monkeypatch.setattr(ceilings, "time", SimpleNamespace(perf_counter=tick))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(ceilings, "SIDE", 4)
    monkeypatch.setattr(ceilings, "BUFFER_BYTES", 64)


def test_ceilings_are_the_work_of_all_devices_over_the_time(clock, small):
    devices = jax.devices()[:2]
    found = Ceilings(devices)
    # 2·4³ operations on each device, and 64 bytes read and written, in half a second.
    assert found.flops() == 2 * 4**3 * len(devices) / 0.5
    assert found.bandwidth() == 2 * 64 / 0.5


def test_a_measurement_divides_work_by_time(clock, small, monkeypatch):
    monkeypatch.setattr(measure, "LONG_ENOUGH", 1.5)
    found = measure.measure(prepare(run_config(**SETTINGS)))
    # Three segments of two rounds are long enough, as one takes half a second on this clock.
    assert found["rounds_per_second"] == 6 / 0.5
    assert found["evaluation_seconds"] == 0.5
    assert found["compile_seconds"] == 0
    # 4 clients, each with 4 training rows, of 4·3·2 operations.
    assert found["gflop_per_round"] == pytest.approx(4 * 4 * 24e-9)
    assert found["gemm_gflops"] * found["gemm_fraction"] == pytest.approx(4 * 4 * 24e-9 * 12)
    moved = 4 * (2 * 4 * 8 + 2 * 8 + 4 * 4 * 4) / 1e6
    assert found["mb_per_round"] == pytest.approx(moved)
    assert found["memory_gb_per_s"] * found["memory_fraction"] == pytest.approx(moved * 12 / 1e3)
    assert found["clients_per_round"] == 4
    # 20 rows with three features and a label.
    assert found["data_mb"] == 20 * 4 * 4 / 1e6


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
