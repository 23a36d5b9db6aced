"""An unknown cost is ∞, no number is ∞, and ∞ stays ∞: by every scheme and at every door."""

import dataclasses
import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy.stats import binom

from fedjaxsim.privacy import calibration, guarantee, ledger, selection
from fedjaxsim.privacy.accounting import rdp
from fedjaxsim.privacy.accounting.in_loop import rdp_epsilon_in_jit
from fedjaxsim.privacy.accounting.losses import Losses
from fedjaxsim.privacy.accounting.profile import Profile
from fedjaxsim.privacy.entries import Entry, SamplingScheme
from fedjaxsim.privacy.events import Gaussian, PrivacyEvent, PrivacySpend

DELTA, ROUNDS, M = 1e-3, 6, 30
SCHEMES = {
    "full": (SamplingScheme("full", M, M), 1.0),
    "poisson": (SamplingScheme("poisson", M, M), 0.3),
    "poisson, few places": (SamplingScheme("poisson", M, 15), 0.3),
    "fixed": (SamplingScheme("fixed", M, 9), 0.3),
    "groups": (SamplingScheme("groups", M, 10, groups=3), 1 / 3),
    "cyclic": (SamplingScheme("cyclic", M, 7, groups=3), 0.2),
    "allocation": (SamplingScheme("allocation", M, M, period=3), 1 / 3),
}


class OnlyLosses(PrivacyEvent):
    """Gaussian noise whose Rényi divergences nobody wrote down."""

    amplifies = True

    def losses(self, entry, adjacency, interval):
        return Gaussian().losses(entry, adjacency, interval)


class OnlyRdp(PrivacyEvent):
    amplifies = True

    def rdp(self, entry, adjacency, orders, xp):
        return Gaussian().rdp(entry, adjacency, orders, xp)


class SmallOrders(OnlyRdp):
    """Divergences are known up to order 10; above it a formula gives no number."""

    above = math.inf

    def rdp(self, entry, adjacency, orders, xp):
        values = super().rdp(entry, adjacency, orders, xp)
        return xp.where(xp.asarray(orders) <= 10, values, self.above)


class NotANumber(SmallOrders):
    above = math.nan


class Negative(SmallOrders):
    above = -1.0


class NoNumbers(PrivacyEvent):
    """No cost is a number."""

    def losses(self, entry, adjacency, interval):
        return (Losses(interval, 0, np.full(3, math.nan), 0.0),)

    def rdp(self, entry, adjacency, orders, xp):
        return xp.full(len(orders), math.nan)

    def mu(self, entry, adjacency):
        return math.nan

    def largest_loss(self, entry, adjacency):
        return math.nan


class NothingKnown(PrivacyEvent):
    def losses(self, entry, adjacency, interval):
        return None


LESS = (OnlyLosses(), OnlyRdp(), SmallOrders(), NotANumber(), Negative())
NOTHING = (NoNumbers(), NothingKnown())


def spend(event, scheme, z=2.0, rounds=ROUNDS):
    sampling, p = SCHEMES[scheme]
    return PrivacySpend(sampling, event, (Entry(z, p, rounds),))


def in_jit(event, scheme):
    sampling, p = SCHEMES[scheme]
    account = ledger.no_charges(sampling, event, 1)
    account = dataclasses.replace(
        account,
        noise_multiplier=jnp.array([2.0]),
        sampling_rate=jnp.array([p]),
        rounds=jnp.array([ROUNDS]),
    )
    return float(rdp_epsilon_in_jit(ledger.Ledger((account,)), DELTA))


def calibrated(event, scheme):
    sampling, p = SCHEMES[scheme]
    try:
        return calibration.noise_multiplier(
            1.0, DELTA, rounds=ROUNDS, sampling_rate=p, scheme=sampling, event=event
        )
    except ValueError as refused:
        assert "no known cost" in str(refused)  # noqa: PT017
        return math.inf


def budgeted(event, scheme):
    """Return the inverse of the number of rounds that a budget has room for."""
    try:
        limit = calibration.budget(
            3.0, DELTA, lambda rounds: [spend(event, scheme, rounds=rounds)], most=64
        )
    except ValueError as refused:
        assert "no room for a round" in str(refused)  # noqa: PT017
        return math.inf
    return 1 / limit.planned[0].entries[0].rounds


def reported(event, scheme):
    epsilon = guarantee.report([spend(event, scheme)], DELTA).find("zero_out").epsilon
    return math.inf if epsilon is None else epsilon


