"""Rows and states that stay on the host, against the same run in the memory of a device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import simulations
from support.problems import least_squares, read_by

from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.data import load_folder, save_folder
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.engine import stream as streamed
from fedjaxsim.engine.checkpoint import CheckpointFolder
from fedjaxsim.privacy.mechanisms import gaussian
from fedjaxsim.privacy.samplers import full_participation, poisson
from fedjaxsim.simulation import Simulation

VALUES = {
    "learning_rate": 0.1,
    "lam": 0.5,
    "clip": 0.7,
    "noise_multiplier": 0.8,
    "sampling_rate": 0.5,
}


def hparams_of(sim, **changes):
    """The hyperparameters of a simulation."""
    return read_by(sim, **(VALUES | changes))


def run(sim, rounds, seed, **changes):
    """A run from its beginning."""
    hparams = hparams_of(sim, **changes)
    return sim.run(sim.init(seed, hparams), hparams, rounds, eval_every=simulations.SEGMENT)


def simulation(population, task, stream, passes=None):
    batches = Minibatches(2, steps=3, passes=passes) if passes else Minibatches(2, epochs=1)
    sampling = poisson(1.0)
    return Simulation(pmtl(task), population, sampling, batches, gaussian(), streamed=stream)


def assert_agree(one, other):
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
            left, right = jax.random.key_data(left), jax.random.key_data(right)
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def mapped(tmp_path_factory):
    """The population of the shared simulations, mapped from disk."""
    path = tmp_path_factory.mktemp("population") / "folder"
    save_folder(path, simulations.problem()[0])
    return load_folder(path)


@pytest.fixture
def pair(shared_pmtl, shared_streamed, mapped):
    return shared_pmtl, shared_streamed.with_population(mapped)


def test_a_streamed_run_is_the_run_in_memory(pair, monkeypatch):
    monkeypatch.setattr(streamed, "BLOCK", 3)  # clients do not divide into blocks evenly
    monkeypatch.setattr(streamed, "DRAWS", 1)  # a segment draws cohorts more than once
    found = [run(sim, 6, seed=1) for sim in pair]
    (memory, whole), (stream, piecewise) = found
    assert_agree(memory, stream)
    for one, other in zip(whole, piecewise, strict=True):
        assert one.metrics.keys() == other.metrics.keys()
        for name, values in one.metrics.items():
            np.testing.assert_allclose(values, other.metrics[name], rtol=1e-5, err_msg=name)
        for name, values in one.evaluation.values.items():
            np.testing.assert_allclose(values, other.evaluation.values[name], rtol=1e-5)
    assert str(pair[0].guarantee(memory)) == str(pair[1].guarantee(stream))


def test_a_state_is_used_up_by_the_rounds_that_start_from_it(pair):
    """Else a second run would start from the first one's models, and change them."""
    for sim in pair:
        hparams = hparams_of(sim)
        start = sim.init(2, hparams)
        after, _ = sim.run(start, hparams, simulations.SEGMENT)
        models = [np.array(leaf) for leaf in jax.tree.leaves(after.personal)]
        with pytest.raises(ValueError, match="the state is used up"):
            sim.run(start, hparams, simulations.SEGMENT)
        with pytest.raises(ValueError, match="the state is used up"):
            sim.evaluate(start, hparams)
        for before, leaf in zip(models, jax.tree.leaves(after.personal), strict=True):
            np.testing.assert_array_equal(before, leaf)


def test_a_client_in_every_round_has_its_newest_state(pair):
    # p = 1: all clients take part in all rounds, and no state is back before it is needed.
    memory, stream = (run(sim, 6, seed=2, sampling_rate=1.0)[0] for sim in pair)
    assert_agree(memory, stream)


