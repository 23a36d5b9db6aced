"""Many runs as one program; `engine/test_placements.py` has the law that each is its run alone."""

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import compiling, simulations
from support.problems import (
    classification,
    compilations,
    least_squares,
    read_by,
    simulation_of,
)
from support.several import start

from fedjaxsim import pmtl, ppsgd
from fedjaxsim.callbacks import Records
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.splitting import split
from fedjaxsim.data.synthetic import regression_stream
from fedjaxsim.engine.shard import CLIENTS, RUNS
from fedjaxsim.engine.state import state_of
from fedjaxsim.models.network import mlp
from fedjaxsim.privacy.guarantee import compose_reports
from fedjaxsim.privacy.mechanisms.sums import adaptive_clipping
from fedjaxsim.privacy.samplers import full_participation, poisson
from fedjaxsim.simulation import Simulation
from fedjaxsim.simulation_batch import SimulationBatch, grid
from fedjaxsim.tasks.task import known_regression, softmax

THOROUGH = pytest.mark.thorough
pytestmark = pytest.mark.usefixtures("shared_pmtl")
BASE = {
    "learning_rate": 0.05, "lam": 0.3, "lam2": 0.0, "mu": 0.2, "clip": 0.4,
    "noise_multiplier": 0.5,
}  # fmt: skip


def agree(many, state, history, runs, simulation, settings, rtol=1e-9):
    """Every run's state, ledger, metrics and evaluation are those of the run alone."""
    for index, setting in enumerate(settings):
        alone, segments = runs(simulation, setting)
        for a, b in zip(
            jax.tree.leaves(dataclasses.replace(state_of(state, index), key=None)),
            jax.tree.leaves(dataclasses.replace(alone, key=None)),
            strict=True,
        ):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-12)
        for segment, own in zip(history, segments, strict=True):
            for name, value in own.metrics.items():
                shared = segment.metrics[name]
                shared = shared[:, index] if shared.ndim > 1 else shared
                np.testing.assert_allclose(shared, value, rtol=rtol, atol=1e-12)
            whole, single = segment.evaluation.summary(), own.evaluation.summary()
            assert whole.keys() == single.keys()
            for name, value in single.items():
                np.testing.assert_allclose(whole[name][index], value, rtol=rtol, atol=1e-12)


def _alone(simulation, setting, seed, rounds, eval_every):
    return simulation.run(simulation.init(seed, setting), setting, rounds, eval_every=eval_every)


@pytest.mark.thorough
def test_networks_and_adaptive_clipping_agree_too():
    with jax.enable_x64(True):
        population, _ = classification([10, 14, 20, 9])
        model = mlp((4,), 3, hidden=(5,))
        task = softmax(model, 3)
        task = task._replace(init=lambda key: jax.tree.map(jnp.float64, model.init(key)))
        sim = Simulation(
            ppsgd(task),
            population,
            full_participation(),
            Minibatches(3, steps=1),
            adaptive_clipping(),
        )
        base = read_by(sim, **BASE, count_noise=2.0, personalization=1.0)
        settings = [base.replace(learning_rate=rate) for rate in (0.05, 0.1)]
        many = SimulationBatch(sim, settings)
        state, history = many.run(many.init(1), 4)
        run_alone = functools.partial(_alone, seed=1, rounds=4, eval_every=None)
        agree(many, state, history, run_alone, sim, settings)


@pytest.mark.thorough
def test_generated_data_and_noise_schedules_agree_too():
    with jax.enable_x64(True):
        population, task = regression_stream(6, 8, seed=3), known_regression(8)
        sim = Simulation(ppsgd(task), population, full_participation(), Minibatches(5, steps=1))
        base = read_by(sim, **BASE)
        schedules = ([0.5, 0.5, 1.0], [1.0, 2.0, 2.0])
        settings = [base.replace(noise_multiplier=np.array(z)) for z in schedules]
        many = SimulationBatch(sim, settings)
        state, history = many.run(many.init(1), 3)
        run_alone = functools.partial(_alone, seed=1, rounds=3, eval_every=None)
        agree(many, state, history, run_alone, sim, settings)


# --- one program, which the tests below share -----------------------------------------------------


