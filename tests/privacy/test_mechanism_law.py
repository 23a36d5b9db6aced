"""A user's mechanism that charges for noise must bound messages and draw noise from its key."""

import jax
import jax.numpy as jnp
import pytest
from support.problems import classification

import fedjaxsim as fjs

POPULATION, TASK = classification([3] * 4)
BASE = fjs.gaussian()


def begin(mechanism, z=2.0):
    sim = fjs.Simulation(
        fjs.fedavg(TASK), POPULATION, fjs.full_participation(), mechanism=mechanism
    )
    hparams = sim.hyperparameters(learning_rate=0.1, clip=1.0, noise_multiplier=z)
    return sim, hparams, sim.init(0, hparams)


def silent(accumulator, denominator, key, state, hparams, round_):
    value = jax.tree.map(lambda leaf: leaf / denominator, accumulator.total)
    return fjs.privacy.Release(value, state, hparams.noise_multiplier)


def with_one_key(accumulator, denominator, key, *rest):
    return BASE.release(accumulator, denominator, jax.random.key(7), *rest)


def silent_from_the_second_round_on(accumulator, denominator, key, state, hparams, round_):
    key = jax.lax.cond(round_ > 0, lambda: jax.random.key(0), lambda: key)
    return BASE.release(accumulator, denominator, key, state, hparams, round_)


def by_a_tenth(accumulator, denominator, key, state, hparams, round_):
    less = hparams.replace(noise_multiplier=0.1 * hparams.noise_multiplier)
    release = BASE.release(accumulator, denominator, key, state, less, round_)
    return release._replace(noise_multiplier=hparams.noise_multiplier)


def unbounded(accumulator, messages, mask, ids, state, hparams):
    bounded = messages.bound(jnp.inf, mask)
    return fjs.privacy.accumulate(accumulator, bounded, bounded.messages.total())


def scaled(accumulator, messages, mask, ids, state, hparams):
    """Noise hides what no client can enlarge, in whatever units."""
    halves = messages.map(lambda message: jax.tree.map(lambda leaf: leaf / 2, message))
    return BASE.add(accumulator, halves, mask, ids, state, hparams)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"release": silent}, "noise of multiplier 2, but its release is the same for every key"),
        ({"release": with_one_key}, "the same for every key"),
        ({"release": silent_from_the_second_round_on}, "the same for every key"),
        ({"add": unbounded}, "the larger a message, the more it counts"),
    ],
)
def test_what_has_no_epsilon_is_refused_where_it_charges_for_one(changes, words):
    mechanism = BASE._replace(**changes)
    with pytest.raises(ValueError, match=words):
        begin(mechanism)
    begin(mechanism, 0.0)  # which charges for none


@pytest.mark.parametrize("changes", [{"release": by_a_tenth}, {"add": scaled}])
def test_how_large_its_noise_is_stays_its_authors_word_and_is_said_beside_the_epsilon(changes):
    sim, hparams, state = begin(BASE._replace(**changes))
    state, _ = sim.round(state, hparams)
    short = sim.guarantee(state).short()
    assert short.endswith("(joint DP, exact, if your own code draws the noise that it charges)")
