"""The maps Σ → M of MP-MTL against closed forms, and their derivatives against differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjaxsim.algorithms.spectral import shrinkage

TAU = 1.5
VALUES = np.array([9.0, 4.0, 2.0, 0.5])  # 1.5² = 2.25 lies between them


@pytest.fixture(autouse=True)
def _double():
    with jax.enable_x64(True):
        yield


def rotation(d=4, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(d, d)))[0]


def with_values(values):
    u = rotation(len(values))
    return u @ np.diag(values) @ u.T


def symmetric(seed, d=4):
    a = np.random.default_rng(seed).normal(size=(d, d))
    return a + a.T


def test_the_eigenvalues_are_those_of_the_formula():
    # 1 − 1.5/3 and 1 − 1.5/2; roots below 1.5 are dropped.
    u = rotation()
    expected = u @ np.diag([0.5, 0.25, 0, 0]) @ u.T
    np.testing.assert_allclose(shrinkage(with_values(VALUES), TAU), expected, atol=1e-14)
    np.testing.assert_allclose(shrinkage(jnp.array(VALUES), TAU), [0.5, 0.25, 0, 0])


@pytest.mark.parametrize("m", [3, 9])
def test_it_makes_the_proximal_points_of_both_norms(m):
    w = np.random.default_rng(m).normal(size=(4, m))
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    low_rank = u @ np.diag(np.maximum(s - TAU, 0)) @ vt
    np.testing.assert_allclose(shrinkage(w @ w.T, TAU) @ w, low_rank, atol=1e-12)
    norms = np.linalg.norm(w, axis=1, keepdims=True)
    group_sparse = w * np.maximum(1 - TAU / norms, 0)
    rows = shrinkage(jnp.sum(w**2, axis=1), TAU)
    np.testing.assert_allclose(rows[:, None] * w, group_sparse, atol=1e-12)


def test_no_penalty_changes_nothing_and_noise_may_break_definiteness():
    broken = with_values([3.0, 0.0, -1e-9, -2.0])
    np.testing.assert_allclose(shrinkage(broken, 0.0), np.eye(4), atol=1e-14)
    u = rotation()
    kept = u @ np.diag([1 - 1 / np.sqrt(3), 0, 0, 0]) @ u.T
    np.testing.assert_allclose(shrinkage(broken, 1.0), kept, atol=1e-12)
    np.testing.assert_array_equal(shrinkage(jnp.array([0.0, -1.0]), 0.0), 1)
    np.testing.assert_array_equal(shrinkage(jnp.array([0.0, -1.0]), 1.0), 0)


@pytest.mark.parametrize("values", [VALUES, [9.0, 9.0, 2.0, 2.0], [5.0, -1.0, 0.0, 2.0]])
def test_the_derivative_is_that_of_differences(values):
    gram, change = with_values(values), symmetric(1)
    _, found = jax.jvp(shrinkage, (gram, TAU), (change, 0.7))
    h = 1e-5
    near = [shrinkage(gram + e * change, TAU + 0.7 * e) for e in (-h, h)]
    np.testing.assert_allclose(found, (near[1] - near[0]) / (2 * h), atol=1e-8)


@pytest.mark.parametrize("c", [9.0, 1.0])
def test_at_a_multiple_of_the_identity_it_is_the_slope(c):
    # f(Σ) = 1 − 1.5/√Σ has the slope 0.75 c^−1.5 at cI, 0 where nothing is kept.
    slope = 0.75 * c**-1.5 if c == 9 else 0.0
    change = symmetric(2)
    _, found = jax.jvp(shrinkage, (c * np.eye(4), TAU), (change, 0.0))
    np.testing.assert_allclose(found, slope * change, atol=1e-12)
    weights = symmetric(3)
    back = jax.grad(lambda gram: jnp.sum(weights * shrinkage(gram, TAU)))(c * np.eye(4))
    np.testing.assert_allclose(back, slope * weights, atol=1e-12)


def test_both_modes_agree_where_noise_made_a_matrix_unsymmetric():
    gram = with_values(VALUES)
    change, weights = np.random.default_rng(4).normal(size=(2, 4, 4))
    forward = np.sum(weights * jax.jvp(shrinkage, (gram, TAU), (change, 0.3))[1])
    back, of_tau = jax.grad(lambda *at: jnp.sum(weights * shrinkage(*at)), (0, 1))(gram, TAU)
    np.testing.assert_allclose(np.sum(back * change) + 0.3 * of_tau, forward, rtol=1e-12)


def test_at_the_kink_it_is_the_slope_from_below_and_bounded_beside_it():
    change = symmetric(5, 2)
    at = np.diag([TAU**2, TAU**2])
    np.testing.assert_array_equal(jax.jvp(shrinkage, (at, TAU), (change, 0.0))[1], 0)
    for above in (1e-16, 1e-15, 1e-9):
        beside = np.diag([TAU**2 * (1 + above), TAU**2])
        found = jax.jvp(shrinkage, (beside, TAU), (change, 0.0))[1]
        assert np.all(np.abs(found) <= 0.5 / TAU**2 * np.abs(change) * (1 + 1e-9))


def test_a_batch_is_one_by_one():
    grams = np.stack([with_values(VALUES), 9 * np.eye(4), with_values(VALUES[::-1] * 2)])
    taus = np.array([0.5, 1.0, 0.0])

    def value_and_slope(gram, tau):
        return jax.jvp(shrinkage, (gram, tau), (np.ones((4, 4)), 1.0))

    together = jax.vmap(value_and_slope)(grams, taus)
    for k in range(3):
        alone = value_and_slope(grams[k], taus[k])
        for a, b in zip(together, alone, strict=True):
            np.testing.assert_allclose(a[k], b, atol=1e-13)