@functools.cache
def three() -> SimulationBatch:
    """Three runs that may differ in η and λ, in segments of two rounds."""
    sim = simulations.shared("pmtl")
    base = read_by(sim, **BASE)
    return SimulationBatch(
        sim, [base, base.replace(learning_rate=0.06, lam=0.1), base.replace(lam=0.2)]
    )


def base_of_three():
    return three().settings[0]


def after(many, rounds, seed=0):
    return many.run(many.init(seed), rounds, eval_every=2)[0]


@pytest.mark.thorough
def test_a_run_that_diverges_changes_no_other():
    tame, wild = list(three().settings), list(three().settings)
    wild[1] = base_of_three().replace(lam=1e30, learning_rate=1e30)
    finals = [
        jax.tree.leaves(after(three().with_runs(three().simulation, chosen), 4).personal)
        for chosen in (tame, wild)
    ]
    assert not np.all(np.isfinite(np.concatenate([np.ravel(leaf[:, 1]) for leaf in finals[1]])))
    for a, b in zip(*finals, strict=True):
        np.testing.assert_array_equal(a[:, [0, 2]], b[:, [0, 2]])


@pytest.mark.usefixtures("every_program")
def test_a_run_compiles_nothing_that_a_thread_has_compiled_nor_counts_its_seconds():
    shared, clocks = three(), []
    many = SimulationBatch(shared.simulation, shared.settings, devices=jax.devices()[:1])
    with ThreadPoolExecutor(2) as pool:
        for program in many.lower(0, 2):
            pool.submit(program.compile)

    def elsewhere(*_):
        event = "/jax/core/compile/backend_compile_duration"
        pool.submit(jax.monitoring.record_event_duration_secs, event, 1e6).result()
        clocks.append(records.run.phase_times.seconds["compile"])

    state, records = many.init(0), Records()
    with compilations() as seen, ThreadPoolExecutor(1) as pool:
        many.run(state, 2, callbacks=[records, elsewhere])
    assert len(seen) == len(clocks) == 1
    assert clocks[0] < 1e6


@pytest.mark.usefixtures("every_program")
@pytest.mark.thorough
def test_settings_lie_on_all_devices_and_nothing_is_compiled_twice():
    many, sim = three(), three().simulation
    leaf = after(many, 2).personal["kernel"]
    assert len(jax.devices()) == 2
    assert leaf.shape == (5, 4, 1, 3)  # three settings, the last one repeated
    assert leaf.sharding.device_set == set(jax.devices())
    one = SimulationBatch(sim, many.settings, devices=jax.devices()[:1])
    np.testing.assert_array_equal(after(one, 2).personal["kernel"], leaf[:, :3])
    base = base_of_three()
    other = many.with_runs(sim, [base.replace(lam=0.5), base.replace(lam=0.7)])
    with compilations() as seen:
        after(many, 2, seed=5)
        two, history = other.run(other.init(0), 2)
    assert not seen
    assert history[-1].metrics["loss"].shape == (2, 2)
    # Rows that are split otherwise share the program, whose bounds change no result.
    elsewhere = sim.with_population(
        split(least_squares([10, 6, 13, 8, 11])[0], test=0.3, validation=0.2)
    )
    moved = many.with_runs(elsewhere, many.settings)
    with compilations() as seen:
        found = after(moved, 2).personal["kernel"]
    assert not seen
    alone, _ = elsewhere.run(elsewhere.init(0, base), base, 2)
    np.testing.assert_allclose(found[:, 0], alone.personal["kernel"], rtol=1e-5)
    alone, _ = sim.run(sim.init(0, base), base.replace(lam=0.7), 2)
    np.testing.assert_allclose(
        state_of(two, 1).personal["kernel"], alone.personal["kernel"], rtol=1e-5
    )


