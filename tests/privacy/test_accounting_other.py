"""Accountants for pure-ε steps, for cohorts without replacement, and the central limit theorem."""

import math
from typing import Any

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution

from fedjaxsim.privacy.accounting import (
    clt,
    composition,
    gaussian,
    mixture,
    pld,
    randomized_response,
    rdp,
    rdp_without_replacement,
)
from fedjaxsim.privacy.accounting.randomized_response import Answers
from fedjaxsim.privacy.events import Entry, PrivacyEvent, SamplingScheme

GAUSSIAN, ACCOUNTANTS = PrivacyEvent("gaussian"), ("basic", "randomized_response")


PURE, POISSON = PrivacyEvent("pure", zero_out=0.5, replace=1.0), SamplingScheme("poisson", 9, 9)


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
    ("kinds", "tolerance"),
    [
        ([(0.1, 1.0, 12)], 1e-9),
        ([(2.0, 1.0, 5)], 1e-9),
        ([(1.5, 0.1, 12)], 1e-9),
        ([(0.3, 1.0, 4), (0.5, 1.0, 5), (0.011, 1.0, 3)], 1e-3),
        ([(1.5, 0.2, 5), (0.7, 0.2, 4), (0.3, 1.0, 3)], 1e-3),
        ([(1e-3, 1.0, 8), (2.2e-3, 1.0, 4)], 1e-3),
    ],
)
def test_pure_rounds_cost_what_all_answers_of_randomized_response_say(kinds, tolerance):
    # With p < 1 the client's answer is the other one's with probability 1 − p.
    entries = [Entry(2 * each, p, number) for each, p, number in kinds]
    found = randomized_response.profile(
        randomized_response.answers(entries, PURE, "zero_out", sampled=True)
    )
    single = [(each, p) for each, p, number in kinds for _ in range(number)]
    total = sum(math.log1p(p * math.expm1(each)) for each, p in single)
    for epsilon in total * np.array([0.0, 0.1, 0.37, 0.62, 0.9]):
        exact = by_enumeration(epsilon, single)
        assert found.delta(epsilon) == pytest.approx(exact, rel=tolerance, abs=1e-12)
        assert found.delta(epsilon) >= exact * (1 - 1e-9) - 1e-15
        if exact > 1e-9:
            assert found.epsilon(exact) == pytest.approx(epsilon, rel=tolerance, abs=1e-3 * total)
    assert found.delta(total * 1.001) == pytest.approx(0, abs=1e-11)


@pytest.mark.parametrize("p", [0.2, 1.0])
def test_no_pure_release_costs_more_than_its_randomized_response(p):
    # Laplace noise, by dp_accounting.
    loss = privacy_loss_distribution.from_laplace_mechanism(1.0, sampling_prob=p).self_compose(10)
    rounds = randomized_response.answers([Entry(2.0, p, 10)], PURE, "zero_out", sampled=True)
    found = randomized_response.profile(rounds)
    for epsilon in (0.1, 0.5, 1.0):
        assert loss.get_delta_for_epsilon(epsilon) <= found.delta(epsilon)


def test_a_huge_pure_round_does_not_overflow_and_none_is_free():
    def epsilon(*rounds):
        return randomized_response.profile([Answers(*each) for each in rounds]).epsilon(1e-5)

    assert epsilon((1e4, 1e4, 3)) == pytest.approx(3e4)
    assert epsilon((math.inf, math.inf, 1), (1.0, 1.0, 1)) == math.inf
    assert epsilon() == epsilon((0.0, 0.0, 5)) == 0
    # A billion rounds are Gaussian: μ = √T ε.
    assert epsilon((1e-5, 1e-5, 10**9)) == pytest.approx(
        gaussian.epsilon(1e-5, math.sqrt(0.1)), rel=1e-4
    )


