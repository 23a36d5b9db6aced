"""Devices, a batch of settings and streaming compute what the memory of one device does.

Systems and placements are a covering design: each mechanism and each number of local passes has
all placements, and a system for each kind of state has one. A client's function does not know where
it runs, so systems of one kind have the same code on a placement. Streaming has threads of its own,
which know nothing of `jax.enable_x64`. One test puts a client with most of the rows at any place
among the clients.
"""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from support import simulations
from support.problems import LAWFUL, classification, numbers, read_by, simulation_of

from fedjaxsim.algorithms import SYSTEMS
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.engine.shard import CLIENTS, RUNS
from fedjaxsim.engine.state import state_of
from fedjaxsim.privacy.ledger import charged
from fedjaxsim.privacy.samplers import poisson
from fedjaxsim.simulation_batch import SimulationBatch

THOROUGH = pytest.mark.thorough
PLACEMENTS = ("devices", "settings", "streamed")
KINDS = ("pmtl", "ditto", "ppsgd", "mpmtl", "stl", "scaffold", "apfl", "ifca")
"""Systems with one placement: models, averages, matrices, control variates, mixtures, clusters."""
DESIGN = [
    *zip(KINDS, itertools.cycle(PLACEMENTS[:2]), strict=False),
    *itertools.product(("pmtl", "mpmtl", "dpfedmtl-as-published", "naive-dp"), PLACEMENTS),
    *(("local", placement) for placement in PLACEMENTS[1:]),
    ("ifca", "streamed"),
]
EXACT = [*dict.fromkeys(pair for pair in DESIGN if pair[1] != "streamed")]
STREAMED = [name for name, placement in DESIGN if placement == "streamed"]
BASE = simulations.VALUES | {"learning_rate": 0.05, "lam2": 0.0}
SETTINGS = [
    BASE | {"learning_rate": 0.02, "personalization": 0.0, "lam": 0.0},
    BASE | {"noise_multiplier": 0.0, "personalization": np.inf},
    BASE | {"clip": 0.1, "lam": 1.0, "personalization": 3.0},
]


@functools.cache
def alone(name, dtype):
    """The run of each setting in the memory of one device."""
    del dtype
    sim = simulations.shared(name)
    return [run(sim, read_by(sim, **setting)) for setting in SETTINGS]


def run(sim, hparams):
    return sim.run(sim.init(7, hparams), hparams, 4, eval_every=simulations.SEGMENT)


def placed(name, placement):
    """(Index of the setting, run) of runs that are placed in this way."""
    if placement != "settings":
        sim = simulations.shared(name, placement)
        return [(2, run(sim, read_by(sim, **SETTINGS[2])))]
    sim = simulations.shared(name)
    many = SimulationBatch(sim, [read_by(sim, **setting) for setting in SETTINGS])
    return runs_of(*many.run(many.init(7), 4, eval_every=simulations.SEGMENT), many)


def runs_of(state, history, many):
    assert np.std(history[-1].metrics["loss"][-1]) > 0  # the settings do differ
    for index in range(many.size):
        segments = []
        for segment in history:
            metrics = {
                name: values[:, index] if values.ndim > 1 else values
                for name, values in segment.metrics.items()
            }
            values = {name: v[..., index] for name, v in segment.evaluation.values.items()}
            evaluation = dataclasses.replace(segment.evaluation, values=values)
            segments.append(dataclasses.replace(segment, metrics=metrics, evaluation=evaluation))
        yield index, (many.state_of(state, index), segments)


def agree(one, other, rtol, atol):
    """Two runs have the same state, ledger, metrics and evaluations."""
    (state, history), (same, again) = one, other
    for part in ("shared", "personal", "mechanism"):
        leaves, others = (jax.tree.leaves(getattr(end, part)) for end in (state, same))
        for leaf, twin in zip(leaves, others, strict=True):
            assert (leaf.dtype, leaf.shape) == (twin.dtype, twin.shape)
            np.testing.assert_allclose(twin, leaf, rtol=rtol, atol=atol, err_msg=part)
    if state.consumed is not None:
        np.testing.assert_array_equal(same.consumed, state.consumed)
    assert charged(same.privacy) == charged(state.privacy)
    for segment, twin in zip(history, again, strict=True):
        for name, values in segment.metrics.items():
            np.testing.assert_allclose(twin.metrics[name], values, rtol, atol, err_msg=name)
        for name, values in segment.evaluation.values.items():
            found = twin.evaluation.values[name]
            np.testing.assert_allclose(found, values, rtol, atol, err_msg=name)


def test_each_mechanism_and_each_kind_of_state_has_each_placement():
    for record in ("mechanism", "local_passes"):
        values = {getattr(system, record) for system in LAWFUL.values()}
        pairs = {(getattr(SYSTEMS[name], record), placement) for name, placement in DESIGN}
        assert pairs == {*itertools.product(values, PLACEMENTS)}


