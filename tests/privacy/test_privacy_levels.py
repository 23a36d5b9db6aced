"""Privacy levels of public groups: their ε by other plans and dp_accounting, draws and attacks."""

import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binom
from support.plans import charged
from support.problems import least_squares, read_by, untrained

import fedjaxsim as fjs
from fedjaxsim.keys import seed_key
from fedjaxsim.privacy import calibration, guarantee, second_opinion
from fedjaxsim.privacy.entries import Adjacency, SamplingScheme, SchemeKind
from fedjaxsim.privacy.events import GAUSSIAN, Correlated, Pure
from fedjaxsim.privacy.samplers import (
    available,
    fixed_size,
    full_participation,
    poisson,
    privacy_levels,
    work_of,
)

M, DELTA = 50, 1e-4
GROUPS, SHARES = [0] * 20 + [1] * 30, (1.0, 0.25)
LEVELS = ((20, 1.0), (30, 0.25))


def scheme(kind: SchemeKind = "poisson", capacity=M, levels=LEVELS):
    return SamplingScheme(kind, M, capacity, levels=levels)


def level_of(charges, share, adjacency: Adjacency = "zero_out"):
    """Return ε of a report's group with a share."""
    levels = {level.share: level.epsilon for level in guarantee.report([charges], DELTA).levels}
    return levels[share][adjacency] or math.nan


@pytest.mark.parametrize(("kind", "rate"), [("poisson", 0.2), ("full", 1.0)])
@pytest.mark.parametrize("adjacency", ["zero_out", "replace"])
def test_a_group_has_the_epsilon_of_poisson_cohorts_at_its_own_rate(kind, rate, adjacency):
    found = guarantee.report([charged(scheme(kind), GAUSSIAN, (3.0, rate, 40))], DELTA)
    for level in found.levels:
        own = charged(SamplingScheme("poisson", M, M), GAUSSIAN, (3.0, rate * level.share, 40))
        expected = guarantee.tight_epsilon([own], DELTA, adjacency)
        assert level.epsilon[adjacency] == pytest.approx(expected, rel=1e-3)
    assert found.levels[0].epsilon[adjacency] == found.find(adjacency).epsilon
    charges = charged(scheme(kind), GAUSSIAN, (3.0, rate, 40))
    assert level_of(charges, 0.25, adjacency) < level_of(charges, 1.0, adjacency) / 2


def test_a_group_has_the_epsilon_of_dp_accounting():
    pytest.importorskip("dp_accounting")
    charges = charged(scheme(), GAUSSIAN, (3.0, 0.2, 20))
    own = charges._replace(scheme=charges.scheme.at_share(0.25))
    second = second_opinion.epsilon([own], DELTA, "zero_out")
    assert level_of(charges, 0.25) == pytest.approx(second, rel=5e-3)


def test_full_cohorts_tell_no_more_than_the_draw():
    """What others see of a full cohort is the draw; the coin is a factor of every chance."""
    drawn = scheme(capacity=12, levels=()).inclusions(0.2)
    shared = scheme(capacity=12).at_share(0.25).inclusions(0.2)
    assert [weight for weight, _ in shared] == [weight for weight, _ in drawn]
    assert [chance for _, chance in shared] == [0.25 * chance for _, chance in drawn]
    tight = charged(scheme(capacity=12), GAUSSIAN, (1.0, 0.2, 20))
    roomy = charged(scheme(), GAUSSIAN, (1.0, 0.2, 20))
    assert level_of(roomy, 0.25) < level_of(tight, 0.25) < level_of(tight, 1.0)


def test_what_a_share_does_not_hide_costs_as_much_as_with_share_one():
    noise = charged(scheme("full"), Correlated(bands=2), (9.0, 1.0, 10))
    assert level_of(noise, 0.25) == level_of(noise, 1.0)
    with pytest.raises(ValueError, match="hides nothing of correlated noise"):
        guarantee.tight_epsilon([noise._replace(scheme=noise.scheme.at_share(0.5))], DELTA)
    pure = charged(scheme("full"), Pure(), (9.0, 1.0, 5))
    assert level_of(pure, 0.25) < level_of(pure, 1.0)


def test_stages_with_other_groups_have_the_epsilon_of_share_one_alone():
    one = charged(scheme(), GAUSSIAN, (2.0, 0.2, 20))
    other = charged(scheme(levels=((40, 1.0), (10, 0.5))), GAUSSIAN, (2.0, 0.2, 20))
    assert guarantee.report([one, other], DELTA).levels == ()
    plain = charged(scheme(levels=()), GAUSSIAN, (2.0, 0.2, 20))
    both = guarantee.report([one, plain], DELTA).levels
    assert (both[1].epsilon["zero_out"] or 0) > guarantee.tight_epsilon([plain], DELTA)


def test_calibrated_shares_meet_the_epsilon_of_each_group():
    plan = {"rounds": 40, "sampling_rate": 0.2, "scheme": scheme(levels=())}
    z = calibration.noise_multiplier(4.0, DELTA, **plan)
    shares = calibration.shares([0.5, 4.0, 2.0], DELTA, noise_multiplier=z, **plan)
    assert shares[1] == 1
    for epsilon, share in zip((0.5, 2.0), (shares[0], shares[2]), strict=True):
        own = charged(scheme(levels=()).at_share(share), GAUSSIAN, (z, 0.2, 40))
        assert 0.998 * epsilon <= guarantee.tight_epsilon([own], DELTA) <= epsilon
    with pytest.raises(ValueError, match=r"the largest epsilon must be at least 3\.99"):
        calibration.shares([0.5, 3.0], DELTA, noise_multiplier=z, **plan)