DOORS = {
    "report": reported,
    "spent": lambda event, scheme: guarantee.tight_epsilon([spend(event, scheme)], DELTA),
    "rdp": lambda event, scheme: guarantee.rdp_epsilon([spend(event, scheme)], DELTA),
    "in jit": in_jit,
    "calibrate": calibrated,
    "budget": budgeted,
    "select": lambda event, scheme: selection.epsilon(
        selection.parse("geometric:3"), [[spend(event, scheme)]], DELTA
    ),
}


QUICK = {("report", "fixed"), ("rdp", "poisson, few places"), ("select", "groups")}


@pytest.mark.parametrize(
    ("door", "scheme"),
    [
        pytest.param(door, scheme, marks=() if (door, scheme) in QUICK else pytest.mark.thorough)
        for door, scheme in itertools.product(DOORS, SCHEMES)
    ],
)
def test_whoever_knows_less_of_a_cost_never_pays_less(door, scheme):
    ask = DOORS[door]
    truth = ask(Gaussian(), scheme)
    assert 0 < truth < math.inf
    for event in LESS:
        assert ask(event, scheme) >= truth * (1 - 2e-3), event.kind
    for event in NOTHING:
        assert ask(event, scheme) == math.inf, event.kind


@dataclasses.dataclass(frozen=True)
class LossesAlone(PrivacyEvent):
    """Laplace noise by dp_accounting, without Rényi divergences and without a word on sampling."""

    def losses(self, entry, adjacency, interval):
        return privacy_loss_distribution.from_laplace_mechanism(
            entry.noise_multiplier / self.sensitivity(adjacency),
            sampling_prob=entry.sampling_rate,
            value_discretization_interval=interval,
        )


@pytest.mark.parametrize("rounds", [1, 5])
def test_cohorts_of_a_fixed_size_cost_the_mean_over_participations(rounds):
    """Others know who took part: δ(ε) is the mean over Bin(T, q/m) participations."""
    one = privacy_loss_distribution.from_laplace_mechanism(4.0)
    found = guarantee.tight_epsilon([spend(LossesAlone(), "fixed", z=4.0, rounds=rounds)], DELTA)
    delta = sum(
        binom.pmf(times, rounds, 0.3) * one.self_compose(times).get_delta_for_epsilon(found)
        for times in range(1, rounds + 1)
    )
    assert delta == pytest.approx(DELTA, rel=1e-2)


def test_an_event_that_does_not_say_what_sampling_hides_is_composed_without_it():
    sampled = guarantee.report([spend(LossesAlone(), "poisson")], DELTA)
    whole = guarantee.report([spend(LossesAlone(), "full")], DELTA)
    assert sampled.find("zero_out").epsilon == whole.find("zero_out").epsilon
    assert "cost as much as with all clients" in str(sampled)
    assert "cost as much as with all clients" not in str(whole)


@pytest.mark.thorough
def test_losses_too_large_for_the_usual_grid_get_a_coarser_one():
    assert (
        guarantee.tight_epsilon([spend(LossesAlone(), "full", z=1e-4)], DELTA) > 0.99 * ROUNDS * 1e4
    )
    few = spend(LossesAlone(), "full", z=0.02, rounds=2)
    assert guarantee.tight_epsilon([few], DELTA) == pytest.approx(100, rel=0.02)


def test_losses_on_another_grid_are_refused():
    class Coarse(PrivacyEvent):
        def losses(self, entry, adjacency, interval):
            return Gaussian().losses(entry, adjacency, 2 * interval)

    with pytest.raises(ValueError, match="as it was asked for"):
        guarantee.tight_epsilon([spend(Coarse(), "full")], DELTA)


def test_missing_mass_counts_as_an_infinite_loss():
    class Incomplete(PrivacyEvent):
        def losses(self, entry, adjacency, interval):
            return (Losses(interval, 0, np.array([0.9]), 0.0),)

    assert guarantee.tight_epsilon([spend(Incomplete(), "full", rounds=1)], 0.09) == math.inf
    assert guarantee.tight_epsilon([spend(Incomplete(), "full", rounds=1)], 0.11) == 0


def test_no_number_is_infinite_in_each_conversion():
    nothing = np.full(len(rdp.ORDERS), math.nan)
    assert rdp.epsilon(nothing, DELTA) == math.inf
    assert rdp.delta(nothing, 1.0) == 1
    assert Profile(lambda e: math.nan, lambda d: math.nan).epsilon(DELTA) == math.inf
    assert Profile(lambda e: math.nan, lambda d: math.nan).delta(1.0) == 1
