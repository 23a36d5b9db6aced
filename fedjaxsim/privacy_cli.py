"""The privacy commands: ε of a plan, what a target ε asks for, published claims, audits.

All but the audit take numbers instead of a run, and answer with the accountants that a run reports
with.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import rich.box
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tyro.conf import OmitArgPrefixes

from fedjaxsim import plans, plots
from fedjaxsim.config import RunConfig
from fedjaxsim.experiment import prepare as prepare_experiment
from fedjaxsim.plans import GAUSSIAN, Cohorts, OptionalInt, plan
from fedjaxsim.privacy import calibration, claims
from fedjaxsim.privacy.accounting.composition import ADJACENCIES, Adjacency, View
from fedjaxsim.privacy.accounting.trade_off import trade_off
from fedjaxsim.privacy.claims import Verdict
from fedjaxsim.privacy.guarantee import Report
from fedjaxsim.privacy.ledger import Entry
from fedjaxsim.progress import epsilon_text, number
from fedjaxsim.rundir import strict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epsilon(Cohorts):
    """The ε of a planned run, in both adjacencies and both views."""

    noise_multiplier: float
    """z: the noise on the sum of clipped messages over the clip norm."""
    rounds: int
    """T."""
    delta: float
    """The total δ."""
    accountant: Annotated[
        str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(optional)")
    ] = None
    """One accountant by name; by default the tightest sound one."""
    json: bool = False
    """Print JSON instead of text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Target:
    epsilon: float
    """The ε to meet, in nats."""
    delta: float
    """The total δ."""
    adjacency: Adjacency = "zero_out"
    """The adjacency that ε is for."""
    view: View = "joint_dp"
    """The view that ε is for."""
    json: bool = False
    """Print JSON instead of text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise(_Target, Cohorts):
    """The smallest noise multiplier z that meets a target ε, and the report it leads to."""

    rounds: int
    """T."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds(_Target, Cohorts):
    """The most rounds that meet a target ε (2³¹ − 1 if any number does), and their report."""

    noise_multiplier: float
    """z: the noise on the sum of clipped messages over the clip norm."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate(_Target):
    """The largest rate of Poisson sampling that meets a target ε, and the report it leads to."""

    noise_multiplier: float
    """z: the noise on the sum of clipped messages over the clip norm."""
    rounds: int
    """T."""
    clients: OptionalInt = None
    """m; ε depends on it only through a capacity."""
    capacity: OptionalInt = None
    """Places in a cohort; by default enough for all clients."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claims:
    """What the settings published in five papers guarantee, next to what the papers say."""

    json: bool = False
    """Print JSON instead of a table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TradeOff(Cohorts):
    """Draw the errors that a guarantee leaves to any test for one client's data."""

    noise_multiplier: float
    """z: the noise on the sum of clipped messages over the clip norm."""
    rounds: int
    """T."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE.png")]
    """Where to draw."""
    view: View = "joint_dp"
    """Who tests: all other clients together, or a reader of what the server published."""


Question = Epsilon | Noise | Rounds | Rate | Claims | TradeOff


@dataclasses.dataclass(frozen=True)
class Privacy:
    """Account for privacy without a run: epsilon, noise, rounds, rate, claims, tradeoff."""

    question: OmitArgPrefixes[
        Annotated[Epsilon, tyro.conf.subcommand("epsilon")]
        | Annotated[Noise, tyro.conf.subcommand("noise")]
        | Annotated[Rounds, tyro.conf.subcommand("rounds")]
        | Annotated[Rate, tyro.conf.subcommand("rate")]
        | Annotated[Claims, tyro.conf.subcommand("claims")]
        | Annotated[TradeOff, tyro.conf.subcommand("tradeoff")]
    ]


@dataclasses.dataclass(frozen=True)
class Audit:
    """Attack simulations with canaries; the exit code is 1 if that refutes the reported ε."""

    settings: OmitArgPrefixes[RunConfig]
    config: tyro.conf.Positional[Annotated[Path | None, tyro.conf.arg(metavar="[CONFIG.toml]")]] = (
        None
    )
    """A TOML file with the same settings; flags win over it."""
    canaries: OptionalInt = None
    """n, clients of each run that are canaries; half of what is possible by default."""
    runs: int = 20
    """How many runs; time grows with them, and what can be found out with n times them."""
    confidence: float = 0.99
    """Probability, at least, with which a sound simulation is not refuted."""
    json: bool = False
    """Print JSON instead of text."""


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
            plans.check(z, rounds)
            planned = plan(question, delta)
            found, report = {}, plans.report(planned, z, rounds, delta, question.accountant)
        case _:
            found, report = _calibrate(question)

    def work() -> int:
        nested = report.to_json()
        if question.json:
            _print_json({**found, "guarantee": nested} if found else nested)
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
    planned = plan(cohorts, delta)
    p = planned.sampling_rate
    found: dict[str, float]
    target: Any = {
        "scheme": planned.scheme, "adjacency": question.adjacency, "view": question.view
    }  # fmt: skip
    if isinstance(question, Noise):
        T = question.rounds
        plans.check(0, T)
        z = calibration.noise_multiplier(epsilon, delta, rounds=T, sampling_rate=p, **target)
        found = {"noise_multiplier": z}
    elif isinstance(question, Rounds):
        z = question.noise_multiplier
        T = calibration.rounds(epsilon, delta, noise_multiplier=z, sampling_rate=p, **target)
        found = {"rounds": T}
    else:
        z, T = question.noise_multiplier, question.rounds
        plans.check(z, T)
        p = calibration.sampling_rate(epsilon, delta, noise_multiplier=z, rounds=T, **target)
        planned = planned._replace(sampling_rate=p)
        found = {"sampling_rate": p}
    return found, plans.report(planned, z, T, delta)


def _prepare_trade_off(question: TradeOff) -> Callable[[], int]:
    z, T = question.noise_multiplier, question.rounds
    plans.check(z, T)
    plots.check_path(question.out)
    scheme, p, _ = plan(question)
    # Closer together at both ends, where curves are steep.
    type_one = (1 - np.cos(np.linspace(0, np.pi, 201))) / 2
    curves = {
        adjacency: trade_off([Entry(z, p, T)], scheme, GAUSSIAN, type_one, adjacency, question.view)
        for adjacency in ADJACENCIES
    }
    title = f"{question.sampling} sampling, p = {p:.4g}, z = {z:.4g}, T = {T}, {question.view}"

    def work() -> int:
        plots.save(plots.trade_off_figure(type_one, curves, title), question.out)
        print(question.out)
        return 0

    return work


def _prepare_claims(question: Claims) -> Callable[[], int]:
    def work() -> int:
        verdicts = claims.table()
        if question.json:
            _print_json([_record(verdict) for verdict in verdicts])
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


def prepare_audit(command: Audit) -> Callable[[], int]:
    """Audits; what is returned prints the result and says in its exit code what came of it.

    Raises:
      FileNotFoundError, ValueError: for bad input.
    """
    # Only audits need jax_privacy, which it imports.
    from fedjaxsim.privacy.audit import audit

    config = command.settings
    if config.out is not None:
        raise ValueError(f"out must not be given, as an audit writes no files, got {config.out}")
    experiment = prepare_experiment(config)
    console = Console(stderr=True)
    with Progress(
        TextColumn("audit"), BarColumn(bar_width=12), TextColumn("run {task.completed}"),
        TextColumn("of {task.total}"), TimeRemainingColumn(compact=True),
        console=console, transient=True, disable=config.quiet or not console.is_terminal,
    ) as progress:  # fmt: skip
        bar = progress.add_task("audit", total=command.runs)
        result = audit(
            experiment.simulation,
            experiment.hparams,
            config.rounds,
            canaries=command.canaries,
            runs=command.runs,
            confidence=command.confidence,
            delta=experiment.delta,
            seed=config.seed,
            on_run=lambda done, _: progress.update(bar, completed=done),
        )

    def work() -> int:
        if command.json:
            _print_json(result.to_json())
        else:
            print(result)
        return int(result.violated)

    return work


def _print_json(value: Any) -> None:
    print(json.dumps(strict(value), indent=2, allow_nan=False, ensure_ascii=False))
