"""Exact Gaussian differential privacy against 60-digit arithmetic and integration."""

import math

import mpmath
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from fedjaxsim.privacy.accounting import composition, gaussian
from fedjaxsim.privacy.entries import Adjacency, Entry, SamplingScheme
from fedjaxsim.privacy.events import Gaussian, PrivacySpend

MUS = [1e-6, 1e-3, 0.03, 0.3, 1.0, 3.0, 10.0]


def epsilon_of(*entries, adjacency: Adjacency = "zero_out", event=Gaussian()):
    plan = PrivacySpend(SamplingScheme("full", 9, 9), event, entries)
    return composition.profile([plan], adjacency).epsilon(1e-5)


def exact_log_delta(epsilon, mu):
    with mpmath.workdps(60):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
        return mpmath.log(mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m))


@pytest.mark.parametrize("mu", MUS)
@pytest.mark.parametrize("deviations", [0.0, 0.5, 2.0, 7.0, 30.0])
def test_delta_has_full_relative_precision(mu, deviations):
    epsilon = deviations * mu
    assert float(gaussian.log_delta(epsilon, mu) - exact_log_delta(epsilon, mu)) == pytest.approx(
        0, abs=1e-12
    )


def test_delta_is_the_hockey_stick_integral():
    mu, epsilon = 0.8, 1.1

    def positive_part(x):
        return max(0.0, norm.pdf(x, mu) - math.exp(epsilon) * norm.pdf(x))

    start = epsilon / mu + mu / 2
    value = quad(positive_part, start, start + 12, epsabs=1e-14)[0]
    assert gaussian.delta(epsilon, mu) == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("mu", MUS)
@pytest.mark.parametrize("delta", [1e-200, 1e-12, 1e-5, 1 / 205])
def test_epsilon_inverts_delta_from_above(mu, delta):
    epsilon = gaussian.epsilon(delta, mu)
    assert gaussian.log_delta(epsilon, mu) <= math.log(delta)
    if epsilon > 0:
        assert gaussian.log_delta(epsilon * (1 - 1e-9), mu) > math.log(delta)


@pytest.mark.parametrize(
    ("z", "rounds", "zero_out", "replace"), [(4, 10, 3.3414, 7.5113), (50, 1000, 2.5944, 5.7595)]
)
def test_reference_values(z, rounds, zero_out, replace):
    # Published to five digits from a discretization of 1e-4.
    expected: dict[Adjacency, float] = {"zero_out": zero_out, "replace": replace}
    for adjacency, epsilon in expected.items():
        found = epsilon_of(Entry(z, 1.0, rounds), adjacency=adjacency)
        assert found == pytest.approx(epsilon, abs=6e-5)


def test_rounds_add_in_inverse_squares():
    # 3 rounds at z = 1 and 4 at z = 2: μ² = 3 + 4/4 = 4.
    entries = [Entry(1.0, 1.0, 3), Entry(2.0, 1.0, 4)]
    assert epsilon_of(*entries) == pytest.approx(gaussian.epsilon(1e-5, 2))
    gram = epsilon_of(*entries, adjacency="replace", event=Gaussian(replace=math.sqrt(2)))
    assert gram == pytest.approx(gaussian.epsilon(1e-5, 2 * math.sqrt(2)))
    assert epsilon_of(*entries, Entry(0.0, 1.0, 1)) == math.inf
    assert epsilon_of() == 0


@pytest.mark.parametrize("mu", [1e6, 1e10, 1e12])
@pytest.mark.parametrize("delta", [1e-12, 1 / 205])
def test_epsilon_of_a_huge_mu_is_that_of_the_normal_tail(mu, delta):
    # The number subtracted from Φ(μ/2 − ε/μ) vanishes: ε = μ²/2 − μ Φ⁻¹(δ), within δ's float64.
    above = gaussian.epsilon(delta, mu) - mu**2 / 2
    assert above == pytest.approx(-mu * norm.ppf(delta), rel=0.02)


@pytest.mark.parametrize("mu", [1.1e12, 8.9e15, 1e17, math.inf])
def test_what_float64_cannot_tell_apart_is_no_protection(mu):
    assert gaussian.epsilon(1e-5, mu) == math.inf
    assert gaussian.delta(1.0, mu) == 1


def test_the_ends():
    assert gaussian.epsilon(1e-5, 0.0) == 0
    assert gaussian.epsilon(1e-5, math.inf) == math.inf
    assert gaussian.delta(1.0, math.inf) == 1
    assert gaussian.delta(1.0, 0.0) == 0
    # At ε = 0 δ is the total variation 2Φ(μ/2) − 1.
    assert gaussian.delta(0.0, 1.0) == pytest.approx(2 * norm.cdf(0.5) - 1)
    assert gaussian.epsilon(0.5, 1.0) == 0
    for bad in (0.0, 1.0, -1e-5):
        with pytest.raises(ValueError, match="delta"):
            gaussian.epsilon(bad, 1.0)
    with pytest.raises(ValueError, match="epsilon"):
        gaussian.delta(-1.0, 1.0)


def test_log_delta_takes_arrays():
    mus = np.array([0.5, 1.0, 4.0])
    one_by_one = [float(gaussian.log_delta(0.7, mu)) for mu in mus]
    np.testing.assert_array_equal(gaussian.log_delta(0.7, mus), one_by_one)
