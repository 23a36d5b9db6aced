"""Simulated seconds: the expected time of a round, by public numbers and a public law.

A real clock is private: it follows how many rows each client has, and who took part. This one
knows neither. Every client does the work of one with the declared, or largest, number of rows, and
the time is a mean over cohorts. So it says nothing about data that a guarantee does not.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from fedjaxsim import checks

_POINTS, _DEVIATIONS = 20_001, 10


class RoundWork(NamedTuple):
    """Public numbers from which the time of a round follows.

    Attributes:
      operations: multiplications of real numbers by one client, if it has as many rows as any
        client may have.
      message_bytes: bytes of one client's message.
      draws: how many independent coins decide who answers.
      answers: the probability of each that a client does.
      at_work: the server's steps while a client works, on average; None if a round waits for all
        its clients.

    Example:
      >>> work = fjs.RoundWork(operations=2e9, message_bytes=0.0, draws=1, answers=0.5)
      >>> fjs.Clock(spread=0.0).seconds(work)
      1.0
    """

    operations: float
    message_bytes: float
    draws: int
    answers: float
    at_work: float | None = None

    def record(self) -> dict[str, float]:
        """Return the numbers as a run's files keep them."""
        return {name: value for name, value in self._asdict().items() if value is not None}


@dataclasses.dataclass(frozen=True)
class Clock:
    """A public law of a client's time: V·(operations/`speed` + message bytes/`bandwidth`) seconds.

    V of each client in each round is log-normal with median 1, independent of everything else. A
    round takes the time of its slowest client, none if nobody is drawn. Downloads and the server
    take no time, and a client that leaves out local steps counts as if it did them.

    Attributes:
      speed: multiplications of a median client in a second.
      bandwidth: bytes that a median client sends in a second.
      spread: standard deviation of log V; 0 if all clients are alike.

    Example:
      >>> alike = fjs.Clock(speed=1e6, bandwidth=1e3, spread=0.0)
      >>> alike.seconds(fjs.RoundWork(operations=3e6, message_bytes=500, draws=10, answers=1.0))
      3.5
    """

    speed: float = 1e9
    bandwidth: float = 1e6
    spread: float = 0.5

    def __post_init__(self):
        checks.positive(speed=self.speed, bandwidth=self.bandwidth)
        checks.in_range("[0, 5]", spread=self.spread)

    def seconds(self, work: RoundWork) -> float:
        """Return the expected seconds of a round."""
        median = work.operations / self.speed + work.message_bytes / self.bandwidth
        if work.at_work is not None:
            return median * math.exp(self.spread**2 / 2) / work.at_work
        return median * self._slowest(work.draws, work.answers)

    def _slowest(self, draws: int, answers: float) -> float:
        """Return E[max V], 0 without clients: ∫ P(max V > v) dv, with v = exp(spread·x)."""
        from scipy.stats import norm  # slow to import

        if self.spread == 0:
            return -math.expm1(draws * math.log1p(-answers)) if answers < 1 else 1.0
        x = np.linspace(-_DEVIATIONS, _DEVIATIONS + self.spread, _POINTS)
        with np.errstate(divide="ignore"):  # log 0 of a client who surely is slower
            longer = -np.expm1(draws * np.log1p(-answers * norm.sf(x)))
        v = np.exp(self.spread * x)
        return float(v[0] * longer[0] + np.trapezoid(longer * self.spread * v, x))

    def __str__(self) -> str:
        return (
            f"{self.speed:g} multiplications/s, {self.bandwidth:g} bytes/s, spread {self.spread:g}"
        )


class Axis(NamedTuple):
    """The horizontal axis of a figure: rounds, bytes that clients sent, or a clock's seconds."""

    over: Literal["rounds", "bytes", "seconds"] = "rounds"
    clock: Clock = Clock()

    @property
    def title(self) -> str:
        """Its label."""
        return {
            "rounds": "rounds",
            "bytes": "megabytes sent by clients (expected)",
            "seconds": f"simulated seconds (expected)\n{self.clock}",
        }[self.over]

    def per_round(self, bytes_sent: Callable[[], float], work: Callable[[], RoundWork]) -> float:
        """Return how far a round goes; only what the axis needs is asked for."""
        if self.over == "rounds":
            return 1.0
        return bytes_sent() / 1e6 if self.over == "bytes" else self.clock.seconds(work())


ROUNDS = Axis()
