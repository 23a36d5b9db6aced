"""Scopes of accountants, the profile of failure, and cohorts of a fixed size."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from fedjaxsim.privacy.accounting import composition, gaussian, mixture
from fedjaxsim.privacy.accounting.composition import require_match
from fedjaxsim.privacy.accounting.profile import with_failure
from fedjaxsim.privacy.events import Entry, PrivacyEvent, SamplingScheme

GAUSSIAN = PrivacyEvent("gaussian")
PURE = PrivacyEvent("pure")
POISSON = SamplingScheme("poisson", 205, 205)
FIXED = SamplingScheme("fixed", 205, 100)
CAPPED = SamplingScheme("capped", 205, 100, max_participations=5)
EVERYONE = SamplingScheme("full", 205, 205)


@pytest.mark.parametrize(
    ("accountant", "scheme", "event", "allowed"),
    [
        ("pld", FIXED, GAUSSIAN, "mixture"),
        ("rdp", EVERYONE, GAUSSIAN, "gaussian"),
        ("gaussian", POISSON, GAUSSIAN, "pld or rdp"),
        ("mixture", POISSON, GAUSSIAN, "pld"),
        ("pld", POISSON, PrivacyEvent("no_release"), "no ε is known"),
        ("gaussian", EVERYONE, PrivacyEvent("unprotected"), "no ε is known"),
        ("rdp_without_replacement", POISSON, GAUSSIAN, "pld"),
        ("randomized_response", EVERYONE, GAUSSIAN, "gaussian"),
        ("pld", POISSON, PURE, "randomized_response"),
        ("clt", FIXED, GAUSSIAN, "mixture"),
    ],
)
def test_a_mismatch_names_both_and_what_is_allowed(accountant, scheme, event, allowed):
    with pytest.raises(ValueError, match=allowed) as error:
        require_match(accountant, scheme, event)
    assert accountant in str(error.value)
    assert scheme.kind in str(error.value)


def test_an_unknown_accountant_is_refused():
    with pytest.raises(ValueError, match="accountant"):
        require_match("moments", POISSON, GAUSSIAN)


@pytest.mark.parametrize(
    ("entry", "scheme", "message"),
    [
        (Entry(1.0, 0.5, 1), EVERYONE, "sampling_rate"),
        (Entry(1.0, 0.5, 1), FIXED, "sampling_rate"),
        (Entry(-1.0, 0.5, 1), POISSON, "noise_multiplier"),
        (Entry(math.nan, 0.5, 1), POISSON, "noise_multiplier"),
        (Entry(1.0, 1.5, 1), POISSON, "sampling_rate"),
        (Entry(1.0, 0.5, -1), POISSON, "rounds"),
    ],
)
def test_rounds_that_cannot_come_from_the_scheme_are_refused(entry, scheme, message):
    with pytest.raises(ValueError, match=message):
        composition.check_entries([entry], scheme)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "shuffled", "clients": 5, "capacity": 5}, "kind"),
        ({"kind": "poisson", "clients": 0, "capacity": 1}, "clients"),
        ({"kind": "poisson", "clients": 5, "capacity": 6}, "capacity"),
        ({"kind": "full", "clients": 5, "capacity": 4}, "capacity"),
        ({"kind": "capped", "clients": 5, "capacity": 4}, "max_participations"),
        (
            {"kind": "capped", "clients": 5, "capacity": 4, "max_participations": 0},
            "max_participations",
        ),
    ],
)
def test_schemes_are_validated(arguments, message):
    with pytest.raises(ValueError, match=message):
        SamplingScheme(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "laplace"}, "kind"),
        ({"kind": "gaussian", "zero_out": 0.0}, "zero_out"),
        ({"kind": "gaussian", "replace": math.inf}, "replace"),
        ({"kind": "gaussian", "replace": 2.5}, "replace"),
    ],
)
def test_events_are_validated(arguments, message):
    with pytest.raises(ValueError, match=message):
        PrivacyEvent(**arguments)


def test_overflow_is_a_union_bound_over_rounds():
    scheme = SamplingScheme("poisson", 100, 20)
    entries = [Entry(1.0, 0.1, 30), Entry(1.0, 0.05, 7)]
    expected = 30 * binom.sf(20, 100, 0.1) + 7 * binom.sf(20, 100, 0.05)
    assert composition.overflow_probability(entries, scheme) == pytest.approx(expected)
    assert composition.overflow_probability(entries, SamplingScheme("poisson", 100, 100)) == 0
    assert composition.overflow_probability([Entry(1.0, 0.9, 10**9)], scheme) == 1


@pytest.mark.parametrize("tau", [1e-12, 1e-9, 1e-7])
def test_failure_costs_its_probability_twice(tau):
    described = gaussian.profile(0.8)
    profile = with_failure(described, tau)
    epsilon = profile.epsilon(1e-5)
    assert profile.delta(1.0) == pytest.approx(described.delta(1.0) + (1 + math.e) * tau, rel=1e-12)
    assert described.delta(epsilon) + (1 + math.exp(epsilon)) * tau <= 1e-5
    # It is the smallest ε that meets the inequality.
    less = epsilon * (1 - 1e-6)
    assert described.delta(less) + (1 + math.exp(less)) * tau > 1e-5


def test_a_failure_that_no_epsilon_can_carry_is_not_certified():
    assert with_failure(gaussian.profile(0.8), 5e-6).epsilon(1e-5) == math.inf
    # At ε = 10 the failure alone costs more than δ.
    assert with_failure(gaussian.profile(3.0), 1e-9).epsilon(1e-5) == math.inf
    assert with_failure(gaussian.profile(3.0), 1e-13).epsilon(1e-5) < math.inf


@pytest.mark.parametrize(
    ("fraction", "z", "rounds", "delta", "sensitivity", "expected"),
    [
        (100 / 205, 25.0, 1000, 1 / 205, 1, 2.214),
        (100 / 205, 25.0, 1000, 1 / 205, 2, 5.526),
        (0.02, 10.0, 2000, 1e-4, 1, 2.308),
    ],
)
def test_fixed_size_reference_values(fraction, z, rounds, delta, sensitivity, expected):
    profile = mixture.profile([Entry(z, fraction, rounds)], fraction, sensitivity)
    assert profile.epsilon(delta) == pytest.approx(expected, abs=6e-4)


def test_fixed_size_is_the_mean_over_participations():
    entries, fraction = [Entry(2.0, 0.3, 6)], 0.3
    for epsilon in (0.0, 0.5, 3.0):
        expected = sum(
            binom.pmf(k, 6, fraction) * gaussian.delta(epsilon, 2 * math.sqrt(k) / 2.0)
            for k in range(1, 7)
        )
        assert mixture.profile(entries, fraction, 2).delta(epsilon) == pytest.approx(expected)


def test_fixed_size_of_the_whole_population_is_full_participation():
    profile = mixture.profile([Entry(5.0, 1.0, 40)], 1.0, 1)
    assert profile.epsilon(1e-5) == pytest.approx(gaussian.epsilon(1e-5, math.sqrt(40) / 5))


def test_fixed_size_with_several_noise_levels_is_a_close_upper_bound():
    z, other, fraction = 2.0, 3.0, 0.4
    entries = [Entry(z, fraction, 5), Entry(other, fraction, 4)]
    profile = mixture.profile(entries, fraction, 1)
    for epsilon in (0.1, 1.0, 3.0):
        expected = sum(
            binom.pmf(j, 5, fraction)
            * binom.pmf(k, 4, fraction)
            * gaussian.delta(epsilon, math.sqrt(j / z**2 + k / other**2))
            for j in range(6)
            for k in range(5)
        )
        assert expected * (1 - 1e-9) <= profile.delta(epsilon) <= expected * (1 + 1e-3)


def test_a_capped_client_may_meet_the_costliest_rounds():
    entries = [Entry(4.0, 0.1, 10), Entry(1.0, 0.1, 2), Entry(2.0, 0.1, 1)]
    capped = SamplingScheme("capped", 205, 100, max_participations=4)
    # Least noise first, but the largest ε first where the entries hold ε.
    assert composition.met_by_one_client(entries, capped, GAUSSIAN) == [
        Entry(1.0, 0.1, 2),
        Entry(2.0, 0.1, 1),
        Entry(4.0, 0.1, 1),
    ]
    assert composition.met_by_one_client(entries, capped, PURE) == [Entry(4.0, 0.1, 4)]
    assert composition.met_by_one_client(entries, POISSON, GAUSSIAN) == entries
    profile = composition.profile(
        [Entry(3.0, 100 / 205, 1000)], CAPPED, GAUSSIAN, "replace", "joint_dp", "gaussian"
    )
    assert profile.epsilon(1e-5) == gaussian.epsilon(1e-5, 2 * math.sqrt(5) / 3)


def test_poisson_sampling_at_rate_one_is_full_participation_if_all_fit():
    full, part = [Entry(1.0, 1.0, 3)], [Entry(1.0, 1.0, 3), Entry(1.0, 0.5, 1)]
    assert composition.effective_scheme(full, POISSON) == EVERYONE
    assert composition.effective_scheme(part, POISSON) is POISSON
    tight = SamplingScheme("poisson", 205, 204)
    assert composition.effective_scheme(full, tight) is tight


def test_no_noise_has_no_profile():
    profile = composition.profile(
        [Entry(0.0, 0.5, 1)], POISSON, GAUSSIAN, "zero_out", "joint_dp", "pld"
    )
    assert profile.epsilon(0.5) == math.inf
    assert profile.delta(10.0) == 1


def test_replacing_needs_an_accountant_that_knows_it():
    with pytest.raises(ValueError, match="'rdp'"):
        composition.profile([Entry(1.0, 0.5, 1)], POISSON, GAUSSIAN, "replace", "joint_dp", "rdp")


def test_fixed_size_cohorts_are_not_amplified_for_those_who_know_who_took_part():
    with pytest.raises(ValueError, match=r"released_sequence.*'zero_out'"):
        composition.profile(
            [Entry(1.0, 100 / 205, 1)],
            FIXED,
            GAUSSIAN,
            "zero_out",
            "joint_dp",
            "rdp_without_replacement",
        )


def test_exact_is_said_of_exact_numbers_only():
    one, two = [Entry(1.0, 1.0, 3)], [Entry(1.0, 1.0, 3), Entry(2.0, 1.0, 1)]
    assert composition.status("gaussian", two, EVERYONE) == "exact"
    assert composition.status("gaussian", one, CAPPED) == "upper_bound"
    assert composition.status("mixture", one, FIXED) == "exact"
    assert composition.status("mixture", two, FIXED) == "upper_bound"
    assert composition.status("pld", one, POISSON) == "upper_bound"


def test_an_approximation_is_never_chosen_by_default():
    for scheme in (POISSON, FIXED, CAPPED, EVERYONE):
        for event in (GAUSSIAN, PURE):
            for adjacency in composition.ADJACENCIES:
                for view in composition.VIEWS:
                    names = composition.default_accountants(scheme, event, adjacency, view)
                    assert names
                    assert "clt" not in names


@pytest.mark.thorough
def test_sampling_never_costs_more_than_taking_part_always():
    rng = np.random.default_rng(0)
    for z, p in zip(rng.uniform(0.7, 5, 5), rng.uniform(0.01, 0.9, 5), strict=True):
        for adjacency in composition.ADJACENCIES:
            sensitivity = {"zero_out": 1, "replace": 2}[adjacency]
            sampled = composition.profile(
                [Entry(z, p, 30)], POISSON, GAUSSIAN, adjacency, "joint_dp", "pld"
            ).epsilon(1e-5)
            assert sampled < gaussian.epsilon(1e-5, sensitivity * math.sqrt(30) / z)
