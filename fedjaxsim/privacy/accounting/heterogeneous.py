"""Composition of releases of different kinds.

A state may pass through several samplers and mechanisms. Two accountants describe all of them:
privacy loss distributions, which convolve, and Rényi divergences, which add up. Both give upper
bounds.

The adversary of joint differential privacy knows when it took part; the reader of the released
sequence knows less, so a number for the first bounds the second.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjaxsim.privacy.accounting import (
    composition,
    gaussian,
    pld,
    randomized_response,
    rdp,
    rdp_without_replacement,
    subsampled_gaussian_pld,
)
from fedjaxsim.privacy.accounting.groups import merge, merge_pure
from fedjaxsim.privacy.accounting.profile import NOTHING, Profile, with_failure
from fedjaxsim.privacy.accounting.randomized_response import Answers
from fedjaxsim.privacy.events import Adjacency, Entry, PrivacySpend, View

_ALPHAS = np.array(rdp.INTEGER_ORDERS, np.float64)


class _Parts(NamedTuple):
    """The rounds that one client can have met, by their description.

    Attributes:
      mu: of the Gaussian releases with full participation, as one Gaussian release.
      sampled: Poisson-sampled rounds, z in units of one message's norm.
      fixed: rounds of cohorts of a fixed size, z in units of the distance, p = q/m.
      pure: rounds that are each ε-differentially private.
    """

    mu: float
    sampled: tuple[Entry, ...]
    fixed: tuple[Entry, ...]
    pure: tuple[Answers, ...]


def _met(charged: PrivacySpend) -> list[Entry]:
    composition.check_entries(charged.entries, charged.scheme)
    return composition.met_by_one_client(charged.entries, charged.scheme, charged.event)


def _parts(charges: Sequence[PrivacySpend], adjacency: Adjacency) -> _Parts:
    squared, sampled, fixed, pure = [], [], [], []
    for charged in charges:
        scheme, event = charged.scheme, charged.event
        s, spent = event.sensitivity(adjacency), _met(charged)
        if event.kind == "pure":
            sampled_too = scheme.kind == "poisson"
            pure += randomized_response.answers(merge_pure(spent), event, adjacency, sampled_too)
            continue
        noisy = [entry for entry in spent if entry.noise_multiplier < math.inf]
        if scheme.kind == "fixed":
            q = scheme.capacity / scheme.clients
            fixed += [Entry(z / s, q, rounds) for z, _, rounds in noisy]
            continue
        always = [entry for entry in noisy if scheme.kind != "poisson" or entry.sampling_rate == 1]
        squared.append(gaussian.mu(always, s) ** 2)
        sampled += [
            entry._replace(noise_multiplier=entry.noise_multiplier / event.zero_out)
            for entry in noisy
            if scheme.kind == "poisson" and entry.sampling_rate < 1
        ]
    return _Parts(
        math.sqrt(math.fsum(squared)),
        tuple(merge(sampled)),
        tuple(merge(fixed)),
        tuple(pure),
    )


def accountants(charges: Sequence[PrivacySpend], adjacency: Adjacency) -> tuple[str, ...]:
    """Return the accountants of all these kinds; Poisson sampling has RDP for zero-out only."""
    sampled = _parts(charges, adjacency).sampled
    return ("pld",) if adjacency == "replace" and sampled else ("pld", "rdp")


def profile(
    charges: Sequence[PrivacySpend], adjacency: Adjacency, view: View, accountant: str
) -> Profile:
    """Compute the privacy profile of charges with noise, overflow of cohorts included.

    Raises:
      ValueError: if the accountant does not describe all of them, or a ledger cannot come from its
        scheme.
    """
    if accountant not in accountants(charges, adjacency):
        raise ValueError(
            f"accountant {accountant!r} does not describe releases of different kinds together "
            f"for {adjacency!r}; use {' or '.join(accountants(charges, adjacency))}"
        )
    if accountant == "rdp":
        total = sum((rdp_of(charged, adjacency, view) for charged in charges), 0.0 * _ALPHAS)
        found = rdp.profile(total, rdp.INTEGER_ORDERS)
    else:
        found = _convolved(_parts(charges, adjacency), adjacency)
    return with_failure(found, composition.any_overflow(charges))


def rdp_of(
    charged: PrivacySpend,
    adjacency: Adjacency,
    view: View,
    orders: Sequence[float] = rdp.INTEGER_ORDERS,
) -> np.ndarray:
    """Compute RDP of the rounds of one kind at some orders, (orders,).

    At all orders long schedules are merged into fewer rounds of more cost.
    """
    alphas, all_orders = np.asarray(orders, np.float64), orders is rdp.INTEGER_ORDERS
    few = merge if all_orders else list
    scheme, event = charged.scheme, charged.event
    s, spent = event.sensitivity(adjacency), _met(charged)
    if event.kind == "pure":
        rounds = randomized_response.answers(spent, event, adjacency, scheme.kind == "poisson")
        return randomized_response.renyi(rounds, orders)
    if scheme.kind != "fixed":
        entries = [
            entry if scheme.kind == "poisson" else entry._replace(sampling_rate=1.0)
            for entry in spent
        ]
        return rdp.compose(few(entries), s, orders)
    total, q = 0.0 * alphas, scheme.capacity / scheme.clients
    for z, _, rounds in spent:
        # log E[e^((α−1)·loss)] over the client's participation, which the others know.
        exponent = alphas * (alphas - 1) * (s / z) ** 2 / 2
        total += rounds * np.logaddexp(math.log1p(-q) if q < 1 else -np.inf, math.log(q) + exponent)
    joint = total / (alphas - 1)
    if view == "joint_dp" or not all_orders:
        return joint
    released = rdp_without_replacement.compose(
        merge(spent), scheme.capacity, scheme.clients, event.replace
    )
    return np.minimum(joint, released)


def _interval(parts: _Parts) -> float:
    """Choose the grid of losses: fine enough for Poisson-sampled rounds, with room for all."""
    finest = pld.interval(parts.sampled) if parts.sampled else pld.INTERVAL
    if parts.pure:
        finest = min(finest, pld.grid(randomized_response.interval(parts.pure)))
    one = [subsampled_gaussian_pld.largest_loss(z, 1.0) for z, _, _ in parts.fixed]
    one += [each.high for each in parts.pure]
    one += [subsampled_gaussian_pld.largest_loss(1 / parts.mu, 1.0)] if parts.mu > 0 else []
    if not one:
        return finest
    # A rough bound on the composed losses is enough: a grid too coarse is pessimistic.
    spread = rdp.compose(parts.sampled, orders=rdp.INTEGER_ORDERS) + _ALPHAS * parts.mu**2 / 2
    for z, _, rounds in parts.fixed:
        spread = spread + rounds * _ALPHAS / (2 * z**2)
    spread = spread + randomized_response.renyi(parts.pure)
    whole = max(max(one), 2 * rdp.epsilon(spread, 1e-15, rdp.INTEGER_ORDERS))
    rounds = sum(entry.rounds for entry in (*parts.sampled, *parts.fixed, *parts.pure))
    return max(finest, pld.coarsest(max(one), whole, rounds))


@functools.lru_cache(maxsize=2)
def _convolved(parts: _Parts, adjacency: Adjacency) -> Profile:
    """Compute the profile; the last few are cached, as a report asks for both views."""
    interval = _interval(parts)
    pieces = pld.sampled_rounds(parts.sampled, adjacency == "replace", interval)
    for z, q, rounds in parts.fixed:
        pieces.append(
            subsampled_gaussian_pld.one_fixed_size_round(z, q, interval).self_compose(rounds)
        )
    pieces += randomized_response.distributions(parts.pure, interval)
    if not pieces:
        return gaussian.profile(parts.mu) if parts.mu > 0 else NOTHING
    counted = [*parts.sampled, *parts.fixed, *parts.pure]
    return pld.composed(pieces, parts.mu, interval, sum(entry.rounds for entry in counted))
