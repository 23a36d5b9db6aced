"""Accountants for pure-ε steps, for cohorts without replacement, and the central limit theorem."""

import math
from typing import Any

import mpmath
import numpy as np
import pytest
from scipy.special import comb

from fedjaxsim.privacy.accounting import (
    clt,
    composition,
    gaussian,
    kov,
    mixture,
    pld,
    rdp,
    rdp_without_replacement,
)
from fedjaxsim.privacy.events import Entry, PrivacyEvent, SamplingScheme

GAUSSIAN = PrivacyEvent("gaussian")


def steps(epsilon, rounds):
    return Entry(epsilon, 1.0, rounds)


def randomized_response_epsilon(epsilon, rounds, delta):
    """The exact optimum for equal steps (Kairouz, Oh and Viswanath 2017, Theorem 3.3)."""
    best = rounds * epsilon
    for i in range(rounds // 2 + 1):
        spent = (
            sum(
                comb(rounds, k)
                * (math.exp((rounds - k) * epsilon) - math.exp((rounds - 2 * i + k) * epsilon))
                for k in range(i)
            )
            / (1 + math.exp(epsilon)) ** rounds
        )
        if spent <= delta:
            best = min(best, (rounds - 2 * i) * epsilon)
    return best


@pytest.mark.parametrize(("epsilon", "rounds"), [(0.1, 30), (0.01, 60), (1.0, 10)])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_composition_of_pure_steps_is_between_the_optimum_and_the_sum(epsilon, rounds, delta):
    bound = kov.compose([steps(epsilon, rounds)], delta)
    assert randomized_response_epsilon(epsilon, rounds, delta) <= bound
    assert bound <= rounds * epsilon * (1 + 1e-12)


def test_composition_of_pure_steps_by_hand():
    entries = [steps(0.1, 100), steps(0.2, 50)]
    squares = 100 * 0.01 + 50 * 0.04
    drift = 100 * 0.1 * (math.e**0.1 - 1) / (math.e**0.1 + 1)
    drift += 50 * 0.2 * (math.e**0.2 - 1) / (math.e**0.2 + 1)
    # √3/1e-5 + e is more than 1/1e-5, so the plain logarithm counts.
    assert kov.compose(entries, 1e-5) == pytest.approx(
        drift + math.sqrt(2 * squares * math.log(1e5))
    )
    # With √Σε² = 1e-3 and δ = 0.3 it is the other one: e + 1e-3/0.3 is less than 1/0.3.
    small = [steps(1e-4, 100)]
    drift = 100 * 1e-4 * math.tanh(5e-5)
    expected = drift + math.sqrt(2e-6 * math.log(math.e + 1e-3 / 0.3))
    assert kov.compose(small, 0.3) == pytest.approx(expected)
    assert kov.compose(entries, 0.0) == pytest.approx(20.0)


def test_a_huge_step_does_not_overflow_and_none_is_free():
    assert kov.compose([steps(1e4, 3)], 1e-5) == 3e4
    assert kov.compose([], 1e-5) == 0
    assert kov.compose([steps(0.0, 5)], 1e-5) == 0
    with pytest.raises(ValueError, match="delta"):
        kov.compose([], 1.0)


def test_basic_composition_is_the_sum_at_every_delta_and_never_the_smaller_bound():
    full, event = (
        SamplingScheme("full", 10, 10),
        PrivacyEvent("pure", zero_out=0.5, replace=1.0),
    )
    for entries in ([Entry(0.3, 1.0, 7), Entry(2.0, 1.0, 2)], [Entry(1e-3, 1.0, 10**5)]):
        total = sum(entry.rounds * entry.noise_multiplier for entry in entries)
        cases: Any = (("zero_out", 0.5), ("replace", 1.0))
        for adjacency, scale in cases:
            ask = entries, full, event, adjacency, "joint_dp"
            basic, best = (composition.profile(*ask, name) for name in ("basic", "kov"))
            for delta in (1e-12, 1e-5, 0.3):
                assert basic.epsilon(delta) == pytest.approx(scale * total, rel=1e-15)
                assert best.epsilon(delta) <= basic.epsilon(delta)
            assert basic.delta(scale * total * (1 + 1e-9)) == 0
            assert basic.delta(scale * total * (1 - 1e-9)) == 1
    assert composition.default_accountants(full, event, "replace", "joint_dp") == ("kov",)


def laplace_sensitivity_grid(z):
    """Noise of density ∝ exp(−|x|/z) for messages −1, 0 and 1, on a grid with the peaks."""
    x = np.arange(-3000, 3001) / 1000
    return {message: np.exp(-np.abs(x - message) / z) for message in (-1, 0, 1)}


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.7, 1.0])
@pytest.mark.parametrize("z", [0.02, 0.5, 20.0])
def test_a_sampled_pure_release_costs_what_the_densities_of_neighbours_say(z, p):
    density, entry = laplace_sensitivity_grid(z), Entry(2 / z, p, 1)
    event = PrivacyEvent("pure", zero_out=0.5, replace=1.0)

    def worst(one, other):
        mixed = [p * density[k] + (1 - p) * density[0] for k in (one, other)]
        return float(np.max(np.abs(np.log(mixed[0]) - np.log(mixed[1]))))

    poisson = SamplingScheme("poisson", 1000, 1000)
    cases: Any = (("zero_out", (1, 0)), ("replace", (1, -1)))
    for adjacency, pair in cases:
        [found] = composition.pure_rounds([entry], poisson, event, adjacency)
        assert found.noise_multiplier == pytest.approx(worst(*pair), rel=1e-9)
    zero_out = composition.pure_rounds([entry], poisson, event, "zero_out")[0].noise_multiplier
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
    found = composition.pure_rounds([entry], SamplingScheme("poisson", 9, 9), event, "replace")[0][
        0
    ]
    assert largest <= found < largest * 1.005


@pytest.mark.parametrize("kind", ["fixed", "full", "capped"])
def test_without_independent_cohorts_nothing_is_amplified(kind):
    scheme = SamplingScheme(kind, 10, 10 if kind == "full" else 5, 4 if kind == "capped" else None)
    entry = Entry(2.0, scheme.capacity / 10, 3)
    found = composition.pure_rounds([entry], scheme, PrivacyEvent("pure"), "zero_out")
    assert found == [entry]


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


@pytest.mark.parametrize("entries", [[steps(0.1, 100)], [steps(1e-4, 1000), steps(0.01, 5)]])
def test_the_profile_of_pure_steps_inverts(entries):
    profile = kov.profile(entries)
    total = sum(entry.rounds * entry.noise_multiplier for entry in entries)
    for delta in (0.3, 1e-2, 1e-5, 1e-9):
        epsilon = profile.epsilon(delta)
        if epsilon < total:
            assert profile.delta(epsilon) == pytest.approx(delta, rel=1e-9)
    assert profile.delta(total) == 0
    assert profile.delta(0.0) == 1


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
