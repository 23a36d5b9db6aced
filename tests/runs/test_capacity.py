"""What memory a run is said to need: counted by hand, and against arrays and programs."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from fedjaxsim.data import load_folder, save_folder
from fedjaxsim.data.population import Population
from fedjaxsim.data.splitting import split
from fedjaxsim.engine import stream as streamed
from fedjaxsim.engine.devices import mesh_of
from fedjaxsim.engine.shard import CLIENTS, shard
from fedjaxsim.engine.state import map_parts
from fedjaxsim.runs import capacity
from fedjaxsim.runs.assemble import parts_of
from fedjaxsim.runs.build import fill_settings
from fedjaxsim.runs.memory import Machine
from fedjaxsim.runs.settings import run_config
from fedjaxsim.runs.sizes import sizes_of, sizes_without_data
from fedjaxsim.simulation import Simulation

GB = 10**9
CONFIG = run_config(classes=3, sampling_rate=0.5, test_fraction=0.5, local_steps=1)
LARGE = Machine(2, 80 * GB, 80 * GB)


def population(clients, rows=4, features=16):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(clients * rows, features)).astype(np.float32)
    y = np.tile(np.arange(rows) % 3, clients)
    return split(Population.from_flat({"x": x, "y": y}, np.full(clients, rows)), test=0.5)


def simulation(config, data, devices=None, *, streamed=False):
    parts = parts_of(config, data, data.num_clients)
    return Simulation(
        parts.algorithm, data, parts.sampling, parts.minibatches, parts.mechanism,
        devices=devices, streamed=streamed,
    )  # fmt: skip


def bytes_on(device, arrays):
    """What arrays take on one device."""
    shards = (
        shard.data.nbytes
        for leaf in {id(leaf): leaf for leaf in jax.tree.leaves(arrays)}.values()
        if isinstance(leaf, jax.Array)
        for shard in leaf.addressable_shards
        if shard.device == device
    )
    return sum(shards)


def placements(plan):
    return {each.name: each for each in plan.placed}


def of_device(plan, name):
    need = placements(plan)[name].device
    assert need is not None
    return need


@functools.cache
def images():
    """10,000 clients with a softmax model of 784 features of their own, on a CPU."""
    config = CONFIG.replace(algorithm="local", classes=10, sampling_rate=0.1, test_fraction=0.2)
    sizes = sizes_without_data(config, (784,), 10_000, 10)
    return capacity.plan(config, sizes, Machine(1, None, 8 * GB))


def test_what_lies_in_memory_is_that_counted_by_hand():
    plan = images()
    own, rows = 4 * 785 * 10, 4 * 784 + 4
    assert (plan.sizes.rows["train"], plan.sizes.rows["test"]) == (80_000, 20_000)
    found = {name: each.host for name, each in placements(plan).items()}
    assert {need.states for need in found.values()} == {10_000 * own}
    assert [need.rows for need in found.values()] == [100_000 * rows, 0, 0]
    # Of each client a name and where three splits begin and end, and the latter on the device.
    assert found["in memory"].ranges == found["mapped"].ranges == 10_000 * (4 + 24 + 24)
    assert found["streamed"].ranges == 10_000 * (4 + 24)
    # Neither a round nor an evaluation copies the states.
    data = found["in memory"].peak - found["in memory"].process
    assert 1 < data / (10_000 * own + 100_000 * rows) < 1.05
    assert (plan.parameters, plan.folder) == (7850, 100_000 * rows + 10_000 * 12)


def test_a_process_is_there_whatever_the_data():
    need = capacity.Need(rows=3, states=2, process=10, round=1, evaluation=5)
    assert (need.lasting, need.peak, need.largest) == (15, 20, "process")
    processes = {each.host.process for each in images().placed}
    assert len(processes) == 1
    assert all(0 <= each < GB for each in processes)


def test_blocks_of_an_evaluation_are_bounded_in_clients_and_in_bytes():
    sizes = [(10**6, 132), (10**6, 200_000), (10**6, 10**9), (1, 10**9)]
    assert [streamed.block_of(*each) for each in sizes] == [4096, 320, 2, 1]


def test_what_fits_and_what_binds():
    plan = images()
    assert [each.name for each in plan.fitting] == ["in memory", "mapped", "streamed"]
    small = plan._replace(machine=Machine(1, None, GB // 4))
    assert small.fitting == ()
    memory, need, has = small.nearest.binding(small.machine)
    assert (memory, need.largest, has) == ("host", "states", GB // 4)


def test_rows_beyond_int32_are_refused():
    with pytest.raises(ValueError, match="rows-per-client"):
        sizes_without_data(CONFIG, (32,), 10**9, 3)
    sizes = sizes_without_data(CONFIG, (32,), 10**9, 2)
    assert sizes.num_rows == 2 * 10**9


@pytest.mark.thorough
@pytest.mark.parametrize("clients", [8, 9])
def test_devices_hold_what_is_planned(clients):
    data = population(clients)
    plan = capacity.plan(CONFIG, sizes_of(data), LARGE)
    two = jax.devices()[:2]
    for name, devices in (("in memory", None), ("over 2 devices", two)):
        sim = simulation(CONFIG, data, devices)
        hparams = fill_settings(CONFIG, sim.records)
        state = sim.init(0, hparams)
        placed = sim.setup.placed
        state, _ = sim.setup.compiled.rounds(state, hparams.as_arrays(), placed["train"], rounds=2)
        for device in two if devices else two[:1]:
            assert bytes_on(device, (placed, state)) == of_device(plan, name).lasting, name
        fields = sum(values.nbytes for values in data.fields.values())
        assert placements(plan)[name].host.rows == fields


def test_protected_examples_are_planned_with_their_minibatches_and_accounts():
    data, machine = population(6), Machine(1, 80 * GB, 80 * GB)
    config = run_config(
        algorithm="fedavg", sampling="full", example_epsilon=3.0, rounds=2, local_steps=1
    )
    need = of_device(capacity.plan(config, sizes_of(data), machine), "in memory")
    sim = simulation(config, data)
    state = sim.init(0, fill_settings(config, sim.records))
    assert need.states == 4 * 6  # an int32 counts the minibatches of each client
    assert need.server == sum(leaf.nbytes for leaf in jax.tree.leaves(state)) - need.states


@pytest.mark.thorough
def test_a_mapped_and_a_streamed_run_hold_what_is_planned(tmp_path):
    save_folder(tmp_path / "folder", population(8))
    data = load_folder(tmp_path / "folder")
    plan = capacity.plan(CONFIG, sizes_of(data), Machine(1, None, GB))
    sim = simulation(CONFIG, data, streamed=True)
    state = sim.init(0, fill_settings(CONFIG, sim.records))
    on_host = sum(leaf.nbytes for leaf in jax.tree.leaves(state.personal))
    ranges = [each for r in data.splits.values() for each in (r.start, r.count)]
    need = placements(plan)["streamed"].host
    assert (need.rows, need.states) == (0, on_host)
    assert need.ranges == data.names.nbytes + sum(each.nbytes for each in ranges)
    files = (tmp_path / "folder").glob("*.npy")
    # Every file begins with 128 bytes that say what is in it.
    assert plan.folder == sum(file.stat().st_size - 128 for file in files)
    everyone = CONFIG.replace(sampling_rate=1.0)
    plan = capacity.plan(everyone, sizes_of(data), Machine(1, None, GB))
    assert not placements(plan)["streamed"].fits(plan.machine)


@pytest.mark.thorough
def test_a_billion_clients_are_planned_without_any_memory_for_them():
    config = run_config(loss="squared", sampling_rate=1e-6, test_fraction=0.5, local_steps=1)
    sizes = sizes_without_data(config, (32,), 10**9, 2)
    plan = capacity.plan(config, sizes, Machine(16, 80 * GB, 25 * GB))
    each = of_device(plan, "over 16 devices")
    assert each.states == 4 * 33 * 10**9 // 16
    assert each.rows == 2 * 10**9 * 4 * 33 // 16
    assert each.ranges == 24 * 10**9  # not divided
    assert each.process == 0  # which is the host's
    assert plan.capacity < 2000
    assert plan.fitting == ()


@pytest.mark.thorough
@pytest.mark.usefixtures("fully_optimized")
@pytest.mark.parametrize("clients", [2000, 2001])
def test_one_of_several_devices_works_in_what_the_program_of_all_says(clients):
    data = population(clients)
    config = CONFIG.replace(chunk_map="vmap", chunk_size=64)
    need = of_device(capacity.plan(config, sizes_of(data), LARGE), "over 2 devices")
    sim = simulation(config, data, jax.devices()[:2])
    hparams = fill_settings(config, sim.records).as_arrays()
    state = sim.init(0, hparams)
    whole: Any = shard(sim.program, mesh_of(jax.devices()[:2], CLIENTS)).compiled().rounds
    lowered = whole.lower(state, hparams, sim.setup.placed["train"], rounds=2)
    found = lowered.compile().memory_analysis()
    assert found is not None
    # The program's own numbers are of one device.
    states = map_parts(lambda part, tree: tree if part.owner == "clients" else None, state)
    own = sum(leaf.nbytes for leaf in jax.tree.leaves(states)) // (1 if clients % 2 else 2)
    assert found.alias_size_in_bytes == pytest.approx(own, rel=0.01)
    working = found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    assert need.round == pytest.approx(working, rel=0.1)
