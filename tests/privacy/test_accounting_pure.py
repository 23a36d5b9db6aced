"""Pure releases against all answers of randomized response, and dp_accounting."""

import functools
import math

import numpy as np
import pytest
from dp_accounting.pld import common, privacy_loss_distribution
from support.plans import charged, profile_of

from fedjaxsim.privacy.accounting import gaussian, randomized_response, rdp
from fedjaxsim.privacy.entries import ADJACENCIES, Adjacency, Entry, SamplingScheme
from fedjaxsim.privacy.events import Pure

PURE, POISSON = Pure(), SamplingScheme("poisson", 9, 9)
EVERYONE = SamplingScheme("full", 9, 9)


def pure(*kinds, adjacency: Adjacency = "zero_out", accountant="pld"):
    """The profile of rounds (ε, p, number)."""
    plan = charged(POISSON, PURE, *((1 / each, p, number) for each, p, number in kinds))
    return profile_of(plan, adjacency=adjacency, accountant=accountant)


def by_enumeration(epsilon, rounds):
    """δ of randomized response, (ε_t, p_t) each: the answers of all rounds, one by one."""
    one, other = np.ones(1), np.ones(1)
    for each, p in rounds:
        yes = np.array([1 / (1 + math.exp(-each)), 1 / (1 + math.exp(each))])
        no = yes[::-1]
        one = np.outer(one, p * yes + (1 - p) * no).ravel()
        other = np.outer(other, no).ravel()
    gains = (
        np.maximum(one - math.exp(epsilon) * other, 0),
        np.maximum(other - math.exp(epsilon) * one, 0),
    )
    return max(math.fsum(gain) for gain in gains)


@pytest.mark.parametrize(
    "kinds",
    [
        [(0.1, 1.0, 12)],
        [(2.0, 1.0, 5)],
        [(1.5, 0.1, 12)],
        [(0.3, 1.0, 4), (0.5, 1.0, 5), (0.011, 1.0, 3)],
        [(1.5, 0.2, 5), (0.7, 0.2, 4), (0.3, 1.0, 3)],
        [(1e-3, 1.0, 8), (2.2e-3, 1.0, 4)],
    ],
)
def test_pure_rounds_cost_what_all_answers_of_randomized_response_say(kinds):
    found, single = pure(*kinds), [(e, p) for e, p, number in kinds for _ in range(number)]
    total = sum(math.log1p(p * math.expm1(each)) for each, p in single)
    for epsilon in total * np.array([0.0, 0.1, 0.37, 0.62, 0.9]):
        exact = by_enumeration(epsilon, single)
        assert found.delta(epsilon) == pytest.approx(exact, rel=1e-3, abs=1e-12)
        assert found.delta(epsilon) >= exact * (1 - 1e-9)
        if exact > 1e-9:
            assert found.epsilon(exact) == pytest.approx(epsilon, rel=1e-3, abs=1e-3 * total)
    # At order ∞, RDP is the sum of ε at any δ.
    assert pure(*kinds, accountant="rdp").epsilon(1e-200) == pytest.approx(total)
    assert pure(*kinds, accountant="rdp").delta(total * (1 + 1e-9)) == 0


