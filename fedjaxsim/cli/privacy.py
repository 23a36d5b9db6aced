"""`fedjaxsim privacy`: what a plan costs, or what meets an ε, by the accountants of runs."""

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal

from fedjaxsim import checks
from fedjaxsim.factories import flag
from fedjaxsim.privacy.entries import (
    MOST_ROUNDS,
    Adjacency,
    SamplingScheme,
    check_delta,
    check_noise_multiplier,
)
from fedjaxsim.privacy.events import GAUSSIAN, PrivacySpend
from fedjaxsim.privacy.schedule import Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cohorts:
    """Sampling of cohorts, as asked for.

    Attributes:
      sampling: Sampling of cohorts: independent, of exactly q clients, or all. K passes cost
        what K rounds of all clients do.
      sampling_rate: p (poisson), or the cohort's share q/m of the clients (fixed).
      clients: m; ε depends on it only through a capacity or a share.
      capacity: Places in a cohort (poisson; by default enough for all), or its size q (fixed).
    """

    sampling: Literal["poisson", "fixed", "full"] = "poisson"
    sampling_rate: float | None = None
    clients: int | None = None
    capacity: int | None = None


def privacy(
    *,
    epsilon: float | None = None,
    delta: float,
    noise_multiplier: float | None = None,
    rounds: int | None = None,
    cohorts: Cohorts,
    adjacency: Adjacency | None = None,
    noise_schedule: str | None = None,
    accountant: str | None = None,
    json: bool = False,
) -> Callable[[], int]:
    """Compute the ε of a plan, or the noise, rounds or sampling rate that meets an ε.

    Without --epsilon, a plan has the ε of its noise, rounds and sampling. With it, leave out one of
    them: the smallest noise multiplier, the most rounds (2³¹ − 1 if any number does) or the largest
    rate of Poisson sampling that meets it is found, with the report of that plan.

    Args:
      epsilon: Target ε, in nats.
      delta: Total δ.
      noise_multiplier: z, noise on the sum of clipped messages over the clip norm.
      rounds: T.
      cohorts: Sampling.
      adjacency: Adjacency of the target; by default zero_out.
      noise_schedule: Spread of the privacy cost over the rounds (constant, power:A or geometric:Q);
        z is then the constant noise of the same total cost. Constant where rounds are solved for.
      accountant: pld or rdp, for a plan's ε; by default the tighter one.
      json: Print JSON instead of text.
    """
    plan: dict[str, Any] = {"noise_multiplier": noise_multiplier, "rounds": rounds}
    if cohorts.sampling == "poisson":
        plan["sampling_rate"] = cohorts.sampling_rate
    missing = [name for name, value in plan.items() if value is None]
    if epsilon is not None and not missing:
        raise ValueError(
            f"epsilon finds what a plan lacks: leave out one of {', '.join(map(flag, plan))}"
        )
    if len(missing) != (0 if epsilon is None else 1):
        needed = "all" if epsilon is None else "epsilon and all but one"
        raise ValueError(
            f"a plan has {needed} of {', '.join(map(flag, plan))}; not given: "
            f"{', '.join(map(flag, missing))}"
        )
    if missing == ["sampling_rate"]:  # The scheme of Poisson sampling is the same at every rate.
        cohorts = dataclasses.replace(cohorts, sampling_rate=1.0)
    (scheme, share, assumed), schedule = _resolve(cohorts, delta), Schedule.parse(noise_schedule)
    check_noise_multiplier(noise_multiplier or 0.0, zero=True)
    checks.count(1, MOST_ROUNDS, rounds=1 if rounds is None else rounds)
    plan["sampling_rate"], solved = share, {}
    if epsilon is None and adjacency is not None:
        raise ValueError("adjacency has no effect without epsilon: both are reported")
    if epsilon is not None:
        if accountant is not None:
            raise ValueError("accountant has no effect with epsilon, which the tighter one meets")
        known = {name: value for name, value in plan.items() if name not in missing}
        solved = {
            missing[0]: _solve(
                missing[0],
                epsilon,
                delta,
                schedule,
                scheme=scheme,
                adjacency=adjacency or "zero_out",
                **known,
            )
        }
    z, T, p = (plan | solved).values()
    if T == 0:
        raise ValueError(f"not even one round meets epsilon {epsilon:g}")
    from fedjaxsim.privacy.guarantee import report  # late, as scipy is slow to import

    charged = PrivacySpend(scheme, GAUSSIAN, schedule.entries(z, p, T))
    made = report([charged], delta, accountant).assuming(assumed)

    def work() -> int:
        from fedjaxsim.report.files import print_json

        if json:
            nested = made.to_json()
            print_json({**solved, "guarantee": nested} if solved else nested)
        else:
            for name, value in solved.items():
                print(f"{name.replace('_', ' ')}: {value}")
            print(made)
        return 0

    return work


def _solve(quantity: str, epsilon: float, delta: float, schedule: Schedule, **plan: Any) -> Any:
    """Return the noise multiplier, the rounds or the rate with which a plan meets an ε."""
    from fedjaxsim.privacy import calibration

    if quantity == "rounds" and not schedule.is_constant:
        raise ValueError(
            "noise_schedule must be constant to solve for rounds, because other shares depend on "
            f"their number, got {schedule}"
        )
    if quantity != "rounds":
        plan["noise_schedule"] = schedule
    return getattr(calibration, quantity)(epsilon, delta, **plan)


def _resolve(cohorts: Cohorts, delta: float) -> tuple[SamplingScheme, float, tuple[str, ...]]:
    """Return scheme, rate, and sentences on values filled in: ε does not depend on them."""
    kind, p, m = cohorts.sampling, cohorts.sampling_rate, cohorts.clients
    check_delta(delta)
    if p is not None:
        checks.in_range(f"[{2.0**-32}, 1]", sampling_rate=p)
    if m is None and cohorts.capacity is not None:
        raise ValueError(f"capacity must come with clients, got {cohorts.capacity} alone")
    assumed = ()
    if m is None:
        m = _any_clients(p if kind == "fixed" else None, delta)
        assumed = (f"The number of clients was not given: {m} stand for any, with the same ε.",)
    if kind == "fixed":
        cohort = _cohort(cohorts, m)
        return SamplingScheme(kind, m, cohort), cohort / m, assumed
    capacity = m if cohorts.capacity is None else cohorts.capacity
    if kind == "full":
        if p not in (None, 1):
            raise ValueError(f"sampling_rate must be 1 for full participation, got {p}")
        return SamplingScheme(kind, m, capacity), 1.0, assumed
    if p is None:
        raise ValueError("sampling_rate must be given for poisson sampling, got none")
    if capacity == m:
        assumed += ("Cohorts have room for all clients.",)
    return SamplingScheme(kind, m, capacity), p, assumed


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
                "sampling_rate, or clients and capacity, must be given for fixed, got none"
            )
        cohort = max(1, round(p * clients))
    if p is not None and not math.isclose(p, cohort / clients, rel_tol=1e-6):
        raise ValueError(
            f"sampling_rate must be a cohort's share of {clients} clients, such as "
            f"{cohort}/{clients} = {cohort / clients:.9g}, got {p}"
        )
    return cohort
