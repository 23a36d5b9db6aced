import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import (
    classification,
    compilations,
    least_squares,
    noise_key,
    read_by,
    simulation_of,
)

from fedjaxsim.algorithms import optimizers
from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.local import local
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.data.synthetic import regression_stream
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.mechanisms import gaussian, no_release, noise_like
from fedjaxsim.privacy.samplers import Sampling, full_participation, poisson
from fedjaxsim.privacy.samplers.passes import passes
from fedjaxsim.simulation import Simulation
from fedjaxsim.tasks.known_risk import known_regression

PRIVATE = {
    "learning_rate": 0.1,
    "lam": 0.2,
    "clip_norm": 0.3,
    "noise_multiplier": 0.8,
    "sampling_rate": 0.4,
}
EPOCH = Minibatches(4, epochs=1)


def simulation(population, task, algorithm=pmtl, **kwargs):
    return Simulation(algorithm(task), population, poisson(1.0), EPOCH, **kwargs)


@functools.cache
def standard():
    """PMTL with twelve clients; made once, for its compilation, and run in segments of two."""
    return simulation(*classification([10] * 12))


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
    """The outcome of a run; in float64."""
    population, task = least_squares([4 + k for k in range(13)], test=0.2)
    sim = simulation(population, task, chunk_size=size, chunk_map=chunk_map)
    return run(sim, 5, seed=1)


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
        (one, (first,)), (two, (second,)) = in_chunks(64, "vmap"), in_chunks(size, chunk_map)
        chex.assert_trees_all_close(learned(one), learned(two), rtol=1e-11, atol=1e-14)
        chex.assert_trees_all_close(first.metrics, second.metrics, rtol=1e-11)
        chex.assert_trees_all_close(first.evaluation.values, second.evaluation.values, rtol=1e-11)


def test_segments_are_rounds_are_one_run():
    sim = standard()
    hparams = sim.hyperparameters(**PRIVATE)
    stepped = sim.init(3, hparams)
    losses = []
    for _ in range(6):
        stepped, metrics = sim.round(stepped, hparams)
        losses.append(float(metrics["loss"]))
    state, history = run(sim, 6, seed=3, eval_every=4)
    assert [segment.round for segment in history] == [4, 6]
    chex.assert_trees_all_close(learned(state), learned(stepped), rtol=1e-5, atol=1e-6)
    reported = np.concatenate([segment.metrics["loss"] for segment in history])
    np.testing.assert_allclose(reported, losses, rtol=1e-5)


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    sim = standard()
    runs = [run(sim, 2, seed)[0] for seed in (5, 5, 6)]
    chex.assert_trees_all_equal(learned(runs[0]), learned(runs[1]))
    assert np.any(runs[0].personal["kernel"] != runs[2].personal["kernel"])
    keyed, _ = run(sim, 2, jax.random.key(5))
    chex.assert_trees_all_equal(learned(runs[0]), learned(keyed))


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
    hparams = sim.hyperparameters(clip_norm=0.5, sampling_rate=0.3)
    sizes = set()
    for seed in range(4):
        state, metrics = sim.round(sim.init(seed, hparams), hparams)
        norm = np.sqrt(sum(float(jnp.vdot(v, v)) for v in jax.tree.leaves(state.shared.params)))
        participants = int(metrics["participants"])
        sizes.add(participants)
        np.testing.assert_allclose(norm, participants * 0.5 / (0.3 * 20), rtol=1e-4)
    assert len(sizes) > 1


def test_the_ledger_counts_every_round_at_the_noise_really_drawn():
    sim = standard()
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


def test_a_closed_door_charges_nothing():
    population, task = classification([10] * 5)
    sim = simulation(population, task, local, mechanism=no_release())
    state, _ = run(sim, 3)
    assert ledger.charged(state.privacy)[0].entries == ()
    assert sim.guarantee(state).find("zero_out", "joint_dp").epsilon == 0


def test_the_guarantee_is_the_exact_one_for_everyone():
    # GDP: T = 4 rounds, z = 8: μ = √4/8 = 1/4 (zero-out), 1/2 (replace).
    from scipy.stats import norm

    population, task = classification([10] * 5)
    sim = Simulation(pmtl(task), population, full_participation(), EPOCH)
    hparams = sim.hyperparameters(lam=0.0, clip_norm=1.0, noise_multiplier=8.0)
    state, _ = sim.run(sim.init(0, hparams), hparams, 4)
    report = sim.guarantee(state, delta=1e-3)
    found = {"zero_out": report.find("zero_out"), "replace": report.find("replace")}
    for adjacency, mu in [("zero_out", 0.25), ("replace", 0.5)]:
        epsilon = found[adjacency].epsilon
        assert epsilon is not None
        delta = norm.cdf(-epsilon / mu + mu / 2) - np.exp(epsilon) * norm.cdf(
            -epsilon / mu - mu / 2
        )
        np.testing.assert_allclose(delta, 1e-3, rtol=1e-6)


