"""Standard errors of the published model: cluster-robust ones, and the noise of all rounds."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import fedjaxsim as fjs
from fedjaxsim.algorithms.shared_model import SharedModel
from fedjaxsim.models import linear, mlp
from fedjaxsim.privacy.mechanisms.sums import adaptive_clipping, per_part, pure
from fedjaxsim.tasks import squared

CLIENTS, RANGES = 12, {"age": (20, 80), "dose": (0, 5), "y": (-50, 150)}


def frame_of(seed=0):
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(CLIENTS), rng.integers(3, 9, CLIENTS))
    age, dose = rng.uniform(20, 80, len(who)), rng.uniform(0, 5, len(who))
    y = 10 + 0.5 * age - 3 * dose + rng.normal(0, 4, CLIENTS)[who] + rng.normal(0, 2, len(who))
    return pd.DataFrame({"who": who, "age": age, "dose": dose, "y": y})


def simulation(frame, rate=None, **mechanism):
    rows = fjs.data.from_dataframe(frame, client="who", target="y")
    task = squared(linear((2,), 1))
    return fjs.Simulation(
        fjs.fedavg(task),
        fjs.data.scale(rows, RANGES),
        fjs.full_participation() if rate is None else fjs.poisson(rate),
        fjs.Minibatches(100, epochs=1),  # one step on all rows
        fjs.gaussian(**mechanism),
    )


def cluster_robust(frame, weights):
    """Compute weighted least squares and its cluster-robust errors in the frame's units."""
    x = np.column_stack([np.ones(len(frame)), frame.age, frame.dose])
    bread = np.linalg.inv(x.T @ (weights[:, None] * x))
    estimate = bread @ x.T @ (weights * frame.y)
    scores = pd.DataFrame(x * (weights * (np.asarray(frame.y) - x @ estimate))[:, None])
    meat = np.asarray(scores.groupby(np.asarray(frame.who)).sum())
    m, (n, q) = CLIENTS, x.shape
    few = m / (m - 1) * (n - 1) / (n - q)
    return estimate, np.sqrt(few * np.diag(bread @ meat.T @ meat @ bread))


def stored(estimate):
    """Return coefficients in the frame's units as the scaled model's parameters."""
    (low, high), *others = RANGES["y"], RANGES["age"], RANGES["dose"]
    centre, half = np.mean(others, axis=1), np.diff(others, axis=1)[:, 0] / 2
    slopes = estimate[1:] * half / ((high - low) / 2)
    bias = (estimate[0] + estimate[1:] @ centre - (high + low) / 2) / ((high - low) / 2)
    return {"bias": jnp.array([bias], float), "kernel": jnp.array([slopes], float)}


@pytest.mark.parametrize("by_rows", [False, True])
def test_errors_over_clients_are_the_cluster_robust_ones_of_least_squares(by_rows):
    frame = frame_of()
    sizes = frame.groupby("who").who.transform("size").to_numpy()
    weights = np.ones(len(frame)) if by_rows else 1 / sizes
    estimate, errors = cluster_robust(frame, weights)
    counts = np.bincount(frame.who)
    sim = simulation(frame, **({"weights": counts} if by_rows else {}))
    hparams = sim.hyperparameters()
    state = sim.init(0, hparams)
    state = dataclasses.replace(state, shared=SharedModel(stored(estimate), state.shared.optimizer))
    table = pd.DataFrame(sim.standard_errors(state, hparams)).set_index("coefficient")
    assert [*table.index] == ["intercept", "age", "dose"]
    np.testing.assert_allclose(table.estimate, estimate, rtol=1e-4)
    np.testing.assert_allclose(table.sampling, errors, rtol=2e-3)
    assert not table[["noise", "cohorts"]].to_numpy().any()
    # Student's t with 11 degrees of freedom: 2.201 (a table of quantiles).
    np.testing.assert_allclose((table.high - table.low) / (2 * table.sampling), 2.201, atol=1e-3)
    if by_rows:
        api = pytest.importorskip("statsmodels.api")
        x = api.add_constant(frame[["age", "dose"]])
        fit = api.OLS(frame.y, x).fit(cov_type="cluster", cov_kwds={"groups": frame.who})
        np.testing.assert_allclose(table.sampling, fit.bse, rtol=2e-3)


