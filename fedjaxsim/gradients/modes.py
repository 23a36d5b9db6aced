"""Ways to differentiate a run: in forward mode or in reverse mode.

`fixed_point.Implicit` is the third way.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from fedjaxsim import checks
from fedjaxsim.engine.program import Program
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.gradients.reverse import reversible, run_rounds, segment_length
from fedjaxsim.hyperparameters import Hyperparameters

Differentiated = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]
"""(chosen, rows, objective, epsilon, key, hparams) -> (value, derivatives by `chosen`)."""


class Run(NamedTuple):
    """A run that is differentiated.

    Attributes:
      program: its program.
      begin: `(chosen, epsilon, key, hparams) -> (first state, hparams with the chosen ones)`.
      rows: the training rows.
      rounds: T.
    """

    program: Program
    begin: Callable[..., tuple[SimulationState, Hyperparameters]]
    rows: Rows
    rounds: int

    def value(
        self, program: Program, segment: Callable[[SimulationState], int] | None = None
    ) -> Callable[..., jax.Array]:
        """Return the objective after the run, a function of the arguments of `Differentiated`."""

        def value(chosen, rows, objective, *given):
            state, hparams = self.begin(chosen, *given)
            length = self.rounds if segment is None else segment(state)
            state = run_rounds(program, state, hparams, rows, self.rounds, length)
            return objective(state, hparams)

        return value


class Mode(Protocol):
    """A way to differentiate a run."""

    def differentiate(self, run: Run) -> Differentiated:
        """Return the value of an objective and its derivatives as a compiled function."""
        ...

    def runs(self, count: int) -> int:
        """Return about how many runs the derivatives of `count` numbers take."""
        ...


@dataclasses.dataclass(frozen=True)
class Forward:
    """Forward mode, for few numbers.

    It carries a derivative of the state for every number through the rounds. Its time grows with
    their number; its memory does not grow with T.
    """

    def differentiate(self, run: Run) -> Differentiated:
        """Return the value of an objective and its derivatives as a compiled function."""
        value = run.value(run.program)

        def twice(*arguments: Any):
            found = value(*arguments)
            return found, found

        def differentiate(*arguments: Any):
            gradient, found = jax.jacfwd(twice, has_aux=True)(*arguments)
            return found, gradient

        return jax.jit(differentiate)

    def runs(self, count: int) -> int:
        """Return about how many runs the derivatives of `count` numbers take."""
        return 1 + count


@dataclasses.dataclass(frozen=True)
class Reverse:
    """Reverse mode, for many numbers.

    It takes two to four times the time of a run for any number of derivatives, and keeps part of
    every round; see `reverse.segment_length`.

    Args:
      segment: number of rounds that are recomputed together; by default the number that needs the
        least memory. T keeps all rounds, which saves a third of the time.

    Raises:
      ValueError: if the segment is below 1.
    """

    segment: int | None = None

    def __post_init__(self):
        if self.segment is not None:
            checks.count(segment=self.segment)

    def differentiate(self, run: Run) -> Differentiated:
        """Return the value of an objective and its derivatives as a compiled function."""
        program = reversible(run.program, run.rows)

        def length(state: SimulationState) -> int:
            return self.segment or segment_length(program, state, run.rounds)

        return jax.jit(jax.value_and_grad(run.value(program, length)))

    def runs(self, count: int) -> int:
        """Return about how many runs the derivatives take: two forwards and two back."""
        del count
        return 4
