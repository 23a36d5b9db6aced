"""Reports recomputed with dp_accounting: every scheme and kind of release, and a wrong report."""

import dataclasses
import math

import pytest
from support.plans import charged

from fedjaxsim.privacy.entries import SamplingScheme
from fedjaxsim.privacy.events import (
    GAUSSIAN,
    Banded,
    Correlated,
    Gaussian,
    NoRelease,
    PrivacyEvent,
    Pure,
)
from fedjaxsim.privacy.guarantee import Report, report
from fedjaxsim.privacy.second_opinion import epsilon

M, DELTA = 200, 1e-4
EVERYONE = SamplingScheme("full", M, M)
POISSON = SamplingScheme("poisson", M, M)
FIXED = SamplingScheme("fixed", M, 20)
GROUPS = SamplingScheme("groups", M, 50, groups=4)
CYCLIC = SamplingScheme("cyclic", M, 30, groups=4)
TURNS = SamplingScheme("allocation", M, M, period=4)
CROWDED = SamplingScheme("allocation", M, 75, period=4)
PLANS = {
    "full": charged(EVERYONE, GAUSSIAN, (9.0, 1.0, 20), (12.0, 1.0, 5)),
    "poisson": charged(POISSON, GAUSSIAN, (1.0, 0.05, 100), (2.0, 0.05, 10)),
    "few places": charged(SamplingScheme("poisson", M, 15), GAUSSIAN, (2.0, 0.05, 50)),
    "fixed": charged(FIXED, GAUSSIAN, (4.0, 0.1, 30)),
    "groups": charged(GROUPS, GAUSSIAN, (4.0, 0.25, 9), (3.0, 0.25, 3)),
    "gram": charged(POISSON, Gaussian(replace=math.sqrt(2)), (2.0, 0.1, 20)),
    "gram, full": charged(EVERYONE, Gaussian(replace=math.sqrt(2)), (5.0, 1.0, 7)),
    "correlated": charged(GROUPS, Correlated(bands=4), (4.0, 0.25, 12)),
    "banded": charged(CYCLIC, Banded(coefficients=(3.0, 4.0)), (6.0, 0.1, 41)),
    "allocation": charged(TURNS, GAUSSIAN, (2.0, 0.25, 8)),
    "many turns": charged(TURNS, GAUSSIAN, (18.0, 0.25, 4000)),
    "turns in full cohorts": charged(CROWDED, GAUSSIAN, (1.0, 0.25, 12)),
    "pure": charged(EVERYONE, Pure(), (20.0, 1.0, 12)),
    "pure, sampled": charged(POISSON, Pure(), (2.0, 0.1, 12)),
}
QUICK = ("fixed", "allocation")


@pytest.mark.parametrize(
    "plan", [pytest.param(p, marks=() if p in QUICK else pytest.mark.thorough) for p in PLANS]
)
def test_two_accountants_agree(plan):
    opinions = report([PLANS[plan]], DELTA).verify()
    assert [opinion.adjacency for opinion in opinions] == ["zero_out", "replace"]
    for opinion in opinions:
        assert opinion.second == pytest.approx(opinion.epsilon, rel=5e-3)


@pytest.mark.thorough
def test_charges_of_unlike_kinds_are_composed():
    found = report([PLANS["poisson"], PLANS["pure"], PLANS["groups"]], DELTA)
    for opinion in found.verify():
        assert opinion.second == pytest.approx(opinion.epsilon, rel=5e-3)


def test_a_difference_above_one_percent_is_an_error():
    good = report([PLANS["full"]], DELTA)
    for factor in (0.98, 1.02):
        wrong = [
            dataclasses.replace(each, epsilon=factor * (each.epsilon or 0.0))
            for each in good.guarantees
        ]
        with pytest.raises(ValueError, match="differ by more than 1 %: zero_out: ε"):
            dataclasses.replace(good, guarantees=tuple(wrong)).verify()


def test_what_cannot_be_verified_says_so():
    class Own(PrivacyEvent):
        def losses(self, entry, adjacency, interval):
            return GAUSSIAN.losses(entry, adjacency, interval)

    own = report([charged(EVERYONE, Own(), (9.0, 1.0, 2))], DELTA)
    with pytest.raises(ValueError, match="no second opinion on 'Own' releases"):
        own.verify()
    long = SamplingScheme("allocation", 10_000, 10_000, period=4000)
    with pytest.raises(ValueError, match="a period above 2,000 rounds"):
        epsilon([charged(long, GAUSSIAN, (1.0, 1 / 4000, 4000))], DELTA, "zero_out")
    gram = Gaussian(replace=math.sqrt(2))
    with pytest.raises(ValueError, match=r"whose replacement is 1\.41, not 2, clip norms away"):
        epsilon([charged(TURNS, gram, (1.0, 0.25, 4))], DELTA, "replace")
    read = Report.from_json(report([PLANS["full"]], DELTA).to_json())
    with pytest.raises(ValueError, match="from a run, not from a file"):
        read.verify()


def test_nothing_released_is_nothing_by_both():
    found = report([charged(EVERYONE, NoRelease())], DELTA).verify()
    assert [(opinion.epsilon, opinion.second) for opinion in found] == [(0, 0), (0, 0)]
