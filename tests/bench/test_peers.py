"""The parts of benchmarks/peers that need no peer: its numpy loop, its files and its arithmetic."""

import importlib
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.npz import save_npz
from fedjaxsim.data.population import Population
from fedjaxsim.data.splitting import split
from fedjaxsim.models.model import linear
from fedjaxsim.privacy.samplers import full_participation
from fedjaxsim.simulation import Simulation
from fedjaxsim.tasks.task import softmax

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
CLASSES = 3


@pytest.fixture
def peers(monkeypatch):
    """Imports a file of the folder as its scripts do, which are no package."""
    monkeypatch.syspath_prepend(PEERS)
    return importlib.import_module


def clients(rng):
    """The order of rows must not matter: alike where an epoch has several batches of 4."""
    alike = np.repeat(rng.normal(size=(1, 5)), 9, axis=0)
    return [
        (rng.normal(size=(3, 5)), np.array([0, 1, 1])),
        (alike, np.full(9, 2)),
        (rng.normal(size=(4, 5)), np.array([2, 0, 1, 2])),
    ]


def loop_of(peers, data, **settings):
    loops = peers("numpy_loops")
    base = {"learning_rate": 0.3, "lam": 0.2, "clip_norm": 0.1, "noise_multiplier": 0.0}
    chosen = loops.Settings(batch=4, **(base | settings))
    return loops.PMTL(data, CLASSES, chosen, np.random.default_rng(0))


@pytest.mark.thorough
def test_pmtl_in_numpy_is_pmtl(peers):
    data = clients(np.random.default_rng(1))
    with jax.enable_x64(True):
        population = Population.from_clients([{"x": x, "y": y} for x, y in data])
        task = softmax(linear((5,), CLASSES), CLASSES)
        sim = Simulation(pmtl(task), population, full_participation(), Minibatches(4, epochs=1))
        hparams = sim.hyperparameters(learning_rate=0.3, lam=0.2, clip_norm=0.1)
        state, history = sim.run(sim.init(0, hparams), hparams, rounds=3)
        assert history[0].metrics["clipped"].min() > 0
        ours = jax.tree.map(np.asarray, (state.shared.params, state.personal))
    loop = loop_of(peers, data)
    loop.run(3)
    for params, theirs in zip(ours, (loop.shared, loop.personal), strict=True):
        assert np.abs(theirs).max() > 0.01
        np.testing.assert_allclose(
            theirs[..., :-1, :], params["kernel"].swapaxes(-1, -2), rtol=1e-12, atol=1e-14
        )
        np.testing.assert_allclose(theirs[..., -1, :], params["bias"], rtol=1e-12, atol=1e-14)


def test_noise_of_the_numpy_loop_has_deviation_z_c_over_p_m(peers):
    # Images of many pixels, all 0, give zero gradients but for the bias: the rest of w̃ is noise.
    data = [(np.zeros((2, 20_000)), np.array([0, 1])) for _ in range(4)]
    loop = loop_of(peers, data, noise_multiplier=2.0, sampling_rate=0.5)
    loop.run(1)
    np.testing.assert_allclose(loop.shared[:-1].std(), 2.0 * 0.1 / (0.5 * 4), rtol=0.02)


def test_numpy_cohorts_are_poisson(peers):
    data = [(np.ones((1, 1)), np.array([k % CLASSES])) for k in range(2000)]
    loop = loop_of(peers, data, sampling_rate=0.3)
    loop.run(1)
    moved = np.any(loop.personal != 0, axis=(1, 2)).sum()
    assert abs(moved - 600) < 5 * np.sqrt(2000 * 0.3 * 0.7)


def test_correct_predictions_are_counted_with_the_own_model(peers):
    loop = loop_of(peers, clients(np.random.default_rng(1)))
    loop.personal[1, -1] = [0.0, 1.0, 0.0]  # biases: class 1 for any features
    assert loop.correct(1, np.zeros((3, 5)), np.array([1, 1, 2])) == 2


def test_children_read_the_split_that_was_written(peers, tmp_path):
    data = [{"x": x, "y": y} for x, y in clients(np.random.default_rng(2))]
    population = split(Population.from_clients(data), test=0.3, seed=0)
    save_npz(tmp_path / "clients.npz", population)
    read = peers("child").read_clients(tmp_path / "clients.npz")
    for k in range(3):
        for name, rows in (("train", read.train), ("test", read.test)):
            expected = population.rows(k, name)
            np.testing.assert_array_equal(rows[k][0], expected["x"])
            np.testing.assert_array_equal(rows[k][1], expected["y"])
    assert read.all_tests()[0].shape == (1 + 3 + 1, 5)


