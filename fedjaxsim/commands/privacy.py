"""Answers of `fedjaxsim privacy`, by the accountants that a run reports with."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import rich.box
from rich.console import Console
from rich.table import Table

from fedjaxsim.privacy import calibration, claims, hypothetical
from fedjaxsim.privacy.accounting.trade_off import trade_off
from fedjaxsim.privacy.budget import Budget
from fedjaxsim.privacy.claims import Verdict
from fedjaxsim.privacy.events import ADJACENCIES, GAUSSIAN, Adjacency, PrivacySpend
from fedjaxsim.privacy.guarantee import Report
from fedjaxsim.privacy.hypothetical import Cohorts, resolve
from fedjaxsim.report.files import print_json
from fedjaxsim.report.progress import epsilon_text, number

_SOLVERS: dict[str, Callable[..., Any]] = {
    "noise_multiplier": calibration.noise_multiplier,
    "rounds": calibration.rounds,
    "sampling_rate": calibration.sampling_rate,
}


def prepare_epsilon(
    cohorts: Cohorts,
    noise_multiplier: float,
    rounds: int,
    delta: float,
    accountant: str | None,
    budget: str | None,
    *,
    json: bool,
) -> Callable[[], int]:
    """Compute the guarantees of a plan; return a function that prints them.

    Raises:
      ValueError: for bad input.
    """
    hypothetical.check(noise_multiplier, rounds)
    planned, spread = resolve(cohorts, delta), Budget.parse(budget)
    report = hypothetical.report(planned, noise_multiplier, rounds, delta, accountant, spread)
    return lambda: _print_report(report, json=json)


def prepare_calibration(
    quantity: str,
    cohorts: Cohorts,
    epsilon: float,
    delta: float,
    budget: str | None,
    *,
    adjacency: Adjacency,
    json: bool,
    noise_multiplier: float = 0.0,
    rounds: int = 1,
) -> Callable[[], int]:
    """Solve a plan for the quantity that meets a target ε; return a function that prints it.

    `quantity` is `noise_multiplier`, `rounds` or `sampling_rate`; the plan gives the two others.

    Raises:
      ValueError: for bad input, and for a target that cannot be met.
    """
    planned, spread = resolve(cohorts, delta), Budget.parse(budget)
    hypothetical.check(noise_multiplier, rounds)
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
    found = _SOLVERS[quantity](epsilon, delta, scheme=planned.scheme, adjacency=adjacency, **known)
    z, T, p = (plan | {quantity: found}).values()
    report = hypothetical.report(planned._replace(sampling_rate=p), z, T, delta, budget=spread)
    return lambda: _print_report(report, {quantity: found}, json=json)


def _print_report(report: Report, found: Mapping[str, float] = {}, *, json: bool) -> int:
    nested = report.to_json()
    if json:
        print_json({**found, "guarantee": nested} if found else nested)
        return 0
    for name, value in found.items():
        print(f"{name.replace('_', ' ')}: {value}")
    print(report)
    return 0


def prepare_trade_off(
    cohorts: Cohorts,
    noise_multiplier: float,
    rounds: int,
    budget: str | None,
    out: Path,
) -> Callable[[], int]:
    """Compute the errors of any test under a plan; return a function that draws them.

    Raises:
      ValueError: for bad input.
    """
    from fedjaxsim.report import plots

    hypothetical.check(noise_multiplier, rounds)
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


def prepare_claims(*, json: bool) -> Callable[[], int]:
    """Return a function that prints the guarantees of published settings."""

    def work() -> int:
        verdicts = claims.table()
        print_json([_record(verdict) for verdict in verdicts]) if json else _print_claims(verdicts)
        return 0

    return work


def _record(verdict: Verdict) -> dict[str, Any]:
    """Return one published setting with every ε by name; null where there is none."""
    fields = dataclasses.asdict(verdict.claim)
    stated = fields.pop("epsilon")
    return {
        **fields,
        "epsilon_stated": stated,
        "epsilon_by_method": verdict.published,
        "epsilon": verdict.zero_out,
        "epsilon_replace": verdict.replace,
    }


def _print_claims(verdicts: list[Verdict]) -> None:
    table = Table(
        title="Published settings: ε as stated, by the paper's own method, and sound (joint DP)",
        title_justify="left",
        box=rich.box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 1, 0),
    )
    table.add_column("paper, source")
    table.add_column("setting", ratio=1)
    for heading in ("ε\nstated", "ε by its\nmethod", "sound ε\nzero-out", "sound ε\nreplace", "δ"):
        table.add_column(heading, justify="right")
    table.add_column("why", justify="right")
    reasons = list(dict.fromkeys(verdict.claim.why for verdict in verdicts))
    for claim, by_method, zero_out, replace in verdicts:
        table.add_row(
            f"{claim.paper}\n{claim.source}",
            claim.setting,
            number(claim.epsilon),
            "–" if by_method is None else epsilon_text(by_method),
            *map(epsilon_text, (zero_out, replace)),
            f"{claim.delta:.2g}",
            str(reasons.index(claim.why) + 1),
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    console.print(table)
    for index, reason in enumerate(reasons, 1):
        console.print(f"{index}. {reason}", highlight=False)