@pytest.mark.thorough
def test_intervals_of_sampling_cover_the_slopes_of_the_clients_population():
    # Other clients in each repetition, with slopes of their own around 0.5 and −3.
    m, n, repetitions = 40, 5, 200
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(m), n)
    age = rng.uniform(20, 80, (repetitions, m * n))
    dose = rng.uniform(0, 5, (repetitions, m * n))
    of_age, of_dose = rng.normal([[0.5], [-3.0]], [[0.05], [0.5]], (repetitions, 2, m))[
        ..., who
    ].swapaxes(0, 1)
    y = 10 + of_age * age + of_dose * dose + rng.normal(0, 3, (repetitions, m))[:, who]
    y += rng.normal(0, 2, y.shape)
    first = pd.DataFrame({"who": who, "age": age[0], "dose": dose[0], "y": y[0]})
    sim = simulation(first)
    hparams = sim.hyperparameters()
    state = sim.init(0, hparams)
    inside = []
    for k in range(repetitions):
        frame = first.assign(age=age[k], dose=dose[k], y=y[k])
        x = np.column_stack([np.ones(m * n), frame.age, frame.dose])
        fit = stored(np.linalg.lstsq(x, y[k])[0])
        at_fit = dataclasses.replace(state, shared=SharedModel(fit, state.shared.optimizer))
        rows = fjs.data.from_dataframe(frame, client="who", target="y")
        other = sim.with_population(fjs.data.scale(rows, RANGES))
        table = other.standard_errors(at_fit, hparams)
        inside.append((table["low"] < (10, 0.5, -3)) & (table["high"] > (10, 0.5, -3)))
    # The standard error of a share of 0.95 in 200 is 0.0154.
    np.testing.assert_allclose(np.mean(inside, axis=0), 0.95, atol=0.045)


