"""Reports: which numbers, with which status and words, and when there is none."""

import dataclasses
import json
import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.rdp import RdpAccountant

from fedjaxsim.privacy import guarantee
from fedjaxsim.privacy.accounting import gaussian, rdp
from fedjaxsim.privacy.assumptions import METRICS, SIMULATION, TRUSTED_SERVER, default_delta
from fedjaxsim.privacy.calibration import noise_multiplier
from fedjaxsim.privacy.entries import ADJACENCIES, Entry, SamplingScheme, round_up
from fedjaxsim.privacy.events import (
    Correlated,
    Gaussian,
    NoKnownCost,
    NoRelease,
    PrivacySpend,
    Pure,
)
from fedjaxsim.privacy.guarantee import rdp_epsilon, report, tight_epsilon
from fedjaxsim.privacy.samplers import poisson

GAUSSIAN = Gaussian()
POISSON = SamplingScheme("poisson", 1000, 1000)
EVERYONE = SamplingScheme("full", 1000, 1000)


def rounds_of(scheme, event, *groups, overflowed=False):
    entries = tuple(Entry(*group) for group in groups)
    return [PrivacySpend(scheme, event, entries, overflowed)]


def test_poisson_report():
    found = report(rounds_of(POISSON, GAUSSIAN, (1.0, 0.02, 2000)), 1e-4)
    for view in ("joint_dp", "released_sequence"):
        zero_out, replace = found.find("zero_out", view), found.find("replace", view)
        assert zero_out.epsilon == pytest.approx(4.8410, abs=6e-5)
        assert replace.epsilon == pytest.approx(8.3195, abs=6e-5)
        assert {zero_out.status, replace.status} == {"upper_bound"}
        assert {zero_out.accountant, replace.accountant} == {"pld"}
        assert {zero_out.unit, zero_out.sampling} == {"client", "poisson"}


def test_json_is_nested_and_plain():
    found = report(rounds_of(EVERYONE, GAUSSIAN, (4.0, 1.0, 10)), 1e-5)
    nested = json.loads(json.dumps(found.to_json(), allow_nan=False))
    fields = nested["replace"]["joint_dp"]["gaussian"]
    assert fields["epsilon"] == gaussian.epsilon(1e-5, 2 * math.sqrt(10) / 4)
    assert fields["delta"] == 1e-5
    assert fields["status"] == "exact"
    assert set(nested) == {"zero_out", "replace", "assumed"}
    assert set(nested["zero_out"]) == {"joint_dp", "released_sequence"}


def test_json_is_read_back():
    found = report(rounds_of(EVERYONE, GAUSSIAN, (4.0, 1.0, 10)), 1e-5)
    back = guarantee.Report.from_json(json.loads(json.dumps(found.to_json())))
    assert back.guarantees == found.guarantees
    assert (str(back), back.short()) == (str(found), found.short())
    nothing = report(rounds_of(EVERYONE, GAUSSIAN, (0.0, 1.0, 10)), 1e-5)
    assert guarantee.Report.from_json(nothing.to_json()).find("replace").epsilon is None
    for damaged in ({}, {"replace": 3}, {"replace": {"joint_dp": {"pld": {"epsilon": 1.0}}}}):
        with pytest.raises(ValueError, match="no privacy report"):
            guarantee.Report.from_json(damaged)


def test_text_says_what_it_rests_on_once():
    text = str(report(rounds_of(EVERYONE, GAUSSIAN, (4.0, 1.0, 10)), 1e-5))
    # 3.34141 is rounded up.
    assert "zero_out, joint_dp: ε = 3.3415 at δ = 1e-05 (gaussian)" in text
    for sentence in (TRUSTED_SERVER, METRICS, SIMULATION):
        assert text.count(sentence) == 1
    assert "1/(10 m)" not in text


def test_rounding_up_leaves_numbers_of_few_digits():
    # As floats, 0.14 and 0.55 are slightly above their decimals.
    values = [0.14, 0.55, 1e-5, 8.0, 0.1401, 7.9901, math.inf, 0.0]
    rounded = [round_up(value, 2) for value in values]
    assert rounded == [0.14, 0.55, 1e-5, 8.0, 0.15, 8.0, math.inf, 0.0]


def test_in_one_line():
    found = report(rounds_of(EVERYONE, GAUSSIAN, (4.0, 1.0, 10)), 1e-5)
    replaced = round_up(gaussian.epsilon(1e-5, 2 * math.sqrt(10) / 4))
    assert found.short() == (
        f"ε = 3.3415 zero-out, ε = {replaced:.5g} replace, δ = 1e-05 (joint DP, exact)"
    )
    assert report(rounds_of(POISSON, GAUSSIAN, (0.0, 0.5, 3)), 1e-5).short() == (
        "no guarantee: no noise was added"
    )
    nothing = report(rounds_of(EVERYONE, NoRelease(), (0.0, 1.0, 3)), 1e-5).short()
    assert nothing == "ε = 0 zero-out, ε = 0 replace, δ = 1e-05 (joint DP, exact)"