@pytest.mark.parametrize("placement", ["devices", "settings"])  # streamed: below, in test_stream.py
def test_a_placement_gives_what_the_memory_of_one_device_gives(shared_pmtl, placement):
    del shared_pmtl
    for index, found in placed("pmtl", placement):
        agree(alone("pmtl", "float32")[index], found, rtol=1e-4, atol=1e-6)


@THOROUGH
@pytest.mark.parametrize("shared_system", ["pmtl"], indirect=True)
def test_each_of_several_seeds_and_settings_is_its_run_alone(shared_system):
    settings = [read_by(shared_system, **setting) for setting in SETTINGS]
    many = SimulationBatch(shared_system, settings, seeds=2)
    state, history = many.run(many.init(6), 4, eval_every=simulations.SEGMENT)
    runs = [run for run, (seed, _) in enumerate(many.runs) if 6 + seed == 7]
    for run, expected in zip(runs, alone("pmtl", "float64"), strict=True):
        (found,) = [segments for index, segments in runs_of(state, history, many) if index == run]
        agree(expected, found, rtol=1e-9, atol=1e-12)


@THOROUGH
@pytest.mark.parametrize(("shared_system", "placement"), EXACT, indirect=["shared_system"])
def test_in_float64_a_system_is_the_same_on_every_placement(request, shared_system, placement):
    del shared_system
    name = request.node.callspec.params["shared_system"]
    # MP-MTL's billboard is a matrix near the identity, right to the rounding of that.
    rtol, atol = {"devices": (1e-11, 2e-15)}.get(placement, (1e-9, 1e-12))
    for index, found in placed(name, placement):
        agree(alone(name, "float64")[index], found, rtol, atol)


@THOROUGH
@pytest.mark.parametrize("name", STREAMED)
def test_a_system_is_the_same_if_it_is_streamed(name):
    for index, found in placed(name, "streamed"):
        agree(alone(name, "float32")[index], found, rtol=1e-5, atol=1e-6)


@THOROUGH
@pytest.mark.parametrize("shared_system", ["pmtl", "mpmtl"], indirect=True)
def test_one_setting_over_two_devices_is_its_run_alone(request, shared_system):
    name = request.node.callspec.params["shared_system"]
    many = SimulationBatch(shared_system, [read_by(shared_system, **SETTINGS[2])])
    assert dict(many.program.mesh.shape) == {RUNS: 1, CLIENTS: 2}
    state, history = many.run(many.init(7), 4, eval_every=simulations.SEGMENT)
    assert many.program.plan == shared_system.program.plan
    expected = alone(name, "float64")[2]
    for part in ("shared", "personal"):
        found = numbers(getattr(state_of(state, 0), part))
        np.testing.assert_allclose(found, numbers(getattr(expected[0], part)), 1e-9, 1e-12)
    for segment, same in zip(expected[1], history, strict=True):
        for metric, values in segment.evaluation.summary().items():
            np.testing.assert_allclose(same.evaluation.summary()[metric][0], values, 1e-9, 1e-12)


# --- a client with most of the rows ---------------------------------------------------------------

PEOPLE, SMALL, GIANT = 9, 5, 300
VALUES = {"learning_rate": 0.3, "lam": 0.5, "clip": 1.0, "noise_multiplier": 0.5}
PLACES = {"first": 0, "middle": PEOPLE // 2, "last": PEOPLE - 1}


def problem(place):
    counts = np.full(PEOPLE, SMALL)
    counts[PLACES[place]] = GIANT
    return classification(counts.tolist())


def simulation(**placement):
    population, task = problem("first")
    batches = Minibatches(4, epochs=1)
    return simulation_of("pmtl", task, population, poisson(0.5), batches, chunk_size=4, **placement)


def ends(sim, place):
    """The models and the last evaluation of a run on the population with the giant there."""
    sim = sim.with_population(problem(place)[0])
    hparams = read_by(sim, **VALUES, sampling_rate=0.5)
    state, history = sim.run(sim.init(4, hparams), hparams, 6)
    return numbers(state.personal), numbers(state.shared), history[-1].evaluation.values["loss"]


@THOROUGH
def test_a_giant_client_computes_the_same_wherever_it_is():
    one_by_one = simulation(chunk_map="scan")
    expected = {place: ends(one_by_one, place) for place in PLACES}
    for placement in (
        {"chunk_map": "vmap"},
        {"devices": jax.devices()[:2]},
        {"streamed": True},
    ):
        sim = simulation(**placement)
        for place, numbers_there in expected.items():
            for ours, theirs in zip(ends(sim, place), numbers_there, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=place)
