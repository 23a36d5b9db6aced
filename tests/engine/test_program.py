"""Rounds of a program: chunks and segments change nothing, noise and denominator are exact."""

import dataclasses
import functools
import threading
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import (
    classification,
    compilations,
    least_squares,
    noise_key,
    read_by,
)

from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.divergence import DivergingWarning
from fedjaxsim.kernels.backend import Backend, planning_for
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.mechanisms import noise_like
from fedjaxsim.privacy.samplers import full_participation, poisson
from fedjaxsim.simulation import Simulation

PRIVATE = {
    "learning_rate": 0.1,
    "lam": 0.2,
    "clip": 0.3,
    "noise_multiplier": 0.8,
    "sampling_rate": 0.4,
}
EPOCH = Minibatches(4, epochs=1)


def simulation(population, task, algorithm=pmtl, **kwargs):
    return Simulation(algorithm(task), population, poisson(1.0), EPOCH, **kwargs)


def begin(sim, seed: Any = 0):
    """The state before the first round."""
    return sim.init(seed, read_by(sim, **PRIVATE))


def run(sim, rounds, seed: Any = 0, **options):
    """A run from its beginning."""
    return sim.run(begin(sim, seed), read_by(sim, **PRIVATE), rounds, **options)


def learned(state):
    return state.shared, state.personal, state.privacy


@functools.cache
def in_chunks(size, chunk_map):
    """The outcome of two rounds, and clients' metrics after them; in float64."""
    population, task = least_squares([4 + k for k in range(13)], test=0.2)
    sim = simulation(population, task, chunk_size=size, chunk_map=chunk_map)
    hparams = read_by(sim, **PRIVATE)
    first, metrics = sim.round(begin(sim, 1), hparams)
    second, others = sim.round(first, hparams)
    return learned(second), (metrics, others), sim.evaluate(second, hparams).values


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("size", "chunk_map"),
    [
        (2, "scan"),
        *(
            pytest.param(*other, marks=pytest.mark.thorough)
            for other in ((7, "scan"), (2, "vmap"), (5, "vmap"))
        ),
    ],
)
def test_chunks_change_nothing(size, chunk_map):
    with jax.enable_x64(True):
        (one, *numbers), (two, *others) = in_chunks(64, "vmap"), in_chunks(size, chunk_map)
        chex.assert_trees_all_close(one, two, rtol=1e-11, atol=1e-14)
        chex.assert_trees_all_close(numbers, others, rtol=1e-11)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sampling", "minibatches", "chunk_size", "least"),
    [
        # One batch, also of a round without clients, and local steps and noise without loops.
        (poisson(0.2), Minibatches(4, steps=2), None, 0),
        # Batches of two of the clients, the longest first, as many as there are.
        (poisson(0.2), Minibatches(4, epochs=1), 2, 0),
        (full_participation(), Minibatches(4, steps=2), None, 5),  # the store is the batch
    ],
)
def test_the_program_of_an_accelerator_gives_the_same_numbers(
    sampling, minibatches, chunk_size, least
):
    with jax.enable_x64(True):
        population, task = least_squares([4 + k for k in range(5)])
        layout, found = {"chunk_map": "vmap", "chunk_size": chunk_size}, []
        for platform in ("cpu", "gpu"):
            with planning_for(Backend(platform, 10**9)):
                sim = Simulation(pmtl(task), population, sampling, minibatches, **layout)
                hparams = read_by(sim, **(PRIVATE | {"sampling_rate": 0.2}))
                state, (segment,) = sim.run(sim.init(0, hparams), hparams, 8)
                measured = sim.evaluate(state, hparams, split="train").values
            found.append((learned(state), segment.metrics, measured))
        assert min(found[0][1]["participants"]) == least
        chex.assert_trees_all_close(*found, rtol=1e-9, atol=1e-12)


