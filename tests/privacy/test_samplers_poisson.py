import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from support.problems import least_squares

from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.kernels.backend import Backend, planning_for
from fedjaxsim.privacy.samplers import default_capacity, full_participation, poisson
from fedjaxsim.simulation import Simulation

ALARM = 1e-6  # false-alarm rate of every statistical test here


def without_overflow(m):
    """Return a Poisson sampler of any rate, with a slot for every client."""
    return poisson(max_rate=1.0).for_clients(m)


def membership(sampling, p, draws, seed=0):
    """(draws, m) bool."""
    m = sampling.scheme.clients
    hparams = Hyperparameters(sampling_rate=p).as_arrays()

    def one(key):
        cohort = sampling.draw(key, jnp.int32(0), hparams)
        return jnp.zeros(m, bool).at[jnp.where(cohort.mask, cohort.ids, m)].set(True, mode="drop")

    return np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(seed), draws)))


@pytest.mark.thorough
def test_inclusion_frequencies_are_binomial():
    m, p, draws = 50, 0.3, 20_000
    counts = membership(without_overflow(m), p, draws).sum(axis=0)
    statistic = np.sum((counts - draws * p) ** 2) / (draws * p * (1 - p))  # χ², m degrees
    low, high = scipy.stats.chi2.ppf([ALARM / 2, 1 - ALARM / 2], m)
    assert low < statistic < high


@pytest.mark.thorough
def test_clients_are_pairwise_independent():
    m, p, draws = 20, 0.3, 20_000
    drawn = membership(without_overflow(m), p, draws).astype(np.int64)
    together = drawn.T @ drawn
    pairs = list(itertools.combinations(range(m), 2))
    counts = np.array([together[i, j] for i, j in pairs])
    # Each count is Bin(draws, p²); Bonferroni over the pairs.
    tail = ALARM / 2 / len(pairs)
    assert counts.min() >= scipy.stats.binom.ppf(tail, draws, p * p)
    assert counts.max() <= scipy.stats.binom.isf(tail, draws, p * p)


@pytest.mark.thorough
def test_clients_of_different_blocks_are_independent():
    m, p, draws = 2500, 0.5, 2_000
    sizes = membership(without_overflow(m), p, draws).sum(axis=1)
    statistic = np.sum((sizes - m * p) ** 2) / (m * p * (1 - p))  # variances add only if so
    low, high = scipy.stats.chi2.ppf([ALARM / 2, 1 - ALARM / 2], draws)
    assert low < statistic < high


def test_a_clients_bits_do_not_depend_on_the_number_of_clients():
    few, many = (membership(without_overflow(m), 0.1, 20) for m in (1500, 4000))
    np.testing.assert_array_equal(few, many[:, :1500])


@pytest.mark.parametrize("p", [1e-7, 1e-4, 1 / 3, 100 / 206])
def test_the_rate_charged_is_the_fraction_of_bit_patterns_that_include(p):
    hparams = Hyperparameters(sampling_rate=p).as_arrays()
    patterns = np.floor(np.float64(np.float32(p)) * 2**32)
    assert float(without_overflow(10).rate(hparams)) == patterns / 2**32


def test_every_round_draws_anew():
    hparams = Hyperparameters(sampling_rate=0.5).as_arrays()
    draw = jax.jit(without_overflow(40).draw)
    cohorts = [draw(jax.random.key(0), jnp.int32(t), hparams).ids.tolist() for t in (0, 1, 1)]
    assert cohorts[0] != cohorts[1]
    assert cohorts[1] == cohorts[2]


def test_rate_one_includes_all_clients():
    assert membership(without_overflow(30), 1.0, 5).all()
    assert float(without_overflow(30).rate(Hyperparameters(sampling_rate=1.0).as_arrays())) == 1


@pytest.mark.thorough
def test_an_overfull_cohort_loses_members_uniformly():
    m, p, places, draws = 60, 0.5, 15, 20_000
    sampling = poisson(capacity=places).for_clients(m)
    counts = membership(sampling, p, draws).sum(axis=0)
    # Cohorts are nearly always full: each id is kept with probability 15/60; full cohorts make
    # the counts negatively correlated, which only shrinks the statistic: an upper bound suffices.
    q = places / m
    statistic = np.sum((counts - counts.mean()) ** 2) / (draws * q * (1 - q))
    assert statistic < scipy.stats.chi2.isf(ALARM, m)
    third = m // 3
    difference = counts[:third].sum() - counts[-third:].sum()
    assert abs(difference) < scipy.stats.norm.isf(ALARM / 2) * np.sqrt(
        2 * third * draws * q * (1 - q)
    )


