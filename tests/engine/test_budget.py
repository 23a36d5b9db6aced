"""A state with a budget runs up to it, and no further, whoever runs it."""

import functools

import jax
import numpy as np
import pytest
from problems import classification, read_by, same

import fedjaxsim as fjs
from fedjaxsim.engine.checkpoint import CheckpointFolder
from fedjaxsim.privacy import ledger
from fedjaxsim.privacy.filter import MARGIN

EPSILON, DELTA, Z = 4.0, 1e-3, 3.0
HALF = functools.partial(fjs.poisson, 0.5)


@functools.cache
def simulation(sampling=fjs.full_participation, **settings):
    population, task = classification([4] * 6)
    return fjs.Simulation(
        fjs.fedavg(task), population, sampling(), fjs.Minibatches(2, steps=1), **settings
    )


def started(sim, epsilon: float | None = EPSILON, z=Z):
    hparams = read_by(sim, clip=1.0, noise_multiplier=z, sampling_rate=0.5)
    state = sim.init(0, hparams)
    if epsilon is not None:
        state = sim.with_budget(state, hparams, epsilon=epsilon, delta=DELTA)
    return state, hparams


def room(state, z=Z):
    """The number of rounds with full participation, by hand."""
    limit = state.privacy.limit
    return int(limit.rdp / MARGIN / (limit.order / (2 * z**2)))


def test_a_run_ends_before_the_round_that_would_exceed_its_budget():
    sim = simulation()
    state, hparams = started(sim)
    most = room(state)
    assert 3 < most < 30
    state, history = sim.run(state, hparams, 30, eval_every=3)
    assert int(state.round) == most
    assert history[-1].round == most
    assert len(history[-1].metrics["participants"]) == (most - 1) % 3 + 1
    found = sim.guarantee(state, DELTA).find("zero_out")
    assert found.epsilon == EPSILON
    # Nothing is released, charged or counted beyond it, by a round, a run or a stage.
    after, metrics = sim.round(state, hparams)
    assert same(after, state)
    assert metrics["participants"] == 0
    unspent, _ = started(sim, epsilon=None)
    for _ in range(most):
        unspent, _ = sim.round(unspent, hparams)
    np.testing.assert_allclose(
        jax.tree.leaves(unspent.shared)[0], jax.tree.leaves(state.shared)[0], rtol=1e-5
    )
    stage = sim.start_from(state, hparams)
    assert int(sim.round(stage, hparams)[0].round) == 0
    # Less noise would cost more; much more noise still fits.
    louder, quieter = (hparams.replace(noise_multiplier=z) for z in (1.0, 1000.0))
    assert int(sim.round(stage, louder)[0].round) == 0
    assert int(sim.round(stage, quieter)[0].round) == 1


def test_a_budget_comes_before_the_first_release_and_stays():
    sim = simulation()
    state, hparams = started(sim, epsilon=None)
    late, _ = sim.round(state, hparams)
    with pytest.raises(ValueError, match="before the first release"):
        sim.with_budget(late, hparams, epsilon=1.0)
    state = sim.with_budget(state, hparams, epsilon=1.0)
    assert sim.with_budget(state, hparams, epsilon=1.0) is state
    with pytest.raises(ValueError, match="before the first release"):
        sim.with_budget(state, hparams, epsilon=2.0)
    with pytest.raises(ValueError, match="no noise"):
        started(sim, z=0.0)


def test_a_checkpoint_keeps_the_budget(tmp_path):
    sim = simulation()
    state, hparams = started(sim)
    folder = CheckpointFolder(tmp_path)
    folder.save(0, state, {})
    last = folder.last()
    assert last is not None
    assert last.state(sim.init(0, hparams)).privacy.limit == state.privacy.limit


@pytest.mark.thorough
def test_the_budget_ends_everywhere_after_the_same_round():
    placements = {}, {"devices": tuple(jax.devices()[:2])}, {"streamed": True}
    states = []
    for settings in placements:
        sim = simulation(HALF, **settings)
        state, hparams = started(sim)
        states.append(sim.run(state, hparams, 40, eval_every=20)[0])
    one, *others = states
    assert 0 < int(one.round) < 40
    for other in others:
        assert ledger.charged(one.privacy) == ledger.charged(other.privacy)
        np.testing.assert_allclose(
            jax.tree.leaves(one.shared)[0], jax.tree.leaves(other.shared)[0], rtol=1e-4, atol=1e-6
        )
