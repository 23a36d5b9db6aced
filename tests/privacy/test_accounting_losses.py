"""Numerical composition against published values, closed forms, dp_accounting, integration."""

import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution
from scipy.stats import norm
from support.plans import POISSON, charged, compose, poisson, profile_of

from fedjaxsim.privacy.accounting import composition, gaussian, losses, rdp
from fedjaxsim.privacy.entries import Entry
from fedjaxsim.privacy.events import GAUSSIAN, Gaussian

GRAM = Gaussian(replace=math.sqrt(2))

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


def way(replace):
    return "replace" if replace else "zero_out"


def one_release_deltas(epsilons, z, p, replace):
    """δ(ε) of one release by integrating the positive part on a fine grid, both directions."""
    x = np.linspace(-12 * z - 1, 12 * z + 1, 400_001)
    absent = norm.pdf(x, 0, z)
    first = (1 - p) * absent + p * norm.pdf(x, 1, z)
    second = first[::-1] if replace else absent
    width = x[1] - x[0]
    return [
        max(
            width * np.maximum(a - math.exp(epsilon) * b, 0).sum()
            for a, b in ((first, second), (second, first))
        )
        for epsilon in epsilons
    ]


@pytest.mark.parametrize(("p", "z", "rounds", "delta", "zero_out", "replace"), REFERENCE)
def test_reference_values(p, z, rounds, delta, zero_out, replace):
    entries = [Entry(z, p, rounds)]
    for value, swap in ((zero_out, False), (replace, True)):
        assert poisson(*entries, adjacency=way(swap)).epsilon(delta) == pytest.approx(
            value, abs=6e-5
        )


@pytest.mark.parametrize(
    ("p", "z"),
    [
        (0.1, 2.0),
        (0.5, 1.0),
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in ((0.01, 0.6), (0.9, 5.0))),
    ],
)
@pytest.mark.parametrize("replace", [False, True])
def test_one_release_is_the_hockey_stick_integral(p, z, replace):
    profile, epsilons = poisson((z, p, 1), adjacency=way(replace)), (0.0, 0.1, 0.7, 2.0)
    exacts = one_release_deltas(epsilons, z, p, replace)
    for epsilon, exact in zip(epsilons, exacts, strict=True):
        assert exact - 1e-9 <= profile.delta(epsilon) <= exact * (1 + 1e-4) + 1e-9


@pytest.mark.parametrize(
    ("p", "z"),
    [
        (0.3, 30.0),
        *(
            pytest.param(*it, marks=pytest.mark.thorough)
            for it in ((0.02, 1.0), (0.999, 5.0), (1e-4, 0.5))
        ),
    ],
)
@pytest.mark.parametrize("replace", [False, True])
def test_one_release_keeps_all_mass_and_agrees_with_dp_accounting(p, z, replace):
    ours = gaussian.sampled(z, p, replace, 1e-4)
    relation = NeighboringRelation.REPLACE_ONE if replace else NeighboringRelation.ADD_OR_REMOVE_ONE
    theirs = privacy_loss_distribution.from_gaussian_mechanism(
        z, sampling_prob=p, neighboring_relation=relation
    )
    # No direction has an excess of mass to be composed.
    for one in ours:
        assert one.masses.sum() + one.infinite == pytest.approx(1, abs=1e-14)
    ours, theirs = losses.profile([(ours, 20)]), theirs.self_compose(20)
    for epsilon in (0.0, 0.2, 1.0):
        expected = theirs.get_delta_for_epsilon(epsilon)
        assert ours.delta(epsilon) == pytest.approx(expected, rel=1e-4, abs=1e-12)


def test_a_rate_near_one_is_full_participation():
    # The sampled form with p → 1 must meet the exact one, which shares no code with it.
    for replace, sensitivity in ((False, 1), (True, 2)):
        sampled = poisson((5.0, 1 - 1e-12, 20), adjacency=way(replace)).epsilon(1e-5)
        exact = gaussian.epsilon(1e-5, sensitivity * math.sqrt(20) / 5)
        assert exact <= sampled <= exact * (1 + 1e-4)


