"""Private selection: the published bounds, exact distributions, and an attack on the plain one."""

import math

import numpy as np
import pytest
from scipy.stats import norm
from support.plans import compose

from fedjaxsim.privacy import selection
from fedjaxsim.privacy.accounting import rdp
from fedjaxsim.privacy.entries import Entry, SamplingScheme
from fedjaxsim.privacy.events import GAUSSIAN, Prepared, PrivacySpend

ORDERS = tuple(np.geomspace(1.05, 2000, 4000))


@pytest.mark.parametrize(
    ("eta", "mean"),
    [
        pytest.param(eta, mean, marks=[] if mean == 10.0 and eta <= 1 else [pytest.mark.thorough])
        for eta in (-0.5, 0.0, 0.5, 1.0, 3.0)
        for mean in (1.5, 10.0, 50.0)
    ],
)
def test_numbers_of_runs_have_their_mean(eta, mean):
    runs = selection.with_mean(eta, mean)
    pmf = runs.pmf(400_000)
    assert pmf.sum() == pytest.approx(1, abs=1e-6)
    assert np.arange(1, len(pmf) + 1) @ pmf == pytest.approx(mean, rel=1e-3)
    assert runs.mean == pytest.approx(mean, rel=1e-9)
    # P(K = k + 1)/P(K = k) = (1 − γ)(k + η)/(k + 1): their Definition of D_{η,γ}.
    k = np.arange(1, 6)
    ratios = (1 - runs.gamma) * (k + eta) / (k + 1)
    np.testing.assert_allclose(pmf[1:6] / pmf[:5], ratios)
    drawn = [runs.draw(np.random.default_rng(seed)) for seed in range(2000)]
    spread = math.sqrt((np.arange(1, len(pmf) + 1) ** 2 @ pmf - mean**2) / 2000)
    assert np.mean(drawn) == pytest.approx(mean, abs=4 * spread)


def test_one_is_geometric_and_zero_is_logarithmic():
    k = np.arange(1, 30)
    geometric = selection.NegativeBinomial(1.0, 0.2)
    np.testing.assert_allclose(geometric.pmf(29), 0.2 * 0.8 ** (k - 1))
    logarithmic = selection.NegativeBinomial(0.0, 0.2)
    np.testing.assert_allclose(logarithmic.pmf(29), 0.8**k / (k * math.log(5)))


def test_the_price_of_a_geometric_number_is_the_closed_form_of_concentrated_privacy():
    """ρ(λ) = λρ: the best λ̂ is √(log(1/γ)/ρ), so ρ'(λ) = λρ + 4√(ρ L) − 2ρ + L/(λ − 1)."""
    rho, mean = 0.01, 50.0
    alphas, cost = np.array(ORDERS), math.log(mean)
    found = selection.parse("geometric:50").rdp(alphas * rho, ORDERS)
    exact = alphas * rho + 4 * math.sqrt(rho * cost) - 2 * rho + cost / (alphas - 1)
    np.testing.assert_allclose(found, exact, rtol=1e-5)
    assert np.min(found) == pytest.approx(6 * math.sqrt(rho * cost) - rho, rel=1e-4)


def test_a_pure_run_costs_about_three_of_itself_for_any_number_of_runs():
    """Liu and Talwar 2019: 3 ε for a geometric number; Papernot and Steinke 2022: (2 + η) ε."""
    pure = np.full(len(ORDERS), 0.1)
    huge = (*ORDERS, 1e12)
    for eta in (0.0, 0.5, 1.0):
        values = selection.with_mean(eta, 1000.0).rdp(np.append(pure, 0.1), huge)
        assert values[-1] == pytest.approx((2 + eta) * 0.1, rel=1e-4)


