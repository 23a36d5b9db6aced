"""Calibration meets the reported ε to 0.1 % and never exceeds it."""

import math
from typing import Any

import numpy as np
import pytest
from scipy.optimize import bisect

from fedjaxsim.privacy import calibration, guarantee
from fedjaxsim.privacy.accounting import gaussian
from fedjaxsim.privacy.entries import ADJACENCIES, Entry, SamplingScheme
from fedjaxsim.privacy.events import (
    GAUSSIAN,
    Gaussian,
    NoKnownCost,
    NoRelease,
    PrivacyEvent,
    PrivacySpend,
)

POISSON = SamplingScheme("poisson", 205, 205)


def largest_mu(epsilon, delta):
    """The μ whose exact profile meets (ε, δ)."""

    def excess(log_mu):
        return gaussian.log_delta(epsilon, math.exp(log_mu)) - math.log(delta)

    root: Any = bisect(excess, -20.0, 20.0, xtol=1e-14)
    return math.exp(root)


def spent(z, p, rounds, delta, scheme, event: PrivacyEvent = GAUSSIAN, **settings):
    """The ε of equal rounds."""
    charged = PrivacySpend(scheme, event, (Entry(z, p, rounds),))
    return guarantee.tight_epsilon([charged], delta, **settings)


def assert_meets(value, target):
    assert (1 - calibration.TOLERANCE) * target <= value <= target


@pytest.mark.parametrize(
    ("epsilon", "delta", "p", "rounds", "adjacency"),
    [
        (1.0, 1 / 205, 100 / 205, 200, "zero_out"),
        (1.0, 1 / 205, 100 / 205, 200, "replace"),
        (2.0, 1e-4, 0.01, 20000, "zero_out"),
        pytest.param(8.0, 1e-5, 20 / 9343, 400, "zero_out", marks=pytest.mark.thorough),
        (0.1, 1e-5, 0.001, 1000, "replace"),
        (3.0, 1e-5, 1.0, 100, "replace"),
    ],
)
def test_noise_meets_the_target_at_float32(epsilon, delta, p, rounds, adjacency):
    z = calibration.noise_multiplier(
        epsilon,
        delta,
        rounds=rounds,
        sampling_rate=p,
        scheme=POISSON,
        adjacency=adjacency,
    )
    assert z == float(np.float32(z))
    charged = float(np.float32(p))
    found = spent(z, charged, rounds, delta, POISSON, adjacency=adjacency)
    assert_meets(found, epsilon)


@pytest.mark.thorough
def test_the_tight_accountant_needs_less_noise_than_rdp():
    # RDP at integer orders asks for z = 16.8323 and z = 2.77982.
    z = calibration.noise_multiplier(
        1.0, 1 / 205, rounds=200, sampling_rate=100 / 205, scheme=POISSON
    )
    assert 0.8 * 16.8323 < z < 16.8323
    z = calibration.noise_multiplier(2.0, 1e-4, rounds=20000, sampling_rate=0.01, scheme=POISSON)
    assert 0.8 * 2.77982 < z < 2.77982


def test_without_sampling_noise_has_a_closed_form():
    scheme = SamplingScheme("full", 10, 10)
    gram = Gaussian(replace=math.sqrt(2))
    z = calibration.noise_multiplier(
        1.0, 1e-5, rounds=50, sampling_rate=1.0, scheme=scheme, event=gram, adjacency="replace"
    )
    exact = math.sqrt(2 * 50) / largest_mu(1.0, 1e-5)
    assert exact * (1 - 1e-6) <= z <= exact * (1 + calibration.TOLERANCE)


def test_capacity_is_part_of_the_price():
    small, large = SamplingScheme("poisson", 205, 30), POISSON
    plan = {"rounds": 100, "sampling_rate": 0.1}
    dear = calibration.noise_multiplier(0.5, 1e-5, scheme=small, **plan)
    cheap = calibration.noise_multiplier(0.5, 1e-5, scheme=large, **plan)
    assert dear > cheap
    assert_meets(spent(dear, float(np.float32(0.1)), 100, 1e-5, small), 0.5)


