"""The maps Σ → M of MP-MTL against closed forms, and their derivatives against differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjaxsim.algorithms.server_maps import shrinkage

VALUE = jax.jit(shrinkage)
SLOPE = jax.jit(lambda at, towards: jax.jvp(shrinkage, at, towards)[1])
BACK = jax.jit(lambda weights, at: jax.vjp(shrinkage, *at)[1](weights))
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
    np.testing.assert_allclose(VALUE(with_values(VALUES), TAU), expected, atol=1e-14)
    np.testing.assert_allclose(VALUE(jnp.array(VALUES), TAU), [0.5, 0.25, 0, 0])


@pytest.mark.parametrize("m", [3, 9])
def test_it_makes_the_proximal_points_of_both_norms(m):
    w = np.random.default_rng(m).normal(size=(4, m))
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    low_rank = u @ np.diag(np.maximum(s - TAU, 0)) @ vt
    np.testing.assert_allclose(VALUE(w @ w.T, TAU) @ w, low_rank, atol=1e-12)
    norms = np.linalg.norm(w, axis=1, keepdims=True)
    group_sparse = w * np.maximum(1 - TAU / norms, 0)
    rows = VALUE(jnp.sum(w**2, axis=1), TAU)
    np.testing.assert_allclose(rows[:, None] * w, group_sparse, atol=1e-12)


def test_no_penalty_changes_nothing_and_noise_may_break_definiteness():
    broken = with_values([3.0, 0.0, -1e-9, -2.0])
    np.testing.assert_allclose(VALUE(broken, 0.0), np.eye(4), atol=1e-14)
    u = rotation()
    kept = u @ np.diag([1 - 1 / np.sqrt(3), 0, 0, 0]) @ u.T
    np.testing.assert_allclose(VALUE(broken, 1.0), kept, atol=1e-12)
    np.testing.assert_array_equal(VALUE(jnp.array([0.0, -1.0]), 0.0), 1)
    np.testing.assert_array_equal(VALUE(jnp.array([0.0, -1.0]), 1.0), 0)


@pytest.mark.parametrize("values", [VALUES, [9.0, 9.0, 2.0, 2.0], [5.0, -1.0, 0.0, 2.0]])
def test_the_derivative_is_that_of_differences(values):
    gram, change = with_values(values), symmetric(1)
    found = SLOPE((gram, TAU), (change, 0.7))
    h = 1e-5
    near = [VALUE(gram + e * change, TAU + 0.7 * e) for e in (-h, h)]
    np.testing.assert_allclose(found, (near[1] - near[0]) / (2 * h), atol=1e-8)


@pytest.mark.parametrize("c", [9.0, 1.0])
def test_at_a_multiple_of_the_identity_it_is_the_slope(c):
    # f(Σ) = 1 − 1.5/√Σ has the slope 0.75 c^−1.5 at cI, 0 where nothing is kept.
    slope = 0.75 * c**-1.5 if c == 9 else 0.0
    change = symmetric(2)
    found = SLOPE((c * np.eye(4), TAU), (change, 0.0))
    np.testing.assert_allclose(found, slope * change, atol=1e-12)
    weights = symmetric(3)
    back, _ = BACK(weights, (c * np.eye(4), TAU))
    np.testing.assert_allclose(back, slope * weights, atol=1e-12)


def test_both_modes_agree_where_noise_made_a_matrix_unsymmetric():
    gram = with_values(VALUES)
    change, weights = np.random.default_rng(4).normal(size=(2, 4, 4))
    forward = np.sum(weights * SLOPE((gram, TAU), (change, 0.3)))
    back, of_tau = BACK(weights, (gram, TAU))
    np.testing.assert_allclose(np.sum(back * change) + 0.3 * of_tau, forward, rtol=1e-12)


def test_at_the_kink_it_is_the_slope_from_below_and_bounded_beside_it():
    change = symmetric(5, 2)
    at = np.diag([TAU**2, TAU**2])
    np.testing.assert_array_equal(SLOPE((at, TAU), (change, 0.0)), 0)
    for above in (1e-16, 1e-15, 1e-9):
        beside = np.diag([TAU**2 * (1 + above), TAU**2])
        found = SLOPE((beside, TAU), (change, 0.0))
        assert np.all(np.abs(found) <= 0.5 / TAU**2 * np.abs(change) * (1 + 1e-9))


def test_a_batch_is_one_by_one():
    grams = np.stack([with_values(VALUES), 9 * np.eye(4), with_values(VALUES[::-1] * 2)])
    taus = np.array([0.5, 1.0, 0.0])

    towards = np.ones((3, 4, 4)), np.ones(3)
    for function, arguments in ((VALUE, (grams, taus)), (SLOPE, ((grams, taus), towards))):
        together = jax.jit(jax.vmap(function))(*arguments)
        for k in range(3):
            alone = function(*jax.tree.map(lambda leaf, k=k: leaf[k], arguments))
            np.testing.assert_allclose(together[k], alone, atol=1e-13)


def gap(w, c, eta, lam, norms):
    """How far W is from the proximal point of C, in the proximal objective (Lemmas 1 and 2)."""

    def objective(w):
        return np.sum((w - c) ** 2) / (2 * eta) + lam * norms(w).sum()

    if norms is singular_values:
        u, s, vt = np.linalg.svd(c, full_matrices=False)
        best = u @ np.diag(np.maximum(s - eta * lam, 0)) @ vt
    else:
        best = c * np.maximum(1 - eta * lam / np.maximum(norms(c), 1e-300), 0)[:, None]
    return objective(w) - objective(best)


def singular_values(w):
    return np.linalg.svd(w, compute_uv=False)


def row_norms(w):
    return np.linalg.norm(w, axis=1)


def perturbations(d, rng):
    """Symmetric matrices of spectral norm 1: of both signs, positive, and of one direction."""
    a = rng.normal(size=(d, d))
    for e in (a + a.T, a @ a.T, -np.outer(a[0], a[0])):
        yield e / singular_values(e)[0]


@pytest.mark.parametrize("seed", range(5))
def test_lemma_1_holds_with_its_constants(seed):
    rng, d, m, eta, lam = np.random.default_rng(seed), 6, 9, 0.5, 4.0
    u, _, vt = np.linalg.svd(rng.normal(size=(d, m)), full_matrices=False)
    s = np.array([25.0, 12.0, 5.0, 1.5, 0.3, 0.0])  # ηλ = 2: k = 3 of rank 5
    c, k, rank = u @ np.diag(s) @ vt, 3, 5
    assert abs(gap(c, c, eta, 0.0, singular_values)) < 1e-12
    largest = np.min(np.sqrt(s[:k]) - np.sqrt(s[1 : k + 1])) / 2  # that the lemma allows
    for e in perturbations(d, rng):
        for size in (0.0, 1e-6, 1e-3, 0.1, 1.0):
            sigma = size * largest
            w = np.asarray(VALUE(c @ c.T + sigma * e, eta * lam)) @ c
            bound = (s[0] ** 2 / (eta * lam) + s[0]) / eta
            bound *= (k**2 / (eta * lam) + 2 * k) * sigma + max(0, rank - k) * np.sqrt(sigma)
            assert -1e-9 < gap(w, c, eta, lam, singular_values) <= bound + 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_lemma_2_holds_with_its_constants(seed):
    rng, d, m, eta, lam = np.random.default_rng(seed), 6, 9, 0.5, 4.0
    norms = np.array([8.0, 5.0, 2.5, 1.0, 0.2, 0.0])  # ηλ = 2: k = 3 of 5 rows
    c = rng.normal(size=(d, m))
    c, k, rows = c / row_norms(c)[:, None] * norms[:, None], 3, 5
    for e in perturbations(d, rng):
        for size in (0.0, 1e-6, 1e-3, 0.1, 1.0, 100.0):
            diagonal = size * np.diag(e)
            w = np.asarray(VALUE(np.sum(c**2, axis=1) + diagonal, eta * lam))[:, None] * c
            off = np.abs(diagonal).max()
            bound = (rows / (eta * lam) * norms[0] ** 2 + norms[0]) / eta
            bound *= k / (2 * eta * lam) * off + max(0, rows - k) * np.sqrt(off)
            assert -1e-9 < gap(w, c, eta, lam, row_norms) <= bound + 1e-9
