"""Answers to the questions of `fedjaxsim privacy`, by the accountants that a run reports with."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import rich.box
from rich.console import Console
from rich.table import Table

from fedjaxsim.cli.privacy import Claims, Epsilon, Noise, Question, Rate, Rounds, TradeOff
from fedjaxsim.privacy import calibration, claims, hypothetical
from fedjaxsim.privacy.accounting.trade_off import trade_off
from fedjaxsim.privacy.budget import Budget
from fedjaxsim.privacy.claims import Verdict
from fedjaxsim.privacy.events import ADJACENCIES, GAUSSIAN
from fedjaxsim.privacy.guarantee import Report
from fedjaxsim.privacy.hypothetical import Cohorts, resolve
from fedjaxsim.report.files import print_json
from fedjaxsim.report.progress import epsilon_text, number


def prepare(question: Question) -> Callable[[], int]:
    """Computes what a privacy command asks for; what is returned prints it.

    Raises:
      ValueError: for bad input; a target that cannot be met is found out by computing.
    """
    match question:
        case Claims():
            return _prepare_claims(question)
        case TradeOff():
            return _prepare_trade_off(question)
        case Epsilon(noise_multiplier=z, rounds=rounds, delta=delta):
            hypothetical.check(z, rounds)
            planned, budget = resolve(question, delta), Budget.parse(question.budget)
            found = {}
            report = hypothetical.report(planned, z, rounds, delta, question.accountant, budget)
        case _:
            found, report = _calibrate(question)

    def work() -> int:
        nested = report.to_json()
        if question.json:
            print_json({**found, "guarantee": nested} if found else nested)
            return 0
        for name, value in found.items():
            print(f"{name.replace('_', ' ')}: {value}")
        print(report)
        return 0

    return work


def _calibrate(question: Noise | Rounds | Rate) -> tuple[dict[str, float], Report]:
    """What meets a target, under its name, and the guarantees that it leads to."""
    epsilon, delta = question.epsilon, question.delta
    if isinstance(question, Rate):
        # The scheme of Poisson sampling has no rate, so any will do.
        cohorts = Cohorts(sampling_rate=1.0, clients=question.clients, capacity=question.capacity)
    else:
        cohorts = question
    planned = resolve(cohorts, delta)
    p = planned.sampling_rate
    found: dict[str, float]
    target: Any = {
        "scheme": planned.scheme, "adjacency": question.adjacency, "view": question.view
    }  # fmt: skip
    budget = Budget.parse(question.budget)
    if isinstance(question, Noise):
        T = question.rounds
        hypothetical.check(0, T)
        z = calibration.noise_multiplier(
            epsilon, delta, rounds=T, sampling_rate=p, budget=budget, **target
        )
        found = {"noise_multiplier": z}
    elif isinstance(question, Rounds):
        if not budget.is_constant:
            raise ValueError(
                "budget must be constant where the number of rounds is asked for, on which the "
                f"shares of any other depend, got {budget}"
            )
        z = question.noise_multiplier
        T = calibration.rounds(epsilon, delta, noise_multiplier=z, sampling_rate=p, **target)
        found = {"rounds": T}
    else:
        z, T = question.noise_multiplier, question.rounds
        hypothetical.check(z, T)
        p = calibration.sampling_rate(
            epsilon, delta, noise_multiplier=z, rounds=T, budget=budget, **target
        )
        planned = planned._replace(sampling_rate=p)
        found = {"sampling_rate": p}
    return found, hypothetical.report(planned, z, T, delta, budget=budget)


def _prepare_trade_off(question: TradeOff) -> Callable[[], int]:
    from fedjaxsim.report import plots

    z, T = question.noise_multiplier, question.rounds
    hypothetical.check(z, T)
    plots.check_path(question.out)
    scheme, p, _ = resolve(question)
    entries = Budget.parse(question.budget).entries(z, p, T, GAUSSIAN)
    # Closer together at both ends, where curves are steep.
    type_one = (1 - np.cos(np.linspace(0, np.pi, 201))) / 2
    curves = {
        adjacency: trade_off(entries, scheme, GAUSSIAN, type_one, adjacency, question.view)
        for adjacency in ADJACENCIES
    }
    title = f"{question.sampling} sampling, p = {p:.4g}, z = {z:.4g}, T = {T}, {question.view}"

    def work() -> int:
        plots.save(plots.errors_figure(type_one, curves, title), question.out)
        print(question.out)
        return 0

    return work


def _prepare_claims(question: Claims) -> Callable[[], int]:
    def work() -> int:
        verdicts = claims.table()
        if question.json:
            print_json([_record(verdict) for verdict in verdicts])
        else:
            _print_claims(verdicts)
        return 0

    return work


def _record(verdict: Verdict) -> dict[str, Any]:
    """One published setting, with every ε by name; null where there is none."""
    fields = dataclasses.asdict(verdict.claim)
    return {
        **fields,
        "epsilon_stated": fields.pop("epsilon"),
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
            epsilon_text(zero_out),
            epsilon_text(replace),
            f"{claim.delta:.2g}",
            str(reasons.index(claim.why) + 1),
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    console.print(table)
    for place, reason in enumerate(reasons, 1):
        console.print(f"{place}. {reason}", highlight=False)
