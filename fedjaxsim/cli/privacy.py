"""`fedjaxsim privacy`: what a plan costs, or what meets an ε, by the accountants of runs."""

import dataclasses
from collections.abc import Callable
from typing import Any

from fedjaxsim.factories import flag
from fedjaxsim.privacy.entries import Adjacency
from fedjaxsim.privacy.hypothetical import Cohorts, check, report, resolve
from fedjaxsim.privacy.schedule import Schedule


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
    planned, schedule = resolve(cohorts, delta), Schedule.parse(noise_schedule)
    check(noise_multiplier or 0.0, 1 if rounds is None else rounds)
    plan["sampling_rate"], solved = planned.sampling_rate, {}
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
                scheme=planned.scheme,
                adjacency=adjacency or "zero_out",
                **known,
            )
        }
    z, T, p = (plan | solved).values()
    if T == 0:
        raise ValueError(f"not even one round meets epsilon {epsilon:g}")
    planned = planned._replace(sampling_rate=p)
    made = report(planned, z, T, delta, accountant, schedule)

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
