"""`fedjaxsim privacy`: ε of a plan, calibration to a target ε, trade-off curves.

All take numbers instead of a run, and answer by the accountants that a run reports with.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedjaxsim.privacy.budget import Budget
from fedjaxsim.privacy.events import ADJACENCIES, GAUSSIAN, Adjacency, PrivacySpend
from fedjaxsim.privacy.hypothetical import Cohorts, check, report, resolve

if TYPE_CHECKING:
    from fedjaxsim.privacy.guarantee import Report


@dataclasses.dataclass(frozen=True)
class Target:
    """A guarantee to meet.

    Attributes:
      epsilon: Target ε, in nats.
      delta: Total δ.
      adjacency: Adjacency of the target.
      budget: Spread of the budget over the rounds (constant, power:A or geometric:Q); z is then the
        constant noise of the same total cost. Constant where rounds are solved for.
      json: Print JSON instead of text.
    """

    epsilon: float
    delta: float
    adjacency: Adjacency = "zero_out"
    budget: str | None = None
    json: bool = False


def epsilon(
    *,
    noise_multiplier: float,
    rounds: int,
    delta: float,
    cohorts: Cohorts,
    budget: str | None = None,
    accountant: str | None = None,
    json: bool = False,
) -> Callable[[], int]:
    """Compute the ε of a planned run, in both adjacencies.

    Args:
      noise_multiplier: z, noise on the sum of clipped messages over the clip norm.
      rounds: T.
      delta: Total δ.
      cohorts: Sampling.
      budget: Spread of the budget over the rounds (constant, power:A or geometric:Q); z is then the
        constant noise of the same total cost.
      accountant: pld or rdp; by default the tighter one.
      json: Print JSON instead of text.
    """
    check(noise_multiplier, rounds)
    planned, spread = resolve(cohorts, delta), Budget.parse(budget)
    found = report(planned, noise_multiplier, rounds, delta, accountant, spread)
    return lambda: _print_report(found, json=json)


def noise(*, rounds: int, target: Target, cohorts: Cohorts) -> Callable[[], int]:
    """Find the smallest noise multiplier z that meets a target ε, with its report.

    Args:
      rounds: T.
      target: The guarantee.
      cohorts: Sampling.
    """
    return _solve("noise_multiplier", target, cohorts, rounds=rounds)


def rounds(*, noise_multiplier: float, target: Target, cohorts: Cohorts) -> Callable[[], int]:
    """Find the most rounds that meet a target ε (2³¹ − 1 if any number does), with their report.

    Args:
      noise_multiplier: z, noise on the sum of clipped messages over the clip norm.
      target: The guarantee.
      cohorts: Sampling.
    """
    return _solve("rounds", target, cohorts, noise_multiplier=noise_multiplier)


def rate(
    *,
    noise_multiplier: float,
    rounds: int,
    target: Target,
    clients: int | None = None,
    capacity: int | None = None,
) -> Callable[[], int]:
    """Find the largest rate of Poisson sampling that meets a target ε, with its report.

    Args:
      noise_multiplier: z, noise on the sum of clipped messages over the clip norm.
      rounds: T.
      target: The guarantee.
      clients: m; ε depends on it only through a capacity.
      capacity: Slots of a cohort; by default enough for all clients.
    """
    # The scheme of Poisson sampling is the same at every rate.
    cohorts = Cohorts(sampling_rate=1.0, clients=clients, capacity=capacity)
    return _solve(
        "sampling_rate", target, cohorts, noise_multiplier=noise_multiplier, rounds=rounds
    )


def _solve(
    quantity: str,
    target: Target,
    cohorts: Cohorts,
    *,
    noise_multiplier: float = 0.0,
    rounds: int = 1,
) -> Callable[[], int]:
    """Solve a plan for the quantity that meets the target; return a function that prints it.

    `quantity` is `noise_multiplier`, `rounds` or `sampling_rate`; the plan gives the two others.
    """
    from fedjaxsim.privacy import calibration

    planned, spread = resolve(cohorts, target.delta), Budget.parse(target.budget)
    check(noise_multiplier, rounds)
    if quantity == "rounds" and not spread.is_constant:
        raise ValueError(
            "budget must be constant to solve for rounds, because other shares depend on their "
            f"number, got {spread}"
        )
    plan: dict[str, Any] = {
        "noise_multiplier": noise_multiplier, "rounds": rounds,
        "sampling_rate": planned.sampling_rate,
    }  # fmt: skip
    known = {name: value for name, value in plan.items() if name != quantity}
    if quantity != "rounds":
        known["budget"] = spread
    found = getattr(calibration, quantity)(
        target.epsilon, target.delta, scheme=planned.scheme, adjacency=target.adjacency, **known
    )  # fmt: skip
    z, T, p = (plan | {quantity: found}).values()
    made = report(planned._replace(sampling_rate=p), z, T, target.delta, budget=spread)
    return lambda: _print_report(made, {quantity: found}, json=target.json)


def _print_report(found: "Report", solved: Mapping[str, float] = {}, *, json: bool) -> int:
    from fedjaxsim.report.files import print_json

    nested = found.to_json()
    if json:
        print_json({**solved, "guarantee": nested} if solved else nested)
        return 0
    for name, value in solved.items():
        print(f"{name.replace('_', ' ')}: {value}")
    print(found)
    return 0


def tradeoff(
    *,
    noise_multiplier: float,
    rounds: int,
    out: Path,
    cohorts: Cohorts,
    budget: str | None = None,
) -> Callable[[], int]:
    """Draw the error rates that a guarantee forces on every test for one client's data.

    Args:
      noise_multiplier: z, noise on the sum of clipped messages over the clip norm.
      rounds: T.
      out: Figure to write: .png, .pdf or .svg.
      cohorts: Sampling.
      budget: Spread of the budget over the rounds (constant, power:A or geometric:Q); z is then the
        constant noise of the same total cost.
    """
    import numpy as np

    from fedjaxsim.privacy.accounting.trade_off import trade_off
    from fedjaxsim.report import plots

    check(noise_multiplier, rounds)
    plots.check_path(out)
    scheme, p, _ = resolve(cohorts)
    entries = Budget.parse(budget).entries(noise_multiplier, p, rounds)
    plan = [PrivacySpend(scheme, GAUSSIAN, entries)]
    # Closer together at both ends, where curves are steep.
    type_one = (1 - np.cos(np.linspace(0, np.pi, 201))) / 2
    curves = {adjacency: trade_off(plan, type_one, adjacency) for adjacency in ADJACENCIES}
    title = f"{cohorts.sampling} sampling, p = {p:.4g}, z = {noise_multiplier:.4g}, T = {rounds}"

    def work() -> int:
        plots.save(plots.errors_figure(type_one, curves, title), out)
        print(out)
        return 0

    return work