def test_in_one_line_with_one_adjacency_lost():
    half = report(rounds_of(POISSON, GAUSSIAN, (8.0, 0.01, 10)), 1e-5)
    assert half.short().endswith("replace, δ = 1e-05 (joint DP, upper bound)")
    lost = dataclasses.replace(half.guarantees[0], epsilon=None, reason="lost", adjacency="replace")
    mixed = dataclasses.replace(half, guarantees=(half.guarantees[0], lost)).short()
    assert "zero-out, no ε replace (lost), δ = 1e-05 (joint DP, upper bound)" in mixed


def test_a_weak_delta_is_called_weak():
    assert default_delta(205) == 1 / 2050
    with pytest.raises(ValueError, match="num_clients"):
        default_delta(0)
    groups = [(4.0, 1.0, 10)]
    at_default = report(rounds_of(EVERYONE, GAUSSIAN, *groups), default_delta(1000))
    assert "random client" not in str(at_default)
    few = report(rounds_of(SamplingScheme("full", 3, 3), GAUSSIAN, *groups), default_delta(3))
    assert "δ = 0.0333 is large" in str(few)
    assert "is large" not in str(at_default)
    assert "δ = 0.001 is above 1/(10 m)" in str(
        report(rounds_of(EVERYONE, GAUSSIAN, *groups), 1e-3)
    )


@pytest.mark.parametrize(
    ("charges", "reason"),
    [
        (rounds_of(POISSON, GAUSSIAN, (0.0, 0.5, 3)), "no noise was added"),
        (rounds_of(POISSON, GAUSSIAN, (1.0, 0.5, 3), (0.0, 0.5, 1)), "no noise was added"),
        (rounds_of(EVERYONE, Pure(), (0.0, 1.0, 3)), "no noise was added"),
        (rounds_of(POISSON, GAUSSIAN, (float("nan"), 0.5, 3)), "not a number"),
        (rounds_of(POISSON, NoKnownCost(), (1.0, 0.5, 3)), "no guarantee is known"),
        (rounds_of(POISSON, GAUSSIAN, (1.0, 0.5, 3), overflowed=True), "ledger overflowed"),
    ],
)
def test_no_guarantee_has_a_reason(charges, reason):
    found = report(charges, 1e-5)
    for one in found.guarantees:
        assert one.epsilon is None
        assert one.status == "none"
        assert reason in one.reason
        assert reason in str(one)
    assert '"epsilon": null' in json.dumps(found.to_json())


def test_nothing_released_costs_exactly_nothing():
    for found in (
        report(rounds_of(EVERYONE, NoRelease(), (0.0, 1.0, 50)), 1e-5),
        report(rounds_of(POISSON, GAUSSIAN), 1e-5),
    ):
        assert [one.epsilon for one in found.guarantees] == [0.0] * 4
        assert {one.status for one in found.guarantees} == {"exact"}


def test_no_release_is_not_judged_by_its_ledger():
    closed = rounds_of(EVERYONE, NoRelease(), (0.0, 1.0, 50), overflowed=True)
    assert report(closed, 1e-5).find("replace").epsilon == 0


def test_cohorts_over_capacity_are_paid_for():
    def found(capacity):
        scheme = SamplingScheme("poisson", 1000, capacity)
        return report(rounds_of(scheme, GAUSSIAN, (5.0, 0.1, 200)), 1e-5).find("zero_out")

    roomy, tight, over = (found(capacity) for capacity in (1000, 165, 120))
    low, middle, high = (each.epsilon for each in (roomy, tight, over) if each.epsilon is not None)
    assert low <= middle <= high
    assert low < high < 2 * low
    assert any("exceeds the 120 places" in sentence for sentence in over.assumptions)


@pytest.mark.parametrize(
    ("clients", "rate"),
    [
        (50, 0.5),
        pytest.param(1000, 0.1, marks=pytest.mark.thorough),
        pytest.param(100_000, 0.001, marks=pytest.mark.thorough),
    ],
)
def test_default_places_are_enough_for_any_epsilon_that_one_would_report(clients, rate):
    scheme = poisson(rate).for_clients(clients).scheme
    z = noise_multiplier(15.0, 1e-9, rounds=1000, sampling_rate=rate, scheme=scheme)
    found = report(rounds_of(scheme, GAUSSIAN, (z, rate, 1000)), 1e-9)
    assert found.find("zero_out").epsilon == pytest.approx(15, rel=1e-3)
    replace = found.find("replace").epsilon
    assert replace is not None
    assert replace > 15


def test_poisson_sampling_at_rate_one_is_exact():
    one = report(rounds_of(POISSON, GAUSSIAN, (4.0, 1.0, 10)), 1e-5).find("zero_out")
    assert (one.status, one.accountant, one.sampling) == ("exact", "gaussian", "poisson")


