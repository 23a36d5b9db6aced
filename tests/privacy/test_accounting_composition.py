"""Which rounds cost what, together: closed forms, references, and a mechanism of one's own."""

import dataclasses
import functools
import importlib
import inspect
import itertools
import math
import pkgutil
import re

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.signal
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from scipy.stats import binom, norm
from support.plans import charged, poisson, profile_of

from fedjaxsim import privacy
from fedjaxsim.privacy.accounting import composition, gaussian
from fedjaxsim.privacy.accounting.profile import with_failure
from fedjaxsim.privacy.entries import ADJACENCIES, Entry, SamplingScheme
from fedjaxsim.privacy.events import (
    GAUSSIAN,
    ChecksSkipped,
    Correlated,
    Cost,
    Gaussian,
    NoKnownCost,
    NoRelease,
    PrivacyEvent,
    Pure,
    event_from,
)

PURE = Pure()
POISSON = SamplingScheme("poisson", 205, 205)
FIXED = SamplingScheme("fixed", 205, 100)
GROUPS = SamplingScheme("groups", 205, 41, groups=5)
EVERYONE = SamplingScheme("full", 205, 205)
DELTA = 1e-5


@dataclasses.dataclass(frozen=True)
class OwnLaplace(PrivacyEvent):
    """Laplace noise of scale z on a number in [0, 1], by dp_accounting; replacing is unknown."""

    amplifies = True

    def losses(self, entry, adjacency, interval):
        if adjacency == "replace":
            return None
        return privacy_loss_distribution.from_laplace_mechanism(
            entry.noise_multiplier,
            value_discretization_interval=interval,
            sampling_prob=entry.sampling_rate,
        )


def test_an_own_mechanism_is_priced_by_its_losses_and_not_as_any_pure_release():
    plan = charged(EVERYONE, OwnLaplace(), (1.0, 1.0, 30))
    found = profile_of(plan).epsilon(DELTA)
    alone = privacy_loss_distribution.from_laplace_mechanism(1.0).self_compose(30)
    assert found == pytest.approx(alone.get_epsilon_for_delta(DELTA), rel=1e-6)
    any_pure = profile_of(charged(EVERYONE, PURE, (1.0, 1.0, 30))).epsilon(DELTA)
    assert found < 0.9 * any_pure
    assert profile_of(plan, adjacency="replace").epsilon(DELTA) == math.inf
    sampled = charged(POISSON, OwnLaplace(), (1.0, 0.1, 30))
    assert profile_of(sampled).epsilon(DELTA) < 0.5 * found
    # It composes with others, and RDP, which it does not know, certifies nothing.
    both = profile_of(plan, charged(EVERYONE, GAUSSIAN, (5.0, 1.0, 3))).epsilon(DELTA)
    assert found < both < found + gaussian.epsilon(DELTA / 2, math.sqrt(3) / 5) + 0.1
    assert profile_of(plan, accountant="rdp").epsilon(DELTA) == math.inf


def test_correlated_noise_under_sampling_is_refused():
    with pytest.raises(ValueError, match="full or groups"):
        Correlated(bands=2).check_scheme(POISSON)
    Correlated(bands=2).check_scheme(EVERYONE)
    assert composition.met_by_one_client([charged(EVERYONE, Correlated(bands=2))]) == []


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
        ({"kind": "groups", "clients": 5, "capacity": 4}, "groups"),
        ({"kind": "groups", "clients": 5, "capacity": 4, "groups": 6}, "groups"),
    ],
)
def test_schemes_are_validated(arguments, message):
    with pytest.raises(ValueError, match=message):
        SamplingScheme(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"unit": "row"}, "unit"),
        ({"replace": math.inf}, "replace"),
        ({"replace": 2.5}, "replace"),
    ],
)
def test_events_are_validated(arguments, message):
    with pytest.raises(ValueError, match=message):
        Gaussian(**arguments)


def test_events_are_written_and_read():
    unknown = NoKnownCost(), ChecksSkipped(reason="not checked")
    for event in (GAUSSIAN, PURE, Correlated(bands=3), NoRelease(), OwnLaplace(), *unknown):
        assert event_from(event.to_dict()) == event
    with pytest.raises(ValueError, match="import the module"):
        event_from({"kind": "staircase"})
    with pytest.raises(ValueError, match="other fields"):
        event_from({"kind": "pure", "bands": 3})
    with pytest.raises(ValueError, match="reason"):  # without one a charge would look harmless
        event_from({"kind": "checks_skipped"})