def test_epsilon_inside_jit_bounds_the_reported_one():
    sim = standard()
    hparams = sim.hyperparameters(**(PRIVATE | {"noise_multiplier": 3.0}))
    state, _ = sim.run(sim.init(0, hparams), hparams, 20, eval_every=2)
    inside = float(jax.jit(lambda state: sim.epsilon(state, 1e-3))(state))
    reported = sim.guarantee(state, 1e-3).find("zero_out").epsilon
    assert reported is not None
    assert reported <= inside <= 1.25 * reported


# --- evaluation --------------------------------------------------------------------------------


def test_evaluation_is_that_of_numpy_on_each_clients_own_rows():
    population, task = classification([10, 23, 40, 5, 17])
    sim = simulation(population, task)
    state, _ = run(sim, 3)
    hparams = sim.hyperparameters(**PRIVATE)
    for split in ("train", "test"):
        evaluation = sim.evaluate(state, hparams, split)
        expected, counts = [], []
        for k in range(5):
            rows = population.rows(k, split)
            w = np.asarray(state.personal["kernel"][k]), np.asarray(state.personal["bias"][k])
            expected.append(np.mean(np.argmax(rows["x"] @ w[0].T + w[1], axis=1) == rows["y"]))
            counts.append(len(rows["y"]))
        np.testing.assert_allclose(evaluation.values["accuracy"], expected, rtol=1e-6)
        summary = evaluation.summary()
        name = f"{split}_accuracy"
        np.testing.assert_allclose(summary[name], np.mean(expected), rtol=1e-6)
        np.testing.assert_allclose(
            summary[f"{name}_weighted"], np.average(expected, weights=counts), rtol=1e-6
        )
        for q in (10, 90):
            np.testing.assert_allclose(
                summary[f"{name}_p{q}"], np.percentile(expected, q), rtol=1e-6
            )


def test_nmse_is_pooled_squared_error_over_the_variance_of_targets():
    population, task = least_squares([10, 20, 30], test=0.3)
    sim = Simulation(local(task), population, full_participation(), EPOCH, no_release())
    hparams = sim.hyperparameters(learning_rate=0.05)
    state, _ = sim.run(sim.init(0, hparams), hparams, 3)
    errors, targets = [], []
    for k in range(3):
        rows = population.rows(k, "test")
        kernel = np.asarray(state.personal["kernel"][k, 0])
        errors.append(rows["x"] @ kernel + np.asarray(state.personal["bias"][k]) - rows["y"])
        targets.append(rows["y"])
    variance = np.var(np.concatenate(targets))
    summary = sim.evaluate(state, hparams).summary()
    pooled = np.mean(np.concatenate(errors) ** 2) / variance
    np.testing.assert_allclose(summary["test_nmse"], pooled, rtol=1e-5)
    unweighted = np.mean([np.mean(e**2) for e in errors]) / variance
    np.testing.assert_allclose(summary["test_nmse_unweighted"], unweighted, rtol=1e-5)


def test_clients_without_rows_do_not_count():
    population, task = classification([10, 2, 30])  # two rows leave none for the test
    assert population.splits["test"].count[1] == 0
    sim = simulation(population, task)
    hparams = sim.hyperparameters(**PRIVATE)
    state = sim.init(0, hparams)
    evaluation = sim.evaluate(state, hparams)
    assert np.isnan(evaluation.values["loss"][1])
    # At w = 0 every loss is log 3.
    np.testing.assert_allclose(evaluation.summary()["test_loss"], np.log(3), rtol=1e-6)
    assert np.isnan(sim.evaluate(state, hparams, "validation").summary()["validation_loss"])


# --- compilation, donation, transformations ----------------------------------------------------


