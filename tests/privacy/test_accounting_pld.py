"""Numerical composition against published values, closed forms, dp_accounting, integration."""

import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution
from scipy.stats import norm

from fedjaxsim.privacy.accounting import gaussian, groups, pld, rdp, subsampled_gaussian_pld
from fedjaxsim.privacy.events import Entry, PrivacyEvent

GAUSSIAN = PrivacyEvent("gaussian")
GRAM = PrivacyEvent("gaussian", replace=math.sqrt(2))

REFERENCE = [
    (1.0, 4.0, 10, 1e-5, 3.3414, 7.5113),
    (1.0, 50.0, 1000, 1e-5, 2.5944, 5.7595),
    (100 / 205, 25.0, 200, 1 / 205, 0.5007, 1.2104),
    (100 / 205, 10.0, 1000, 1 / 205, 4.6114, 11.9903),
    (0.02, 1.0, 2000, 1e-4, 4.8410, 8.3195),
    (0.01, 0.8, 10000, 1e-5, 10.0537, 16.1511),
    (20 / 9343, 0.65, 400, 1e-5, 1.4148, 1.4596),
    (0.1, 2.0, 500, 1e-5, 5.5555, 11.3850),
]


def one_release_delta(epsilon, z, p, replace):
    """δ(ε) of one release by integrating the positive part on a fine grid, both directions."""
    x = np.linspace(-12 * z - 1, 12 * z + 1, 400_001)
    first = (1 - p) * norm.pdf(x, 0, z) + p * norm.pdf(x, 1, z)
    second = first[::-1] if replace else norm.pdf(x, 0, z)
    width = x[1] - x[0]
    return max(
        width * np.maximum(a - math.exp(epsilon) * b, 0).sum()
        for a, b in ((first, second), (second, first))
    )


@pytest.mark.parametrize(("p", "z", "rounds", "delta", "zero_out", "replace"), REFERENCE)
def test_reference_values(p, z, rounds, delta, zero_out, replace):
    entries = [Entry(z, p, rounds)]
    for value, swap in ((zero_out, False), (replace, True)):
        assert pld.profile(entries, GAUSSIAN, swap).epsilon(delta) == pytest.approx(value, abs=6e-5)


@pytest.mark.parametrize(("p", "z"), [(0.1, 2.0), (0.5, 1.0), (0.01, 0.6), (0.9, 5.0)])
@pytest.mark.parametrize("replace", [False, True])
def test_one_release_is_the_hockey_stick_integral(p, z, replace):
    profile = pld.profile([Entry(z, p, 1)], GAUSSIAN, replace)
    for epsilon in (0.0, 0.1, 0.7, 2.0):
        exact = one_release_delta(epsilon, z, p, replace)
        assert exact - 1e-9 <= profile.delta(epsilon) <= exact * (1 + 1e-4) + 1e-9


@pytest.mark.parametrize(
    ("p", "z"),
    [
        (0.02, 1.0),
        (0.3, 30.0),
        *(pytest.param(*it, marks=pytest.mark.thorough) for it in ((0.999, 5.0), (1e-4, 0.5))),
    ],
)
@pytest.mark.parametrize("replace", [False, True])
def test_one_release_keeps_all_mass_and_agrees_with_dp_accounting(p, z, replace):
    ours = subsampled_gaussian_pld.one_round(z, p, replace, 1e-4)
    relation = NeighboringRelation.REPLACE_ONE if replace else NeighboringRelation.ADD_OR_REMOVE_ONE
    theirs = privacy_loss_distribution.from_gaussian_mechanism(
        z, sampling_prob=p, neighboring_relation=relation
    )
    # At ε = −∞ the profile is the total mass; no direction has an excess to be composed.
    assert ours.get_delta_for_epsilon(-1e3) == pytest.approx(1, abs=1e-14)
    ours, theirs = ours.self_compose(20), theirs.self_compose(20)
    for epsilon in (0.0, 0.2, 1.0):
        expected = theirs.get_delta_for_epsilon(epsilon)
        assert ours.get_delta_for_epsilon(epsilon) == pytest.approx(expected, rel=1e-4, abs=1e-12)


