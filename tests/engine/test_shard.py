"""Several devices give what one gives: same cohorts, same noise, sums up to rounding."""

import dataclasses

import jax
import numpy as np
import pytest
from support.problems import after, classification, least_squares, numbers, read_by, simulation_of

from fedjaxsim import fedavg, pmtl
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.engine.processes import mesh_of
from fedjaxsim.engine.program import Program
from fedjaxsim.engine.shard import CLIENTS, Shard, shard
from fedjaxsim.privacy.samplers import full_participation, poisson
from fedjaxsim.simulation import Simulation

THOROUGH = pytest.mark.thorough
VALUES = {
    "learning_rate": 0.1,
    "lam": 0.3,
    "mu": 0.0,
    "clip": 0.2,
    "noise_multiplier": 0.5,
}
EPOCHS, PASSES = Minibatches(4, epochs=2), Minibatches(4, steps=1, passes=2)


@THOROUGH
def test_two_devices_use_up_the_minibatches_that_one_does():
    population, task = least_squares([6, 9, 11, 4, 8], test=0.3)
    parts = pmtl(task), population, poisson(0.6), Minibatches(4, steps=1, passes=2)
    ends = []
    for devices in (None, jax.devices()[:2]):
        sim = Simulation(*parts, devices=devices)
        hparams = read_by(sim, **VALUES)
        ends.append(after(sim, hparams, 6, seed=3))
    one, two = ends
    assert one.consumed is not None
    np.testing.assert_array_equal(two.consumed, one.consumed)
    np.testing.assert_allclose(numbers(two.personal), numbers(one.personal), rtol=1e-4, atol=1e-6)


def noise_of_its_own(patch):
    """Each device draws another noise."""

    def server_update(
        program, state, hparams, drawn, worked, *, server_update=Program.server_update
    ):
        key = jax.random.fold_in(drawn.noise, jax.lax.axis_index(CLIENTS))
        return server_update(program, state, hparams, drawn._replace(noise=key), worked)

    patch.setattr(Program, "server_update", server_update)


def clients_counted_twice(patch):
    """The sum over devices is taken twice."""
    once = Shard.total
    patch.setattr(Shard, "total", lambda shard, sums: once(shard, once(shard, sums)))


@pytest.mark.thorough
def test_a_placement_that_changes_noise_or_counts_is_seen():
    population, task = least_squares([5, 6])

    def billboard(devices):
        """That of each device: where the engine is wrong, they may differ."""
        steps = Minibatches(4, steps=1)
        sim = simulation_of(
            "fedavg", task, population, full_participation(), steps, devices=devices
        )
        hparams = read_by(sim, **VALUES)
        state, _ = sim.round(sim.init(0, hparams), hparams)
        leaf = jax.tree.leaves(state.shared)[1]
        return [np.asarray(shard.data) for shard in leaf.addressable_shards]

    [alone] = billboard(None)
    for wrong in (noise_of_its_own, clients_counted_twice):
        with pytest.MonkeyPatch.context() as patch:
            wrong(patch)
            errors = [np.linalg.norm(one - alone) for one in billboard(jax.devices()[:2])]
        assert max(errors) > 0.01 * np.linalg.norm(alone)


@pytest.mark.thorough
def test_a_device_holds_its_own_clients_and_their_rows():
    population, task = least_squares([40, 3, 5, 30], test=0.3)
    sim = Simulation(
        pmtl(task), population, full_participation(), EPOCHS, devices=jax.devices()[:2]
    )
    hparams = read_by(sim, **VALUES)
    state, _ = sim.run(sim.init(0, hparams), hparams, 1)
    for leaf in jax.tree.leaves(state.personal):
        assert [shard.data.shape[0] for shard in leaf.addressable_shards] == [2, 2]
    x = population.fields["x"].astype(np.float32)
    pieces = [np.asarray(s.data) for s in sim.placed["train"].fields["x"].addressable_shards]
    # The larger half has 43 rows, up to a power of two: pieces of near lengths share a program.
    np.testing.assert_array_equal(pieces[0], x[:64])
    np.testing.assert_array_equal(pieces[1], x[14:])
    assert len(pieces[1]) == 64


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [pytest.param(None, marks=THOROUGH), jax.devices()[:2]])
def test_a_simulation_may_be_traced_before_it_runs(devices):
    population, task = least_squares([4, 4, 5], test=0.3)
    sim = Simulation(fedavg(task), population, full_participation(), EPOCHS, devices=devices)
    hparams = read_by(sim, **VALUES)
    traced, _ = jax.jit(lambda key: sim.round(sim.init(key, hparams), hparams))(jax.random.key(0))
    state, _ = sim.run(sim.init(0, hparams), hparams, 1)
    np.testing.assert_allclose(numbers(traced.shared), numbers(state.shared), rtol=1e-6)


def test_a_simulation_needs_a_device():
    population, task = least_squares([4, 4])
    with pytest.raises(ValueError, match="device"):
        Simulation(pmtl(task), population, full_participation(), EPOCHS, devices=[])


def test_devices_of_a_cpu_share_the_memory_of_the_population():
    population, task = classification([40, 3, 5, 30], features=32)
    x = population.fields["x"]
    with pytest.raises(ValueError, match="read-only"):
        x[0] = 0
    first = x.ctypes.data
    sim = Simulation(pmtl(task), population, full_participation(), EPOCHS)
    assert sim.rows["train"].fields["x"].unsafe_buffer_pointer() == first
    # Rows have 128 bytes. Of 78 rows, the first two clients have 43: both pieces have 64.
    sharded = shard(sim.program, mesh_of(jax.devices()[:2], CLIENTS))
    divided = sharded.place(population)["train"].fields["x"]
    for piece, row in zip(divided.addressable_shards, (0, 14), strict=True):
        assert piece.data.unsafe_buffer_pointer() == first + row * 32 * x.itemsize
    again = dataclasses.replace(population, names=population.names[::-1])
    assert again.fields["x"] is x