def test_hyperparameters_seeds_and_cohorts_do_not_recompile():
    population, task = classification([10] * 6)
    sim = simulation(population, task)
    kinds = [float, np.float32, np.float64, jnp.float32, np.asarray, jnp.asarray]

    def settings(seed, kind):
        hparams = sim.hyperparameters(
            learning_rate=kind(0.1 + 0.1 * seed),
            lam=kind(seed),
            clip_norm=kind(1.0),
            noise_multiplier=kind(1.0 + seed),
            sampling_rate=kind(0.2 + 0.1 * seed),
        )
        hparams.as_arrays()  # converting a JAX array may itself compile something small
        return hparams

    def run_of(seed, hparams):
        sim.run(sim.init(seed, hparams), hparams, 2)

    with compilations() as first:
        run_of(0, settings(0, float))
    assert len(first) >= 3  # init, rounds and evaluation: the counter counts
    for seed, kind in enumerate(kinds):
        hparams = settings(seed, kind)
        with compilations() as again:
            run_of(seed, hparams)
        assert not again, kind


def test_a_run_leaves_what_the_user_passed_alone():
    population, _ = classification([10] * 4)
    _, task = classification([10] * 4)
    mine = {"kernel": jnp.ones((3, 4)), "bias": jnp.zeros(3)}
    own = task._replace(init=lambda key: mine)
    sim = Simulation(pmtl(own), population, poisson(1.0), EPOCH)
    key = jax.random.key(0)
    run(sim, 2, key)
    np.testing.assert_array_equal(mine["kernel"], np.ones((3, 4)))
    jax.random.split(key)  # raises if its buffer was donated


def test_a_round_maps_over_hyperparameters():
    sim = standard()
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
    hparams = sim.hyperparameters(lam=0.1, clip_norm=1.0)
    state, (segment,) = sim.run(sim.init(0, hparams), hparams, 4)
    assert segment.metrics["nonfinite"].sum() >= 1
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state.shared))
    healthy = np.asarray(state.personal["kernel"])[[0, 1, 3]]
    assert np.all(np.isfinite(healthy))


def test_the_callback_sees_every_segment_and_can_stop():
    sim = standard()
    seen = []

    def watch(state, segment):
        seen.append((int(state.round), segment.round))
        return len(seen) < 2

    state, history = run(sim, 10, eval_every=2, callbacks=[watch])
    assert seen == [(2, 2), (4, 4)]
    assert int(state.round) == 4
    assert len(history) == 2


# --- errors before any compute -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling_rate": 1.5}, r"sampling_rate must lie in \(0, 1\], got 1\.5"),
        ({"sampling_rate": 0.0}, r"sampling_rate must lie in \(0, 1\], got 0\.0"),
        ({"noise_multiplier": -1.0}, r"noise_multiplier must be finite and at least 0.* got -1"),
        ({"noise_multiplier": np.nan}, r"noise_multiplier must be finite and at least 0.* got nan"),
        ({"clip_norm": 0.0}, r"clip_norm must be positive .* got 0\.0"),
        ({"clip_norm": 1e-20}, r"clip_norm must be .* lie in \[1e-12, 1e\+15\], got 1e-20"),
        ({"clip_norm": np.inf}, "needs a finite clip_norm"),
        ({"learning_rate": -0.1}, r"learning_rate must be finite and at least 0, got -0\.1"),
        ({"lam": np.inf}, "lam must be finite and at least 0, got inf"),
        ({"server_learning_rate": -1.0}, "server_learning_rate must be finite and .* got -1"),
        ({"lam": np.ones(2)}, r"lam must be one number, got shape \(2,\)"),
        ({"noise_multiplier": np.ones((2, 2))}, r"one number per round, got shape \(2, 2\)"),
    ],
)
def test_bad_hyperparameters_are_refused(change, message):
    population, task = classification([10] * 4)
    sim = simulation(population, task)
    for make in (
        lambda: sim.hyperparameters(**(PRIVATE | change)),
        lambda: sim.hyperparameters(**PRIVATE).replace(**change),
    ):
        with pytest.raises(ValueError, match=message):
            sim.init(0, make())


