"""Trade-off curves against the Gaussian closed form and the most powerful test of one round."""

import math

import numpy as np
import pytest
from plans import charged
from scipy.stats import norm

from fedjaxsim.privacy.accounting import composition, gaussian, profile
from fedjaxsim.privacy.entries import SamplingScheme
from fedjaxsim.privacy.events import Gaussian, NoRelease, Unprotected

GAUSSIAN = Gaussian()
EVERYONE = SamplingScheme("full", 100, 100)
POISSON = SamplingScheme("poisson", 100, 100)
ALPHAS = np.linspace(0, 1, 41)


@pytest.mark.parametrize("mu", [0.1, 1.0, 3.0])
def test_the_profile_gives_the_closed_form_from_below(mu):
    exact = gaussian.trade_off(mu, ALPHAS)
    curve = profile.trade_off(gaussian.profile(mu), ALPHAS)
    assert np.all(curve <= exact + 1e-12)
    np.testing.assert_allclose(curve, exact, atol=2e-3)


@pytest.mark.parametrize(
    "adjacency", ["zero_out", pytest.param("replace", marks=pytest.mark.thorough)]
)
def test_one_sampled_round_is_the_most_powerful_test(adjacency):
    z, p = 1.0, 0.3
    curve = composition.trade_off([charged(POISSON, GAUSSIAN, (z, p, 1))], ALPHAS, adjacency)
    thresholds = np.linspace(-8, 9, 4001)

    def mixed(center):
        return (1 - p) * norm.sf(thresholds) + p * norm.sf(thresholds, center)

    # Rejecting above a threshold is most powerful in one dimension; the curve holds both ways.
    type_one = mixed(-1.0) if adjacency == "replace" else norm.sf(thresholds)
    type_two = 1 - mixed(1.0)
    best = np.interp(ALPHAS, type_one[::-1], type_two[::-1])
    mirrored = np.interp(ALPHAS, type_two, type_one)
    assert np.all(curve <= np.minimum(best, mirrored) + 1e-4)
    # Where neither direction dominates, the symmetric curve is their convex hull.
    np.testing.assert_allclose(curve, np.minimum(best, mirrored), atol=1e-2)


@pytest.mark.thorough
def test_curves_are_convex_decreasing_and_below_perfect_privacy():
    curve = composition.trade_off([charged(POISSON, GAUSSIAN, (1.0, 0.1, 50))], ALPHAS)
    assert np.all(np.diff(curve) <= 1e-12)
    assert np.all(np.diff(curve, 2) >= -1e-9)
    assert np.all(curve <= 1 - ALPHAS + 1e-12)
    assert curve.shape == ALPHAS.shape


def test_exact_at_full_participation():
    curve = composition.trade_off([charged(EVERYONE, GAUSSIAN, (5.0, 1.0, 4))], ALPHAS, "replace")
    np.testing.assert_allclose(curve, norm.cdf(norm.isf(ALPHAS) - 0.8), atol=1e-12)


def test_the_ends():
    nothing = composition.trade_off([], ALPHAS)
    np.testing.assert_array_equal(nothing, 1 - ALPHAS)
    closed = composition.trade_off([charged(EVERYONE, NoRelease(), (0.0, 1.0, 3))], ALPHAS)
    np.testing.assert_array_equal(closed, 1 - ALPHAS)
    open_ = composition.trade_off([charged(EVERYONE, GAUSSIAN, (0.0, 1.0, 3))], ALPHAS)
    np.testing.assert_array_equal(open_, 0)
    unknown = composition.trade_off([charged(EVERYONE, Unprotected(), (1.0, 1.0, 3))], ALPHAS)
    np.testing.assert_array_equal(unknown, 0)
    with pytest.raises(ValueError, match="type_one"):
        composition.trade_off([charged(EVERYONE, GAUSSIAN, (1.0, 1.0, 3))], [math.nan])