def test_fixed_size_is_not_amplified_for_the_other_clients():
    found = report(rounds_of(SamplingScheme("fixed", 1000, 20), GAUSSIAN, (10.0, 0.02, 2000)), 1e-4)
    assert found.find("zero_out").epsilon == pytest.approx(2.308, abs=6e-4)
    assert found.find("zero_out").accountant == "pld"


def test_values_are_validated():
    for delta in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="delta"):
            report(rounds_of(POISSON, GAUSSIAN), delta)
    with pytest.raises(ValueError, match="sampling_rate"):
        report(rounds_of(EVERYONE, GAUSSIAN, (1.0, 0.5, 1)), 1e-5)


def test_at_any_delta_there_is_an_epsilon():
    found = report(rounds_of(POISSON, GAUSSIAN, (1.0, 0.1, 100)), 1e-40)
    # Losses on a grid end at probability 1e-23 a round; RDP certifies any δ.
    assert {one.accountant for one in found.guarantees} == {"rdp"}
    assert all(one.epsilon is not None for one in found.guarantees)


def test_pure_releases_compose():
    found = report(rounds_of(EVERYONE, Pure(), (10.0, 1.0, 2)), 1e-5)
    for adjacency, each in zip(ADJACENCIES, (0.1, 0.2), strict=True):
        # Both losses are high with probability (1 + e^−ε)^−2; δ takes a little of that.
        expected = 2 * each + math.log1p(-1e-5 * (1 + math.exp(-each)) ** 2)
        epsilon = found.find(adjacency).epsilon
        assert epsilon is not None
        assert epsilon == pytest.approx(expected, rel=1e-4)
        assert epsilon >= expected


def test_a_report_shows_its_guarantees_and_no_charges():
    found = report(rounds_of(EVERYONE, GAUSSIAN, (4.0, 1.0, 10)), 1e-5)
    assert repr(found).splitlines() == [
        "Report of privacy", *(f"  {each}" for each in found.guarantees)
    ]  # fmt: skip


def test_a_report_without_a_guarantee_shows_why():
    found = report(rounds_of(EVERYONE, GAUSSIAN, (0.0, 1.0, 10)), 1e-5)
    assert "no guarantee (no noise was added)" in repr(found)


KINDS = {
    "poisson": rounds_of(POISSON, GAUSSIAN, (2.0, 0.05, 100), (3.0, 0.05, 10)),
    "few places": rounds_of(SamplingScheme("poisson", 1000, 64), GAUSSIAN, (2.0, 0.05, 100)),
    "full": rounds_of(EVERYONE, GAUSSIAN, (20.0, 1.0, 10)),
    "fixed": rounds_of(SamplingScheme("fixed", 1000, 100), GAUSSIAN, (8.0, 0.1, 40)),
    "groups": rounds_of(SamplingScheme("groups", 1000, 100, groups=10), GAUSSIAN, (9.0, 0.1, 30)),
    "allocation": rounds_of(
        SamplingScheme("allocation", 1000, 1000, period=10), GAUSSIAN, (2.0, 0.1, 30)
    ),
    "cyclic": rounds_of(SamplingScheme("cyclic", 1000, 40, groups=10), GAUSSIAN, (2.0, 0.02, 300)),
    "pure": rounds_of(EVERYONE, Pure(), (50.0, 1.0, 5)),
    "correlated": rounds_of(EVERYONE, Correlated(bands=4), (5, 1, 9)),
    "nothing": rounds_of(EVERYONE, GAUSSIAN),
    "no noise": rounds_of(POISSON, GAUSSIAN, (0.0, 0.1, 1)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_on_the_way_is_above_the_tight_epsilon(kind):
    tight = tight_epsilon(KINDS[kind], 1e-5)
    assert tight <= rdp_epsilon(KINDS[kind], 1e-5) <= 1.35 * tight


def test_the_bound_on_the_way_is_that_of_dp_accounting():
    accountant = RdpAccountant(rdp.ORDERS[:-1])
    round_ = PoissonSampledDpEvent(0.05, GaussianDpEvent(2.0))
    accountant.compose(SelfComposedDpEvent(round_, 300))
    found = rdp_epsilon(rounds_of(POISSON, GAUSSIAN, (2.0, 0.05, 300)), 1e-5)
    assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)


@pytest.mark.parametrize("kind", [pytest.param("gaussian", marks=pytest.mark.thorough), "pure"])
def test_the_bound_of_a_long_schedule_is_hardly_above_that_of_its_rounds(kind, monkeypatch):
    noise, event = (np.geomspace(1, 2, 80), GAUSSIAN)
    if kind == "pure":
        noise, event = np.geomspace(25, 50, 80), Pure()
    rounds = rounds_of(POISSON, event, *((float(z), 0.1, 1) for z in noise))
    rounded = rdp_epsilon(rounds, 1e-5)
    monkeypatch.setattr(guarantee, "_FEW", 200)
    single = rdp_epsilon(rounds, 1e-5)
    assert single <= rounded <= 1.03 * single