def test_overflow_is_a_union_bound_over_rounds():
    scheme, groups = SamplingScheme("poisson", 100, 20), ((1.0, 0.1, 30), (1.0, 0.05, 7))
    expected = 30 * binom.sf(20, 100, 0.1) + 7 * binom.sf(20, 100, 0.05)
    found = composition.overflow_probability([charged(scheme, GAUSSIAN, *groups)])
    assert found == pytest.approx(expected)
    roomy = SamplingScheme("poisson", 100, 100)
    assert composition.overflow_probability([charged(roomy, GAUSSIAN, *groups)]) == 0
    often = charged(scheme, GAUSSIAN, (1.0, 0.9, 10**9))
    assert composition.overflow_probability([often]) == 1


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
    ("q", "m", "z", "rounds", "delta", "sensitivity", "expected"),
    [
        (100, 205, 25.0, 1000, 1 / 205, 1, 2.214),
        (100, 205, 25.0, 1000, 1 / 205, 2, 5.526),
        (20, 1000, 10.0, 2000, 1e-4, 1, 2.308),
    ],
)
def test_cohorts_of_a_fixed_size_are_the_mean_over_participations(
    q, m, z, rounds, delta, sensitivity, expected
):
    # The others know how often a client took part: δ(ε) = E_k δ_Gauss(ε; s √k / z).
    adjacency = ADJACENCIES[sensitivity - 1]
    plan = charged(SamplingScheme("fixed", m, q), GAUSSIAN, (z, q / m, rounds))
    found = profile_of(plan, adjacency=adjacency).epsilon(delta)
    assert found == pytest.approx(expected, abs=6e-4)
    k = np.arange(1, rounds + 1)
    exact = binom.pmf(k, rounds, q / m) @ np.exp(
        gaussian.log_delta(found, sensitivity * np.sqrt(k) / z)
    )
    assert delta * (1 - 1e-3) <= exact <= delta


def test_fixed_cohorts_with_several_noise_levels_are_the_mean_over_both():
    plan = charged(SamplingScheme("fixed", 10, 4), GAUSSIAN, (2.0, 0.4, 5), (3.0, 0.4, 4))
    for epsilon in (0.1, 1.0, 3.0):
        exact = sum(
            binom.pmf(j, 5, 0.4)
            * binom.pmf(k, 4, 0.4)
            * gaussian.delta(epsilon, math.sqrt(j / 4 + k / 9))
            for j, k in itertools.product(range(6), range(5))
        )
        assert exact <= profile_of(plan).delta(epsilon) <= exact * (1 + 1e-3)


def naive_truncation(m, p, capacity):
    """Weight and chance of a client to be in, by what the others know, cohort by cohort."""
    weights = {}
    for others in range(m):
        for drawn, of_client in ((0, 1 - p), (1, p)):
            weight = binom.pmf(others, m - 1, p) * of_client
            size = others + drawn
            kept = drawn * min(1.0, capacity / max(size, 1))
            for inside, chance in ((1, kept), (0, 1 - kept)):
                if weight * chance == 0:
                    continue
                seen = min(size, capacity) - inside
                weights.setdefault(seen, [0.0, 0.0])[inside] += weight * chance
    return weights


@pytest.mark.parametrize(("m", "p", "capacity"), [(6, 0.3, 2), (5, 0.5, 4), (6, 0.4, 1), (4, 1, 3)])
def test_what_others_know_of_a_client_in_truncated_cohorts(m, p, capacity):
    known = SamplingScheme("poisson", m, capacity).inclusions(p)
    assert math.fsum(weight for weight, _ in known) == pytest.approx(1)
    naive = naive_truncation(m, p, capacity).items()
    expected = {seen: (sum(both), both[1] / sum(both)) for seen, both in naive}
    below = [v for seen, v in expected.items() if seen < capacity - 1 and v[0] > 0]
    assert all(chance == pytest.approx(p) for _, chance in below)
    assert known[0][0] == pytest.approx(math.fsum(weight for weight, _ in below))
    assert known[1] == pytest.approx(expected[capacity - 1])
    assert known[2] == pytest.approx(expected[capacity])
    assert known[2][1] == 0


