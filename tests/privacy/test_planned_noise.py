"""The ledger is the only source of ε: plans ask the mechanism for its noise."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems import classification, untrained

import fedjaxsim as fjs
from fedjaxsim.gradients.whole_run import hypergradient
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.accounting import gaussian
from fedjaxsim.privacy.entries import Entry
from fedjaxsim.privacy.guarantee import tight_epsilon

Z, ROUNDS, DELTA = 4.0, 3, 1e-2
POPULATION, TASK = classification([3, 4, 5])


WAYS = {
    "two releases": lambda z, state, round_, key: z / jnp.sqrt(2.0),
    "a mechanism in jit": jax.jit(lambda z, state, round_, key: z / 2),
    "no noise at first": lambda z, state, round_, key: jnp.where(round_ == 0, 0.0, z),
    "less and less": lambda z, state, round_, key: z / (1.0 + round_),
    "from its state": lambda z, state, round_, key: z * state,
    "at random": lambda z, state, round_, key: z * jax.random.uniform(key),
    "from messages": lambda z, state, round_, key, total: z + jnp.sum(jnp.abs(total)),
}
UNKNOWN = "from its state", "at random", "from messages"


@functools.cache
def simulation(name):
    """A run with a mechanism whose noise multiplier is not that of the hyperparameters."""
    way = WAYS[name]
    base = fjs.gaussian()

    def release(accumulator, denominator, key, state, hparams, round_):
        value = base.release(accumulator, denominator, key, (), hparams, round_).value
        read = hparams.noise_multiplier, state, round_, key
        messages = jax.tree.leaves(accumulator.total)[:1] * (name == "from messages")
        z = way(*read, *messages)
        return fjs.privacy.Release(value, state * 1.0, z)

    mechanism = base._replace(init=lambda hparams: jnp.float32(0.5), release=release)
    sampling, batches = fjs.full_participation(), fjs.Minibatches(4, steps=1)
    return fjs.Simulation(untrained(TASK), POPULATION, sampling, batches, mechanism)


def settings(sim, z=Z):
    return sim.hyperparameters(learning_rate=0.1, clip=1.0, noise_multiplier=z)


def test_a_plan_has_the_noise_that_the_mechanism_returns():
    plans = {name: simulation(name) for name in WAYS}
    groups = {name: sim.planned(settings(sim), 0, ROUNDS).entries for name, sim in plans.items()}
    assert groups["two releases"] == (Entry(float(np.float32(Z / math.sqrt(2))), 1.0, ROUNDS),)
    assert groups["a mechanism in jit"] == (Entry(Z / 2, 1.0, ROUNDS),)
    assert groups["no noise at first"] == (Entry(0.0, 1.0, 1), Entry(Z, 1.0, ROUNDS - 1))
    third = float(np.float32(4 / 3))
    assert groups["less and less"] == (Entry(third, 1, 1), Entry(2, 1, 1), Entry(4, 1, 1))
    later = plans["less and less"].planned(settings(plans["less and less"]), 1, 3)
    assert later.entries == groups["less and less"][:2]
    for name in UNKNOWN:
        assert math.isnan(groups[name][0].noise_multiplier)


def test_calibration_meets_the_target_at_the_noise_of_the_mechanism():
    # Full participation is one Gaussian release of μ = √(Σ 1/z²).
    root = {"two releases": math.sqrt(2), "less and less": math.sqrt((1 + 4 + 9) / ROUNDS)}
    for name, factor in root.items():
        sim = simulation(name)
        z = float(
            sim.calibrate(settings(sim), epsilon=1.0, rounds=ROUNDS, delta=DELTA).noise_multiplier
        )
        epsilon = gaussian.epsilon(DELTA, factor * math.sqrt(ROUNDS) / z)
        assert 0.998 <= epsilon <= 1.0
    reasons = {**dict.fromkeys(UNKNOWN, "no plan knows it"), "no noise at first": "no noise was"}
    for name, why in reasons.items():
        sim = simulation(name)
        with pytest.raises(ValueError, match=f"noise cannot be calibrated: .*{why}"):
            sim.calibrate(settings(sim), epsilon=1.0, rounds=ROUNDS, delta=DELTA)


def test_a_budget_is_made_of_the_noise_of_the_mechanism():
    sim = simulation("less and less")
    planned = sim.budget(settings(sim), epsilon=2.0, delta=DELTA).planned
    (noise,) = (sorted(entry.noise_multiplier for entry in each.entries) for each in planned)
    np.testing.assert_allclose(noise, sorted(Z / np.arange(1, len(noise) + 1)), rtol=1e-6)
    assert tight_epsilon(planned, DELTA) <= 2
    for name in (*UNKNOWN, "no noise at first"):
        sim = simulation(name)
        with pytest.raises(ValueError, match="no budget bounds"):
            sim.budget(settings(sim), epsilon=2.0, delta=DELTA)


@pytest.mark.thorough
def test_a_gradient_at_a_fixed_epsilon_has_the_noise_that_meets_it():
    # Two releases of z/√2 each: one of μ = √(2 ROUNDS)/z.
    sim = simulation("two releases")

    def noise(state, hparams):
        return hparams.noise_multiplier + 0 * hparams.learning_rate

    gradient = hypergradient(sim, noise, ROUNDS, "learning_rate", delta=DELTA)
    z, slope = gradient(0, settings(sim), epsilon=1.0)
    epsilon = gaussian.epsilon(DELTA, math.sqrt(2 * ROUNDS) / float(z))
    assert 0.998 <= epsilon <= 1.0
    assert slope["learning_rate"] == 0


@pytest.mark.thorough
@pytest.mark.parametrize("name", WAYS)
def test_a_plan_is_what_a_run_is_charged(name):
    sim = simulation(name)
    hparams = settings(sim)
    state, _ = sim.run(sim.init(0, hparams), hparams, ROUNDS)
    (charged,) = ledger.charged(state.privacy)
    planned = sim.planned(hparams, 0, ROUNDS)
    if name in UNKNOWN:
        assert tight_epsilon([planned], DELTA) == math.inf
    else:
        assert sorted(charged.entries) == sorted(planned.entries)


def test_planned_noise_that_varies_has_room_in_the_ledger():
    """Twelve different noise multipliers of one's own, with hyperparameters of one."""
    sim = simulation("less and less")
    hparams = settings(sim)
    state = sim.announce(sim.init(0, hparams), hparams, 12)
    assert len(state.privacy.charges[0].rounds) >= 12