def test_segments_are_rounds_are_one_run(shared_pmtl):
    sim = shared_pmtl
    hparams = sim.hyperparameters(**PRIVATE)
    stepped = sim.init(3, hparams)
    losses = []
    for _ in range(6):
        stepped, metrics = sim.round(stepped, hparams)
        losses.append(float(metrics["loss"]))
    state, history = run(sim, 6, seed=3, eval_every=2)
    assert [segment.round for segment in history] == [2, 4, 6]
    chex.assert_trees_all_close(learned(state), learned(stepped), rtol=1e-5, atol=1e-6)
    assert sim.guarantee(state).draws == sim.guarantee(stepped).draws
    reported = np.concatenate([segment.metrics["loss"] for segment in history])
    np.testing.assert_allclose(reported, losses, rtol=1e-5)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(shared_pmtl):
    sim = shared_pmtl
    runs = [run(sim, 2, seed)[0] for seed in (5, 5, 6)]
    chex.assert_trees_all_equal(learned(runs[0]), learned(runs[1]))
    assert np.any(runs[0].personal["kernel"] != runs[2].personal["kernel"])
    keyed, _ = run(sim, 2, jax.random.key(5))
    chex.assert_trees_all_equal(learned(runs[0]), learned(keyed))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "chunks", [(2, "scan"), pytest.param((8, "vmap"), marks=pytest.mark.thorough)]
)
def test_one_noise_draw_a_round_whatever_the_cohort(chunks):
    # With learning rate 0 every message is zero, so w moves by the noise alone: N(0, (zC/(pm))²),
    # whatever the number of chunks and of clients that took part.
    population, task = classification([10] * 30, features=400, classes=50)
    size, chunk_map = chunks
    sim = Simulation(
        fedavg(task), population, poisson(1.0), EPOCH, chunk_size=size, chunk_map=chunk_map
    )
    hparams = read_by(sim, **(PRIVATE | {"learning_rate": 0.0}))
    start = sim.init(0, hparams)
    state, metrics = sim.round(start, hparams)
    assert int(metrics["participants"]) > size
    moved = np.asarray(state.shared.params["kernel"], np.float64).ravel()
    sd = 0.8 * 0.3 / (0.4 * 30)
    # χ² with 20,000 degrees of freedom; the false-alarm rate is 1e-6.
    statistic = np.sum((moved / sd) ** 2)
    assert abs(statistic - moved.size) < 4.9 * np.sqrt(2 * moved.size)
    expected = noise_like(noise_key(start, 0), start.shared.params, jnp.float32(sd))
    chex.assert_trees_all_close(state.shared.params, expected, rtol=1e-4, atol=1e-8)


def test_the_denominator_is_the_expected_cohort_size():
    # Every update is clipped to norm C exactly, and all are equal, so |w¹| = |S| C/(p m).
    rows = {"x": np.ones((20, 1)), "y": np.full(20, 1e3)}
    _, task = least_squares([1], features=1)
    population = Population.from_flat(rows, [1] * 20)
    sim = Simulation(fedavg(task), population, poisson(1.0), Minibatches(1, steps=1))
    hparams = sim.hyperparameters(clip=0.5, sampling_rate=0.3)
    sizes = set()
    for seed in range(4):
        state, metrics = sim.round(sim.init(seed, hparams), hparams)
        norm = np.sqrt(sum(float(jnp.vdot(v, v)) for v in jax.tree.leaves(state.shared.params)))
        participants = int(metrics["participants"])
        sizes.add(participants)
        np.testing.assert_allclose(norm, participants * 0.5 / (0.3 * 20), rtol=1e-4)
        # A metric is a mean over those who took part: all begin at the loss (0 − 1000)²/2.
        np.testing.assert_allclose(metrics["loss"], 5e5, rtol=1e-6)
    assert len(sizes) > 1


def test_the_ledger_counts_every_round_at_the_noise_really_drawn(shared_pmtl):
    sim = shared_pmtl
    schedule = sim.hyperparameters(
        **(PRIVATE | {"noise_multiplier": [1.0, 2.0, 1.0, 3.0, 1.0, 2.0]})
    )
    state, _ = sim.run(sim.init(0, schedule), schedule, 6, eval_every=2)
    p = np.floor(np.float64(np.float32(0.4)) * 2**32) / 2**32
    assert sorted(ledger.charged(state.privacy)[0].entries) == [
        (1.0, p, 3),
        (2.0, p, 2),
        (3.0, p, 1),
    ]


def test_epsilon_inside_jit_bounds_the_reported_one(shared_pmtl):
    sim = shared_pmtl
    hparams = sim.hyperparameters(**(PRIVATE | {"noise_multiplier": 3.0}))
    state, _ = sim.run(sim.init(0, hparams), hparams, 20, eval_every=2)
    inside = float(jax.jit(lambda state: sim.epsilon(state, 1e-3))(state))
    reported = sim.guarantee(state, 1e-3).find("zero_out").epsilon
    assert reported is not None
    assert reported <= inside <= 1.25 * reported


# --- compilation, donation, transformations ----------------------------------------------------


@pytest.mark.usefixtures("every_program")
@pytest.mark.filterwarnings("ignore:this run diverges")  # with noise that is large
def test_programs_of_a_thread_that_another_test_left_at_work_do_not_count():
    begun = threading.Event()

    def late():
        begun.wait()
        jax.jit(lambda x: x + 2)(0)

    left = threading.Thread(target=late)
    left.start()
    with compilations() as here:
        begun.set()
        left.join()
        assert not here
        of_test = threading.Thread(target=lambda: jax.jit(lambda x: x + 3)(0))
        of_test.start()
        of_test.join()
    assert len(here) == 1