def test_noise_and_cohorts_of_two_rounds_are_sums_by_hand(monkeypatch):
    """Of the slope of age, half of which a round keeps, with parts of ±1: 100/30 in its units."""
    sim = simulation(frame_of(), 0.2)
    parts = np.outer(np.resize([1.0, -1.0], CLIENTS), [0.0, 1.0, 0.0])
    of_round = parts, -np.eye(3) / 2, np.eye(3)
    monkeypatch.setattr(sim, "_linear_round", lambda *_: of_round, raising=False)
    hparams = sim.hyperparameters(clip=0.5, noise_multiplier=0.2)
    state = dataclasses.replace(sim.init(0, hparams), round=jnp.int32(2))
    table = pd.DataFrame(sim.standard_errors(state, hparams)).set_index("coefficient")
    both = 1 + 0.5**2
    noise, cohorts = (0.5 * 0.2 / (0.2 * CLIENTS)) ** 2, (1 - 0.2) / 0.2 * CLIENTS
    np.testing.assert_allclose(table.noise["age"], 100 / 30 * np.sqrt(both * noise), rtol=1e-5)
    np.testing.assert_allclose(table.cohorts["age"], 100 / 30 * np.sqrt(both * cohorts), rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("rate", [None, 0.5])
def test_intervals_of_the_noise_cover_the_models_of_runs_that_differ_in_it(rate):
    rounds, runs = 60, 400
    sim = simulation(frame_of(), rate)
    hparams = sim.hyperparameters(clip=0.5, noise_multiplier=0.2, learning_rate=0.2)
    silent = hparams.replace(noise_multiplier=0.0)
    program, rows = sim.program, sim.rows["train"]

    def trained(key, hparams):
        return program.rounds(program.init(key, hparams), hparams, rows, rounds)[0]

    states = jax.jit(jax.vmap(trained, (0, None)))(
        jax.random.split(jax.random.key(0), runs), hparams
    )
    plain = jax.jit(trained)(jax.random.key(1), silent)
    of_runs = states.shared.params
    deviation = np.concatenate(
        [np.asarray(of_runs["bias"]), np.asarray(of_runs["kernel"])[:, 0]], axis=1
    ).std(axis=0)
    state = dataclasses.replace(
        plain, shared=jax.tree.map(lambda leaf: leaf.mean(axis=0), states.shared)
    )
    table = sim.standard_errors(state, hparams)
    both = np.hypot(table["noise"], table["cohorts"])
    # Slopes by their units; 400 runs tell a deviation to 3.5 %.
    (low, high), *others = RANGES["y"], RANGES["age"], RANGES["dose"]
    half = np.diff(others, axis=1)[:, 0] / 2
    wanted = deviation[1:] * (high - low) / 2 / half
    np.testing.assert_allclose(both[1:], wanted, rtol=0.12)
    if rate is None:
        assert not table["cohorts"].any()
        slopes = np.asarray(of_runs["kernel"])[:, 0] * (high - low) / 2 / half
        inside = np.abs(slopes - slopes.mean(axis=0)) < 1.96 * table["noise"][1:]
        np.testing.assert_allclose(inside.mean(axis=0), 0.95, atol=0.035)


@pytest.mark.parametrize(
    "mechanism",
    [
        adaptive_clipping(),
        per_part(parts=["bias", "kernel"]),
        pure(),
        fjs.gaussian(exact_sums=True),
    ],
    ids=["adaptive", "parts", "pure", "exact"],
)
def test_noise_of_other_mechanisms_is_not_stated(mechanism):
    sim = dataclasses.replace(simulation(frame_of()), mechanism=mechanism)
    names = {"clip", "clip_bias", "clip_kernel", "count_noise"} & {*sim.records}
    hparams = sim.hyperparameters(noise_multiplier=1.0, **dict.fromkeys(names, 1.0))
    with pytest.raises(ValueError, match="known for mechanism gaussian"):
        sim.standard_errors(sim.init(0, hparams), hparams)


@pytest.mark.thorough
def test_the_noise_is_what_a_mechanism_of_ones_own_draws():
    plain, base = simulation(frame_of()), fjs.gaussian()

    def release(accumulator, denominator, key, state, hparams, round_):
        hparams = hparams.replace(noise_multiplier=0.1 * hparams.noise_multiplier)
        return base.release(accumulator, denominator, key, state, hparams, round_)

    quiet = dataclasses.replace(plain, mechanism=base._replace(release=release))
    hparams = plain.hyperparameters(clip=0.5, noise_multiplier=0.2, learning_rate=0.2)
    state, _ = plain.run(plain.init(0, hparams), hparams, 2)
    loud = plain.standard_errors(state, hparams)["noise"]
    compiled: Any = plain._linear_round
    assert compiled._cache_size() == 1
    np.testing.assert_array_equal(plain.standard_errors(state, hparams)["noise"], loud)
    assert compiled._cache_size() == 1  # compiled once
    with pytest.raises(ValueError, match="began from an earlier one"):
        plain.standard_errors(plain.start_from(state, hparams), hparams)
    soft = quiet.standard_errors(state, hparams)["noise"]
    np.testing.assert_allclose(soft, 0.1 * loud, rtol=1e-5)


def test_other_messages_have_no_standard_errors():
    frame = frame_of()
    sim = dataclasses.replace(simulation(frame), algorithm=fjs.pmtl(squared(linear((2,), 1))))
    hparams = sim.hyperparameters()
    with pytest.raises(ValueError, match="changes of one published model"):
        sim.standard_errors(sim.init(0, hparams), hparams)
    plain = simulation(frame)
    hparams = plain.hyperparameters()
    with pytest.raises(ValueError, match="a pull to a centre"):
        plain.standard_errors(plain.init(0, hparams), hparams, model="personal")


def test_models_that_are_not_linear_are_refused_before_anything_is_computed(monkeypatch):
    network = fjs.fedavg(squared(mlp((2,), 1, hidden=(4,))))
    sim = dataclasses.replace(simulation(frame_of()), algorithm=network)
    hparams = sim.hyperparameters()
    monkeypatch.setattr(sim, "_linear_round", None, raising=False)
    with pytest.raises(ValueError, match="only linear models"):
        sim.standard_errors(sim.init(0, hparams), hparams)