@pytest.mark.thorough
def test_cohorts_over_capacity_cost_little_if_they_are_rare():
    # m = 1,000, p = 0.01: a cohort above 25 comes once in 10⁵ rounds. dp_accounting counts the
    # others that a client pushes out, too: an upper bound.
    rounds, z, delta = 128, 1.0, 1e-6
    [tight, roomy] = [
        profile_of(charged(SamplingScheme("poisson", 1000, b), GAUSSIAN, (z, 0.01, rounds)))
        for b in (25, 1000)
    ]
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    event = dp_accounting.dp_event.TruncatedSubsampledGaussianDpEvent(1000, 0.01, 25, z)
    accountant.compose(event, rounds)
    bound = accountant.get_epsilon(delta)
    assert roomy.epsilon(delta) < tight.epsilon(delta) < min(bound, 1.01 * roomy.epsilon(delta))
    # In cohorts that are always full sampling is of a fixed size.
    full = SamplingScheme("poisson", 50, 5)
    fixed = profile_of(charged(SamplingScheme("fixed", 50, 5), GAUSSIAN, (z, 0.1, 9)))
    assert profile_of(charged(full, GAUSSIAN, (z, 1.0, 9))).epsilon(delta) == pytest.approx(
        fixed.epsilon(delta), rel=1e-6
    )


def test_the_price_of_truncated_cohorts_lies_between_bounds_by_enumeration():
    # Every size of a cohort of 1,000, and every cell of a release: losses rounded down, and then
    # up, to a grid, summed by scipy's convolution. (dp_accounting's 1.2625 is of a client whose
    # absence lets another one in: it moves the sum by 2. A silent client keeps its place.)
    z, rounds, p, delta, width = 1.0, 128, 0.01, 1e-6, 1e-4
    first, size = -round(5 / width), round(11 / width)
    losses = width * (first + np.arange(size))
    scheme, x = SamplingScheme("poisson", 1000, 25), np.linspace(-12, 13, 25_001)
    known = naive_truncation(1000, p, 25).values()

    def bound(epsilon, rounding, sign):
        masses = np.zeros(size)
        for absent, present in known:
            chance = present / (absent + present)
            loss = sign * np.log1p(chance * np.expm1((x - 0.5) / z**2))
            ends = np.sort([loss[:-1], loss[1:]], axis=0)[0 if rounding is np.floor else 1]
            cells = np.diff(norm.cdf(x / z))
            if sign > 0:
                cells = (1 - chance) * cells + chance * np.diff(norm.cdf((x - 1) / z))
            places = rounding(ends / width).astype(int) - first
            inside = (places >= 0) & (places < size)
            masses += (absent + present) * np.bincount(places[inside], cells[inside], size)
        for _ in range(int(math.log2(rounds))):
            masses = scipy.signal.fftconvolve(masses, masses)[-first : size - first]
        lost = 0 if rounding is np.floor else 1 - masses.sum()
        return float(np.maximum(0, -np.expm1(epsilon - losses)) @ masses) + lost

    ours = profile_of(charged(scheme, GAUSSIAN, (z, p, rounds))).epsilon(delta)
    assert max(bound(ours * 1.01, np.ceil, sign) for sign in (1, -1)) < delta
    assert max(bound(ours * 0.99, np.floor, sign) for sign in (1, -1)) > delta


def test_a_client_of_a_group_may_meet_the_costliest_rounds():
    entries = [Entry(4.0, 0.2, 17), Entry(1.0, 0.2, 2), Entry(2.0, 0.2, 1)]  # it meets four of 20
    # Least noise first.
    costliest = [Entry(1.0, 0.2, 2), Entry(2.0, 0.2, 1), Entry(4.0, 0.2, 1)]

    def met(event, scheme, xp=np):
        def groups_of(z, p, rounds):
            return event.met(Cost(scheme, event, z, p, rounds), xp)[2:]

        groups_of = groups_of if xp is np else jax.jit(groups_of)
        groups = groups_of(*(np.asarray(values) for values in zip(*entries, strict=True)))
        return [Entry(*group) for group in zip(*(g.tolist() for g in groups), strict=True)]

    in_jit = [Entry(z, float(np.float32(p)), n) for z, p, n in costliest]
    assert met(GAUSSIAN, GROUPS) == met(PURE, GROUPS) == costliest
    assert met(GAUSSIAN, GROUPS, jnp) == in_jit
    assert met(GAUSSIAN, POISSON) == entries
    found = profile_of(charged(GROUPS, GAUSSIAN, (3.0, 0.2, 25)), adjacency="replace")
    assert found.epsilon(1e-5) == gaussian.epsilon(1e-5, 2 * math.sqrt(5) / 3)