def test_hyperparameters_seeds_and_cohorts_do_not_recompile(shared_pmtl):
    sim = shared_pmtl
    kinds = [float, np.float32, np.float64, jnp.float32, np.asarray, jnp.asarray]

    def settings(seed, kind):
        hparams = sim.hyperparameters(
            learning_rate=kind(0.1 + 0.1 * seed),
            lam=kind(seed),
            clip=kind(1.0),
            noise_multiplier=kind(1.0 + seed),
            sampling_rate=kind(0.2 + 0.1 * seed),
        )
        hparams.as_arrays()  # converting a JAX array may itself compile something small
        return hparams

    def run_of(seed, hparams):
        sim.run(sim.init(seed, hparams), hparams, 2)

    run_of(0, settings(0, float))
    with compilations() as first:
        jax.jit(lambda x: x + 1)(0)
    assert len(first) == 1  # the counter counts
    for seed, kind in enumerate(kinds):
        hparams = settings(seed, kind)
        with compilations() as again:
            run_of(seed, hparams)
        assert not again, kind


@pytest.mark.thorough
def test_a_round_maps_over_hyperparameters(shared_pmtl):
    sim = shared_pmtl
    rates = jnp.array([0.05, 0.2])

    def loss_after(rate):
        hparams = sim.hyperparameters(**(PRIVATE | {"learning_rate": rate}))
        state, metrics = sim.round(sim.init(0, hparams), hparams)
        return state.shared.params["kernel"], metrics["loss"]

    kernels, losses = jax.vmap(loss_after)(rates)
    for i, rate in enumerate(rates):
        kernel, loss = loss_after(rate)
        np.testing.assert_allclose(kernels[i], kernel, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(losses[i], loss, rtol=1e-5)


def test_a_broken_client_is_counted_and_hurts_no_other():
    population, task = classification([10] * 4)
    x = np.array(population.fields["x"])
    start = population.splits["train"].start[2]
    x[start : start + 8] = 3e37  # finite, but its logits overflow after a step
    broken = dataclasses.replace(population, fields={"x": x, "y": population.fields["y"]})
    sim = Simulation(pmtl(task), broken, full_participation(), EPOCH)
    hparams = sim.hyperparameters(lam=0.1, clip=1.0)
    with pytest.warns(DivergingWarning) as caught:
        state, (segment,) = sim.run(sim.init(0, hparams), hparams, 4)
    lost = segment.metrics["nonfinite"].sum()
    assert lost >= 1
    [told] = (str(each.message) for each in caught)
    assert told.startswith(f"{lost} messages of clients were not finite")
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state.shared))
    healthy = np.asarray(state.personal["kernel"])[[0, 1, 3]]
    assert np.all(np.isfinite(healthy))


@pytest.mark.thorough
def test_passes_bound_how_often_a_row_is_seen():
    # 5 clients of 4 rows in batches of 2 have 2 batches each; after two rounds with everyone all
    # are used up, and the models stand still although more rounds follow.
    population, task = classification([5] * 5)
    minibatches = Minibatches(2, steps=1, passes=1)
    sim = Simulation(fedavg(task), population, full_participation(), minibatches, chunk_size=2)
    hparams = sim.hyperparameters(learning_rate=0.5)
    state, _ = sim.run(sim.init(0, hparams), hparams, 2)
    assert state.consumed is not None
    assert state.consumed.tolist() == [2] * 5
    before = jax.tree.map(np.array, state.shared.params)
    assert np.any(before["kernel"] != 0)
    state, _ = sim.run(state, hparams, 3)
    np.testing.assert_array_equal(before["kernel"], state.shared.params["kernel"])


def test_a_client_consumes_the_minibatches_that_it_takes():
    # Of 5 and 2 rows, three of two rows each and one; a round takes two, or what is left.
    population, task = least_squares([5, 2])
    minibatches = Minibatches(2, steps=2, passes=1)
    sim = Simulation(fedavg(task), population, full_participation(), minibatches)
    hparams = sim.check(sim.hyperparameters(learning_rate=0.1))
    state, rows = jax.jit(sim.program.init)(jax.random.key(0), hparams), sim.rows["train"]
    client = sim.program.client(state, hparams, rows, jax.jit(sim.program.draw)(state, hparams))
    after = jax.jit(lambda consumed, k: client(((), consumed), k)[0][1])  # compiles a count alone
    for k, counts in enumerate(([2, 3, 3], [1, 1, 1])):
        consumed = jnp.int32(0)
        for count in counts:
            consumed = after(consumed, k)
            assert int(consumed) == count