@pytest.mark.parametrize("spec", ["geometric:10", "logarithmic:10", "negative-binomial:-0.5:10"])
def test_the_bound_holds_for_the_best_gaussian_of_all(spec):
    """A run publishes x ~ N(±1/2, z²), its own score: the density of the best one is exact."""
    z, delta = 2.0, 1e-3
    runs = selection.parse(spec)
    x = np.linspace(-30, 30, 20_001)

    def best(mean):
        """The log density of the best: that of a run times E[K F^(K − 1)]."""
        density, below = norm.logpdf(x, mean, z), norm.cdf(x, mean, z)
        slope = -(1 + runs.eta) * np.log1p(-(1 - runs.gamma) * below)
        return density + math.log(runs.pmf(1)[0]) + slope

    p, q = best(0.5), best(-0.5)
    orders = rdp.INTEGER_ORDERS
    bound = runs.rdp(np.array(orders) / (2 * z**2), orders)
    step = x[1] - x[0]
    for one, other in ((p, q), (q, p)):
        for order, most in zip(orders[:15], bound, strict=False):
            moment = np.sum(np.exp(order * one - (order - 1) * other)) * step
            assert math.log(moment) / (order - 1) <= most * (1 + 1e-9) + 1e-9
        epsilon = rdp.epsilon(bound, delta, orders)
        assert np.sum(np.maximum(0, np.exp(one) - np.exp(epsilon + other))) * step <= delta


def test_plain_best_of_k_gives_away_what_a_random_number_hides():
    """A run says "good" with probability 1/2 or 1/4: log 2 of pure privacy; good is published."""
    good, other, k = 0.5, 0.25, 16
    assert math.log((1 - other) / (1 - good)) <= math.log(2)
    # The best of k is bad only if all are: an attacker who sees "bad" knows whom he has.
    plain = k * math.log((1 - other) / (1 - good))
    runs = selection.with_mean(1.0, k)

    def bad(p):  # E[(1 − p)^K] of a geometric number
        return runs.gamma * (1 - p) / (1 - (1 - runs.gamma) * (1 - p))

    hidden = math.log(bad(other) / bad(good))
    price = runs.rdp(np.full(len(ORDERS) + 1, math.log(2)), (*ORDERS, 1e12))[-1]
    assert hidden <= price < plain
    assert price == pytest.approx(3 * math.log(2), rel=1e-4)


def test_the_costliest_candidate_is_charged():
    scheme = SamplingScheme("full", 100, 100)
    cheap, dear = ([PrivacySpend(scheme, GAUSSIAN, (Entry(z, 1.0, 10),))] for z in (40.0, 20.0))
    runs = selection.parse("geometric:10")
    both = selection.epsilon(runs, [cheap, dear], 1e-3)
    assert both == selection.epsilon(runs, [dear], 1e-3) > selection.epsilon(runs, [cheap], 1e-3)
    assert both > rdp.epsilon(compose((20.0, 1.0, 10)), 1e-3)


def test_what_all_runs_share_is_charged_once_and_all_of_it():
    """Ranges of five candidates are five releases, whichever candidate is the best."""
    scheme, z = SamplingScheme("full", 100, 100), 4.0
    run = [PrivacySpend(scheme, GAUSSIAN, (Entry(40.0, 1.0, 10),))]
    ranges = [
        PrivacySpend(scheme, Prepared(digest=str(number)), (Entry(z, 1.0, 1),))
        for number in range(5)
    ]
    runs, orders = selection.parse("geometric:10"), rdp.INTEGER_ORDERS
    alone = runs.rdp(10 * np.array(orders) / (2 * 40.0**2), orders)
    for count in (1, 5):
        total = alone + count * np.array(orders) / (2 * z**2)
        spent = selection.epsilon(runs, 5 * [run], 1e-3, ranges[:count])
        assert spent == pytest.approx(rdp.epsilon(total, 1e-3, orders), rel=1e-9)


@pytest.mark.parametrize(
    "text", ["geometric", "geometric:1", "best:3", "negative-binomial:x:3", "logarithmic:nan"]
)
def test_other_words_are_refused(text):
    with pytest.raises(ValueError, match="geometric:MEAN"):
        selection.parse(text)