@pytest.mark.parametrize(
    ("z", "p", "rounds", "delta"),
    [
        (100.0, 1e-3, 10**6, 1e-5),
        pytest.param(1.0, 1e-4, 10**7, 1e-6, marks=pytest.mark.thorough),
        (1000.0, 0.1, 10**6, 1e-6),
    ],
)
def test_very_many_cheap_rounds_are_gaussian(z, p, rounds, delta):
    # The central limit theorem with μ = p √(T (e^{1/z²} − 1)) is sharp here; a rounding of losses
    # that is too coarse, or an excess of mass, would show.
    mu = p * math.sqrt(rounds * math.expm1(1 / z**2))
    epsilon = poisson((z, p, rounds)).epsilon(delta)
    assert epsilon == pytest.approx(gaussian.epsilon(delta, mu), rel=3e-3)
    assert epsilon <= rdp.epsilon(compose((z, p, rounds)), delta)


@pytest.mark.parametrize("delta", [1e-3, 1e-9, 1e-14, 1e-17])
def test_a_tilt_resolves_a_delta_far_below_rounding_errors(delta):
    # 400 rounds at p = 1 are one Gaussian release, whose δ is known to any depth.
    one = gaussian.sampled(25.0, 1.0, False, 1e-4)
    found = losses.profile([(one, 400)])
    exact = gaussian.epsilon(delta, 20 / 25.0)
    assert exact <= found.epsilon(delta) <= exact * (1 + 1e-4)
    assert found.delta(exact) == pytest.approx(delta, rel=1e-3)
    # Beyond the end of one round's grid losses are infinite: 1e-23 a round.
    assert found.epsilon(1e-21) == math.inf


@pytest.mark.parametrize("z", [pytest.param(0.7, marks=pytest.mark.thorough), 2.0])
def test_replacing_by_the_same_number_of_rounds_at_a_small_delta_is_bounded_by_rdp(z):
    for adjacency in ("zero_out", "replace"):
        found = profile_of(charged(POISSON, GAUSSIAN, (z, 0.01, 5000)), adjacency=adjacency)
        bound = profile_of(
            charged(POISSON, GAUSSIAN, (z, 0.01, 5000)), adjacency=adjacency, accountant="rdp"
        )
        for delta in (1e-6, 1e-12):
            assert found.epsilon(delta) < bound.epsilon(delta) < 1.6 * found.epsilon(delta)


@pytest.mark.thorough
def test_heterogeneous_ledgers_compose():
    parts = [Entry(1.0, 0.1, 20), Entry(2.0, 0.05, 100), Entry(10.0, 1.0, 4)]
    for replace in (False, True):
        together = poisson(*parts, adjacency=way(replace)).epsilon(1e-5)
        backwards = poisson(*parts[::-1], adjacency=way(replace)).epsilon(1e-5)
        assert backwards == pytest.approx(together, rel=1e-9)
        # Splitting an entry changes nothing but rounding.
        split = [Entry(1.0, 0.1, 8), Entry(1.0, 0.1, 12), *parts[1:]]
        again = poisson(*split, adjacency=way(replace)).epsilon(1e-5)
        assert again == pytest.approx(together, rel=1e-6)
        assert all(poisson(e, adjacency=way(replace)).epsilon(1e-5) < together for e in parts)
    bound = rdp.epsilon(compose(*parts), 1e-5)
    assert poisson(*parts).epsilon(1e-5) < bound


@pytest.mark.thorough
def test_merging_a_long_schedule_gives_a_close_upper_bound():
    schedule = [Entry(z, 0.2, 10) for z in np.linspace(2.0, 2.5, 10)]
    exact = poisson(*schedule).epsilon(1e-5)
    merged = poisson(*composition.merge(schedule, 5)).epsilon(1e-5)
    # No z is lowered by more than (2.5/2)^(1/5).
    lowest = [Entry(z / 1.25**0.2, p, rounds) for z, p, rounds in schedule]
    assert exact < merged < poisson(*lowest).epsilon(1e-5)