def test_a_rate_near_one_is_full_participation():
    # The sampled form with p → 1 must meet the exact one, which shares no code with it.
    for replace, sensitivity in ((False, 1), (True, 2)):
        sampled = pld.profile([Entry(5.0, 1 - 1e-12, 20)], GAUSSIAN, replace).epsilon(1e-5)
        exact = gaussian.epsilon(1e-5, sensitivity * math.sqrt(20) / 5)
        assert exact <= sampled <= exact * (1 + 1e-4)


@pytest.mark.parametrize(
    ("z", "p", "rounds", "delta"),
    [(100.0, 1e-3, 10**6, 1e-5), (1.0, 1e-4, 10**7, 1e-6), (1000.0, 0.1, 10**6, 1e-6)],
)
def test_very_many_cheap_rounds_are_gaussian(z, p, rounds, delta):
    # The central limit theorem with μ = p √(T (e^{1/z²} − 1)) is sharp here; a rounding of losses
    # that is too coarse, or an excess of mass, would show.
    mu = p * math.sqrt(rounds * math.expm1(1 / z**2))
    epsilon = pld.profile([Entry(z, p, rounds)], GAUSSIAN, False).epsilon(delta)
    assert epsilon == pytest.approx(gaussian.epsilon(delta, mu), rel=3e-3)
    assert epsilon <= rdp.epsilon(rdp.compose([Entry(z, p, rounds)]), delta)


def test_what_the_transform_cannot_resolve_is_not_certified():
    assert pld.profile([Entry(1.0, 0.1, 100)], GAUSSIAN, False).epsilon(1e-15) == math.inf


@pytest.mark.thorough
def test_heterogeneous_ledgers_compose():
    parts = [Entry(1.0, 0.1, 20), Entry(2.0, 0.05, 100), Entry(10.0, 1.0, 4)]
    for replace in (False, True):
        together = pld.profile(parts, GAUSSIAN, replace).epsilon(1e-5)
        backwards = pld.profile(parts[::-1], GAUSSIAN, replace).epsilon(1e-5)
        assert backwards == pytest.approx(together, rel=1e-9)
        # Splitting an entry changes nothing but rounding.
        split = [Entry(1.0, 0.1, 8), Entry(1.0, 0.1, 12), *parts[1:]]
        again = pld.profile(split, GAUSSIAN, replace).epsilon(1e-5)
        assert again == pytest.approx(together, rel=1e-6)
        assert all(pld.profile([e], GAUSSIAN, replace).epsilon(1e-5) < together for e in parts)
    bound = rdp.epsilon(rdp.compose(parts), 1e-5)
    assert pld.profile(parts, GAUSSIAN, False).epsilon(1e-5) < bound


@pytest.mark.thorough
def test_merging_a_long_schedule_gives_a_close_upper_bound(monkeypatch):
    schedule = [Entry(z, 0.2, 10) for z in np.linspace(2.0, 2.5, 10)]
    exact = pld.profile(schedule, GAUSSIAN, False).epsilon(1e-5)
    monkeypatch.setattr(pld, "merge", lambda entries: groups.merge(entries, 5))
    merged = pld.profile(schedule, GAUSSIAN, False).epsilon(1e-5)
    # No z is lowered by more than (2.5/2)^(1/5).
    lowest = [Entry(z / 1.25**0.2, p, rounds) for z, p, rounds in schedule]
    monkeypatch.undo()
    assert exact < merged < pld.profile(lowest, GAUSSIAN, False).epsilon(1e-5)


def test_rounds_without_participation_or_information_are_free():
    assert pld.profile([Entry(1.0, 0.0, 10)], GAUSSIAN, True).epsilon(1e-5) == 0
    assert pld.profile([Entry(math.inf, 0.5, 10)], GAUSSIAN, True).epsilon(1e-5) == 0


@pytest.mark.parametrize("angle", [0.0, 0.25, 0.5, 0.75])
def test_opposite_messages_are_the_worst_replacement_under_sampling(angle):
    # Messages a = (1, 0) and b = (cos, sin) of the same norm, in the plane, both directions.
    z, p = 1.0, 0.2
    direction = math.cos(angle * math.pi), math.sin(angle * math.pi)
    grid = np.linspace(-8, 8, 801)
    x, y = np.meshgrid(grid, grid)

    def density(center):
        absent = norm.pdf(x) * norm.pdf(y)
        return (1 - p) * absent + p * norm.pdf(x, center[0], z) * norm.pdf(y, center[1], z)

    first, second = density((1.0, 0.0)), density(direction)
    cell = (grid[1] - grid[0]) ** 2
    profile = pld.profile([Entry(z, p, 1)], GRAM, True)
    for epsilon in (0.0, 0.2, 0.5, 1.0):
        exact = cell * np.maximum(first - math.exp(epsilon) * second, 0).sum()
        assert profile.delta(epsilon) >= exact - 1e-6


