import jax
import numpy as np
import pytest
import scipy.stats

from fedjaxsim.data import (
    group_sparse_regression,
    low_rank_regression,
    regression_stream,
    synthetic_regression,
)
from fedjaxsim.data.minibatches import Batch
from fedjaxsim.tasks import known_regression
from fedjaxsim.tasks.task import check_rows


def check_variance(values, variance):
    """Normal values with mean 0 and this variance, by a two-sided χ² test: false alarm 1e-6."""
    law = scipy.stats.chi2(values.size)
    statistic = np.sum(np.asarray(values, np.float64) ** 2) / variance
    assert 2 * min(law.cdf(statistic), law.sf(statistic)) > 1e-6


def test_shapes_and_types():
    population, theta = synthetic_regression(7, 6, 3)
    assert population.num_clients == 7
    assert population.fields["x"].shape == (21, 6)
    assert population.fields["x"].dtype == population.fields["y"].dtype == np.float32
    assert population.splits["train"].count.tolist() == [3] * 7
    assert theta.shape == (7, 6)


def test_clients_share_all_but_the_last_five_coefficients():
    _, theta = synthetic_regression(500, 200, 1, offset_scale=0.1)
    np.testing.assert_array_equal(theta[:, :-5], np.tile(theta[0, :-5], (500, 1)))
    check_variance(theta[0, :-5], 10.0**2)
    differences = theta[1::2, -5:] - theta[0::2, -5:]
    check_variance(differences, 2 * 0.1**2)


def test_features_have_variance_one_over_k():
    population, _ = synthetic_regression(100, 10, 50)
    for k in range(10):
        check_variance(population.fields["x"][:, k], 1 / (k + 1))
    check_variance(
        population.fields["x"].sum(axis=1), np.sum(1 / np.arange(1, 11))
    )  # no covariance


def test_labels_are_linear_up_to_the_noise():
    population, theta = synthetic_regression(50, 8, 40, label_noise=0.01)
    residuals = [
        population.rows(k)["y"] - population.rows(k)["x"].astype(np.float64) @ theta[k]
        for k in range(50)
    ]
    check_variance(np.stack(residuals), 0.01**2)


def test_without_noise_each_clients_parameters_can_be_solved_for():
    population, theta = synthetic_regression(4, 6, 30, offset_scale=3.0, label_noise=0.0)
    for k in range(4):
        rows = population.rows(k)
        solution = np.linalg.lstsq(rows["x"].astype(np.float64), rows["y"], rcond=None)[0]
        np.testing.assert_allclose(solution, theta[k], atol=1e-4)


def test_the_seed_decides():
    first, second, other = (synthetic_regression(3, 5, 2, seed=s)[1] for s in (1, 1, 2))
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_clients": 0}, "num_clients"),
        ({"num_features": 4}, "num_features"),
        ({"num_rows": 0}, "num_rows"),
        ({"offset_scale": -0.1}, "offset_scale"),
        ({"label_noise": float("inf")}, "label_noise"),
        ({"seed": -1}, "seed"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        synthetic_regression(**arguments)


def test_a_stream_makes_fresh_examples_of_the_same_problem():
    population = regression_stream(4, 10, label_noise=0.5, seed=3)
    _, theta = synthetic_regression(4, 10, 1, label_noise=0.5, seed=3)
    for k in range(4):
        for split in ("train", "test"):
            np.testing.assert_allclose(
                population.rows(k, split)["theta"], theta[k][None], rtol=1e-6
            )
    assert population.generate is not None
    row = {"theta": jax.numpy.asarray(theta[1], "float32")}
    batch = jax.jit(population.generate, static_argnums=2)(jax.random.key(0), row, 4000)
    other = jax.jit(population.generate, static_argnums=2)(jax.random.key(1), row, 4000)
    assert not np.any(np.asarray(batch["x"]) == np.asarray(other["x"]))
    for k in range(10):
        check_variance(batch["x"][:, k], 1 / (k + 1))
    residual = np.asarray(batch["y"], np.float64) - np.asarray(batch["x"], np.float64) @ theta[1]
    check_variance(residual, 0.5**2)
    # Equal settings make equal functions, so that seeds share compiled code.
    assert population.generate == regression_stream(4, 10, label_noise=0.5, seed=4).generate


def test_the_risk_is_that_of_the_true_parameters():
    # d = 5, Σ = diag(1, 1/2, …, 1/5): an error of 2 in the second coefficient costs 2²/2.
    population, task = regression_stream(3, 5, seed=1), known_regression(5)
    theta = jax.numpy.asarray(population.rows(0, "test")["theta"])
    error = jax.numpy.zeros((1, 5)).at[0, 1].set(2.0)
    batch = Batch({"theta": theta}, jax.numpy.ones(1))
    risk = task.metrics({"kernel": theta + error}, batch)["excess_risk"]
    np.testing.assert_allclose(risk, [2.0], rtol=1e-5)
    with pytest.raises(ValueError, match="'theta'"):
        check_rows(known_regression(6), population.fields)


@pytest.mark.parametrize("drawn", [low_rank_regression, group_sparse_regression])
def test_related_regressions_are_those_of_mp_mtl(drawn):
    population, w = drawn(40, 12, 7, seed=3)
    assert w.shape == (12, 40)
    for split, count in (("train", 7), ("test", 63)):
        assert population.splits[split].count.tolist() == [count] * 40
    x = population.fields["x"].astype(np.float64)
    np.testing.assert_allclose(np.linalg.norm(x, axis=1), 1, atol=1e-6)
    check_variance(x @ np.ones(12), 1)  # uniform directions: E xxᵀ = I/12
    residuals = [population.rows(k)["y"] - population.rows(k)["x"] @ w[:, k] for k in range(40)]
    check_variance(np.stack(residuals), 1)
    if drawn is low_rank_regression:
        assert np.linalg.matrix_rank(w) == 5
        np.testing.assert_allclose(w.mean(axis=1), 0, atol=1e-12)
        np.testing.assert_array_equal(w[:, :4], np.tile(w[:, :1], 4))
        np.testing.assert_array_equal(w[:, 4:8], -w[:, :4])
        check_variance(w[:, ::8], 100)
    else:
        assert np.all(w[4:] == 0)
        assert np.all((np.abs(w[:4]) >= 1) & (np.abs(w[:4]) <= 50))
        assert 50 < np.sum(w[:4] > 0) < 110  # of 160 fair coins, but for 1e-6
    assert not np.array_equal(w, drawn(40, 12, 7, seed=4)[1])


def test_wrong_arguments_of_related_regressions_are_refused():
    with pytest.raises(ValueError, match="num_features"):
        group_sparse_regression(num_features=3)