def test_a_report_is_found_below_and_above_other_output(peers):
    compare = peers("compare")
    assert compare.last_report('{"a": 1}\nwarming up\n{"a": 2}\nbye\n') == {"a": 2}
    with pytest.raises(ValueError, match="printed no report, but 'bye"):
        compare.last_report("bye\n")


def test_the_fastest_setting_that_ran_is_taken(peers):
    compare = peers("compare")
    trials = {"a": {"rounds_per_s": 1.0}, "b": {"rounds_per_s": 2.0}, "c": {"error": "no"}}
    assert compare.fastest(trials) == "b"
    with pytest.raises(RuntimeError, match="c: no"):
        compare.fastest({"c": {"error": "no"}})


def report(rate, accuracy=0.5):
    learned, setting = {"accuracy": accuracy}, "jit"
    numbers = {"rounds_per_s": rate, "warm_seconds": 2.0, "peak_mb": 100.0}
    return numbers | {"learned": learned, "setting": setting}


def test_ratios_are_taken_within_a_repetition(peers):
    # Medians first would give 2/2; the machine was slow in the second repetition and fast in the
    # third, for both.
    pairs = [("a", "b"), ("a", "c")]
    repetitions = [
        {"a": report(2.0), "b": report(1.0), "c": {"error": "no"}},
        {"a": report(1.0), "b": report(2.0), "c": {"error": "no"}},
        {"a": report(9.0), "b": report(3.0), "c": {"error": "no"}},
        {"a": report(9.0), "b": {"error": "no"}, "c": {"error": "no"}},
    ]
    found = peers("compare").ratios(repetitions, pairs)
    assert found == {"a / b": {"median": 2.0, "least": 0.5, "greatest": 3.0}}


def test_the_table_has_medians_and_says_what_failed(peers):
    compare = peers("compare")
    failed = {"error": "Traceback\n  File x\njax.errors.SomeError: no\nmore on it"}
    repetitions = [
        {"a": report(1.0, 0.2), "b": failed, "c": {"error": "not done"}},
        {"a": report(4.0, 0.4), "b": failed, "c": {"error": "not done"}},
        {"a": report(2.0, 0.3), "b": failed, "c": {"error": "not done"}},
    ]
    summary = compare.summarize(repetitions)
    lines = compare.table(json.loads(json.dumps(summary)), {}).splitlines()
    assert lines[2] == "| a | 2 (1 to 4) | 2.0 | 100 | accuracy 0.3 | jit |"
    assert lines[3] == "| b | failed | | | | jax.errors.SomeError: no |"
    assert lines[4] == "| c | failed | | | | not done |"


def test_every_ratio_is_of_runs_and_every_run_has_its_files(peers):
    compare = peers("compare")
    assert {name for pair in compare.RATIOS for name in pair} == set(compare.RUNS)
    assert {name for pair in compare.TEXT_RATIOS for name in pair} == set(compare.TEXT_RUNS)
    for run in [*compare.RUNS.values(), *compare.TEXT_RUNS.values()]:
        assert (PEERS / run.script).exists()
        assert run.peer == "" or (PEERS / f"requirements-{run.peer}.txt").exists()
        assert run.peer in compare.settings(2)


def test_the_picture_has_a_bar_for_each_median_and_says_how_much_slower(peers):
    rates = {"fedjaxsim FedAvg, clip and noise": 3.0, "FedJAX FedAvg": 0.5}
    picture = peers("picture")
    every = {name: rates.get(name, 1.0) for name in picture.ROWS}
    ratio = {"median": 6.25}
    results = {
        "machine": {"cores": 2},
        "summary": {
            name: {"rounds_per_s": {"median": rate, "greatest": 4.0}}
            for name, rate in every.items()
        },
        "repetitions": [{name: {"rounds_per_s": rate} for name, rate in every.items()}],
        "ratios": {f"{picture.FIRST} / FedJAX FedAvg": ratio},
    }
    (axes,) = picture.draw(results).axes
    assert [bar.get_width() for bar in axes.patches] == list(every.values())
    assert "0.50   6.2 times slower" in [text.get_text() for text in axes.texts]