def test_the_sensitivity_of_a_replacement_counts_where_nothing_is_sampled():
    full = [Entry(4.0, 1.0, 10)]
    assert pld.profile(full, GRAM, True).epsilon(1e-5) == pytest.approx(
        gaussian.epsilon(1e-5, math.sqrt(20) / 4)
    )


@pytest.mark.parametrize(
    ("z", "rounds", "delta"),
    [
        (1e6, 1, 1e-9),
        (1e8, 1, 1e-10),  # ε is a few units of the grid
        (1e10, 1, 1e-12),  # and here less than one
        (1000.0, 10**6, 1e-5),
        (1e4, 10**6, 1e-3),
        (30.0, 1000, 2e-12),  # near the rounding errors of the transform
        pytest.param(0.05, 3, 1e-5, marks=pytest.mark.thorough),
        (0.001, 1, 1e-5),
        (0.001, 100, 0.5),
        (1e-6, 1, 1e-5),
    ],
)
def test_at_the_limits_of_the_grid_epsilon_is_a_bound_from_above(z, rounds, delta):
    # With p so close to 1 the sampled form is the exact one, up to what the grid adds.
    entries = [Entry(z, 1 - 1e-12, rounds)]
    epsilon = pld.profile(entries, GAUSSIAN, False).epsilon(delta)
    exact = gaussian.epsilon(delta, math.sqrt(rounds) / z)
    assert exact <= epsilon <= 1.02 * exact + pld.interval(entries)
    assert epsilon <= rdp.epsilon(rdp.compose(entries), delta) + pld.interval(entries)


@pytest.mark.parametrize(
    ("z", "rounds", "delta"),
    [(1e6, 10**8, 1e-6), pytest.param(1e4, 2**31 - 1, 1e-5, marks=pytest.mark.thorough)],
)
def test_where_the_losses_of_very_many_rounds_are_cut_off_epsilon_is_a_bound(z, rounds, delta):
    entries = [Entry(z, 1 - 1e-12, rounds)]
    exact = gaussian.epsilon(delta, math.sqrt(rounds) / z)
    assert exact <= pld.profile(entries, GAUSSIAN, False).epsilon(delta) <= 1.1 * exact
    # All but 1e-15 of the mass of a sum lies within 8.4 standard deviations.
    one = subsampled_gaussian_pld.one_round(z, 1 - 1e-12, False, pld.interval(entries))
    points = 2 * 8.4 * math.sqrt(rounds) / z / pld.interval(entries)
    assert one.self_compose(rounds)._pmf_remove.size < 1.2 * points


@pytest.mark.parametrize(("z", "p"), [(1.0, 0.1), (0.3, 0.999), (0.1, 0.5)])
@pytest.mark.parametrize("replace", [False, True])
def test_what_a_coarse_grid_cuts_off_below_and_above_only_adds(z, p, replace):
    # Each grid holds the points of the next one, so each cut and each rounding is upwards.
    fine, middle, coarse = (
        subsampled_gaussian_pld.one_round(z, p, replace, 0.032 * 2**k) for k in (0, 5, 7)
    )
    for epsilon in (0.0, 0.3, 1.0, 3.0, 10.0):
        exact = one_release_delta(epsilon, z, p, replace)
        deltas = [one.get_delta_for_epsilon(epsilon) for one in (fine, middle, coarse)]
        assert exact - 1e-9 <= deltas[0]
        assert deltas[0] <= deltas[1] + 1e-12 <= deltas[2] + 2e-12
    assert coarse.get_delta_for_epsilon(-1e3) == pytest.approx(1, abs=1e-14)


@pytest.mark.thorough
def test_a_run_that_hardly_anyone_is_in_costs_nothing_at_a_large_delta():
    # Nobody can tell more than whether the client took part at all: δ(0) ≤ 1 − (1 − p)^T.
    for z in (1e-6, 0.0435, 1.0):
        assert pld.profile([Entry(z, 0.1, 3)], GAUSSIAN, False).epsilon(1 - 0.9**3 + 1e-6) == 0