def test_no_noise_has_no_profile():
    assert poisson((0.0, 0.5, 1)).epsilon(0.5) == math.inf
    assert poisson((0.0, 0.5, 1)).delta(10.0) == 1


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_full_participation_composes_exactly_under_any_scheme(adjacency):
    mu = (2 if adjacency == "replace" else 1) * math.sqrt(10 / 16 + 5 / 25 + 5 / 9)
    plan = [
        charged(EVERYONE, GAUSSIAN, (4.0, 1.0, 10)),
        charged(POISSON, GAUSSIAN, (5.0, 1.0, 5)),
        charged(GROUPS, GAUSSIAN, (3.0, 0.2, 20), (4.0, 0.2, 5)),  # five of the first are met
    ]
    found, status = composition.profiles(plan, adjacency)
    assert found["gaussian"].epsilon(DELTA) == pytest.approx(gaussian.epsilon(DELTA, mu))
    assert (list(found), status) == (["gaussian"], "upper_bound")
    assert composition.profiles(plan[:2], adjacency)[1] == "exact"


@functools.cache
def all_kinds():
    gram = Gaussian(replace=math.sqrt(2))
    return (
        charged(EVERYONE, GAUSSIAN, (20.0, 1.0, 10)),
        charged(POISSON, gram, (2.0, 0.05, 100), (3.0, 0.05, 10)),
        charged(SamplingScheme("fixed", 205, 20), GAUSSIAN, (8.0, 20 / 205, 40)),
        charged(EVERYONE, PURE, (50.0, 1.0, 5)),
        charged(POISSON, PURE, (5.0, 0.1, 20)),
    )


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_both_accountants_are_bounds_of_all_kinds_and_the_tight_one_is_the_smaller(adjacency):
    plan = all_kinds()
    tight = profile_of(*plan, adjacency=adjacency).epsilon(DELTA)
    loose = profile_of(*plan, adjacency=adjacency, accountant="rdp").epsilon(DELTA)
    assert tight < loose < 1.35 * tight
    backwards = profile_of(*plan[::-1], adjacency=adjacency).epsilon(DELTA)
    assert backwards == pytest.approx(tight, rel=1e-6)
    for left_out in range(len(plan)):
        others = plan[:left_out] + plan[left_out + 1 :]
        assert profile_of(*others, adjacency=adjacency).epsilon(DELTA) < tight


@pytest.mark.parametrize(
    ("z", "p", "rounds", "delta", "at_most"),
    [
        (1.0, 0.001, 120_000, 1e-10, 5.11),
        pytest.param(4.0, 0.00033, 3_000_000, 1e-12, 2.0, marks=pytest.mark.thorough),
    ],
)
def test_replacing_at_a_small_delta_is_certified(z, p, rounds, delta, at_most):
    plan = charged(SamplingScheme("poisson", 10**6, 10**6), GAUSSIAN, (z, p, rounds))
    found = composition.profile([plan], "replace").epsilon(delta)
    once = composition.profile([plan], "zero_out")
    # Group privacy: two steps of (ε/2, δ) are (ε, (1 + e^(ε/2)) δ).
    assert once.epsilon(delta) < found < at_most
    assert (1 + math.exp(found / 2)) * once.delta(found / 2) > delta


@pytest.mark.thorough
def test_sampling_never_costs_more_than_taking_part_always():
    rng = np.random.default_rng(0)
    for z, p in zip(rng.uniform(0.7, 5, 5), rng.uniform(0.01, 0.9, 5), strict=True):
        for adjacency, sensitivity in zip(ADJACENCIES, (1, 2), strict=True):
            sampled = poisson((z, p, 30), adjacency=adjacency).epsilon(1e-5)
            assert sampled < gaussian.epsilon(1e-5, sensitivity * math.sqrt(30) / z)


def test_no_large_cache_holds_losses_on_a_grid():
    """A grid takes up to 50 MB: caches of more than 64 hold numbers alone."""
    large = {}
    for module in pkgutil.walk_packages(privacy.__path__, f"{privacy.__name__}."):
        for name, function in vars(importlib.import_module(module.name)).items():
            if hasattr(function, "cache_parameters"):
                most = function.cache_parameters()["maxsize"]
                if most is None or most > 64:
                    large[name] = inspect.signature(function).return_annotation
    assert {"_certified", "one_round"} <= large.keys()
    for name, returned in large.items():
        assert not re.search("Profile|Pair|Losses|Any", str(returned)), name