@pytest.mark.thorough
def test_a_state_read_back_goes_on_as_the_run_would_have():
    many, half = three(), after(three(), 2)
    kept = jax.tree.map(
        lambda leaf: leaf if leaf.dtype == half.key.dtype else np.asarray(leaf), half
    )
    resumed, _ = many.run(kept, 2)
    for a, b in zip(
        jax.tree.leaves(after(many, 4).personal), jax.tree.leaves(resumed.personal), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert int(resumed.round) == 4


def test_the_runs_of_a_sweep_share_their_noise_and_their_guarantees_know_it():
    state = after(three(), 2)
    reports = [three().simulation.guarantee(state_of(state, run)) for run in (0, 1)]
    draws, same = (report.draws for report in reports)
    assert draws is not None
    assert [each.rounds for each in draws] == [2]
    assert draws == same
    with pytest.raises(ValueError, match="report 1, report 2"):
        compose_reports(reports)


def test_input_is_checked():
    population, task = least_squares([5, 9, 17, 8])
    sim = Simulation(pmtl(task), population, poisson(0.6, max_rate=1.0), Minibatches(4, steps=2))
    base = read_by(sim, **BASE)
    with pytest.raises(ValueError, match="setting"):
        SimulationBatch(sim, [])
    with pytest.raises(ValueError, match="sampling_rate"):
        SimulationBatch(sim, [base, base.replace(sampling_rate=0.5)])
    with pytest.raises(ValueError, match="learning_rate"):
        SimulationBatch(sim, [base, base.replace(learning_rate=np.nan)])
    with pytest.raises(ValueError, match="noise_multiplier"):
        SimulationBatch(sim, [base, base.replace(noise_multiplier=np.ones(3))])
    many, sim, base = three(), three().simulation, base_of_three()
    with pytest.raises(ValueError, match="seeds"):
        SimulationBatch(sim, [base], seeds=0)
    twice = SimulationBatch(sim, [base, base], seeds=2)
    assert (twice.size, twice.runs) == (4, ((0, 0), (0, 1), (1, 0), (1, 1)))
    wrong: list[Any] = ["x", jax.random.key(0), 2**64 - 1]
    for key, message in zip(wrong, ("seed", "2 keys", "seed"), strict=True):
        with pytest.raises(ValueError, match=message):
            twice.init(key)
    with pytest.raises(ValueError, match="its own key, got one twice"):
        SimulationBatch(sim, [base], seeds=2).init(jnp.stack([jax.random.key(1)] * 2))
    with pytest.raises(ValueError, match="settings"):
        many.with_runs(sim, [base] * 5)
    with pytest.raises(ValueError, match="clip"):
        many.with_runs(sim, [base, base.replace(clip=0.9)])
    with pytest.raises(ValueError, match="split"):
        many.evaluate(many.init(0), "held-out")
    with pytest.raises(ValueError, match="rounds"):
        many.run(many.init(0), 0)
    assert jnp.ndim(many.init(0).shared.params["bias"]) == 2


def test_devices_that_settings_leave_idle_divide_the_clients():
    assert grid(2, 990, 7) == (2, 1)
    assert grid(2, 1, 6) == (1, 2)
    assert grid(2, 1, 7) == (1, 2)  # four clients and three
    assert grid(2, 1, 1) == (1, 1)
    # Over eight devices by clients each has 3 settings of 26 clients; over three by two it would
    # have one setting of 103 clients: more.
    assert grid(8, 3, 206) == (1, 8)
    assert grid(8, 3, 80) == (1, 8)
    assert grid(8, 4, 80) == (4, 2)


@THOROUGH
def test_settings_and_clients_divide_eight_devices():
    process = start(__file__)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors


def over_eight_devices():
    """Four runs over four by two devices, each against itself alone."""
    compiling.quicken()
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)
    population, task = least_squares([5, 9, 7, 8, 12, 6, 4, 5], test=0.2)
    sim = simulation_of("pmtl", task, population, poisson(0.6), Minibatches(4, steps=2))
    settings = [read_by(sim, **BASE | {"learning_rate": 0.01 * k}) for k in range(1, 5)]
    many = SimulationBatch(sim, settings)
    assert dict(many.program.mesh.shape) == {RUNS: 4, CLIENTS: 2}
    state, history = many.run(many.init(7), 4, eval_every=2)
    shards = state.personal["kernel"].addressable_shards
    assert [shard.data.shape for shard in shards] == [(4, 1, 1, 3)] * 8
    run_alone = functools.partial(_alone, seed=7, rounds=4, eval_every=2)
    agree(many, state, history, run_alone, sim, settings)


if __name__ == "__main__":
    over_eight_devices()
