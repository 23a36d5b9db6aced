import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy.samplers import blocks, poisson

ALARM = 1e-6  # false-alarm rate of every statistical test here
M, PLACES, DRAWS = 10_000, 300, 2_000
SAMPLING = poisson(capacity=PLACES).for_clients(M)


@jax.jit
def cohorts(key, p):
    hparams = Hyperparameters(sampling_rate=p).as_arrays()
    keys = jax.random.split(key, DRAWS)
    return jax.lax.map(lambda key: SAMPLING.draw(key, jnp.int32(0), hparams), keys)


def membership(p, seed=0):
    """(DRAWS, M) bool, and how many cohorts overflowed."""
    cohort = cohorts(jax.random.key(seed), p)
    ids, mask = np.asarray(cohort.ids), np.asarray(cohort.mask)
    member = np.zeros((DRAWS, M), bool)
    member[np.nonzero(mask)[0], ids[mask]] = True
    assert member.sum() == mask.sum()  # ids are distinct, and in range
    return member, int(np.count_nonzero(cohort.overflow))


@pytest.mark.parametrize(("first", "block"), [(5, 2**7), (13, 2**15), (25, 2**22)])
def test_the_table_is_the_poisson_distribution_of_its_hit_rate(first, block):
    table = blocks._distribution_functions(first)
    numbers = np.sum(table.astype(np.float64) * 2.0 ** -np.array([32, 64, 96, 128]), axis=-1)
    for j in {first, first + 1, (first + 32) // 2, 32}:
        mean = block * -math.log1p(-(2.0**-j))
        expected = scipy.stats.poisson.cdf(np.arange(table.shape[1]), mean)
        np.testing.assert_allclose(numbers[j - first], expected, rtol=1e-13)


@pytest.mark.parametrize(
    "p",
    [
        pytest.param(0.02, marks=pytest.mark.thorough),
        pytest.param(0.011, marks=pytest.mark.thorough),
        0.003,
    ],
)  # hit rates 1/32, 1/64, 1/256
def test_the_members_of_a_block_are_binomial(p):
    member, overflowed = membership(p)
    assert overflowed == 0
    counts = member[:, : 9 * 1024].reshape(DRAWS, 9, 1024).sum(axis=2).ravel()
    distribution = scipy.stats.binom(1024, np.float64(np.float32(p)))
    low, high = distribution.ppf([0.001, 0.999])  # cells with enough counts for χ²
    edges = np.arange(low, high)
    observed = np.bincount(np.searchsorted(edges, counts), minlength=len(edges) + 1)
    expected = np.diff(distribution.cdf(edges), prepend=0, append=1) * counts.size
    assert scipy.stats.chisquare(observed, expected).pvalue > ALARM


@pytest.mark.thorough
def test_all_clients_are_drawn_alike_and_neighbours_independently():
    p = 0.02
    member, _ = membership(p)
    counts = member.sum(axis=0)  # (M,) each Bin(DRAWS, p), independent
    statistic = np.sum((counts - DRAWS * p) ** 2) / (DRAWS * p * (1 - p))
    spread = math.sqrt(M * (2 + (1 - 6 * p * (1 - p)) / (DRAWS * p * (1 - p))))
    assert abs(statistic - M) < scipy.stats.norm.isf(ALARM / 2) * spread
    pairs = np.sum(member[:, 1:] & member[:, :-1])
    variance = (M - 1) * (p**2 - p**4) + 2 * (M - 2) * (p**3 - p**4)
    deviation = pairs - DRAWS * (M - 1) * p**2
    assert abs(deviation) < scipy.stats.norm.isf(ALARM / 2) * math.sqrt(DRAWS * variance)


@pytest.mark.thorough
def test_blocks_and_rounds_are_independent():
    p = 0.02
    sizes = membership(p)[0].sum(axis=1)
    statistic = np.sum((sizes - M * p) ** 2) / (M * p * (1 - p))  # variances add only if so
    low, high = scipy.stats.chi2.ppf([ALARM / 2, 1 - ALARM / 2], DRAWS)
    assert low < statistic < high


@pytest.fixture(scope="module")
def overfull():
    """Cohorts at the largest rate, as at any above it: 312 clients expected, 300 places."""
    return membership(0.5, seed=1)


def test_an_overfull_cohort_loses_members_uniformly(overfull):
    member, overflowed = overfull
    assert overflowed > DRAWS / 2
    assert member.sum(axis=1).max() == PLACES
    third = M // 3
    first, last = (member[:, part].sum() for part in (slice(third), slice(-third, None)))
    # Given a cohort's size, its members in two disjoint thirds are negatively correlated, and the
    # difference has mean 0 and a variance of at most the expected number of members in both.
    q = PLACES / M
    bound = scipy.stats.norm.isf(ALARM / 2) * math.sqrt(2 * third * DRAWS * q)
    assert abs(first - last) < bound


_row_and_threshold = jax.jit(blocks._row_and_threshold, static_argnums=1)


@pytest.mark.parametrize("p", [2.0**-32, 1e-9, 1e-7, 1e-4, 0.01, 1 / 64, 0.02])
def test_the_rate_charged_is_the_float32_rate_itself(p):
    hparams = Hyperparameters(sampling_rate=p).as_arrays()
    assert float(SAMPLING.rate(hparams)) == float(np.float32(p))
    row, threshold = _row_and_threshold(jnp.float32(p), 5)
    assert float(threshold) * 2.0 ** -(32 + int(row)) == float(np.float32(p))


def test_a_rate_above_the_largest_is_refused_and_never_charged_below_what_is_drawn(overfull):
    with pytest.raises(ValueError, match="sampling_rate"):
        SAMPLING.check(Hyperparameters(sampling_rate=0.5))
    hparams = Hyperparameters(sampling_rate=0.5).as_arrays()
    charged = float(SAMPLING.rate(hparams))
    assert charged == 1 / 32 * (1 - 2.0**-24)
    assert overfull[0].sum(axis=1).mean() < M * charged


def test_a_clients_bits_do_not_depend_on_the_number_of_clients():
    hparams = Hyperparameters(sampling_rate=0.01).as_arrays()
    samplers = SAMPLING, poisson(capacity=400).for_clients(15_000)

    @jax.jit
    def draw(key):
        return [sampling.draw(key, jnp.int32(3), hparams) for sampling in samplers]

    few, many = (np.asarray(c.ids)[np.asarray(c.mask)] for c in draw(jax.random.key(0)))
    np.testing.assert_array_equal(few, many[many < M])
    assert len(many) > len(few) > 0


@pytest.mark.thorough
def test_a_population_of_ten_million_is_drawn_from_evenly():
    m, q, draws = 10**7, 100, 50
    sampling = poisson(q / m).for_clients(m)
    hparams = Hyperparameters(sampling_rate=q / m).as_arrays()
    draw = jax.jit(lambda t: sampling.draw(jax.random.key(0), t, hparams))
    rounds = [draw(jnp.int32(t)) for t in range(draws)]
    ids = np.concatenate([np.asarray(cohort.ids)[np.asarray(cohort.mask)] for cohort in rounds])
    low, high = scipy.stats.poisson.ppf([ALARM / 2, 1 - ALARM / 2], draws * q)
    assert low < len(ids) < high
    assert scipy.stats.kstest(ids / m, "uniform").pvalue > ALARM
    assert not any(int(cohort.overflow) for cohort in rounds)
