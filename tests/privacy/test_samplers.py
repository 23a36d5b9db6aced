"""Cohorts of a fixed size, and fixed groups."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from support.problems import least_squares

from fedjaxsim.algorithms.fedavg import fedavg
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.kernels import threefry
from fedjaxsim.privacy.samplers import fixed_groups, fixed_size
from fedjaxsim.simulation import Simulation

ALARM = 1e-6  # false-alarm rate of every statistical test here
HPARAMS = Hyperparameters().as_arrays()


def draws(sampling, rounds, seed=0):
    """The ids of rounds 0 … rounds − 1, (rounds, q); −1 in places that are not filled."""

    def one(round_):
        cohort = sampling.draw(jax.random.key(seed), round_, HPARAMS)
        return jnp.where(cohort.mask, cohort.ids, -1)

    return np.asarray(jax.jit(jax.vmap(one))(jnp.arange(rounds)))


@pytest.mark.parametrize(
    "q", [pytest.param(2, marks=pytest.mark.thorough), 4]
)  # drawn, and the complement of drawn
def test_every_subset_of_a_fixed_size_is_equally_likely(q):
    ids = np.sort(draws(fixed_size(cohort=q).for_clients(7), 20_000), axis=1)
    subsets = list(itertools.combinations(range(7), q))
    codes = ids @ 7 ** np.arange(q)
    observed = [np.count_nonzero(codes == np.dot(s, 7 ** np.arange(q))) for s in subsets]
    assert sum(observed) == 20_000  # no other set comes up
    assert scipy.stats.chisquare(observed).pvalue > ALARM


@pytest.mark.parametrize(("m", "q"), [(3, 1), (10, 5), (129, 64), (205, 100), (10**6, 10**4)])
def test_too_few_different_clients_are_as_rare_as_is_said(monkeypatch, m, q):
    drawn, round_ = [], jnp.zeros((), jnp.int32)

    def bits(key, shape):
        drawn.append(shape[0])
        return jnp.zeros(shape, jnp.uint32)

    monkeypatch.setattr(threefry, "bits", bits)
    sampling = fixed_size(cohort=q).for_clients(m)
    jax.eval_shape(lambda key: sampling.draw(key, round_, HPARAMS), jax.random.key(0))
    # Even the last new client comes with probability (m − q + 1)/2^bits; fewer than q successes.
    chance = (m - q + 1) / 2 ** (m - 1).bit_length()
    assert scipy.special.betainc(drawn[0] - q + 1, q, 1 - chance) < 1e-18


def test_a_large_population_is_drawn_from_evenly_and_without_repetition():
    m, q = 100_003, 500
    ids = draws(fixed_size(cohort=q).for_clients(m), 20)
    assert all(len(set(row)) == q for row in ids.tolist())
    assert ids.min() >= 0
    assert ids.max() < m
    assert scipy.stats.kstest(ids.ravel() / m, "uniform").pvalue > ALARM


def test_a_cohort_of_m_is_the_population():
    np.testing.assert_array_equal(
        np.sort(draws(fixed_size(cohort=5).for_clients(5), 3)), [range(5)] * 3
    )
    assert set(draws(fixed_size(cohort=1).for_clients(1), 1).ravel()) == {0}


def test_the_rate_is_the_share_of_the_clients():
    population, task = least_squares([2] * 206)
    for sampling, share in ((fixed_size(cohort=100), 100 / 206), (fixed_groups(groups=2), 1 / 2)):
        drawn = sampling.for_clients(206)
        np.testing.assert_allclose(float(drawn.rate(HPARAMS)), share, rtol=1e-7)
        # No hyperparameter could say another one.
        simulation = Simulation(fedavg(task), population, sampling)
        for rate in (100 / 206, 0.5):
            with pytest.raises(ValueError, match="'sampling_rate'"):
                simulation.hyperparameters(sampling_rate=rate)
        hparams = simulation.hyperparameters()
        assert float(simulation.sampler.rate(hparams)) == float(drawn.rate(HPARAMS))


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="cohort"):
        fixed_size(cohort=11).for_clients(10)
    with pytest.raises(ValueError, match="cohort"):
        fixed_size(cohort=0).for_clients(10)
    with pytest.raises(ValueError, match="groups"):
        fixed_groups(groups=11).for_clients(10)
