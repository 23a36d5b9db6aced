"""The facade: its guarantees, what it refuses before any compute, and how it shows itself."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import classification, read_by, simulation_of
from scipy.stats import norm

from fedjaxsim.algorithms.local import local
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.synthetic import regression_stream
from fedjaxsim.privacy.ledger import charged
from fedjaxsim.privacy.mechanisms import gaussian, no_release
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
CLIENTS, TASK = classification([10] * 4)


def simulation(algorithm=pmtl, population=CLIENTS, task=TASK, **settings):
    return Simulation(algorithm(task), population, poisson(1.0), EPOCH, **settings)


@functools.cache
def pmtl_of_four():
    """Made once, for its compilation."""
    return simulation()


def test_without_a_release_nothing_is_charged():
    sim = simulation(local, mechanism=no_release())
    hparams = read_by(sim, **PRIVATE)
    state, _ = sim.round(sim.init(0, hparams), hparams)
    assert charged(state.privacy)[0].entries == ()
    assert sim.guarantee(state).find("zero_out", "joint_dp").epsilon == 0


def test_the_guarantee_is_the_exact_one_under_full_participation():
    # GDP: T = 4 rounds, z = 8: μ = √4/8 = 1/4 (zero-out), 1/2 (replace).
    sim = Simulation(pmtl(TASK), CLIENTS, full_participation(), EPOCH)
    hparams = sim.hyperparameters(lam=0.0, clip_norm=1.0, noise_multiplier=8.0)
    state, _ = sim.run(sim.init(0, hparams), hparams, 4)
    report = sim.guarantee(state, delta=1e-3)
    found = {"zero_out": report.find("zero_out"), "replace": report.find("replace")}
    for adjacency, mu in [("zero_out", 0.25), ("replace", 0.5)]:
        epsilon = found[adjacency].epsilon
        assert epsilon is not None
        below = norm.cdf(-epsilon / mu - mu / 2)
        delta = norm.cdf(-epsilon / mu + mu / 2) - np.exp(epsilon) * below
        np.testing.assert_allclose(delta, 1e-3, rtol=1e-6)


def test_a_run_leaves_what_the_user_passed_alone():
    mine = {"kernel": jnp.ones((3, 4)), "bias": jnp.zeros(3)}
    sim = simulation(task=TASK._replace(init=lambda key: mine))
    hparams = read_by(sim, **PRIVATE)
    key = jax.random.key(0)
    sim.run(sim.init(key, hparams), hparams, 2)
    np.testing.assert_array_equal(mine["kernel"], np.ones((3, 4)))
    jax.random.split(key)  # raises if its buffer was donated


# --- errors before any compute -----------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"sampling_rate": 1.5},
        {"sampling_rate": 0.0},
        {"noise_multiplier": -1.0},
        {"noise_multiplier": np.nan},
        {"clip_norm": 0.0},
        {"clip_norm": 1e-20},
        {"clip_norm": np.inf},
        {"learning_rate": -0.1},
        {"lam": np.inf},
        {"server_learning_rate": -1.0},
        {"lam": np.ones(2)},
        {"noise_multiplier": np.ones((2, 2))},
    ],
)
def test_bad_hyperparameters_are_refused(change):
    sim = pmtl_of_four()
    [name] = change
    for make in (
        lambda: sim.hyperparameters(**(PRIVATE | change)),
        lambda: sim.hyperparameters(**PRIVATE).replace(**change),
    ):
        with pytest.raises(ValueError, match=name):
            sim.init(0, make())


def test_bad_uses_are_refused():
    sim = pmtl_of_four()
    hparams = sim.hyperparameters(**PRIVATE)
    state = sim.init(0, hparams)
    with pytest.raises(ValueError, match="rounds"):
        sim.run(state, hparams, 0)
    with pytest.raises(ValueError, match="eval_every"):
        sim.run(state, hparams, 1, eval_every=0)
    with pytest.raises(ValueError, match="schedule"):
        sim.run(state, hparams.replace(noise_multiplier=[1.0, 2.0]), 3)
    with pytest.raises(ValueError, match="ledger"):
        sim.run(state, hparams.replace(noise_multiplier=np.arange(1.0, 10.0)), 9)
    with pytest.raises(ValueError, match="split"):
        sim.evaluate(state, hparams, "holdout")
    with pytest.raises(ValueError, match="key"):
        sim.init(jax.random.key(0, impl="rbg"), hparams)
    with pytest.raises(ValueError, match="delta"):
        sim.guarantee(state, delta=1.5)
    with pytest.raises(ValueError, match="5 clients"):
        Simulation(pmtl(TASK), CLIENTS, Sampling(lambda m: poisson(1.0).for_clients(m + 1)))
    with pytest.raises(ValueError, match="capacity"):
        Simulation(pmtl(TASK), CLIENTS, poisson(1.0, capacity=5))
    with pytest.raises(ValueError, match="chunk_size"):
        simulation(chunk_size=1)
    with pytest.raises(ValueError, match="4 clients, got 3"):
        sim.with_population(classification([10] * 3)[0])


def test_a_capped_sampler_and_a_weighted_mechanism_check_the_run():
    sim = Simulation(pmtl(TASK), CLIENTS, passes(cohort=2, max_participations=1), EPOCH)
    hparams = read_by(sim, **PRIVATE)
    with pytest.raises(ValueError, match="rounds"):
        sim.run(sim.init(0, hparams), hparams, 3)
    state, (segment,) = sim.run(sim.init(0, hparams), hparams, 2)
    assert segment.metrics["participants"].tolist() == [2, 2]
    # One participation each: exactly one Gaussian release of z = 0.8 per client.
    assert sim.guarantee(state).find("zero_out").accountant == "gaussian"
    with pytest.raises(ValueError, match="3 clients"):
        simulation(mechanism=gaussian(weights=np.ones(3), max_weight=1.0))


def test_an_accountant_that_does_not_describe_the_sampler_is_refused():
    with pytest.raises(ValueError, match="gaussian"):
        simulation(accountant="gaussian")
    sim = simulation(accountant="rdp")
    hparams = read_by(sim, **PRIVATE)
    state, _ = sim.round(sim.init(0, hparams), hparams)
    assert sim.guarantee(state, 1e-3).find("zero_out").accountant == "rdp"


def test_labels_outside_the_model_are_refused_before_anything_runs():
    fields = {"x": CLIENTS.fields["x"], "y": CLIENTS.fields["y"] + 1}
    with pytest.raises(ValueError, match="labels"):
        simulation(population=dataclasses.replace(CLIENTS, fields=fields))


def test_data_made_afresh_have_no_epochs():
    population, task = regression_stream(3, 5), known_regression(5)
    for minibatches in (Minibatches(2, epochs=1), Minibatches(2, steps=1, passes=1)):
        with pytest.raises(ValueError, match="epochs or passes"):
            Simulation(pmtl(task), population, full_participation(), minibatches)


# --- how it shows itself ------------------------------------------------------------------------


def test_a_simulation_says_what_it_is_made_of():
    sim = pmtl_of_four()
    assert repr(sim).splitlines() == [
        "Simulation of pmtl",
        f"  {repr(CLIENTS).splitlines()[0]}",
        "  fields: " + ", ".join(f"{k} {v.shape}" for k, v in CLIENTS.fields.items()),
        "  sampling: poisson, at most 4 clients a round",
        "  mechanism: gaussian",
        "  minibatches: size 4, epochs 1",
        "  data: in memory, devices: 1",
    ]


@pytest.mark.parametrize("name", ["fedprox", "dpfedmtl"])
def test_a_simulation_names_its_algorithm(name):
    sim = simulation_of(name, TASK, CLIENTS, full_participation(), EPOCH)
    assert repr(sim).startswith(f"Simulation of {name}\n")
