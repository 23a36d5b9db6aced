"""Calibration: the noise, number of rounds or sampling rate that meets a privacy target.

Calibration uses the accountants of the report, capacity of cohorts included, and never exceeds the
target: ε was checked in float64 at the very float32 value returned.
"""

import bisect
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from fedjaxsim import checks
from fedjaxsim.checks import Name, SettingError
from fedjaxsim.privacy import guarantee
from fedjaxsim.privacy.accounting.composition import merge
from fedjaxsim.privacy.entries import (
    LARGEST_NOISE,
    MOST_ROUNDS,
    SMALLEST_NOISE,
    Adjacency,
    Entry,
    SamplingScheme,
    check_delta,
    check_epsilon,
    check_noise_multiplier,
)
from fedjaxsim.privacy.events import (
    GAUSSIAN,
    ChecksSkipped,
    PrivacyEvent,
    PrivacyLimit,
    PrivacySpend,
    Silos,
)
from fedjaxsim.privacy.schedule import CONSTANT, Schedule
from fedjaxsim.privacy.silos import SiloMinibatches, delta_of, profile

TOLERANCE = 1e-3
"""Largest relative gap between the target and the ε of a calibrated run."""
_CLOSE = 0.005
"""The same of a search on a coarse grid."""
_FEW_ROUNDS = 10_000
_LEAST_SHARE = 1e-6
Plan = Callable[[int], Sequence[PrivacySpend]]
"""What a number of rounds releases."""


def _check(epsilon: float, delta: float, event: PrivacyEvent) -> None:
    check_epsilon(epsilon)
    check_delta(delta)
    if not event.known:
        no_cost = f"{event.kind!r} releases have no known cost"
        why = event.reason if isinstance(event, ChecksSkipped) else no_cost
        raise ValueError(f"noise cannot be calibrated: {why}")


def _as_drawn(sampling_rate: float) -> float:
    """Return the sampling rate, or its float32 neighbour if larger: the largest possible charge."""
    checks.in_range("(0, 1]", sampling_rate=sampling_rate)
    return min(1.0, max(sampling_rate, float(np.float32(sampling_rate))))


def _search(
    cost: Callable[[float], float],
    epsilon: float,
    start: float,
    power: float,
    most: float = math.inf,
    least: float = 0.0,
    tolerance: float = TOLERANCE,
) -> float | None:
    """Find a float32 x in [least, most] with cost in [(1 − tolerance) ε, ε], by secants in logs.

    The cost is monotone, roughly ∝ x^power. If it jumps over the interval, this is the last x found
    below it; if no x costs that much, the costliest one; None if every x tried costs too much.
    """
    aim = math.log(epsilon) + math.log1p(-tolerance / 2)
    good = bad = best = previous = None
    close = 1e-5
    costliest = most if power > 0 else least
    slope, u = power, math.log(max(min(start, most), least))
    for _ in range(80):
        x = max(least, min(most, float(np.float32(math.exp(u)))))
        value = cost(x)
        if value <= epsilon:
            good, best = u, x
            if value >= (1 - tolerance) * epsilon or x == costliest:
                return x
        else:
            bad, close = u, 1e-5 if value < math.inf else tolerance
        level = math.log(value) if 0 < value < math.inf else aim + (3 if value > epsilon else -3)
        if previous is not None and u != previous[0]:
            secant = (level - previous[1]) / (u - previous[0])
            slope = math.copysign(min(max(abs(secant), 0.2), 50.0), power)
        previous = u, level
        u = min(u + (aim - level) / slope, math.log(most))
        u = max(u, math.log(least)) if least > 0 else u
        if good is not None and bad is not None:
            if abs(good - bad) < close:
                break
            if not min(good, bad) < u < max(good, bad):
                u = (good + bad) / 2
    return best


