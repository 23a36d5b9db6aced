"""`fedjaxsim privacy`: ε of a plan, what a target ε asks for, published claims.

All take numbers instead of a run.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import OmitArgPrefixes

from fedjaxsim.privacy.events import Adjacency, View
from fedjaxsim.privacy.hypothetical import Cohorts, OptionalBudget, OptionalInt


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
    budget: OptionalBudget = None
    """How the budget is spread over the rounds, as of a run; z is then that constant noise which
    costs everyone as much."""
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
    budget: OptionalBudget = None
    """How the budget is spread over the rounds, as of a run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds(_Target, Cohorts):
    """The most rounds that meet a target ε (2³¹ − 1 if any number does), and their report."""

    noise_multiplier: float
    """z: the noise on the sum of clipped messages over the clip norm."""
    budget: OptionalBudget = None
    """Constant: the shares of any other depend on the number of rounds, which is asked for."""


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
    budget: OptionalBudget = None
    """How the budget is spread over the rounds, as of a run."""


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
    budget: OptionalBudget = None
    """How the budget is spread over the rounds, as of a run."""
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

    def prepare(self) -> Callable[[], int]:
        """As `privacy_commands.prepare`."""
        from fedjaxsim.cli import privacy_commands

        return privacy_commands.prepare(self.question)
