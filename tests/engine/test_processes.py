"""Several processes give what one gives, as several devices do."""

import functools
import pickle
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from support import compiling
from support.problems import HANGS, least_squares, read_by, simulation_of
from support.several import free_port, start

from fedjaxsim.callbacks import Progress
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.engine import processes
from fedjaxsim.privacy.ledger import charged
from fedjaxsim.privacy.samplers import poisson

VALUES = {
    "learning_rate": 0.05,
    "lam": 0.3,
    "mu": 0.0,
    "clip": 0.2,
    "noise_multiplier": 0.5,
    "sampling_rate": 0.5,
}
COUNTS = [6, 9, 11, 4, 8, 7, 5, 6, 10, 3]
"""Rows of ten clients: each of two processes holds five, and eight devices hold two or none."""


def result_of(name, rounds, devices):
    """What all of a run comes to, on the host: states, metrics of rounds, evaluation, charges."""
    population, task = least_squares(COUNTS, test=0.3)
    simulation = simulation_of(
        name,
        task,
        population,
        poisson(0.5),
        Minibatches(4, epochs=1),
        chunk_size=2,
        devices=devices,
    )
    hparams = read_by(simulation, **VALUES)
    # The first process alone shows its progress, which needs an evaluation of all.
    callbacks = [Progress(name)]
    state, [segment] = simulation.run(
        simulation.init(3, hparams), hparams, rounds, callbacks=callbacks
    )
    drawn = {key: segment.metrics[key] for key in ("participants", "overflow", "noise_multiplier")}
    leaves = jax.tree.leaves(processes.to_host((state.shared, state.personal)))
    states = [np.asarray(leaf, np.float64) for leaf in leaves]  # also of what is true or false
    return drawn, states, segment.evaluation.values, charged(state.privacy)


def assert_same(result, expected):
    """The same cohorts, noise and charges, and numbers equal up to the rounding of sums."""
    for key, values in expected[0].items():
        np.testing.assert_array_equal(result[0][key], values)
    for mine, wanted in zip(result[1], expected[1], strict=True):
        assert np.linalg.norm(mine - wanted) <= 1e-5 * np.linalg.norm(wanted)
    for key, values in expected[2].items():
        np.testing.assert_allclose(result[2][key], values, rtol=1e-4, atol=1e-5)
    assert result[3] == expected[3]


def begin(count, devices, late, names, rounds, path):
    """Start so many processes with so many devices each; the last one may be late."""
    where = [str(word) for word in (count, devices, late, free_port(), path, rounds, *names)]
    return [start(__file__, str(index), *where) for index in range(count)]


def results_of(running, path):
    """What each process comes to, by system."""
    for each in running:
        _, errors = each.communicate(timeout=HANGS)
        assert each.returncode == 0, errors
    files = [path.with_suffix(f".{index}") for index in range(len(running))]
    return [pickle.loads(file.read_bytes()) for file in files]


def compute(index, count, devices, late, port, path, rounds, *names):
    """One process of a test; the last one comes late to the first round."""
    jax.config.update("jax_num_cpu_devices", int(devices))
    compiling.quicken()
    if int(count) > 1:
        processes.join(f"127.0.0.1:{port}", int(count), int(index))
    assert processes.from_all(["said", int(index)]) == [["said", i] for i in range(int(count))]
    time.sleep(float(late) if int(index) + 1 == int(count) else 0.0)
    found = {name: result_of(name, int(rounds), jax.devices()) for name in names}
    with open(f"{path}.{index}", "wb") as file:
        pickle.dump(found, file)


def test_a_message_that_is_too_long_for_other_processes_is_refused(monkeypatch):
    monkeypatch.setattr(processes, "several", lambda: True)
    with pytest.raises(ValueError, match="takes 8192 bytes, got 9002"):
        processes.from_all("x" * 9000)


ROUNDS = 50
SHAPES = {"eight": (1, 8, 0), "pair": (2, 2, 40)}
"""Processes, devices of each, and by how many seconds the last one is late: devices that connect to
each other give up after 30."""
KINDS = {"eight": ("pmtl", "mpmtl"), "pair": ("pmtl", "dpfedmtl")}
"""Systems of each shape, with every kind of state and message; test_placements.py has more."""


@pytest.fixture(scope="module")
def of_kinds(tmp_path_factory):
    """What each process comes to, by the names of SHAPES; the others compute while one is late."""
    folder = tmp_path_factory.mktemp("processes")

    @functools.cache
    def running(title):
        return begin(*SHAPES[title], KINDS[title], ROUNDS, folder / title)

    running("pair")
    results = functools.cache(lambda title: results_of(running(title), folder / title))
    yield results
    results("pair")


@pytest.fixture(scope="module")
def alone(exact_noise):
    """What a system comes to in this process, on one device, with the noise of those that start."""
    del exact_noise
    return functools.cache(lambda name: result_of(name, ROUNDS, jax.devices()[:1]))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shape", "name"), [(shape, name) for shape in ("eight", "pair") for name in KINDS[shape]]
)
def test_fifty_rounds_are_the_same_however_they_are_divided(of_kinds, alone, name, shape):
    expected = alone(name)
    for result in of_kinds(shape):
        assert_same(result[name], expected)


if __name__ == "__main__":
    compute(*sys.argv[1:])


@pytest.mark.parametrize(
    ("platforms", "extras", "threads"),
    [(None, (), "2"), (None, ("cuda",), None), (None, ("tpu",), None), ("cpu", ("cuda",), "2")],
)
def test_an_accelerator_keeps_its_threads(monkeypatch, platforms, extras, threads):
    config = SimpleNamespace(jax_platforms=platforms, update=lambda *_: None)
    monkeypatch.setattr(processes, "jax", SimpleNamespace(config=config))
    found = {}
    monkeypatch.setattr(processes, "os", SimpleNamespace(cpu_count=lambda: 4, environ=found))
    monkeypatch.setattr(processes, "missing", lambda name: None if name in extras else "why")
    processes.use_devices(2)
    assert found.get(processes.THREADS) == threads


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads have names on Linux")
def test_one_device_computes_in_one_thread():
    script = """if True:
        import time
        from pathlib import Path
        from fedjaxsim.engine import processes
        processes.use_devices(1)
        import jax
        jax.jit(lambda x: x + 1)(1.0).block_until_ready()
        for _ in range(100):  # a thread that compiled may still be ending
            names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
            if names.count("tf_XLAEigen") == 1:
                break
            time.sleep(0.1)
        print(names.count("tf_XLAEigen"))
    """
    with start("-c", script) as process:
        assert process.communicate(timeout=HANGS)[0].split() == ["1"]