def test_basic_composition_is_the_sum_at_every_delta_and_never_the_smaller_bound():
    full, event = SamplingScheme("full", 10, 10), PURE
    for entries in ([Entry(0.3, 1.0, 7), Entry(2.0, 1.0, 2)], [Entry(1e-3, 1.0, 10**5)]):
        total = sum(entry.rounds * entry.noise_multiplier for entry in entries)
        cases: Any = (("zero_out", 0.5), ("replace", 1.0))
        for adjacency, scale in cases:
            ask = entries, full, event, adjacency, "joint_dp"
            basic, best = (composition.profile(*ask, name) for name in ACCOUNTANTS)
            for delta in (1e-12, 1e-5, 0.3):
                assert basic.epsilon(delta) == pytest.approx(scale * total, rel=1e-15)
                assert best.epsilon(delta) <= basic.epsilon(delta)
            assert basic.delta(scale * total * (1 + 1e-9)) == 0
            assert basic.delta(scale * total * (1 - 1e-9)) == 1
    assert composition.default_accountants(full, event, "replace", "joint_dp") == ACCOUNTANTS[1:]


def laplace_sensitivity_grid(z):
    """Noise of density ∝ exp(−|x|/z) for messages −1, 0 and 1, on a grid with the peaks."""
    x = np.arange(-3000, 3001) / 1000
    return {message: np.exp(-np.abs(x - message) / z) for message in (-1, 0, 1)}


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.7, 1.0])
@pytest.mark.parametrize("z", [0.02, 0.5, 20.0])
def test_a_sampled_pure_release_costs_what_the_densities_of_neighbours_say(z, p):
    density, entry = laplace_sensitivity_grid(z), Entry(2 / z, p, 1)

    def worst(one, other):
        mixed = [p * density[k] + (1 - p) * density[0] for k in (one, other)]
        return float(np.max(np.abs(np.log(mixed[0]) - np.log(mixed[1]))))

    cases: Any = (("zero_out", (1, 0)), ("replace", (1, -1)))
    for adjacency, pair in cases:
        [found] = randomized_response.answers([entry], PURE, adjacency, sampled=True)
        assert found.high == pytest.approx(worst(*pair), rel=1e-9)
    zero_out = randomized_response.answers([entry], PURE, "zero_out", sampled=True)[0].high
    if z > 0.1:
        assert zero_out == pytest.approx(math.log(1 + p * (math.exp(1 / z) - 1)), rel=1e-9)


@pytest.mark.parametrize("p", [0.05, 0.6])
def test_between_messages_that_are_not_opposite_the_worst_densities_are_found_by_search(p):
    # Ratios a/c and b/c within e^±s of 1 and e^±r of one another, for Gram matrices r = √2 s.
    s = 1.3
    event = PrivacyEvent("pure", zero_out=1 / math.sqrt(2), replace=1.0)
    entry = Entry(s * math.sqrt(2), p, 1)
    logs = np.linspace(-s, s, 801)
    a, b = np.meshgrid(logs, logs)
    cost = np.abs(np.log(p * np.exp(a) + 1 - p) - np.log(p * np.exp(b) + 1 - p))
    largest = np.max(cost[np.abs(a - b) <= math.sqrt(2) * s + 1e-12])
    found = randomized_response.amplified(entry, event, "replace")
    assert largest <= found < largest * 1.005


@pytest.mark.parametrize("kind", ["fixed", "full", "capped"])
def test_without_independent_cohorts_nothing_is_amplified(kind):
    scheme = SamplingScheme(kind, 10, 10 if kind == "full" else 5, 4 if kind == "capped" else None)
    entries = [Entry(2.0, scheme.capacity / 10, 3)]
    ask = entries, scheme, PrivacyEvent("pure"), "zero_out", "joint_dp", "basic"
    assert composition.profile(*ask).epsilon(1e-5) == 6.0


def test_cohorts_over_capacity_take_what_sampling_has_saved():
    event, entries = PrivacyEvent("pure", zero_out=1.0, replace=2.0), [Entry(0.5, 0.1, 2)]

    def epsilon(capacity, accountant):
        scheme = SamplingScheme("poisson", 100, capacity)
        ask = entries, scheme, event, "zero_out", "joint_dp", accountant
        return composition.profile(*ask).epsilon(1e-5)

    sampled = 2 * math.log(1 + 0.1 * (math.exp(0.5) - 1))
    assert epsilon(100, "basic") == pytest.approx(sampled)
    # A cohort above 12 comes once in a few rounds: only what holds for any cohort is left.
    assert epsilon(12, "basic") == pytest.approx(1.0)


