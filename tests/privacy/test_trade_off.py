"""Trade-off curves against closed forms, an attacker's best tests, and dp_accounting."""

import math

import numpy as np
import pytest
from scipy.special import expit, ndtr, ndtri
from support.plans import charged

from fedjaxsim.privacy.entries import SamplingScheme
from fedjaxsim.privacy.events import GAUSSIAN, NoRelease, Pure
from fedjaxsim.privacy.guarantee import Report, report

M, DELTA = 200, 1e-4
EVERYONE = SamplingScheme("full", M, M)
POISSON = SamplingScheme("poisson", M, M)
ALPHA = np.linspace(0, 1, 101)


def gaussian_curve(mu):
    with np.errstate(divide="ignore"):
        return ndtr(ndtri(1 - ALPHA) - mu)


@pytest.mark.parametrize(("adjacency", "mu"), [("zero_out", 0.75), ("replace", 1.5)])
def test_rounds_of_all_clients_are_one_gaussian_test(adjacency, mu):
    found = report([charged(EVERYONE, GAUSSIAN, (4.0, 1.0, 9))], DELTA).curve(adjacency)
    np.testing.assert_allclose(found.least_miss(ALPHA), gaussian_curve(mu), atol=1e-4)
    assert found.advantage == pytest.approx(2 * ndtr(mu / 2) - 1, rel=1e-9)
    assert found.success() == pytest.approx(ndtr(mu / 2), rel=1e-9)
    for prior in (0.1, 0.9):
        errors = 0.1 * found.least_miss(ALPHA) + 0.9 * ALPHA
        assert found.success(prior) == pytest.approx(1 - np.min(errors), abs=2e-3)


@pytest.mark.parametrize("z", [0.5, 2.0])
def test_one_pure_release_is_randomized_response(z):
    found = report([charged(EVERYONE, Pure(), (z, 1.0, 1))], DELTA)
    assert found.curve().success() == pytest.approx(expit(1 / z), rel=1e-3)
    assert found.find("zero_out").advantage == pytest.approx(2 * expit(1 / z) - 1, rel=1e-3)


def test_no_test_of_a_sampled_round_is_better_and_some_are_as_good():
    z, p = 1.0, 0.3
    found = report([charged(POISSON, GAUSSIAN, (z, p, 1))], DELTA).curve()
    threshold = np.linspace(-12, 12, 20_001)
    absent, present = ndtr(-threshold / z), ndtr((1 - threshold) / z)
    present = (1 - p) * absent + p * present
    both_ways = [(absent, 1 - present), (1 - present, absent)]
    for alpha, beta in both_ways:
        assert np.all(found.least_miss(np.clip(alpha[::10], 0, 1)) <= beta[::10] + 1e-9)
    for epsilon, delta in zip(found.epsilons[:200:40], found.deltas[:200:40], strict=True):
        best = min(np.min(beta + math.exp(epsilon) * alpha) for alpha, beta in both_ways)
        assert best == pytest.approx(1 - delta, abs=1e-4)


def test_curves_are_convex_symmetric_and_fall_with_rounds():
    few, many = (
        report([charged(POISSON, GAUSSIAN, (1.0, 0.1, rounds))], DELTA).curve()
        for rounds in (5, 50)
    )
    for curve in (few, many):
        values = curve.least_miss(ALPHA)
        assert np.all(np.diff(values, 2) >= -1e-12)
        assert np.max(1 - ALPHA - values) <= curve.advantage + 1e-12
        inside = values > 1e-6
        np.testing.assert_allclose(curve.least_miss(values)[inside], ALPHA[inside], atol=1e-9)
    assert np.all(many.least_miss(ALPHA) <= few.least_miss(ALPHA))


def test_curves_have_the_deltas_of_dp_accounting():
    plds = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    found = report([charged(POISSON, GAUSSIAN, (1.0, 0.1, 30))], DELTA).curve()
    one = plds.from_gaussian_mechanism(1.0, sampling_prob=0.1, value_discretization_interval=1e-3)
    deltas = one.self_compose(30).get_delta_for_epsilon(found.epsilons[:200:50].tolist())
    np.testing.assert_allclose(found.deltas[:200:50], deltas, rtol=2e-3)


def test_nothing_released_leaves_an_attacker_with_guesses():
    found = report([charged(EVERYONE, NoRelease())], DELTA)
    np.testing.assert_allclose(found.curve().least_miss(ALPHA), 1 - ALPHA, atol=1e-12)
    assert found.curve().success(0.2) == pytest.approx(0.8)
    assert "at most 50 % (zero_out) or 50 % (replace)" in str(found)


def test_what_has_no_guarantee_has_no_curve_and_no_words():
    without = report([charged(EVERYONE, GAUSSIAN, (0.0, 1.0, 1))], DELTA)
    with pytest.raises(ValueError, match="no trade-off curve: zero_out, joint_dp: no guarantee"):
        without.curve()
    assert without.in_words() == ""
    written = report([charged(EVERYONE, GAUSSIAN, (4.0, 1.0, 1))], DELTA)
    read = Report.from_json(written.to_json())
    with pytest.raises(ValueError, match="from a run, not from a file"):
        read.curve()
    assert read.in_words() == written.in_words() != ""
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        written.curve().least_miss(1.5)


def test_reports_of_older_files_say_nothing_of_an_attacker():
    written = report([charged(EVERYONE, GAUSSIAN, (4.0, 1.0, 1))], DELTA).to_json()
    for adjacency in ("zero_out", "replace"):
        for accountants in written[adjacency].values():
            for fields in accountants.values():
                del fields["advantage"]
    read = Report.from_json(written)
    assert read.in_words() == ""
    assert all(each.advantage is None for each in read.guarantees)
