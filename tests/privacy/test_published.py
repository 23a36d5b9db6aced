"""Values that other accountants publish in their own tests, with their sources in the file."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.plans import compose, poisson

from fedjaxsim.privacy.accounting import rdp

GROUPS = json.loads((Path(__file__).parent / "published.json").read_text(encoding="utf-8"))


def cases(kind):
    """Return the cases of one kind, each with what its group says of all; every third is quick."""
    found = [
        pytest.param(
            group,
            case,
            id=f"{group['source'].split()[0]}-{number}",
            marks=[pytest.mark.thorough] if number % 3 else [],
        )
        for group in GROUPS
        if group["kind"] == kind
        for number, case in enumerate(group["cases"])
    ]
    assert found
    return found


@pytest.mark.parametrize(("group", "case"), cases("rdp"))
def test_rdp_at_each_order_after_any_number_of_rounds(group, case):
    for rounds in case["rounds"]:
        found = compose((case["z"], case["p"], rounds), orders=tuple(case["orders"]))
        np.testing.assert_allclose(found, rounds * np.array(case["rdp"]), rtol=2e-7, atol=1e-12)


@pytest.mark.parametrize(("group", "case"), cases("rdp_epsilon"))
def test_epsilon_by_rdp_is_no_larger(group, case):
    z, p, rounds, epsilon = case
    found = rdp.epsilon(compose((z, p, rounds)), group["delta"])
    assert 0.9 * epsilon < found <= epsilon * (1 + 1e-3)


@pytest.mark.parametrize(("group", "case"), cases("epsilon"))
def test_epsilon_by_privacy_losses(group, case):
    z, p, rounds, epsilon = case
    found = poisson((z, p, rounds), adjacency=group["adjacency"]).epsilon(group["delta"])
    if not group["above"]:
        assert found == pytest.approx(epsilon, rel=3e-4, abs=1e-6)
    # Some report the upper end of an interval, which is so much above their estimate.
    slack = 3e-4 * max(1.0, epsilon)
    assert epsilon - 1.1 * group["above"] - slack <= found <= epsilon + slack


@pytest.mark.parametrize(("group", "case"), cases("delta"))
def test_delta_of_one_release(group, case):
    z, p, epsilon, delta = case
    found = poisson((z, p, 1), adjacency=group["adjacency"]).delta(epsilon)
    assert found == pytest.approx(delta, rel=1e-4, abs=1e-7)