def without_replacement(q, z, order):
    """Theorem 27 of Wang, Balle and Kasiviswanathan 2019, term by term in 200 digits."""
    with mpmath.workdps(200):
        q, z = mpmath.mpf(q), mpmath.mpf(z)
        moment = [mpmath.exp(mpmath.mpf(i * (i - 1)) / (2 * z * z)) for i in range(order + 2)]

        def difference(n):
            return sum((-1) ** (n - i) * mpmath.binomial(n, i) * moment[i] for i in range(n + 1))

        total = 1 + q**2 * mpmath.binomial(order, 2) * min(4 * (moment[2] - 1), 2 * moment[2])
        for j in range(3, order + 1):
            middle = 4 * mpmath.sqrt(difference(2 * (j // 2)) * difference(2 * ((j + 1) // 2)))
            total += q**j * mpmath.binomial(order, j) * min(middle, 2 * moment[j])
        return float(mpmath.log(total) / (order - 1))


@pytest.mark.parametrize("z", [1.0, 4.0, 20.0])
def test_without_replacement_is_the_theorem_at_half_the_noise(z):
    values = rdp_without_replacement.compose([Entry(z, 0.1, 7)], 10, 100, distance=2.0)
    for order in (2, 3, 5, 16):
        expected = 7 * without_replacement(0.1, z / 2, order)
        assert values[rdp.INTEGER_ORDERS.index(order)] == pytest.approx(expected, rel=1e-9)


def test_without_replacement_of_all_clients_is_the_gaussian_mechanism():
    values = rdp_without_replacement.compose([Entry(4.0, 1.0, 3)], 50, 50, distance=2.0)
    np.testing.assert_allclose(values, 3 * 4 * np.array(rdp.INTEGER_ORDERS) / (2 * 16))


@pytest.mark.parametrize(("z", "cohort", "rounds"), [(10.0, 20, 2000), (2.0, 10, 500)])
def test_the_released_sequence_gets_the_smaller_of_both_sound_numbers(z, cohort, rounds):
    scheme = SamplingScheme("fixed", 1000, cohort)
    entries = [Entry(z, cohort / 1000, rounds)]
    for adjacency in composition.ADJACENCIES:
        names = composition.default_accountants(scheme, GAUSSIAN, adjacency, "released_sequence")
        assert set(names) == {"mixture", "rdp_without_replacement"}
        bound = rdp.epsilon(
            rdp_without_replacement.compose(entries, cohort, 1000, 2.0), 1e-5, rdp.INTEGER_ORDERS
        )
        named = composition.profile(
            entries, scheme, GAUSSIAN, adjacency, "released_sequence", "rdp_without_replacement"
        )
        assert named.epsilon(1e-5) == bound
        # If all others' messages are zero the pair is the one of Poisson sampling: a lower bound.
        assert bound > pld.profile(entries, GAUSSIAN, replace=True).epsilon(1e-5)
        # And here hiding who took part is worth a lot.
        assert bound < mixture.profile(entries, cohort / 1000, 1).epsilon(1e-5)


def test_the_central_limit_understates():
    entries = [Entry(0.65, 20 / 9343, 400)]
    epsilon = gaussian.epsilon(1e-5, clt.mu(entries))
    assert epsilon == pytest.approx(0.465, abs=5e-4)
    assert pld.profile(entries, GAUSSIAN, False).epsilon(1e-5) == pytest.approx(1.41, abs=5e-3)
    assert clt.mu([Entry(0.01, 0.1, 1)]) == math.inf
    # Rounds add in squares: 3² + 4² = 5² for T = 9 and 16 equal rounds.
    one = clt.mu([Entry(1.0, 0.1, 1)])
    assert clt.mu([Entry(1.0, 0.1, 9), Entry(1.0, 0.1, 16)]) == pytest.approx(5 * one)


def test_the_central_limit_is_asked_for_by_name():
    entries, scheme = [Entry(0.65, 20 / 9343, 400)], SamplingScheme("poisson", 9343, 9343)
    profile = composition.profile(entries, scheme, GAUSSIAN, "zero_out", "joint_dp", "clt")
    assert composition.status("clt", entries, scheme) == "approximate"
    assert profile.epsilon(1e-5) == pytest.approx(0.465, abs=5e-4)
