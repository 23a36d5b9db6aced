"""Charges of unlike kinds together, against what is known of the kinds alone."""

import math
from typing import Any

import pytest

from fedjaxsim.privacy.accounting import gaussian, heterogeneous, mixture, pld
from fedjaxsim.privacy.events import Entry, PrivacyEvent, PrivacySpend, SamplingScheme
from fedjaxsim.privacy.guarantee import report

GAUSSIAN, PURE = PrivacyEvent("gaussian"), PrivacyEvent("pure")
EVERYONE, POISSON = SamplingScheme("full", 100, 100), SamplingScheme("poisson", 100, 100)
FIXED, CAPPED = (
    SamplingScheme("fixed", 100, 10),
    SamplingScheme("capped", 100, 10, max_participations=3),
)
DELTA = 1e-5


def charged(scheme, event, *groups):
    return PrivacySpend(scheme, event, tuple(Entry(*group) for group in groups))


def epsilon(*charges, adjacency: Any = "zero_out", view: Any = "joint_dp", **options):
    accountant, delta = options.get("accountant", "pld"), options.get("delta", DELTA)
    return heterogeneous.profile(charges, adjacency, view, accountant).epsilon(delta)


@pytest.mark.parametrize("adjacency", ["zero_out", "replace"])
def test_full_participation_composes_exactly_under_any_scheme(adjacency):
    distance = 2 if adjacency == "replace" else 1
    mu = distance * math.sqrt(10 / 16 + 5 / 25 + 3 / 9)
    found = epsilon(
        charged(EVERYONE, GAUSSIAN, (4.0, 1.0, 10)),
        charged(POISSON, GAUSSIAN, (5.0, 1.0, 5)),
        charged(CAPPED, GAUSSIAN, (3.0, 0.1, 20)),  # three of them are met
        adjacency=adjacency,
    )
    assert found == pytest.approx(gaussian.epsilon(DELTA, mu), rel=1e-9)


@pytest.mark.parametrize("sensitivity", [1.0, 2.0])
def test_cohorts_of_a_fixed_size_are_their_mixture(sensitivity):
    exact = mixture.profile([Entry(6.0, 0.1, 50)], 0.1, sensitivity).epsilon(DELTA)
    found = epsilon(
        charged(FIXED, GAUSSIAN, (6.0, 0.1, 20)),
        charged(FIXED, GAUSSIAN, (6.0, 0.1, 30)),
        adjacency="zero_out" if sensitivity == 1 else "replace",
    )
    assert exact <= found < exact * 1.001


@pytest.mark.parametrize("adjacency", ["zero_out", "replace"])
def test_poisson_sampled_rounds_are_what_they_are_alone(adjacency):
    alone = pld.profile([Entry(1.0, 0.05, 300)], GAUSSIAN, adjacency == "replace").epsilon(DELTA)
    found = epsilon(
        charged(POISSON, GAUSSIAN, (1.0, 0.05, 100)),
        charged(SamplingScheme("poisson", 100, 99), GAUSSIAN, (1.0, 0.05, 200)),
        adjacency=adjacency,
    )
    assert found == pytest.approx(alone, rel=1e-3)


def test_pure_releases_of_two_samplers_compose():
    found = epsilon(charged(EVERYONE, PURE, (0.1, 1.0, 30)), charged(POISSON, PURE, (0.2, 0.5, 10)))
    halved = math.log((1 + math.exp(0.2)) / 2)  # sampled with probability ½
    # Many cheap rounds are nearly Gaussian: the losses have the variances 0.1² and p² 0.2².
    assert found == pytest.approx(gaussian.epsilon(DELTA, math.sqrt(0.3 + 0.1)), rel=0.05)
    # At a δ too small for anything else, the sum.
    few = [charged(EVERYONE, PURE, (0.1, 1.0, 1)), charged(POISSON, PURE, (0.2, 0.5, 1))]
    assert epsilon(*few, delta=1e-9) == pytest.approx(0.1 + halved, abs=3e-4)
    # Opposite messages: (1 + e^0.2)/(1 + e^−0.2) = e^0.2.
    assert epsilon(*few, delta=1e-9, adjacency="replace") == pytest.approx(0.4, abs=3e-4)


ALL = [
    charged(EVERYONE, GAUSSIAN, (20.0, 1.0, 10)),
    charged(POISSON, GAUSSIAN, (2.0, 0.05, 100), (3.0, 0.05, 10)),
    charged(FIXED, GAUSSIAN, (8.0, 0.1, 40)),
    charged(CAPPED, GAUSSIAN, (9.0, 0.1, 30)),
    charged(EVERYONE, PURE, (0.02, 1.0, 5)),
]


def test_both_accountants_are_bounds_and_the_tight_one_is_the_smaller():
    for view in ("joint_dp", "released_sequence"):
        tight = epsilon(*ALL, view=view)
        loose = epsilon(*ALL, view=view, accountant="rdp")
        assert tight < loose < 1.35 * tight
    assert heterogeneous.accountants(ALL, "zero_out") == ("pld", "rdp")
    assert heterogeneous.accountants(ALL, "replace") == ("pld",)
    assert heterogeneous.accountants(ALL[2:], "replace") == ("pld", "rdp")
    with pytest.raises(ValueError, match="'rdp'"):
        epsilon(*ALL, adjacency="replace", accountant="rdp")


@pytest.mark.thorough
def test_every_kind_that_is_added_costs_something_and_order_is_of_no_importance():
    spent = [report(ALL[:count], DELTA) for count in range(1, len(ALL) + 1)]
    for adjacency in ("zero_out", "replace"):
        values: list[Any] = [found.find(adjacency).epsilon for found in spent]
        assert values == sorted(values)
        assert len(set(values)) == len(values)
        parts: list[Any] = [report([part], DELTA).find(adjacency).epsilon for part in ALL]
        assert values[-1] > max(parts)
        backwards = report(ALL[::-1], DELTA).find(adjacency).epsilon
        assert backwards == pytest.approx(values[-1], rel=1e-6)


def test_cohorts_over_capacity_are_paid_for_by_all():
    tight = SamplingScheme("poisson", 100, 14)
    found = report([ALL[0], charged(tight, GAUSSIAN, (2.0, 0.05, 100))], DELTA).find("zero_out")
    assert any("exceeds the 14 places" in sentence for sentence in found.assumptions)
    assert found.epsilon is None  # a cohort of 15 comes once in ten thousand rounds
    assert "exceed the 14 places" in found.reason


def test_an_accountant_that_knows_one_kind_only_is_refused():
    with pytest.raises(ValueError, match="'mixture'"):
        report(ALL[1:3], DELTA, accountant="mixture")
    with pytest.raises(ValueError, match="kinds"):
        report([ALL[0], ALL[3]], DELTA, accountant="gaussian")