def test_an_overflowed_ledger_says_what_makes_room():
    sim = simulation("less and less")
    state = sim.init(0, settings(sim))
    (charges,) = state.privacy.charges
    charge = jax.jit(ledger.charge)
    for round_ in range(9):
        charges = charge(charges, Z / (1 + round_), 1.0, round_)
    spends = ledger.charged(ledger.Ledger((charges,), state.privacy.draws))
    assert spends[0].overflowed
    spends = [spends[0]._replace(redrawn=False)]
    reason = fjs.privacy.report(spends, DELTA).find("zero_out").reason
    assert "noise_multiplier of shape (T,)" in reason


@pytest.mark.parametrize("name", ["gaussian", "adaptive_clipping", "pure", "client_noise"])
def test_the_noise_of_our_mechanisms_is_known_before_a_run(name):
    mechanism = getattr(fjs.privacy, name)()
    sampling, batches = fjs.full_participation(), fjs.Minibatches(4, steps=1)
    sim = fjs.Simulation(untrained(TASK), POPULATION, sampling, batches, mechanism)
    values = {"clip": 1.0, "noise_multiplier": Z, "count_noise": 9.0}
    hparams = sim.hyperparameters(**{k: v for k, v in values.items() if k in sim.records})
    assert sim.planned(hparams, 0, ROUNDS).entries == (Entry(Z, 1.0, ROUNDS),)
