"""A privacy filter: a budget (ε, δ) that no run exceeds, however it chooses its rounds.

A report of rounds whose noise and number were fixed beforehand is no bound for a run that stops, or
sets its noise, by what it has published. The filter is one: for one Rényi order α, fixed before the
first release, a round runs only if Σ_t ρ_t(α) including it stays within B(α). The rounds together
are then (α, B(α))-RDP under fully adaptive composition (Feldman and Zrnic 2021, Theorem 4.3;
Lécuyer 2021), hence (ε, δ)-DP by the conversion that defines B(α).

Rounds that are allowed as long as *some* order stays within its budget have no such theorem: which
order holds in the end may follow the releases, and each order has a δ of its own. So a budget has
one order, the one that lets the planned rounds go on longest.
"""

import math
from collections.abc import Sequence

import numpy as np

from fedjaxsim.privacy.accounting import composition, rdp
from fedjaxsim.privacy.accounting.profile import with_failure
from fedjaxsim.privacy.events import Adjacency, PrivacyLimit, PrivacySpend, check_delta

_OF_FILTER = 0.99
"""Share of δ for the filter; cohorts may exceed their capacity with the rest."""
MARGIN = 1 + 1e-4
"""Above the error of RDP in float32, relative."""


def limit_for(epsilon: float, delta: float, plan: Sequence[PrivacySpend] = ()) -> PrivacyLimit:
    """Return the budget whose order allows most repetitions of a plan.

    Args:
      epsilon: ε > 0 in nats, for zero-out.
      delta: δ in (0, 1).
      plan: the rounds that are likely; without a cost, those of a Gaussian with full participation.

    Raises:
      ValueError: if a number is out of range, or no order certifies so small an ε.
    """
    check_delta(delta)
    if not 0 < epsilon < math.inf:
        raise ValueError(f"budget_epsilon must be positive and finite, got {epsilon}")
    alphas = np.array(rdp.INTEGER_ORDERS, np.float64)
    excess = np.log1p(-1 / alphas) - np.log(_OF_FILTER * delta * alphas) / (alphas - 1)
    largest = epsilon - excess
    if np.all(largest <= 0):
        raise ValueError(
            f"budget_epsilon must be above {np.min(excess):.3g} at delta {delta:.3g}, the least "
            f"that RDP certifies, got {epsilon}"
        )
    cost = rdp_of(plan, rdp.INTEGER_ORDERS)
    place = int(np.argmax(largest / np.where(cost > 0, cost, alphas)))
    return PrivacyLimit(epsilon, delta, rdp.INTEGER_ORDERS[place], float(largest[place]))


def rdp_of(charges: Sequence[PrivacySpend], orders: tuple[float, ...]) -> np.ndarray:
    """Compute RDP of charges with noise at some orders, (orders,), in float64 for zero-out."""
    if any(one.event.of_whole_run for one in charges):
        raise ValueError(
            "correlated noise has no cost of single rounds, and no budget or selection"
        )
    return composition.rdp_of(charges, "zero_out", orders)


def odometer(limit: PrivacyLimit, charges: Sequence[PrivacySpend]) -> float:
    """Compute the least budget ε, at this order and δ, that allows the charges, margin included.

    Alone it bounds nothing: the bound is the budget, whatever is left of it.
    """
    spent = rdp_of(charges, (limit.order,)) * MARGIN
    return rdp.epsilon(spent, _OF_FILTER * limit.delta, (limit.order,))


def fits(limit: PrivacyLimit, charges: Sequence[PrivacySpend]) -> bool:
    """Return whether charges are within the budget, as `in_loop.allows` decides it."""
    return bool(rdp_of(charges, (limit.order,))[0] * MARGIN <= limit.rdp)


def exceeded(limit: PrivacyLimit, charges: Sequence[PrivacySpend]) -> str:
    """Return why a budget bounds nothing, in float64: charges exceed it; "" if they do not."""
    spent = float(rdp_of(charges, (limit.order,))[0])
    if spent <= limit.rdp:
        return ""
    return (
        f"the state spent {spent:.5g} RDP of order {limit.order} of the {limit.rdp:.5g} in its "
        "budget: its ledger was changed by hand, or its noise did not follow from published state"
    )


def epsilon(
    limit: PrivacyLimit, charges: Sequence[PrivacySpend], delta: float, adjacency: Adjacency
) -> float:
    """Compute the ε of whatever the budget allows; inf if δ or the order certifies none.

    Replacing a client's data zeroes them out and fills them in again, so it is two neighbours away.
    With a = α/2 > 1 the rounds are then (a, ((a − 1/2)/(a − 1) + 1) B)-RDP (Mironov 2017, Corollary
    4, and D_2a ≥ D_2a−1).

    Args:
      limit: the budget.
      charges: within the budget; only the probability matters that a cohort exceeded its capacity.
      delta: δ in (0, 1); at its own δ or above, ε is the budget's for zero-out.
      adjacency: "zero_out" or "replace".
    """
    spent, order = limit.rdp, float(limit.order)
    if adjacency == "replace":
        order = limit.order / 2
        if order <= 1:
            return math.inf
        spent *= (order - 0.5) / (order - 1) + 1
    found = rdp.profile(np.array([spent]), (order,))
    value = with_failure(found, composition.any_overflow(charges)).epsilon(delta)
    kept = adjacency == "zero_out" and delta >= limit.delta
    return max(value, limit.epsilon) if kept else value