def test_cohorts_of_a_fixed_size_and_groups():
    for scheme in (
        SamplingScheme("fixed", 205, 20),
        SamplingScheme("groups", 205, 21, groups=10),
    ):
        z = calibration.noise_multiplier(
            1.0, 1e-5, rounds=100, sampling_rate=20 / 205, scheme=scheme
        )
        assert_meets(spent(z, 20 / 205, 100, 1e-5, scheme), 1.0)


def test_rounds_are_the_most_that_fit():
    plan = {"noise_multiplier": 4.0, "sampling_rate": 0.1, "scheme": POISSON}
    count = calibration.rounds(1.0, 1e-5, **plan)
    rate = float(np.float32(0.1))
    assert spent(4.0, rate, count, 1e-5, POISSON) <= 1.0
    assert spent(4.0, rate, count + 1, 1e-5, POISSON) > 1.0
    # Without sampling, T is the integer part of (μ z)².
    plan = {"noise_multiplier": 20.0, "sampling_rate": 1.0, "scheme": POISSON}
    assert calibration.rounds(1.0, 1e-5, **plan) == int((20 * largest_mu(1.0, 1e-5)) ** 2)


def test_rounds_at_the_ends():
    plan = {"sampling_rate": 0.5, "scheme": SamplingScheme("groups", 10, 5, groups=2)}
    assert calibration.rounds(1.0, 1e-5, noise_multiplier=1e7, **plan) == 2**31 - 1
    assert calibration.rounds(1.0, 1e-5, noise_multiplier=0.5, **plan) == 0


def test_sampling_rate_meets_the_target():
    p = calibration.sampling_rate(1.0, 1e-5, noise_multiplier=2.0, rounds=1000, scheme=POISSON)
    assert_meets(spent(2.0, p, 1000, 1e-5, POISSON), 1.0)
    largest = calibration.sampling_rate(
        1.0, 1e-5, noise_multiplier=500.0, rounds=1000, scheme=POISSON
    )
    assert largest == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": math.inf}, "epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"rounds": 0}, "rounds"),
        (
            {"event": NoRelease()},
            "calibrated",
        ),
        ({"sampling_rate": 1.5}, "sampling_rate"),
    ],
)
def test_values_are_validated(changes, message):
    plan = {"epsilon": 1.0, "delta": 1e-5, "rounds": 5, "sampling_rate": 0.5, "scheme": POISSON}
    with pytest.raises(ValueError, match=message):
        calibration.noise_multiplier(**{**plan, **changes})


def test_only_poisson_sampling_has_a_rate_to_choose():
    with pytest.raises(ValueError, match="scheme"):
        calibration.sampling_rate(
            1.0, 1e-5, noise_multiplier=2.0, rounds=5, scheme=SamplingScheme("fixed", 205, 20)
        )


@pytest.mark.parametrize("z", [0.11, 0.05, 1e-6])
def test_next_to_no_noise_gives_no_guarantee_by_any_method(z):
    charges = [PrivacySpend(POISSON, GAUSSIAN, (Entry(z, 3 / 206, 1000),))]
    for method in (guarantee.rdp_epsilon, guarantee.tight_epsilon):
        assert method(charges, 1e-5) > 1e3


EVERYONE = SamplingScheme("full", 205, 205)


@pytest.mark.parametrize("epsilon", [1e-6, 1e6])
def test_both_ends_of_the_range_of_epsilon_are_met(epsilon):
    plan = {"rounds": 3, "sampling_rate": 1.0, "scheme": EVERYONE}
    z = calibration.noise_multiplier(epsilon, 1e-5, **plan)
    exact = math.sqrt(3) / largest_mu(epsilon, 1e-5)
    assert exact * (1 - 1e-6) <= z <= exact * (1 + calibration.TOLERANCE)
    count = calibration.rounds(
        epsilon, 1e-5, noise_multiplier=z, sampling_rate=1.0, scheme=EVERYONE
    )
    assert count == 3


@pytest.mark.parametrize("epsilon", [0.99 * 1e-6, 1.01 * 1e6])
def test_beyond_the_range_of_epsilon_nothing_is_looked_for(epsilon):
    plan = {"sampling_rate": 1.0, "scheme": EVERYONE}
    with pytest.raises(ValueError, match="epsilon"):
        calibration.noise_multiplier(epsilon, 1e-5, rounds=3, **plan)
    with pytest.raises(ValueError, match="epsilon"):
        calibration.rounds(epsilon, 1e-5, noise_multiplier=1.0, **plan)