def _solve(
    cost: Callable[..., float], epsilon: float, guess: float, power: float, **limits: float
) -> float | None:
    """Find x with `cost(x[, method, schedule])` ≤ ε from near where cheaper methods meet it."""
    by_rdp: dict[float, float] = {}
    on_grid: dict[float, float] = {}

    def rough(x: float) -> float:
        by_rdp[x] = cost(x, guarantee.rdp_epsilon, CONSTANT)  # a schedule changes this x little
        return by_rdp[x]

    def coarse(x: float) -> float:
        on_grid[x] = cost(x, guarantee.coarse_epsilon)
        return on_grid[x]

    start = (
        _search(rough, epsilon, guess, math.copysign(1, power), tolerance=0.05, **limits) or guess
    )
    power = _slope(by_rdp, start, power)
    if 0 < coarse(start) < math.inf:
        start = _search(coarse, epsilon, start, power, tolerance=_CLOSE, **limits) or start
        power = _slope(on_grid, start, power)
    return _search(cost, epsilon, start, power, **limits)


def _slope(points: dict[float, float], x: float, usual: float) -> float:
    """Return d log cost/d log x at x from the costs at x and the nearest other point."""
    finite = {point: value for point, value in points.items() if 0 < value < math.inf}
    measured = [point for point in finite if point != x]
    if x not in finite or not measured:
        return usual
    other = min(measured, key=lambda point: abs(math.log(point / x)))
    slope = math.log(finite[other] / finite[x]) / math.log(other / x)
    return slope if 0.2 < slope / usual < 50 else usual


def noise_multiplier(
    epsilon: float,
    delta: float,
    *,
    rounds: int,
    sampling_rate: float,
    scheme: SamplingScheme,
    event: PrivacyEvent = GAUSSIAN,
    adjacency: Adjacency = "zero_out",
    noise_schedule: Schedule = CONSTANT,
    drawn: Callable[[float], tuple[Entry, ...]] | None = None,
    before: Sequence[PrivacySpend] = (),
) -> float:
    """Find the smallest z that reports at most (ε, δ); ε is met to 0.1 %, never exceeded.

    Args:
      epsilon: target ε > 0.
      delta: total δ in (0, 1).
      rounds: T ≥ 1.
      sampling_rate: p in (0, 1].
      scheme: the sampling of cohorts; its capacity is part of the price.
      event: the cost of one release.
      adjacency: "zero_out" or "replace".
      noise_schedule: the noise of each round, with scale z: see `Schedule`.
      drawn: the rounds as a mechanism charges them at scale z, by default with the noise of the
        schedule.
      before: charges of releases before round 1, which ε covers, too.

    Raises:
      ValueError: for values outside these ranges, if earlier releases leave nothing of ε, the
        schedule does not suit the rounds, or
        almost no noise is enough, as where δ exceeds the probability to take part.

    Example:
      >>> everyone = fjs.privacy.SamplingScheme("full", 100, 100)
      >>> plan = {"sampling_rate": 1.0, "scheme": everyone}
      >>> once = fjs.privacy.noise_multiplier(1.0, 1e-5, rounds=1, **plan)
      >>> often = fjs.privacy.noise_multiplier(1.0, 1e-5, rounds=4, **plan)
      >>> round(often / once, 2)  # Gaussian noise composes as a root
      2.0
    """
    _check(epsilon, delta, event)
    checks.count(rounds=rounds)
    p = _as_drawn(sampling_rate)

    def cost(z, method=guarantee.tight_epsilon, schedule=noise_schedule):
        groups = schedule.entries(z, p, rounds) if drawn is None else drawn(z)
        return method([*before, PrivacySpend(scheme, event, groups)], delta, adjacency)

    spent = guarantee.tight_epsilon(before, delta, adjacency)
    if spent >= epsilon:
        raise ValueError(
            f"releases before round 1 spend ε {spent:.3g} of epsilon {epsilon}: give columns "
            "public ranges, which cost nothing, or make those releases noisier"
        )
    guess = p * math.sqrt(rounds) / epsilon + 0.5
    z = _solve(cost, epsilon, guess, -1.2, least=SMALLEST_NOISE, most=LARGEST_NOISE)
    if z is None and cost(LARGEST_NOISE) == math.inf:
        raise ValueError(
            f"noise cannot be calibrated: {event.kind!r} releases have no known cost for "
            f"{adjacency} under {scheme.kind!r} sampling, however much the noise"
        )
    if z is None or z <= SMALLEST_NOISE:
        raise ValueError(
            f"epsilon {epsilon} at delta {delta:.3g} asks for a noise multiplier outside "
            f"[{SMALLEST_NOISE}, {LARGEST_NOISE}]: change epsilon, delta or rounds"
        )
    return z