def test_bad_uses_are_refused():
    population, task = classification([10] * 4)
    sim = simulation(population, task)
    hparams = sim.hyperparameters(**PRIVATE)
    state = sim.init(0, hparams)
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        sim.run(state, hparams, 0)
    with pytest.raises(ValueError, match="eval_every must be at least 1, got 0"):
        sim.run(state, hparams, 1, eval_every=0)
    with pytest.raises(ValueError, match="schedule has 2 values, too few for 3 rounds"):
        sim.run(state, hparams.replace(noise_multiplier=[1.0, 2.0]), 3)
    with pytest.raises(ValueError, match="9 distinct values, but the ledger has 8 places"):
        sim.run(state, hparams.replace(noise_multiplier=np.arange(1.0, 10.0)), 9)
    with pytest.raises(ValueError, match="split must be one of"):
        sim.evaluate(state, hparams, "holdout")
    with pytest.raises(ValueError, match="typed threefry key"):
        sim.init(jax.random.key(0, impl="rbg"), hparams)
    with pytest.raises(ValueError, match="delta must lie in"):
        sim.guarantee(state, delta=1.5)
    with pytest.raises(ValueError, match="draws from 5 clients, but the population has 4"):
        Simulation(pmtl(task), population, Sampling(lambda m: poisson(1.0).for_clients(m + 1)))
    with pytest.raises(ValueError, match=r"capacity must lie in \[1, 4\], got 5"):
        Simulation(pmtl(task), population, poisson(1.0, capacity=5))
    with pytest.raises(ValueError, match="chunk_size must be at least 2, got 1"):
        simulation(population, task, chunk_size=1)
    with pytest.raises(ValueError, match="must have 4 clients, got 3"):
        sim.with_population(classification([10] * 3)[0])


def test_a_capped_sampler_and_a_weighted_door_check_the_run():
    population, task = classification([10] * 4)
    sim = Simulation(pmtl(task), population, passes(cohort=2, max_participations=1), EPOCH)
    hparams = read_by(sim, **PRIVATE)
    with pytest.raises(ValueError, match="serves 2 rounds in all, got 0 done and 3 more"):
        sim.run(sim.init(0, hparams), hparams, 3)
    state, (segment,) = sim.run(sim.init(0, hparams), hparams, 2)
    assert segment.metrics["participants"].tolist() == [2, 2]
    # One participation each: exactly one Gaussian release of z = 0.8 per client.
    assert sim.guarantee(state).find("zero_out").accountant == "gaussian"
    weighted = gaussian(weights=np.ones(3), max_weight=1.0)
    with pytest.raises(ValueError, match="for 3 clients, but the population has 4"):
        simulation(population, task, mechanism=weighted)


def test_an_accountant_that_does_not_describe_the_sampler_is_refused():
    population, task = classification([10] * 4)
    with pytest.raises(ValueError, match="'gaussian' describes gaussian releases under full"):
        simulation(population, task, accountant="gaussian")
    sim = simulation(population, task, accountant="rdp")
    state, _ = run(sim, 2)
    assert sim.guarantee(state, 1e-3).find("zero_out").accountant == "rdp"


def test_labels_outside_the_model_are_refused_before_anything_runs():
    population, task = classification([10] * 4)
    fields = {"x": population.fields["x"], "y": population.fields["y"] + 1}
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 3\)"):
        simulation(dataclasses.replace(population, fields=fields), task)


def test_schedules_come_from_optax():
    schedule = optax.cosine_decay_schedule(1.0, 10)
    built = optimizers.local(optax.sgd, schedule)(
        Hyperparameters(learning_rate=0.5).as_arrays(), jnp.int32(5)
    )
    update, _ = built.update(jnp.ones(1), built.init(jnp.ones(1)))
    np.testing.assert_allclose(jnp.asarray(update), [-0.25], rtol=1e-6)  # 0.5 · ½(1 + cos(π/2))


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


def test_data_made_afresh_have_no_epochs():
    population, task = regression_stream(3, 5), known_regression(5)
    for minibatches in (Minibatches(2, epochs=1), Minibatches(2, steps=1, passes=1)):
        with pytest.raises(ValueError, match="has no epochs or passes"):
            Simulation(pmtl(task), population, full_participation(), minibatches)


def test_a_simulation_says_what_it_is_made_of():
    assert repr(standard()).splitlines() == [
        "Simulation of pmtl",
        f"  {repr(standard().population).splitlines()[0]}",
        "  fields: " + ", ".join(f"{k} {v.shape}" for k, v in standard().population.fields.items()),
        "  sampling: poisson, at most 12 clients a round",
        "  mechanism: gaussian",
        "  minibatches: size 4, epochs 1",
        "  data: in memory, devices: 1",
    ]


@pytest.mark.parametrize("name", ["fedprox", "dpfedmtl"])
def test_a_simulation_names_its_algorithm(name):
    population, task = classification([10] * 4)
    sim = simulation_of(name, task, population, full_participation(), EPOCH)
    assert repr(sim).startswith(f"Simulation of {name}\n")
