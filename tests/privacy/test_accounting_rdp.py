"""RDP of the Poisson-subsampled Gaussian against dp_accounting and 40-digit quadrature."""

import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from support.plans import compose

from fedjaxsim.privacy.accounting import rdp

REFERENCE = [
    (1.0, 4.0, 10, 1e-5, 3.62785),
    (1.0, 50.0, 1000, 1e-5, 2.81411),
    (100 / 205, 25.0, 200, 1 / 205, 0.61242),
    (100 / 205, 10.0, 1000, 1 / 205, 5.29866),
    (0.02, 1.0, 2000, 1e-4, 5.39555),
    (0.01, 0.8, 10000, 1e-5, 10.93537),
    (20 / 9343, 0.65, 400, 1e-5, 2.40933),
    (0.1, 2.0, 500, 1e-5, 6.08950),
]


@pytest.mark.parametrize(("p", "z", "rounds", "delta", "expected"), REFERENCE)
def test_reference_values(p, z, rounds, delta, expected):
    values = compose((z, p, rounds), orders=rdp.INTEGER_ORDERS)
    epsilon = rdp.epsilon(values, delta, rdp.INTEGER_ORDERS)
    assert epsilon == pytest.approx(expected, abs=6e-6)
    accountant = RdpAccountant(rdp.INTEGER_ORDERS)
    event = dp_accounting.PoissonSampledDpEvent(p, dp_accounting.GaussianDpEvent(z))
    accountant.compose(event, rounds)
    np.testing.assert_allclose(values, accountant.rdp, rtol=1e-8)
    assert epsilon == pytest.approx(accountant.get_epsilon(delta), rel=1e-8)
    # More orders can only help.
    assert rdp.epsilon(compose((z, p, rounds)), delta) <= epsilon


def integral(density, first, last, step):
    """Compute ∫ by the trapezoidal rule, whose error falls as e^(−c/step) for such a density."""
    places = range(math.floor(first / step), math.ceil(last / step) + 1)
    return step * mpmath.fsum(density(step * place) for place in places)


@pytest.mark.parametrize(
    ("z", "p"),
    [
        (2.0, 0.1),
        pytest.param(25.0, 0.488, marks=pytest.mark.thorough),
        pytest.param(0.8, 0.01, marks=pytest.mark.thorough),
        pytest.param(0.3, 0.9, marks=pytest.mark.thorough),
        pytest.param(0.2, 1e-4, marks=pytest.mark.thorough),
    ],
)
def test_any_order_is_the_integral_that_defines_it(z, p):
    orders = [1.1, 1.5, 2.0, 5.5, 9.0, 9.9, 16.0]
    values = compose((z, p, 1), orders=orders)
    with mpmath.workdps(30):
        for order, value in zip(orders, values, strict=True):

            def density(x, a=order):
                ratio = 1 - mpmath.mpf(p) + p * mpmath.exp(x / z - mpmath.mpf(1) / (2 * z * z))
                return mpmath.npdf(x) * ratio**a

            moment = integral(density, -15, order / z + 15, min(0.25, z / 8))
            expected = mpmath.log(moment) / (order - 1)
            assert value == pytest.approx(float(expected), rel=1e-10)


def test_cheap_rounds_keep_their_relative_precision():
    # To second order in 1/z, RDP(α) = α p² (e^{1/z²} − 1)/2; the textbook sum gives rounding noise.
    values = compose((1000.0, 1e-5, 1))
    np.testing.assert_allclose(values[:-1], np.array(rdp.ORDERS[:-1]) * 1e-16 / 2, rtol=2e-3)
    assert np.all(np.diff(values) > 0)
    assert values[-1] == np.inf


def test_composition_adds():
    one, two = (1.0, 0.1, 7), (3.0, 1.0, 5)
    np.testing.assert_allclose(compose(one, two), compose(one) + compose(two), rtol=1e-14)
    # p = 1: α T / (2 z²).
    np.testing.assert_allclose(compose(two), np.array(rdp.ORDERS) * 5 / (2 * 9), rtol=1e-14)
    assert rdp.epsilon(compose((1.0, 0.0, 100)), 1e-5) == 0
    assert rdp.epsilon(compose((0.0, 0.5, 1)), 1e-5) == np.inf


@pytest.mark.parametrize(("p", "z", "rounds"), [(0.1, 2.0, 500), (1.0, 4.0, 10), (1e-3, 1.0, 50)])
def test_delta_inverts_epsilon(p, z, rounds):
    profile = rdp.profile(compose((z, p, rounds)))
    for delta in (1e-12, 1e-5, 1e-2):
        epsilon = profile.epsilon(delta)
        if epsilon > 0:
            assert profile.delta(epsilon) == pytest.approx(delta, rel=1e-6)
        else:
            assert profile.delta(0.0) <= delta


@pytest.mark.parametrize(
    ("z", "p"),
    [
        pytest.param(1.0, 0.1, marks=pytest.mark.thorough),
        (4.0, 0.00033),
        pytest.param(0.5, 0.02, marks=pytest.mark.thorough),
    ],
)
def test_replacement_is_the_integral_of_its_pair(z, p):
    orders = (1.5, 2.0, 7.0, 32.0, 256.0)
    values = rdp.one_round(orders, z, p, replace=True)
    with mpmath.workdps(30):
        for order, value in zip(orders, values, strict=True):

            def density(x, a=order):
                absent, scale = (1 - mpmath.mpf(p)) * mpmath.npdf(x), mpmath.mpf(p)
                first = absent + scale * mpmath.npdf(x, 1 / mpmath.mpf(z))
                return first**a * (absent + scale * mpmath.npdf(x, -1 / mpmath.mpf(z))) ** (1 - a)

            moment = integral(density, -15, order / z + 15, min(0.25, z / 8))
            expected = mpmath.log(moment) / (order - 1)
            assert value == pytest.approx(float(expected), rel=1e-8)
            # Never below one zeroing, nor above full participation at twice the distance.
            assert rdp.one_round((order,), z, p)[0] <= value <= order * (2 / z) ** 2 / 2


def test_replacement_at_order_two_has_a_series():
    # E[(P/Q − 1)²] = p² E[(e^u − e^−u')²] to lowest order in p: 2 p² e^{−1/(2·z²)}·… at z large.
    z, p = 1000.0, 1e-3
    [value] = rdp.one_round((2.0,), z, p, replace=True)
    assert value == pytest.approx((2 * p / z) ** 2, rel=1e-4)
