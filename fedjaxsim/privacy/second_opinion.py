"""A second opinion on ε: the charges of a report, recomputed with Google's dp_accounting.

Privacy loss distributions, their mixtures and their composition are dp_accounting's. Only what
others know of a client's participation comes from the sampling scheme here. A period of random
allocation, which dp_accounting does not describe, is simulated (`accounting.simulation`).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedjaxsim.extras import importing
from fedjaxsim.privacy.accounting import (
    allocation,
    composition,
    losses,
    randomized_response,
    simulation,
)
from fedjaxsim.privacy.entries import Adjacency, Entry
from fedjaxsim.privacy.events import (
    Allocated,
    Banded,
    Correlated,
    Gaussian,
    Prepared,
    PrivacyEvent,
    PrivacySpend,
    Pure,
)

LARGEST_DIFFERENCE = 0.01
"""Largest relative difference of two values of one ε."""
_OF_LOSS = 2e-3
"""Grid in units of the loss of a pure release."""
_KINDS = Gaussian, Prepared, Correlated, Banded, Pure


class SecondOpinion(NamedTuple):
    """An ε of a report, and dp_accounting's, for joint DP at one adjacency."""

    adjacency: Adjacency
    delta: float
    epsilon: float
    second: float

    @property
    def agrees(self) -> bool:
        """Return whether both differ by at most 1 %."""
        return math.isclose(self.epsilon, self.second, rel_tol=LARGEST_DIFFERENCE, abs_tol=1e-6)

    def __str__(self) -> str:
        """Return one line, as in `zero_out: ε 1.2345, and by dp_accounting 1.2346`."""
        both = f"ε {self.epsilon:.5g}, and by dp_accounting {self.second:.5g}"
        return f"{self.adjacency}: {both} (δ = {self.delta:.3g})"


def epsilon(charges: Sequence[PrivacySpend], delta: float, adjacency: Adjacency) -> float:
    """Compute the joint-DP ε of clients' charges with dp_accounting.

    Raises:
      ValueError: for releases that dp_accounting does not describe.
      MissingExtraError: if dp_accounting is not installed.
    """
    with importing("verify"):
        from dp_accounting.pld import privacy_loss_distribution

    for charged in charges:
        if type(charged.event) not in _KINDS:
            raise ValueError(
                f"there is no second opinion on {charged.event.kind!r} releases: dp_accounting "
                "describes Gaussian and pure ones"
            )
    met = composition.met_by_one_client(charges)
    for rounds in met:
        if isinstance(rounds.event, Allocated):
            _check_simulated(rounds.event, adjacency)
    if any(rounds.entry.noise_multiplier <= 0 for rounds in met):
        return math.inf
    interval = composition.grid(met, adjacency)
    for rounds in met:
        if isinstance(rounds.event, Pure):  # dp_accounting rounds each of its two losses up
            high, _ = randomized_response.answer(rounds.entry, rounds.event.replace, adjacency)
            interval = min(interval, _OF_LOSS * high)
    total = privacy_loss_distribution.identity(interval)
    for rounds in met:
        mixture, above = None, 0.0
        for weight, p in rounds.inclusions:
            if weight > 0:
                entry = rounds.entry._replace(sampling_rate=p)
                part = _one_round(rounds.event, entry, adjacency, interval)
                mixture = (
                    part
                    if mixture is None
                    else mixture.compute_mixture(part, above / (above + weight))
                )
                above += weight
        if mixture is not None:
            total = total.compose(mixture.self_compose(rounds.entry.rounds))
    return float(total.get_epsilon_for_delta(delta))


def _check_simulated(event: Allocated, adjacency: Adjacency) -> None:
    if event.period > simulation.LONGEST_PERIOD:
        raise ValueError(
            "there is no second opinion on random allocation with a period above "
            f"{simulation.LONGEST_PERIOD:,} rounds, which takes long to simulate"
        )
    if adjacency == "replace" and event.replace < 2:
        raise ValueError(
            "there is no second opinion on random allocation of messages whose replacement is "
            f"{event.replace:.3g}, not 2, clip norms away"
        )


def _one_round(event: PrivacyEvent, entry: Entry, adjacency: Adjacency, interval: float) -> Any:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld import privacy_loss_distribution as plds

    z, p, _ = entry
    if p == 0:
        return plds.identity(interval)
    if isinstance(event, Allocated):
        turn_entry = Entry(z, 1.0, 1)
        turn = _one_round(Gaussian(replace=event.replace), turn_entry, adjacency, interval)
        if not allocation.hides(z, event.period, interval):
            return turn
        pair = simulation.losses(z, event.period, interval)
        if adjacency == "replace":
            pair = (losses.chained(*pair),)
        hidden = plds.PrivacyLossDistribution(
            *(
                pld_pmf.DensePLDPmf(interval, side.first, side.masses, side.infinite, True)
                for side in pair
            )
        )
        return hidden.compute_mixture(turn, 1 - event.full) if event.full else hidden
    if isinstance(event, Gaussian):
        if p == 1:
            z, relation = z / event.sensitivity(adjacency), NeighboringRelation.ADD_OR_REMOVE_ONE
        elif adjacency == "replace":
            relation = NeighboringRelation.REPLACE_ONE
        else:
            relation = NeighboringRelation.ADD_OR_REMOVE_ONE
        return plds.from_gaussian_mechanism(
            z,
            value_discretization_interval=interval,
            sampling_prob=p,
            neighboring_relation=relation,
        )
    # The worst pair of a pure release: two answers of randomized response.
    high, low = randomized_response.answer(entry, event.replace, adjacency)
    likely = math.log(math.expm1(-low) / math.expm1(-high - low))
    rare = math.log1p(-math.exp(likely))
    return plds.from_two_probability_mass_functions(
        {"yes": likely - high, "no": rare + low},
        {"yes": likely, "no": rare},
        value_discretization_interval=interval,
        symmetric=adjacency == "replace",
    )