@pytest.mark.thorough
def test_where_a_client_hardly_takes_part_no_noise_is_found():
    # Whoever is out of all rounds is protected by that: δ(0) ≤ 1 − 0.9³ = 0.271 without any noise.
    with pytest.raises(ValueError, match="noise multiplier"):
        calibration.noise_multiplier(1.0, 0.3, rounds=3, sampling_rate=0.1, scheme=POISSON)


@pytest.mark.parametrize("z", [300.0, 1e4])
def test_very_many_rounds_meet_the_target_to_the_tolerance(z):
    # Without sampling, T is the integer part of (μ z)²: some 10⁵ and 10⁸.
    count = calibration.rounds(2.0, 1e-5, noise_multiplier=z, sampling_rate=1.0, scheme=EVERYONE)
    most = (z * largest_mu(2.0, 1e-5)) ** 2
    # ε grows at least as the root of T, so that it is met to less than twice the tolerance in T.
    assert (1 - 2 * calibration.TOLERANCE) * most <= count <= most
    assert spent(z, 1.0, count, 1e-5, EVERYONE) <= 2.0


class TestSecants:
    """The search behind all three, on costs whose inverse is known."""

    @pytest.mark.parametrize("power", [-3.0, -1.0, -0.3, 0.5, 1.0, 4.0])
    @pytest.mark.parametrize("start", [1e-4, 1.0, 1e4])
    def test_powers_are_met_from_any_start(self, power, start):
        calls = []

        def cost(x):
            calls.append(x)
            return 7 * x**power

        x = calibration._search(cost, 0.5, start, math.copysign(1.0, power))
        assert x is not None
        assert x == float(np.float32(x))
        assert_meets(cost(x), 0.5)
        assert len(calls) < 20

    def test_a_cost_that_is_zero_and_infinite_at_its_ends_is_met_in_between(self):
        def cost(x):
            return math.inf if x < 0.01 else max(0.0, 1 / x - 1)

        for start in (1e-3, 0.5, 100.0):
            x = calibration._search(cost, 3.0, start, -1.0)
            assert x is not None
            assert_meets(cost(x), 3.0)

    def test_where_the_cost_jumps_over_the_target_the_cheap_side_is_taken(self):
        x = calibration._search(lambda x: 1.0 if x >= 2 else 5.0, 3.0, 1.0, -1.0)
        assert x is not None
        assert 2 <= x < 2 * (1 + 1e-4)

    def test_the_ends_of_what_is_allowed(self):
        assert calibration._search(lambda x: x, 3.0, 1.0, 1.0, most=2.0) == 2.0
        assert calibration._search(lambda x: 1 / x, 3.0, 1.0, -1.0, least=0.5) == 0.5
        assert calibration._search(lambda x: math.inf, 3.0, 1.0, 1.0, most=2.0, least=1.0) is None


def test_a_plan_that_releases_nothing_is_free_and_one_without_a_guarantee_costs_infinity():
    assert spent(0.0, 1.0, 5, 1e-5, POISSON, NoRelease()) == 0
    without_cost = NoKnownCost()
    assert spent(1.0, 1.0, 5, 1e-5, POISSON, without_cost) == math.inf


@pytest.mark.parametrize(
    "adjacency", [pytest.param(each, marks=pytest.mark.thorough) for each in ADJACENCIES]
)
def test_targets_at_a_small_delta_are_met_for_either_adjacency(adjacency):
    scheme = SamplingScheme("poisson", 10**6, 10**6)
    plan: Any = {"scheme": scheme, "adjacency": adjacency}
    count = calibration.rounds(1.0, 1e-12, noise_multiplier=4.0, sampling_rate=0.00033, **plan)
    # RDP alone certifies 3,052,429 for zero-out, a quarter of it for twice the distance.
    assert count > (3_052_429 if adjacency == "zero_out" else 700_000)
    z = calibration.noise_multiplier(1.0, 1e-12, rounds=10_000, sampling_rate=0.00033, **plan)
    assert z < 1
    assert_meets(spent(z, float(np.float32(0.00033)), 10_000, 1e-12, **plan), 1.0)
    p = calibration.sampling_rate(2.0, 1e-10, noise_multiplier=1.0, rounds=10**6, **plan)
    assert p > 1e-4
