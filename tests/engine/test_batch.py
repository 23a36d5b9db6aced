"""Several runs as one program, on one device and on several: each is what it is alone."""

import jax
import numpy as np
import pytest
from support.problems import least_squares, numbers, read_by

from fedjaxsim import pmtl
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.engine.batch import batch, stack, varying
from fedjaxsim.engine.processes import mesh_of
from fedjaxsim.engine.shard import CLIENTS, RUNS, shard
from fedjaxsim.engine.state import state_of
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy.samplers import full_participation
from fedjaxsim.simulation import Simulation

VALUES = {
    "learning_rate": 0.1,
    "lam": 0.3,
    "mu": 0.0,
    "clip": 0.2,
    "noise_multiplier": 0.5,
}
EPOCHS = Minibatches(4, epochs=2)


@pytest.mark.thorough
def test_a_settings_axis_composes_with_clients_on_several_devices():
    population, task = least_squares([4, 4, 5], test=0.3)
    sim = Simulation(pmtl(task), population, full_participation(), EPOCHS)
    hparams = read_by(sim, **VALUES)
    settings = [hparams.replace(learning_rate=rate).as_arrays() for rate in (0.01, 0.1)]
    axes = varying(settings)
    mesh = mesh_of(jax.devices()[:2], CLIENTS)
    key, hparams = jax.random.key(0, impl="threefry2x32"), stack(settings, axes).as_arrays()
    for program in (
        shard(batch(sim.program, axes, 2), mesh),
        batch(shard(sim.program, mesh), axes, 2),
    ):
        rows, functions = program.place(population)["train"], program.compiled()
        state, _ = functions.rounds(functions.init(key, hparams), hparams, rows, rounds=2)
        agree_alone(sim, state, settings, key)


def test_settings_are_compared_by_name_and_by_whole_values():
    first = Hyperparameters(noise_multiplier=[1.0, 2.0], clip=1.0)
    second = Hyperparameters(clip=1.0, noise_multiplier=[1.0, 3.0])
    axes = varying([first, second])
    assert (axes.noise_multiplier, axes.clip) == (0, None)
    both = stack([first, second], axes)
    np.testing.assert_array_equal(both.noise_multiplier, [[1, 2], [1, 3]])


def test_a_mesh_that_does_not_suit_a_program_is_refused():
    population, task = least_squares([4, 4])
    sim = Simulation(pmtl(task), population, full_participation(), EPOCHS)
    hparams = read_by(sim, **VALUES)
    two = jax.devices()[:2]
    axes = varying([hparams, hparams.replace(learning_rate=0.3)])
    with pytest.raises(ValueError, match="mesh"):
        shard(sim.program, mesh_of(two, "devices"))
    with pytest.raises(ValueError, match="batch"):
        shard(sim.program, mesh_of(two, {RUNS: 2, CLIENTS: 1}))
    with pytest.raises(ValueError, match="runs"):
        shard(batch(sim.program, axes, 3), mesh_of(two, {RUNS: 2, CLIENTS: 1}))
    with pytest.raises(ValueError, match="batch"):
        batch(batch(sim.program, axes, 3), axes, 3)


def agree_alone(sim, state, settings, key):
    """Assert that each run of a state is what it is alone."""
    for run, setting in enumerate(settings):
        start = sim.init(key, setting)
        alone, _ = sim.run(start, setting, 2)
        one = state_of(state, run)
        for name in ("shared", "personal"):
            np.testing.assert_allclose(
                numbers(getattr(one, name)), numbers(getattr(alone, name)), rtol=1e-5, atol=1e-6
            )