def rounds(
    epsilon: float,
    delta: float,
    *,
    noise_multiplier: float,
    sampling_rate: float,
    scheme: SamplingScheme,
    event: PrivacyEvent = GAUSSIAN,
    adjacency: Adjacency = "zero_out",
) -> int:
    """Find the largest number of rounds that reports at most (ε, δ); 0 if one round is too many.

    Above 10,000 rounds it meets ε to 0.1 %. At most 2³¹ − 1, the largest count of a ledger.
    Arguments as for `noise_multiplier`.
    """
    _check(epsilon, delta, event)
    check_noise_multiplier(noise_multiplier)
    p = _as_drawn(sampling_rate)

    def plan(count: int) -> list[PrivacySpend]:
        return [PrivacySpend(scheme, event, CONSTANT.entries(noise_multiplier, p, count))]

    return _most_rounds(plan, epsilon, delta, adjacency, MOST_ROUNDS)


def _most_rounds(plan: Plan, epsilon: float, delta: float, adjacency: Adjacency, most: int) -> int:
    """Find the largest number of rounds, up to `most`, whose plan costs at most (ε, δ)."""

    def cost(count, method=guarantee.tight_epsilon):
        return method(plan(int(count)), delta, adjacency)

    if cost(1) > epsilon:
        return 0
    start = 1
    while start < most // 2 and cost(2 * start, guarantee.rdp_epsilon) <= epsilon:
        start *= 2
    good = int(_search(cost, epsilon, start, 0.7, most=most, least=1) or 1)
    if good > _FEW_ROUNDS or good == most:
        return good
    step = 1
    while good + step <= most and cost(good + step) <= epsilon:
        good, step = good + step, 2 * step
    more = range(1, min(step, most - good + 1))
    return good + bisect.bisect_left(more, True, key=lambda n: cost(good + n) > epsilon)


def budget(
    epsilon: float,
    delta: float,
    plan: Plan,
    *,
    most: int = MOST_ROUNDS,
) -> PrivacyLimit:
    """Find the budget of as many planned rounds as cost at most (ε, δ); see `privacy/filter.py`.

    ε > 0 is for zero-out.
    """
    check_epsilon(epsilon)
    check_delta(delta)
    rounds = _most_rounds(plan, epsilon, delta, "zero_out", most)
    if not rounds:
        raise ValueError(
            f"a budget of ε = {epsilon:g}, δ = {delta:.3g} has no room for a round: the budget or "
            "the noise must be larger"
        )
    planned = (
        spend._replace(entries=tuple(merge(spend.entries, spend.event.different)))
        for spend in plan(rounds)
    )
    return PrivacyLimit(epsilon, delta, tuple(planned))