def test_rounds_without_participation_or_information_are_free():
    assert poisson((1.0, 0.0, 10), adjacency="replace").epsilon(1e-5) == 0
    assert poisson((math.inf, 0.5, 10), adjacency="replace").epsilon(1e-5) == 0


@pytest.mark.parametrize("angle", [0.0, 0.25, 0.5, 0.75])
def test_opposite_messages_are_the_worst_replacement_under_sampling(angle):
    # Messages a = (1, 0) and b = (cos, sin) of the same norm, in the plane, both directions.
    z, p = 1.0, 0.2
    direction = math.cos(angle * math.pi), math.sin(angle * math.pi)
    grid = np.linspace(-8, 8, 801)
    absent = np.outer(norm.pdf(grid), norm.pdf(grid))

    def density(center):
        present = np.outer(*(norm.pdf(grid, place, z) for place in center))
        return (1 - p) * absent + p * present

    first, second = density((1.0, 0.0)), density(direction)
    cell = (grid[1] - grid[0]) ** 2
    profile = poisson((z, p, 1), adjacency="replace", event=GRAM)
    for epsilon in (0.0, 0.2, 0.5, 1.0):
        exact = cell * np.maximum(first - math.exp(epsilon) * second, 0).sum()
        assert profile.delta(epsilon) >= exact - 1e-6


def test_the_sensitivity_of_a_replacement_counts_where_nothing_is_sampled():
    full = [Entry(4.0, 1.0, 10)]
    assert poisson(*full, adjacency="replace", event=GRAM).epsilon(1e-5) == pytest.approx(
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
    epsilon = poisson(*entries).epsilon(delta)
    exact = gaussian.epsilon(delta, math.sqrt(rounds) / z)
    assert exact <= epsilon <= 1.02 * exact + 1e-4
    assert epsilon <= rdp.epsilon(compose(*entries), delta) + 1e-4


@pytest.mark.parametrize(
    ("z", "rounds", "delta"),
    [
        pytest.param(*each, marks=pytest.mark.thorough)
        for each in ((1e6, 10**8, 1e-6), (1e4, 2**31 - 1, 1e-5))
    ],
)
def test_where_the_losses_of_very_many_rounds_are_cut_off_epsilon_is_a_bound(z, rounds, delta):
    entries = [Entry(z, 1 - 1e-12, rounds)]
    exact = gaussian.epsilon(delta, math.sqrt(rounds) / z)
    assert exact <= poisson(*entries).epsilon(delta) <= 1.1 * exact


@pytest.mark.parametrize(("z", "p"), [(1.0, 0.1), (0.3, 0.999), (0.1, 0.5)])
@pytest.mark.parametrize("replace", [False, True])
def test_what_a_coarse_grid_cuts_off_below_and_above_only_adds(z, p, replace):
    # Each grid holds the points of the next one, so each cut and each rounding is upwards.
    fine, middle, coarse = (gaussian.sampled(z, p, replace, 0.032 * 2**k) for k in (0, 5, 7))
    profiles = [losses.profile([(one, 1)]) for one in (fine, middle, coarse)]
    epsilons = (0.0, 0.3, 1.0, 3.0, 10.0)
    exacts = one_release_deltas(epsilons, z, p, replace)
    for epsilon, exact in zip(epsilons, exacts, strict=True):
        deltas = [profile.delta(epsilon) for profile in profiles]
        assert exact - 1e-9 <= deltas[0]
        assert deltas[0] <= deltas[1] + 1e-12 <= deltas[2] + 2e-12
    assert coarse[0].masses.sum() + coarse[0].infinite == pytest.approx(1, abs=1e-14)


@pytest.mark.thorough
def test_a_run_that_hardly_anyone_is_in_costs_nothing_at_a_large_delta():
    # Nobody can tell more than whether the client took part at all: δ(0) ≤ 1 − (1 − p)^T.
    for z in (1e-6, 0.0435, 1.0):
        assert poisson((z, 0.1, 3)).epsilon(1 - 0.9**3 + 1e-6) == 0
