"""Hypothetical runs, described by numbers alone: cohorts, noise, number of rounds."""

import dataclasses
import math
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, NamedTuple

from fedjaxsim import checks
from fedjaxsim.privacy.entries import (
    MOST_ROUNDS,
    SamplingScheme,
    check_delta,
    check_noise_multiplier,
)
from fedjaxsim.privacy.events import GAUSSIAN, PrivacySpend
from fedjaxsim.privacy.schedule import CONSTANT, Schedule

if TYPE_CHECKING:
    from fedjaxsim.privacy.guarantee import Report


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cohorts:
    """Sampling of cohorts, as asked for.

    Attributes:
      sampling: Sampling of cohorts: independent, of exactly q clients, all, or in passes.
      sampling_rate: p (poisson), or the cohort's share q/m of the clients (fixed, passes).
      clients: m; ε depends on it only through a capacity or a share.
      capacity: Places in a cohort (poisson; by default enough for all), or its size q (fixed,
        passes).
      max_participations: Largest number of participations of one client (passes).
    """

    sampling: Literal["poisson", "fixed", "full", "passes"] = "poisson"
    sampling_rate: float | None = None
    clients: int | None = None
    capacity: int | None = None
    max_participations: int | None = None


class ResolvedCohorts(NamedTuple):
    """Sampling of cohorts, as accountants read it, with sentences on values filled in."""

    scheme: SamplingScheme
    sampling_rate: float
    assumed: tuple[str, ...] = ()


def resolve(cohorts: Cohorts, delta: float = 0.1) -> ResolvedCohorts:
    """Fill in missing values, where ε does not depend on them; a missing m suits δ."""
    kind, p, m = cohorts.sampling, cohorts.sampling_rate, cohorts.clients
    check_delta(delta)
    if p is not None and not 2.0**-32 <= p <= 1:
        raise ValueError(f"sampling_rate must lie in [2^-32, 1], got {p}")
    if m is None and cohorts.capacity is not None:
        raise ValueError(f"capacity must come with clients, got {cohorts.capacity} alone")
    if (cohorts.max_participations is None) == (kind == "passes"):
        raise ValueError(
            "max_participations must be given for passes and for no other sampling, got "
            f"{cohorts.max_participations} for {kind}"
        )
    assumed = ()
    if m is None:
        m = _any_clients(p if kind in ("fixed", "passes") else None, delta)
        assumed = (f"The number of clients was not given: {m} stand for any, with the same ε.",)
    if kind in ("fixed", "passes"):
        cohort = _cohort(cohorts, m)
        scheme = "fixed" if kind == "fixed" else "capped"
        return ResolvedCohorts(
            SamplingScheme(scheme, m, cohort, cohorts.max_participations), cohort / m, assumed
        )
    capacity = m if cohorts.capacity is None else cohorts.capacity
    if kind == "full":
        if p not in (None, 1):
            raise ValueError(f"sampling_rate must be 1 for full participation, got {p}")
        return ResolvedCohorts(SamplingScheme(kind, m, capacity), 1.0, assumed)
    if p is None:
        raise ValueError("sampling_rate must be given for poisson sampling, got none")
    if capacity == m:
        assumed += ("Cohorts have room for all clients.",)
    return ResolvedCohorts(SamplingScheme(kind, m, capacity), p, assumed)


def _any_clients(share: float | None, delta: float) -> int:
    """Return m with a whole number q = `share`·m and, if possible, δ ≤ 1/(10 m)."""
    # Typed decimals are ratios of small numbers, up to their rounding to binary.
    unit = 1 if share is None else Fraction(share).limit_denominator(10**12).denominator
    suited = int(0.1 / max(delta, 1e-10) * (1 + 1e-12))
    return unit * max(1, suited // unit)


def _cohort(cohorts: Cohorts, clients: int) -> int:
    """Return the size q of cohorts of a fixed size."""
    p, cohort = cohorts.sampling_rate, cohorts.capacity
    if cohort is None:
        if p is None:
            raise ValueError(
                f"sampling_rate, or clients and capacity, must be given for {cohorts.sampling}, "
                "got none"
            )
        cohort = max(1, round(p * clients))
    if p is not None and not math.isclose(p, cohort / clients, rel_tol=1e-6):
        raise ValueError(
            f"sampling_rate must be a cohort's share of {clients} clients, such as "
            f"{cohort}/{clients} = {cohort / clients:.9g}, got {p}"
        )
    return cohort


def check(noise_multiplier: float, rounds: int) -> None:
    """Raise ValueError unless z is 0 or can be drawn, and a ledger can count the rounds."""
    check_noise_multiplier(noise_multiplier, zero=True)
    checks.count(1, MOST_ROUNDS, rounds=rounds)


def report(
    cohorts: ResolvedCohorts,
    noise_multiplier: float,
    rounds: int,
    delta: float,
    accountant: str | None = None,
    noise_schedule: Schedule = CONSTANT,
) -> "Report":
    """Compute `guarantee.report` of a hypothetical run, naming the values filled in."""
    from fedjaxsim.privacy import guarantee

    entries = noise_schedule.entries(noise_multiplier, cohorts.sampling_rate, rounds)
    charged = PrivacySpend(cohorts.scheme, GAUSSIAN, entries)
    return guarantee.report([charged], delta, accountant).assuming(cohorts.assumed)
