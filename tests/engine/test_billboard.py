"""The billboard lemma by construction: releases are all that a client learns of the others."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import classification, compilations

from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.algorithms.fedprox import fedprox
from fedjaxsim.algorithms.pmtl import pmtl
from fedjaxsim.algorithms.ppsgd import ppsgd
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.population import Population
from fedjaxsim.hparams import Hyperparameters
from fedjaxsim.privacy.mechanisms import gaussian
from fedjaxsim.privacy.sampling import poisson
from fedjaxsim.simulation import Simulation

ROUNDS, M, VICTIM = 6, 12, 4


def taped(mechanism, one_message):
    """The mechanism with a tape for state: while recording it notes every release; afterwards it
    plays them back whatever the messages are. One program does both."""

    def init(hparams):
        tape = jax.tree.map(lambda leaf: jnp.zeros((ROUNDS, *leaf.shape)), one_message)
        return mechanism.init(hparams), tape, jnp.array(True)

    def add(accumulator, messages, mask, ids, state, hparams):
        return mechanism.add(accumulator, messages, mask, ids, state[0], hparams)

    def release(accumulator, denominator, key, state, hparams, round_):
        inner, tape, recording = state
        out = mechanism.release(accumulator, denominator, key, inner, hparams, round_)
        tape = jax.tree.map(
            lambda t, v: jnp.where(recording, t.at[round_].set(v), t), tape, out.value
        )
        value = jax.tree.map(lambda t: t[round_], tape)
        return out._replace(value=value, state=(out.state, tape, recording))

    return mechanism._replace(init=init, add=add, release=release)


@pytest.mark.parametrize(
    ("algorithm", "chunk_map"),
    [
        (pmtl, "scan"),
        (ppsgd, "vmap"),
        (fedavg, "scan"),
        *(
            pytest.param(algorithm, chunk_map, marks=pytest.mark.thorough)
            for algorithm, chunk_map in [
                (pmtl, "vmap"),
                (ppsgd, "scan"),
                (fedavg, "vmap"),
                (fedprox, "scan"),
                (fedprox, "vmap"),
            ]
        ),
    ],
)
def test_with_the_releases_fixed_one_clients_data_reaches_nobody_else(algorithm, chunk_map):
    population, task = classification([10 + k for k in range(M)])
    message = jax.eval_shape(task.init, jax.random.key(0))
    sim = Simulation(
        algorithm(task),
        task,
        population,
        poisson(M),
        Minibatches(4, epochs=1),
        taped(gaussian(), message),
        chunk_size=3,
        chunk_map=chunk_map,
    )
    hparams = Hyperparameters(
        lam=0.2, mu=0.1, clip_norm=0.5, noise_multiplier=0.7, sampling_rate=0.5
    )
    recorded, _ = sim.run(sim.init(0, hparams), hparams, ROUNDS)
    tape = jax.tree.map(jnp.copy, recorded.mechanism[1])

    x, y = np.array(population.fields["x"]), np.array(population.fields["y"])
    for ranges in population.splits.values():
        own = slice(ranges.start[VICTIM], ranges.start[VICTIM] + ranges.count[VICTIM])
        x[own] = 1e3 * np.random.default_rng(1).normal(size=x[own].shape)
        y[own] = 0
    altered = sim.with_population(Population({"x": x, "y": y}, population.splits, population.names))

    def replay(simulation):
        state = simulation.init(0, hparams)
        inner, _, _ = state.mechanism
        # The runs consume their state, so each gets a tape of its own.
        own_tape = jax.tree.map(jnp.copy, tape)
        state = dataclasses.replace(state, mechanism=(inner, own_tape, jnp.array(False)))
        return simulation.run(state, hparams, ROUNDS)

    with compilations() as first:
        one, one_history = replay(sim)
    with compilations() as second:
        two, two_history = replay(altered)
    assert not second  # the same compiled function ran both
    assert len(first) < 10  # and it is that of the recording: only copies of the tape are new

    # The alteration really did something: the victim's own rounds have another loss.
    assert np.any(one_history[0].metrics["loss"] != two_history[0].metrics["loss"])
    for a, b in zip(jax.tree.leaves(one.shared), jax.tree.leaves(two.shared), strict=True):
        np.testing.assert_array_equal(a, b)
    others = np.arange(M) != VICTIM
    for a, b in zip(jax.tree.leaves(one.personal), jax.tree.leaves(two.personal), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[others], np.asarray(b)[others])
        assert np.any(np.asarray(a)[VICTIM] != np.asarray(b)[VICTIM])