@pytest.mark.thorough
def test_a_gpu_draws_the_same_cohorts_full_or_not():
    sampling, key = poisson(capacity=5).for_clients(10), jax.random.key(0)

    def draws():
        rounds = jnp.arange(50)
        return jax.vmap(lambda t: sampling.draw(key, t, Hyperparameters(sampling_rate=0.5)))(rounds)

    usual = draws()
    with planning_for(Backend("gpu", None)):
        jax.tree.map(np.testing.assert_array_equal, draws(), usual)
    assert {-1, 0, 1} == set(np.sign(usual.mask.sum(1) + usual.overflow - 5).tolist())


def test_overflow_is_counted_and_places_are_filled_from_the_front():
    hparams = Hyperparameters(sampling_rate=1.0).as_arrays()
    sampling = poisson(capacity=4).for_clients(10)
    cohort = jax.jit(sampling.draw)(jax.random.key(0), jnp.int32(0), hparams)
    assert int(cohort.overflow) == 6
    assert cohort.mask.all()
    assert len(set(np.asarray(cohort.ids).tolist())) == 4
    hparams, sampling = hparams.replace(sampling_rate=0.3), poisson(capacity=10).for_clients(10)
    cohort = jax.jit(sampling.draw)(jax.random.key(1), jnp.int32(0), hparams.as_arrays())
    mask = np.asarray(cohort.mask)
    assert int(cohort.overflow) == 0
    assert np.all(np.diff(mask.astype(int)) <= 0)
    assert np.all(np.asarray(cohort.ids)[mask] < 10)


def test_default_capacity_is_the_smallest_with_that_tail():
    for m, p in [(206, 100 / 206), (1000, 0.1), (10**6, 1e-4)]:
        capacity = default_capacity(m, p, tail=1e-12)
        assert (
            scipy.stats.binom.sf(capacity, m, p) <= 1e-12 < scipy.stats.binom.sf(capacity - 1, m, p)
        )
    assert default_capacity(10, 0.5) == 10


def test_full_participation_draws_all_clients():
    assert membership(full_participation().for_clients(7), 1.0, 3).all()


def refused(sampling, m, p):
    sampling.for_clients(m).check(Hyperparameters(sampling_rate=p))


def test_rates_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="sampling_rate"):
        refused(poisson(0.1), 1000, 0.5)
    with pytest.raises(ValueError, match="at least 2"):
        refused(poisson(max_rate=1.0), 1000, 1e-12)
    with pytest.raises(ValueError, match="capacity"):
        poisson(capacity=0).for_clients(10)
    wrong: Any = ({"sampling_rate": 1.5}, {"max_rate": 1.5}, {"sampling_rate": 0.0})
    for rates in wrong:
        with pytest.raises(ValueError, match=r"1\.5|0\.0"):
            poisson(**rates)
    with pytest.raises(ValueError, match="max_rate"):
        poisson(0.3, max_rate=0.1)


def test_poisson_sampling_alone_reads_a_rate_and_draws_with_its_own_unless_given_another():
    population, task = least_squares([2] * 10)
    assert full_participation().hyperparameters == ()
    full = Simulation(fedavg(task), population, full_participation())
    with pytest.raises(ValueError, match="'sampling_rate'"):
        full.hyperparameters(sampling_rate=0.5)
    assert float(full.sampler.rate(full.hyperparameters())) == 1
    sampled = Simulation(fedavg(task), population, poisson(0.25, max_rate=0.5))
    assert sampled.sampler.scheme == poisson(0.5).for_clients(10).scheme
    for given, p in (({}, 0.25), ({"sampling_rate": 0.5}, 0.5)):
        hparams = sampled.hyperparameters(**given).as_arrays()
        assert float(sampled.sampler.rate(hparams)) == p


def test_the_default_places_suit_the_largest_rate():
    for sampling, rate in ((poisson(0.1), 0.1), (poisson(0.1, max_rate=0.3), 0.3)):
        assert sampling.for_clients(1000).scheme.capacity == default_capacity(1000, rate)


@pytest.mark.parametrize(
    ("clients", "rate"), [(8, 1.0), (10, 1.0), (20, 0.5), (50, 0.2), (1000, 0.2)]
)
def test_by_default_ten_clients_are_expected_or_a_fifth(clients, rate):
    population, task = least_squares([2] * clients)
    sim = Simulation(fedavg(task), population, poisson())
    p = np.asarray(sim.hyperparameters(noise_multiplier=1.0).sampling_rate)
    np.testing.assert_allclose(p, rate, rtol=1e-6)
    assert sim.sampler.scheme.capacity == default_capacity(clients, rate)
