import numpy as np
import pytest
import scipy.stats

from fedjaxsim.data import synthetic_regression


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
        ({"num_clients": 0}, "num_clients must be at least 1, got 0"),
        ({"num_features": 4}, "num_features must be at least 5, got 4"),
        ({"num_rows": 0}, "num_rows must be at least 1, got 0"),
        ({"offset_scale": -0.1}, "offset_scale must be non-negative and finite, got -0.1"),
        ({"label_noise": float("inf")}, "label_noise must be non-negative and finite, got inf"),
        ({"seed": -1}, "seed must be a non-negative integer, got -1"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        synthetic_regression(**arguments)
