"""`fedjaxsim privacy`: ε of a plan, calibration to a target ε, published claims.

All take numbers instead of a run.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import OmitArgPrefixes

from fedjaxsim.privacy.events import Adjacency
from fedjaxsim.privacy.hypothetical import Cohorts, OptionalBudget, OptionalInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PlannedRounds:
    noise_multiplier: float
    """z: noise on the sum of clipped messages over the clip norm."""
    rounds: int
    """T."""
    budget: OptionalBudget = None
    """Spread of the budget over the rounds; z is then the constant noise of the same total cost."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epsilon(_PlannedRounds, Cohorts):
    """The ε of a planned run, in both adjacencies and both views."""

    delta: float
    """Total δ."""
    accountant: Annotated[
        str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(optional)")
    ] = None
    """pld or rdp; by default the tighter one."""
    json: bool = False
    """Print JSON instead of text."""

    def prepare(self) -> Callable[[], int]:
        """Compute ε; return a function that prints it."""
        from fedjaxsim.commands.privacy import prepare_epsilon

        return prepare_epsilon(
            self, self.noise_multiplier, self.rounds, self.delta, self.accountant, self.budget,
            json=self.json,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Target:
    epsilon: float
    """Target ε, in nats."""
    delta: float
    """Total δ."""
    budget: OptionalBudget = None
    """Spread of the budget over the rounds; constant where rounds are solved for."""
    adjacency: Adjacency = "zero_out"
    """Adjacency of the target."""
    json: bool = False
    """Print JSON instead of text."""

    def _solve(self, quantity: str, cohorts: Cohorts, **known: Any) -> Callable[[], int]:
        from fedjaxsim.commands.privacy import prepare_calibration

        return prepare_calibration(
            quantity, cohorts, self.epsilon, self.delta, self.budget, json=self.json,
            adjacency=self.adjacency, **known,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise(_Target, Cohorts):
    """The smallest noise multiplier z that meets a target ε, with its report."""

    rounds: int
    """T."""

    def prepare(self) -> Callable[[], int]:
        """Solve for z; return a function that prints it."""
        return self._solve("noise_multiplier", self, rounds=self.rounds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds(_Target, Cohorts):
    """The most rounds that meet a target ε (2³¹ − 1 if any number does), and their report."""

    noise_multiplier: float
    """z: noise on the sum of clipped messages over the clip norm."""

    def prepare(self) -> Callable[[], int]:
        """Solve for T; return a function that prints it."""
        return self._solve("rounds", self, noise_multiplier=self.noise_multiplier)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate(_PlannedRounds, _Target):
    """The largest rate of Poisson sampling that meets a target ε, and its report."""

    clients: OptionalInt = None
    """m; ε depends on it only through a capacity."""
    capacity: OptionalInt = None
    """Slots of a cohort; by default enough for all clients."""

    def prepare(self) -> Callable[[], int]:
        """Solve for p; return a function that prints it."""
        # The scheme of Poisson sampling is the same at every rate.
        cohorts = Cohorts(sampling_rate=1.0, clients=self.clients, capacity=self.capacity)
        z, T = self.noise_multiplier, self.rounds
        return self._solve("sampling_rate", cohorts, noise_multiplier=z, rounds=T)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claims:
    """The guarantees of settings published in five papers, next to the papers' claims."""

    json: bool = False
    """Print JSON instead of a table."""

    def prepare(self) -> Callable[[], int]:
        """Return a function that computes and prints the guarantees."""
        from fedjaxsim.commands.privacy import prepare_claims

        return prepare_claims(json=self.json)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TradeOff(_PlannedRounds, Cohorts):
    """Draw the error rates that a guarantee forces on every test for one client's data."""

    out: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """Figure to write: .png, .pdf or .svg."""

    def prepare(self) -> Callable[[], int]:
        """Compute the curves; return a function that draws them."""
        from fedjaxsim.commands.privacy import prepare_trade_off

        return prepare_trade_off(self, self.noise_multiplier, self.rounds, self.budget, self.out)


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
        """Compute the answer; return a function that prints it."""
        return self.question.prepare()
