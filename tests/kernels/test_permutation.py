import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjaxsim.kernels.permutation import _ROUNDS, FEW_ROWS, by_ranks, random_order

seeds = st.integers(0, 2**31 - 1)


@functools.partial(jax.jit, static_argnames="most")
def permutation_of(seed, count, most):
    positions = jnp.arange(most or 5000) % count
    return random_order(jax.random.key(seed), count, most)(positions)


@settings(deadline=None)
@given(seeds, st.integers(1, FEW_ROWS))
def test_ranks_are_a_permutation(seed, count):
    image = np.asarray(permutation_of(seed, count, FEW_ROWS))[:count]
    np.testing.assert_array_equal(np.sort(image), np.arange(count))


@settings(deadline=None)
@given(seeds, st.integers(1, 5000))
def test_swaps_are_a_permutation(seed, count):
    image = np.asarray(permutation_of(seed, count, 0))[:count]
    np.testing.assert_array_equal(np.sort(image), np.arange(count))


def test_ranks_do_not_depend_on_the_bound():
    positions, count = jnp.arange(7), jnp.int32(7)
    few, many = (
        jax.jit(lambda most=most: by_ranks(jax.random.key(3), count, most)(positions))()
        for most in (8, 200)
    )
    np.testing.assert_array_equal(few, many)


@pytest.mark.parametrize("most", [16, pytest.param(0, marks=pytest.mark.thorough)])
def test_all_permutations_are_equally_likely(most):
    n, draws = 4, 48_000
    keys = jax.random.split(jax.random.key(0), draws)
    images = jax.jit(jax.vmap(lambda key: random_order(key, jnp.int32(n), most)(jnp.arange(n))))(
        keys
    )
    codes = np.asarray(images) @ n ** np.arange(n)
    _, counts = np.unique(codes, return_counts=True)
    assert len(counts) == 24
    assert scipy.stats.chisquare(counts).pvalue > 1e-6


@pytest.mark.parametrize("most", [32, pytest.param(0, marks=pytest.mark.thorough)])
def test_pairs_of_positions_go_to_all_pairs_equally(most):
    n, draws = 23, 100_000
    keys = jax.random.split(jax.random.key(5), draws)
    images = jax.jit(
        jax.vmap(lambda key: random_order(key, jnp.int32(n), most)(jnp.array([0, 11])))
    )(keys)
    a, b = np.asarray(images).T
    counts = np.bincount(a * n + b, minlength=n * n).reshape(n, n)
    assert np.trace(counts) == 0
    assert scipy.stats.chisquare(counts[~np.eye(n, dtype=bool)]).pvalue > 1e-6


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_ideal_shuffle_is_uniform_after_so_many_rounds(n):
    # The exact distribution over all n! permutations with ideal coins, as a Markov chain.
    states = list(itertools.permutations(range(n)))
    index = {state: i for i, state in enumerate(states)}
    transition = np.zeros((len(states), len(states)))
    for offset in range(n):
        pairs = {tuple(sorted((x, (offset - x) % n))) for x in range(n)}
        pairs = sorted(pair for pair in pairs if pair[0] != pair[1])
        for coins in itertools.product([False, True], repeat=len(pairs)):
            swap = list(range(n))
            for coin, (i, j) in zip(coins, pairs, strict=True):
                if coin:
                    swap[i], swap[j] = j, i
            for state in states:
                target = tuple(swap[value] for value in state)
                transition[index[state], index[target]] += 1 / n / 2 ** len(pairs)
    distribution = np.linalg.matrix_power(transition, _ROUNDS)[0]
    assert 0.5 * np.abs(distribution - 1 / len(states)).sum() < 1e-5
