"""The cost of one round, by its event: nothing else asks an event for a cost.

An event may be a user's own. A cost that is not a number of at least 0 counts as ∞, which is an
unknown cost, and ∞ stays ∞ in every mixture and sum. An event gets the client's probability to
be in the cohort only if it says that it `amplifies`; otherwise the client is in for certain.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjaxsim.privacy.accounting import losses as grids
from fedjaxsim.privacy.accounting.profile import costs
from fedjaxsim.privacy.accounting.rdp import log_expm1
from fedjaxsim.privacy.entries import Adjacency, Entry
from fedjaxsim.privacy.events import PrivacyEvent

LEAST_NOISE = 1e-100
"""Below this noise there is no useful guarantee, and squares underflow."""
_ROUNDING = 1e-9
"""Largest part of a distribution's mass that rounding may add or lose."""


def _told(event: PrivacyEvent, entry: Entry) -> Entry:
    return entry if event.amplifies else entry._replace(sampling_rate=1.0)


def losses(
    event: PrivacyEvent, entry: Entry, adjacency: Adjacency, interval: float
) -> grids.Pair | None:
    """Return the privacy losses of one round on a grid, or None if they are not known.

    Raises:
      ValueError: if the event gives losses on another grid.
    """
    try:
        answer = event.losses(_told(event, entry), adjacency, interval)
    except OverflowError:  # losses so large that e^loss is no number
        return None
    if answer is None:
        return None
    pair = grids.adapted(answer)
    for one_way in pair:
        if not math.isclose(one_way.interval, interval, rel_tol=1e-9):
            raise ValueError(
                f"the losses of event {event.kind!r} must be on a grid of width {interval:g}, as "
                f"it was asked for, got {one_way.interval:g}"
            )
        masses = np.append(one_way.masses, one_way.infinite)
        if not np.all(masses >= -_ROUNDING):  # also no numbers
            return None
    return tuple(map(_whole, pair))


def _whole(one_way: grids.Losses) -> grids.Losses:
    """Return losses whose missing mass, beyond rounding, counts as an infinite loss."""
    masses = np.maximum(one_way.masses, 0.0)
    missing = 1 - float(np.sum(masses)) - one_way.infinite
    infinite = one_way.infinite + (missing if missing > _ROUNDING else 0.0)
    return one_way._replace(masses=masses, infinite=min(1.0, max(0.0, infinite)))


def rdp(
    event: PrivacyEvent, entry: Entry, adjacency: Adjacency, orders: Sequence[float], xp: Any = np
) -> Any:
    """Return RDP of one round with z > 0, (orders,); on the host, order ∞ may be the last one."""
    entry, finite = _told(event, entry), tuple(order for order in orders if order < math.inf)
    values = xp.broadcast_to(costs(event.rdp(entry, adjacency, finite, xp), xp), (len(finite),))
    if len(finite) == len(orders):
        return values
    return np.append(values, costs(event.largest_loss(entry, adjacency)))


def mu(event: PrivacyEvent, entry: Entry, adjacency: Adjacency) -> float | None:
    """Return μ if a round at p = 1 is one Gaussian release, exactly; else None."""
    value = event.mu(entry, adjacency)
    return None if value is None else float(costs(value))


def mixed_rdp(
    event: PrivacyEvent,
    noise_multiplier: Any,
    inclusions: Sequence[tuple[Any, Any]],
    adjacency: Adjacency,
    orders: Sequence[float],
    xp: Any = np,
) -> Any:
    """Return RDP of one round, (orders,), by (weight, p) of what others may know of it.

    That is log(1 + Σ w (e^((α−1)ρ) − 1))/(α − 1), ρ being RDP of a round at p, and, at order ∞, the
    largest ρ. Traced weights may add up to more than 1.
    """
    weighted = [
        (weight, rdp(event, Entry(noise_multiplier, p, 1), adjacency, orders, xp))
        for weight, p in inclusions
        if not _is_zero(weight) and not _is_zero(p)
    ]
    if not weighted:
        return xp.zeros(len(orders))
    if len(weighted) == 1 and isinstance(weighted[0][0], float) and weighted[0][0] == 1:
        return weighted[0][1]
    if xp is np:
        from scipy.special import logsumexp
    else:
        from jax.scipy.special import logsumexp
    alphas = np.asarray(orders, np.float64)
    steps = xp.asarray(np.where(np.isfinite(alphas), alphas - 1, 1.0), weighted[0][1].dtype)
    terms = []
    for weight, chance in weighted:
        nothing = chance <= 0
        excess = log_expm1(xp.where(nothing, 1.0, steps * chance), xp)
        terms.append(xp.where(nothing, -math.inf, xp.log(weight) + excess))
    mixed = costs(xp.logaddexp(0.0, logsumexp(xp.stack(terms), axis=0)) / steps, xp)
    largest = xp.max(xp.stack([chance for _, chance in weighted]), axis=0)
    return xp.where(np.isfinite(alphas), mixed, largest)


def _is_zero(number: Any) -> bool:
    return isinstance(number, float | int) and number == 0