@pytest.mark.thorough
def test_rows_are_not_replaced_before_a_slow_round_has_read_them(monkeypatch):
    population, task = simulations.problem()
    # Of the device's type, so that it shares them.
    fields = {name: values.astype(np.float32) for name, values in population.fields.items()}
    population = dataclasses.replace(population, fields=fields)
    functions = streamed.functions_of_fetched

    def slow(program):
        work, measure = functions(program)

        def late(state, turn, hparams):
            zeros = jnp.zeros((64, 64)) * hparams.learning_rate
            nothing = jax.lax.fori_loop(0, 2000, lambda _, x: x @ zeros, zeros)[0, 0]
            fields = {name: values + nothing for name, values in turn.rows.fields.items()}
            rows = dataclasses.replace(turn.rows, fields=fields)
            return work(state, turn._replace(rows=rows), hparams)

        return late, measure

    memory = simulation(population, task, False)
    monkeypatch.setattr(streamed, "functions_of_fetched", slow)
    late = simulation(population, task, True)
    assert_agree(*(run(sim, 12, seed=3)[0] for sim in (memory, late)))


def test_a_client_s_state_is_one_piece_of_memory(pair):
    # Copied by columns, as NumPy would, states are read and written a number at a time.
    state = pair[1].init(0, hparams_of(pair[1]))
    leaves = jax.tree.leaves(state.personal)
    assert leaves
    assert all(leaf.flags.c_contiguous for leaf in leaves)


@pytest.mark.filterwarnings("ignore:this run diverges")
@pytest.mark.thorough
def test_checkpoints_hold_every_state_and_go_on(pair, tmp_path):
    sim = pair[1]
    straight, _ = run(sim, 6, seed=3)
    state, _ = run(sim, 2, seed=3)
    CheckpointFolder(tmp_path).save(2, state, {})
    saved = CheckpointFolder(tmp_path).last()
    assert saved is not None
    begun = saved.state(sim.init(3, hparams_of(sim)))
    again, _ = sim.run(begun, hparams_of(sim), 4, eval_every=simulations.SEGMENT)
    for left, right in zip(
        jax.tree.leaves((straight.shared, straight.personal)),
        jax.tree.leaves((again.shared, again.personal)),
        strict=True,
    ):
        np.testing.assert_array_equal(left, right)


def test_what_does_not_stream_is_refused(pair):
    population, task = simulations.problem()
    sim = pair[1]
    with pytest.raises(ValueError, match="round"):
        sim.round(sim.init(0, hparams_of(sim)), hparams_of(sim))
    with pytest.raises(ValueError, match="rows"):
        _ = sim.rows
    parts = (pmtl(task), population, full_participation(), Minibatches(2, epochs=1))
    with pytest.raises(ValueError, match="streamed"):
        Simulation(*parts, streamed=True)
    with pytest.raises(ValueError, match="devices"):
        Simulation(*parts, streamed=True, devices=jax.devices())


@pytest.mark.thorough
def test_minibatches_that_are_used_up_stream_too():
    population, task = least_squares(simulations.COUNTS, test=0.3)
    sims = [simulation(population, task, stream, passes=2) for stream in (False, True)]
    ends = [run(sim, 4, seed=1)[0] for sim in sims]
    assert_agree(*ends)
    # Nobody has rows for validation.
    found = sims[1].evaluate(ends[1], hparams_of(sims[1]), "validation")
    assert np.isnan(found.mean("loss"))


@pytest.mark.filterwarnings("ignore:this run diverges")
@pytest.mark.thorough
@settings(
    deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rates=st.lists(st.sampled_from([0.05, 0.3, 0.6, 0.95, 1.0]), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    seed=st.integers(0, 1000),
)
def test_any_pattern_of_cohorts_streams(pair, rates, lengths, seed):
    ends = []
    for sim in pair:
        state = sim.init(seed, hparams_of(sim))
        for rate, rounds in zip(rates, lengths, strict=False):
            state, _ = sim.run(state, hparams_of(sim, sampling_rate=rate), 2 * rounds, eval_every=2)
        ends.append(dataclasses.replace(state, privacy=()))
    assert_agree(*ends)
