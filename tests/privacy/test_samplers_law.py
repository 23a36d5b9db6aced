"""A sampler draws what its scheme says, or no accountant believes the scheme."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from support.problems import least_squares, read_by, untrained

import fedjaxsim as fjs
from fedjaxsim.privacy.samplers import (
    Cohort,
    Sampling,
    available,
    cyclic,
    fixed_groups,
    fixed_size,
    full_participation,
    intermittent,
    poisson,
    privacy_levels,
    random_allocation,
)
from fedjaxsim.privacy.samplers.law import check_law

M, P = 100, 0.05
HPARAMS = fjs.Hyperparameters(sampling_rate=P).as_arrays()
POISSON, FULL = poisson(P, capacity=M).for_clients(M), full_participation().for_clients(M)
FIXED = fixed_size(cohort=5).for_clients(M)


@pytest.mark.parametrize(
    "sampling",
    [
        poisson(P),
        fixed_size(cohort=5),
        pytest.param(fixed_size(cohort=90), marks=pytest.mark.thorough),
        *(
            pytest.param(each, marks=pytest.mark.thorough)
            for each in (fixed_groups(groups=7), random_allocation(every=7), cyclic(P, groups=7))
        ),
        pytest.param(full_participation(), marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("m", [M, pytest.param(10_000, marks=pytest.mark.thorough)])
def test_the_samplers_of_the_package_obey_their_law(sampling, m):
    check_law(sampling.for_clients(m), HPARAMS)


def together(key, round_, hparams):
    """Draw blocks of five neighbours, each with probability p."""
    blocks = poisson(P, capacity=20).for_clients(20).draw(key, round_, hparams)
    ids = (5 * blocks.ids[:, None] + jnp.arange(5)).ravel()
    return blocks._replace(ids=ids, mask=jnp.repeat(blocks.mask, 5))


LIARS = {
    "all clients, at p = 0.05": (POISSON._replace(draw=FULL.draw), "a client takes part"),
    "a public order": (
        POISSON._replace(
            draw=lambda key, round_, hparams: FULL.draw(key, round_, hparams)._replace(
                mask=jnp.arange(M) // 5 == round_ % 20
            )
        ),
        "neighbours take part together",
    ),
    "one cohort for all rounds": (
        POISSON._replace(draw=lambda key, round_, hparams: POISSON.draw(key, 0 * round_, hparams)),
        "a client takes part",
    ),
    "two cohorts in turn": (
        POISSON._replace(draw=lambda key, round_, hparams: POISSON.draw(key, round_ % 2, hparams)),
        "a client (never )?takes part",
    ),
    "cohorts of one size": (
        POISSON._replace(draw=FIXED.draw),
        "take part together",
    ),
    "neighbours together": (POISSON._replace(draw=together), "neighbours take part together"),
    "a fifth more often": (
        POISSON._replace(
            draw=lambda key, round_, hparams: POISSON.draw(
                key, round_, hparams.replace(sampling_rate=1.2 * P)
            )
        ),
        "a client takes part",
    ),
    "one client twice as often": (
        FIXED._replace(
            draw=lambda key, round_, hparams: (
                lambda cohort: cohort._replace(
                    ids=cohort.ids.at[0].set(
                        jnp.where(jnp.any(cohort.ids == 7) | (round_ % 20 > 0), cohort.ids[0], 7)
                    )
                )
            )(FIXED.draw(key, round_, hparams))
        ),
        "a client takes part",
    ),
    "sizes that vary": (FIXED._replace(draw=POISSON.draw), "sizes vary"),
    "half of the clients": (FULL._replace(draw=POISSON.draw), "every round of its group"),
    "groups that are drawn anew": (
        fixed_groups(groups=20).for_clients(M)._replace(draw=FIXED.draw),
        "every round of its group",
    ),
    "a client twice": (
        FIXED._replace(
            draw=lambda key, round_, hparams: FIXED.draw(key, round_, hparams)._replace(
                ids=jnp.zeros(5, jnp.int32)
            )
        ),
        "twice in one cohort",
    ),
}


ONE_OF_EACH_LAW = {
    "a public order", "a fifth more often", "cohorts of one size", "half of the clients",
    "a client twice",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ONE_OF_EACH_LAW else [pytest.mark.thorough])
        for name in LIARS
    ],
)
def test_a_sampler_of_another_law_than_its_scheme_is_refused(name):
    sampler, words = LIARS[name]
    with pytest.raises(ValueError, match=words) as error:
        check_law(sampler, HPARAMS)
    assert len(str(error.value)) <= 200


@pytest.mark.thorough
def test_forty_clients_of_unlike_rates_are_found_by_the_stated_power():
    """n = 2¹² keys of 6 rounds: 7 √(0.2 · 0.8/n) = 0.018 at p = 0.2; half of that passes here."""
    m, p = 40, 0.2
    sampler, hparams = poisson(p, capacity=m).for_clients(m), fjs.Hyperparameters(sampling_rate=p)

    def with_rates(apart):
        rates = jnp.where(jnp.arange(m) % 2, p + apart, p - apart)

        def draw(key, round_, hparams):
            inside = jax.random.uniform(jax.random.fold_in(key, round_), (m,)) < rates
            ids = jnp.nonzero(inside, size=m, fill_value=m)[0].astype(jnp.int32)
            return Cohort(ids, ids < m, jnp.int32(0))

        return sampler._replace(draw=draw)

    check_law(with_rates(0.009), hparams.as_arrays())
    with pytest.raises(ValueError, match="a client takes part"):
        check_law(with_rates(0.018), hparams.as_arrays())


def test_a_sampler_of_the_package_with_a_scheme_and_rate_of_ones_own_is_refused():
    population, task = least_squares([2] * M, features=2)
    liar = FULL._replace(scheme=POISSON.scheme, rate=lambda hparams: jnp.asarray(0.01))
    whole = POISSON._replace(draw=FULL.draw)
    makers = [lambda m, sampler=each: sampler for each in (liar, liar._replace(rate=POISSON.rate))]
    for maker in (*makers, {M: whole}.__getitem__):  # the last one has no code of a user
        sampling = poisson(P)._replace(for_clients=maker)
        sim = fjs.Simulation(untrained(task), population, sampling, fjs.Minibatches(2, steps=1))
        hparams = read_by(sim, clip=1.0, noise_multiplier=1.0, sampling_rate=P)
        with pytest.raises(ValueError, match="does not draw as its scheme 'poisson' says"):
            sim.init(0, hparams)


def test_a_sampling_of_another_class_is_refused():
    """It could make other samplers than `for_clients`, which is what is asked for its author."""

    class Whole(Sampling):
        def sampler(self, num_clients):
            return super().sampler(num_clients)._replace(draw=FULL.draw)

    population, task = least_squares([2] * M, features=2)
    sampling = Whole(*poisson(P))
    with pytest.raises(ValueError, match="sampling must be of type Sampling"):
        fjs.Simulation(fjs.fedavg(task), population, sampling)


@pytest.mark.parametrize("claim", [{"share": 0.1}, {"levels": ((50, 1.0), (50, 0.1))}])
def test_a_scheme_claims_no_share_that_no_coin_is_tossed_for(claim):
    """Once a share in an own sampler's scheme was charged: ε 0.47 instead of 11.1."""
    claims = POISSON._replace(scheme=dataclasses.replace(POISSON.scheme, **claim))
    sampling = poisson(P)._replace(for_clients=lambda m: claims)
    assert sampling.sampler(M).scheme == POISSON.scheme
    always = available(sampling, intermittent())
    assert always.sampler(M).scheme == POISSON.scheme
    levels = available(sampling, privacy_levels([0] * M, (1.0,)))
    assert levels.sampler(M).scheme.levels == ((M, 1.0),)


def test_a_run_tests_a_sampler_of_ones_own_with_all_hyperparameters_before_it_starts():
    """One may read another one than its rate."""
    population, task = least_squares([2] * M, features=2)

    def draw(key, round_, hparams):
        # One cohort for all rounds, at a small clip norm alone.
        return POISSON.draw(key, jnp.where(hparams.clip < 1, 0, round_), hparams)

    sampling = poisson(P)._replace(for_clients=lambda m: POISSON._replace(draw=draw))
    sim = fjs.Simulation(untrained(task), population, sampling, fjs.Minibatches(2, steps=1))
    hparams = read_by(sim, clip=1.0, noise_multiplier=1.0, sampling_rate=P)
    sim.check_start(0, hparams)
    with pytest.raises(ValueError, match="does not draw as its scheme 'poisson' says"):
        sim.init(0, hparams.replace(clip=0.5))