def test_clients_take_part_at_their_rate_and_independently_of_each_other():
    """Nobody who sees all other clients' answers knows more of a client's own."""
    sampler = available(poisson(0.5, capacity=M), privacy_levels(GROUPS, SHARES)).sampler(M)
    assert sampler.scheme.levels == LEVELS
    assert float(sampler.answer_rate(jnp.float32(0.5))) == pytest.approx(0.5 * 27.5 / 50)
    hparams = fjs.Hyperparameters(sampling_rate=0.5).as_arrays()
    rounds = 4_000

    @jax.jit
    def cohorts():
        def answers(round_):
            cohort = sampler.draw(seed_key(0), round_, hparams)
            return sampler.answering(cohort, jax.random.fold_in(seed_key(1), round_), round_)[:2]

        return jax.lax.map(answers, jnp.arange(rounds))

    ids, mask = map(np.asarray, cohorts())
    took = np.zeros((rounds, M + 1), bool)
    took[np.arange(rounds)[:, None], np.where(mask, ids, M)] = True
    often, seldom = took[:, 1], took[:, 45]
    events = {
        "a client of share 1": (often, 0.5),
        "a client of share 1/4": (seldom, 0.125),
        "both": (often & seldom, 0.5 * 0.125),
        "two of share 1/4": (seldom & took[:, 46], 0.125**2),
        "a round and the next": (seldom[1:] & seldom[:-1], 0.125**2),
    }
    for name, (happened, chance) in events.items():
        count = np.sum(happened)
        tails = binom.cdf(count, len(happened), chance), binom.sf(count - 1, len(happened), chance)
        assert 2 * min(tails) > 1e-6, name


def test_a_share_of_one_always_answers():
    availability = privacy_levels([0, 1], (1.0, 0.5))

    @jax.jit
    @jax.vmap
    def answers(round_):
        return work_of(availability, seed_key(3), round_, jnp.int32(0))

    assert np.all(answers(np.arange(9)) == 1)


@pytest.mark.parametrize(
    ("groups", "shares", "words"),
    [
        ([0, 1], (0.5, 0.5), "the largest of shares must be 1"),
        ([0, 1], (1.0, 1.5), r"share must be in \(0, 1\]|share must lie in \(0, 1\]"),
        ([0, 2], (1.0, 0.5), "groups must be numbers below 2"),
        ([0.5], (1.0,), "whole numbers"),
    ],
)
def test_wrong_levels_are_refused(groups, shares, words):
    with pytest.raises(ValueError, match=words):
        privacy_levels(groups, shares)


def test_answers_of_ones_own_have_no_levels():
    """Only secret coins of the package hide a client: another `work` has no such ε."""
    levels = privacy_levels(GROUPS, SHARES)
    own = levels._replace(work=lambda key, round_, client_id: jnp.ones(()))
    assert available(poisson(0.2), own).sampler(M).scheme.levels == ()
    with pytest.raises(AttributeError):
        levels.levels = ((M, 0.1),)  # pyright: ignore[reportAttributeAccessIssue]
    coins: Any = levels.work

    class Always(type(coins)):
        def __call__(self, key, round_, client_id):
            return jnp.ones(())

    assert levels._replace(work=Always(coins.groups, coins.shares)).levels == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        coins.shares = (1.0, 1.0)


def test_samplings_without_secret_cohorts_are_refused():
    levels = privacy_levels(GROUPS, SHARES)
    with pytest.raises(ValueError, match="need poisson or full sampling, got 'fixed'"):
        available(fixed_size(cohort=10), levels).sampler(M)
    with pytest.raises(ValueError, match="must be given for all 60 clients, got 50"):
        available(poisson(0.2), levels).sampler(60)
    assert available(full_participation(), levels).sampler(M).scheme.kind == "full"


def test_a_run_states_the_epsilon_of_each_group():
    population, task = least_squares([2] * 12, features=2)
    sampling = available(poisson(0.5), privacy_levels([0] * 4 + [1] * 8, (1.0, 0.5)))
    sim = fjs.Simulation(untrained(task), population, sampling, fjs.Minibatches(2, steps=1))
    hparams = read_by(sim, clip=1.0, noise_multiplier=2.0, sampling_rate=0.5)
    state = sim.init(0, hparams)
    for _ in range(2):
        state, _ = sim.round(state, hparams)
    found = sim.guarantee(state, delta=1e-3)
    assert [(level.clients, level.share) for level in found.levels] == [(4, 1.0), (8, 0.5)]
    own = charged(SamplingScheme("poisson", 12, 12), GAUSSIAN, (2.0, 0.25, 2))
    expected = guarantee.tight_epsilon([own], 1e-3)
    assert found.levels[1].epsilon["zero_out"] == pytest.approx(expected, rel=2e-3)
    assert f"  {found.levels[1]}\n" in str(found)
    assert "8 clients with share 0.5: ε ≤ " in str(found)
    assert "may not follow from private rows" in str(found)
    read = guarantee.Report.from_json(json.loads(json.dumps(found.to_json())))
    assert read.levels == found.levels
