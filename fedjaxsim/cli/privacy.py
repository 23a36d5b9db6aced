"""`fedjaxsim privacy`: what a plan costs, or what meets an ε, by the accountants of runs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedjaxsim import checks
from fedjaxsim.checks import Name, SettingError
from fedjaxsim.cli.flags import Json, Work
from fedjaxsim.extras import require
from fedjaxsim.factories import flag
from fedjaxsim.privacy.entries import (
    ADJACENCIES,
    MOST_ROUNDS,
    Adjacency,
    SamplingScheme,
    check_delta,
    check_noise_multiplier,
)
from fedjaxsim.privacy.schedule import Schedule

if TYPE_CHECKING:
    from fedjaxsim.privacy.guarantee import Report


def privacy(
    *,
    epsilon: float | None = None,
    delta: float,
    noise_multiplier: float | None = None,
    rounds: int | None = None,
    sampling: Literal["poisson", "fixed", "full", "allocation", "cyclic"] = "poisson",
    sampling_rate: float | None = None,
    clients: int | None = None,
    capacity: int | None = None,
    every: int | None = None,
    groups: int | None = None,
    adjacency: Adjacency | None = None,
    noise_schedule: str | None = None,
    verify: bool = False,
    plot: Path | None = None,
    json: Json = False,
) -> Work:
    """Compute the ε of a plan, or the noise, rounds or sampling rate that meets an ε.

    Without --epsilon, a plan has the ε of its noise, rounds and sampling. With it, leave out one of
    them: the smallest noise multiplier, the most rounds (2³¹ − 1 if any number does) or the largest
    rate of Poisson or cyclic sampling that meets it is found, with the report of that plan.

    Args:
      epsilon: Target ε, in nats.
      delta: Total δ.
      noise_multiplier: z, noise on the sum of clipped messages over the clip norm.
      rounds: T.
      sampling: Sampling of cohorts: independent, of exactly q clients, all, each client in one
        random round of a period, or independent in the group in turn (cyclic; banded noise costs
        what independent noise does). K passes of fixed groups in turn cost what K rounds of all
        clients do.
      sampling_rate: p (poisson, cyclic).
      clients: m; ε depends on it only through a capacity.
      capacity: Places in a cohort (poisson, cyclic, allocation; by default enough for all), or its
        size (fixed).
      every: Rounds in which each client takes part once (allocation).
      groups: Number of groups in turn (cyclic).
      adjacency: Adjacency of the target; by default zero_out.
      noise_schedule: Spread of the privacy cost over the rounds (constant, power:A or geometric:Q);
        z is then the constant noise of the same total cost. Constant where rounds are solved for.
      verify: Recompute ε with Google's dp_accounting and print both; they must agree to 1 %.
      plot: Figure (.png, .pdf or .svg) of ε against δ, and of trade-off curves: the least type
        II error of an attacker who tells two neighbouring runs apart, at each type I error.
    """
    if plot is not None:
        from fedjaxsim.report.plots import check_path

        check_path(plot, name="plot")
    if verify:
        require("verify")
    plan: dict[str, Any] = {"noise_multiplier": noise_multiplier, "rounds": rounds}
    if sampling in ("poisson", "cyclic"):
        plan["sampling_rate"] = sampling_rate
    needed = ", ".join(map(flag, plan))
    missing = [name for name, value in plan.items() if value is None]
    if epsilon is not None and not missing:
        raise ValueError(f"epsilon finds what a plan lacks: leave out one of {needed}")
    if len(missing) != (0 if epsilon is None else 1):
        all_of = "all" if epsilon is None else "epsilon and all but one"
        absent = ", ".join(map(flag, missing))
        raise ValueError(f"a plan has {all_of} of {needed}; not given: {absent}")
    if missing == ["sampling_rate"]:  # The scheme is the same at every rate.
        sampling_rate = 1 / (groups or 1)
    check_delta(delta)
    turns = {"every": every, "groups": groups}
    scheme, share, assumed = _scheme_of(sampling, sampling_rate, clients, capacity, turns, delta)
    schedule = Schedule.parse(noise_schedule)
    check_noise_multiplier(noise_multiplier or 0.0, zero=True)
    checks.count(1, MOST_ROUNDS, rounds=1 if rounds is None else rounds)
    plan["sampling_rate"], solved = share, {}
    if epsilon is None and adjacency is not None:
        raise ValueError("adjacency has no effect without epsilon: both are reported")
    if missing == ["rounds"] and not schedule.is_constant:
        why = "to solve for rounds, because other shares depend on their number"
        raise SettingError(Name("noise_schedule"), f" must be constant {why}, got {schedule}")
    from fedjaxsim.report.progress import doing

    with doing("computing", quiet=json):
        if missing:
            from fedjaxsim.privacy import calibration  # late, as scipy is slow to import

            [quantity] = missing
            fixed = {name: value for name, value in plan.items() if name != quantity}
            fixed |= {"scheme": scheme, "adjacency": adjacency or "zero_out"}
            if quantity != "rounds":
                fixed["noise_schedule"] = schedule
            solved = {quantity: getattr(calibration, quantity)(epsilon, delta, **fixed)}
        z, T, p = (plan | solved).values()
        if T == 0:
            raise ValueError(f"not even one round meets epsilon {epsilon:g}")
        from fedjaxsim.privacy.events import GAUSSIAN, PrivacySpend
        from fedjaxsim.privacy.guarantee import report

        charged = PrivacySpend(scheme, GAUSSIAN, schedule.entries(z, p, T))
        made = report([charged], delta).assuming(assumed)
        opinions = made.verify() if verify else ()
        picture = b"" if plot is None else _picture(made, plot)

    def work() -> None:
        from fedjaxsim.cli.printing import print_json

        if json:
            second = {opinion.adjacency: opinion.second for opinion in opinions} if verify else None
            print_json({**plan, **solved, "guarantee": made.to_json(), "dp_accounting": second})
        else:
            for name, value in solved.items():
                print(f"{name.replace('_', ' ')}: {value}")
            print(made)
            if opinions:
                print("verified:")
            for opinion in opinions:
                print(f"  {opinion}")
        if plot is not None:
            from fedjaxsim import store

            store.write(plot, picture)
            print(f"written to {plot}", file=sys.stderr if json else sys.stdout)

    return work


def _picture(made: "Report", path: Path) -> bytes:
    from fedjaxsim.report.figures import privacy_figure
    from fedjaxsim.report.plots import content

    covered: list[Adjacency] = [a for a in ADJACENCIES if made.find(a).epsilon is not None]
    if not covered:
        raise ValueError("nothing is guaranteed, so there is nothing to plot")
    title = "Privacy: " + ", ".join(
        f"ε {made.find(a).value} at δ = {made.delta:.3g} ({a.replace('_', '-')})" for a in covered
    )
    return content(privacy_figure([made.curve(a) for a in covered], title), path.suffix[1:])


def _scheme_of(
    kind: Literal["poisson", "fixed", "full", "allocation", "cyclic"],
    p: float | None,
    m: int | None,
    capacity: int | None,
    turns: dict[str, int | None],
    delta: float,
) -> tuple[SamplingScheme, float, tuple[str, ...]]:
    """Return scheme, rate, and sentences on values filled in: ε does not depend on them."""
    every, groups = turns["every"], turns["groups"]
    for name, needed_by in (("every", "allocation"), ("groups", "cyclic")):
        if (kind == needed_by) != (turns[name] is not None):
            raise ValueError(f"{name} must be given for {needed_by} sampling, and for no other")
    takes = {"fixed": "clients and capacity", "allocation": "every"}.get(kind)
    if takes and (p is not None or (kind == "fixed" and None in (m, capacity))):
        raise SettingError(f"{kind} sampling takes {takes}, and no ", Name("sampling_rate"))
    if kind == "full" and p not in (None, 1):
        raise SettingError(Name("sampling_rate"), f" must be 1 for full participation, got {p}")
    if p is None and kind in ("poisson", "cyclic"):
        raise SettingError(Name("sampling_rate"), f" must be given for {kind} sampling, got none")
    if p is not None:
        checks.in_range("[2.33e-10, 1]", sampling_rate=p)  # 2^-32, the finest coin
    assumed = []
    if m is None:
        if capacity is not None:
            raise ValueError(f"capacity must come with clients, got {capacity} alone")
        # So that δ ≤ 1/(10 m), if possible.
        m = max(groups or 1, int(0.1 / max(delta, 1e-10) * (1 + 1e-12)))
        assumed.append(f"The number of clients was not given: {m} stand for any, with the same ε.")
    places = m if capacity is None else capacity
    scheme = SamplingScheme(kind, m, places, groups=groups, period=every)
    if scheme.capacity == m and kind not in ("fixed", "full"):
        assumed.append("Cohorts have room for all clients.")
    shares = {"fixed": places / m, "full": 1.0, "allocation": 1 / (every or 1)}
    return scheme, shares[kind] if p is None else p, tuple(assumed)