@pytest.mark.parametrize("high", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_renyi_divergences_are_those_of_the_two_answers(high, p):
    yes = 1 / (1 + math.exp(-high))
    other = np.array([1 - yes, yes])
    one = p * other[::-1] + (1 - p) * other
    entry, orders = Entry(1 / high, p, 1), (1.5, 2, 30)
    found = PURE.rdp(entry, "zero_out", orders, np)
    for order, value in zip(orders, found, strict=True):
        both = [
            math.log(np.sum(a**order * b ** (1 - order))) / (order - 1)
            for a, b in ((one, other), (other, one))
        ]
        assert value == pytest.approx(max(both), rel=1e-9)
    largest = PURE.largest_loss(entry, "zero_out")
    assert largest == pytest.approx(np.max(np.abs(np.log(one / other))))
    tiny = PURE.rdp(Entry(1e6, 1.0, 1), "zero_out", rdp.INTEGER_ORDERS, np)
    np.testing.assert_allclose(tiny, np.array(rdp.INTEGER_ORDERS) * 1e-12 / 2, rtol=1e-6)


def test_a_huge_pure_round_does_not_overflow_and_none_is_free():
    plan = charged(EVERYONE, PURE, (1e-4, 1.0, 3))
    assert profile_of(plan, accountant="rdp").epsilon(1e-5) == pytest.approx(3e4)
    assert pure().epsilon(1e-5) == pure((1.0, 0.0, 5)).epsilon(1e-5) == 0
    # Very many rounds are Gaussian: μ = √T ε.
    many = profile_of(charged(EVERYONE, PURE, (1e4, 1.0, 10**6))).epsilon(1e-5)
    assert many == pytest.approx(gaussian.epsilon(1e-5, 1 / 10), rel=1e-3)


def test_many_different_rounds_are_hardly_dearer_for_being_merged():
    noise = 1 / np.linspace(0.05, 0.4, 40)
    plan = charged(EVERYONE, PURE, *((float(z), 1.0, 1) for z in noise))
    each = (
        privacy_loss_distribution.from_privacy_parameters(
            common.DifferentialPrivacyParameters(1 / z, 0), value_discretization_interval=1e-4
        )
        for z in noise
    )
    whole = functools.reduce(lambda one, other: one.compose(other), each)
    expected = whole.get_epsilon_for_delta(1e-3)
    assert profile_of(plan).epsilon(1e-3) == pytest.approx(expected, rel=1e-3)


def laplace_sensitivity_grid(z):
    """Noise of density ∝ exp(−|x|/z) for messages −1, 0 and 1, on a grid with the peaks."""
    x = np.arange(-3000, 3001) / 1000
    return {message: np.exp(-np.abs(x - message) / z) for message in (-1, 0, 1)}


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.7, 1.0])
@pytest.mark.parametrize("z", [0.02, 0.5, 20.0])
def test_a_sampled_pure_release_costs_what_the_densities_of_neighbours_say(z, p):
    density, entry = laplace_sensitivity_grid(z), Entry(z, p, 1)

    def worst(one, other):
        mixed = [p * density[k] + (1 - p) * density[0] for k in (one, other)]
        return float(np.max(np.abs(np.log(mixed[0]) - np.log(mixed[1]))))

    for adjacency, pair in zip(ADJACENCIES, ((1, 0), (1, -1)), strict=True):
        found = randomized_response.answer(entry, 2.0, adjacency)
        assert found[0] == pytest.approx(worst(*pair), rel=1e-9)
    zero_out = randomized_response.answer(entry, 2.0, "zero_out")[0]
    if z > 0.1:
        assert zero_out == pytest.approx(math.log(1 + p * (math.exp(1 / z) - 1)), rel=1e-9)


@pytest.mark.parametrize("p", [0.05, 0.6])
def test_between_messages_that_are_not_opposite_the_worst_densities_are_found_by_search(p):
    # Ratios a/c and b/c within e^±s of 1 and e^±r of one another, for Gram matrices r = √2 s.
    s = 1.3
    logs = np.linspace(-s, s, 801)
    a, b = np.meshgrid(logs, logs)
    cost = np.abs(np.log(p * np.exp(a) + 1 - p) - np.log(p * np.exp(b) + 1 - p))
    largest = np.max(cost[np.abs(a - b) <= math.sqrt(2) * s + 1e-12])
    found = randomized_response.answer(Entry(1 / s, p, 1), math.sqrt(2), "replace")[0]
    assert largest <= found < largest * 1.005


@pytest.mark.parametrize("kind", ["fixed", "full", "groups"])
def test_without_independent_cohorts_nothing_is_amplified(kind):
    groups = 2 if kind == "groups" else None
    scheme = SamplingScheme(kind, 10, 10 if kind == "full" else 5, groups)
    # A client takes part in three rounds.
    plan = charged(scheme, PURE, (0.5, scheme.capacity / 10, 3 * (groups or 1)))
    assert profile_of(plan, accountant="rdp").epsilon(1e-9) == pytest.approx(6.0)