def sampling_rate(
    epsilon: float,
    delta: float,
    *,
    noise_multiplier: float,
    rounds: int,
    scheme: SamplingScheme,
    event: PrivacyEvent = GAUSSIAN,
    adjacency: Adjacency = "zero_out",
    noise_schedule: Schedule = CONSTANT,
) -> float:
    """Find the largest p ≥ 2⁻³² of Poisson or cyclic sampling that reports at most (ε, δ).

    It meets ε to 0.1 %, unless p = 1 (cyclic: 1/groups) or the capacity allows no larger p.
    Arguments as for `noise_multiplier`.

    Raises:
      ValueError: for any other scheme, and if no p of at least 2⁻³² suffices.
    """
    _check(epsilon, delta, event)
    if scheme.kind not in ("poisson", "cyclic"):
        raise ValueError(
            f"scheme must be poisson or cyclic to have a sampling rate, got {scheme.kind!r}"
        )
    check_noise_multiplier(noise_multiplier)

    def cost(p, method=guarantee.tight_epsilon, schedule=noise_schedule):
        planned = PrivacySpend(scheme, event, schedule.entries(noise_multiplier, p, rounds))
        return method([planned], delta, adjacency)

    guess = min(1.0, epsilon * noise_multiplier / math.sqrt(rounds))
    p = _solve(cost, epsilon, guess, 1.0, most=1 / (scheme.groups or 1))
    if p is None or p < 2.0**-32:
        raise SettingError(
            "no ",
            Name("sampling_rate"),
            f" meets epsilon {epsilon} at delta {delta} with ",
            Name("noise_multiplier"),
            f" {noise_multiplier} in {rounds} rounds",
        )
    return p


def shares(
    epsilons: Sequence[float],
    delta: float,
    *,
    noise_multiplier: float,
    rounds: int,
    sampling_rate: float,
    scheme: SamplingScheme,
    event: PrivacyEvent = GAUSSIAN,
    adjacency: Adjacency = "zero_out",
) -> tuple[float, ...]:
    """Find the largest shares of `privacy_levels` at which each group reports at most its ε.

    The largest ε has share 1: choose noise and rate for it. Arguments as for `noise_multiplier`.

    Raises:
      ValueError: if share 1 costs more than the largest ε, or no share meets a smaller one.
    """
    groups = CONSTANT.entries(noise_multiplier, _as_drawn(sampling_rate), rounds)

    def cost(share, method=guarantee.tight_epsilon, schedule=CONSTANT):
        return method([PrivacySpend(scheme.at_share(share), event, groups)], delta, adjacency)

    most, parts = cost(1.0), []
    if most > max(epsilons):
        raise ValueError(
            f"the largest epsilon must be at least {most:.4g}, a client's with share 1, got "
            f"{max(epsilons)}"
        )
    for epsilon in epsilons:
        _check(epsilon, delta, event)
        limits = {"most": 1.0, "least": _LEAST_SHARE}
        share = 1.0 if most <= epsilon else _solve(cost, epsilon, epsilon / most, 1.0, **limits)
        if share is None:
            raise ValueError(f"no share of at least {_LEAST_SHARE:g} meets epsilon {epsilon:g}")
        parts.append(share)
    return tuple(parts)


@functools.lru_cache(maxsize=64)
def equal_example_noise(silos: Silos, epsilon: float, rounds: int) -> tuple[tuple[int, float], ...]:
    """Find the noise with which every client that takes part in all rounds meets ε (zero-out).

    It is (n, z) for every number n of rows, as for `private_examples`.
    """
    _check(epsilon, 0.5, GAUSSIAN)
    table: list[tuple[int, float]] = []
    root, z = math.sqrt(silos.gradients), 1.0
    for count in sorted(set(silos.counts) - {0}):
        delta, number = delta_of(silos, count), rounds * silos.minibatches(count)

        def taken(z, count=count, number=number):
            return (SiloMinibatches(count, silos.size, number, z / root, silos.capacity),)

        def cost(z, delta=delta, taken=taken):
            return profile(taken(z), "zero_out").epsilon(delta)

        # Neighbouring numbers of rows need nearly the same noise.
        solved = _search(cost, epsilon, z, -1.2, least=SMALLEST_NOISE, most=LARGEST_NOISE)
        if solved is None or solved <= SMALLEST_NOISE:
            raise ValueError(
                f"no noise gives a client with {count} examples epsilon {epsilon} at delta "
                f"{delta:.3g} in {number} minibatches"
            )
        z = solved
        table.append((count, z))
    return tuple(table)
