"""Ways to differentiate a run: forward mode and reverse mode.

Reverse mode recomputes a client's work instead of keeping it (`Workload.rematerialize`), and so the
rounds of a segment (Griewank 1992; Chen, Xu, Zhang, Guestrin 2016). Kept are the cohort's rows and
the server state of each round in one segment, and the state at the start of every segment.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedjaxsim import checks
from fedjaxsim.engine.layout import Workload
from fedjaxsim.engine.program import Program
from fedjaxsim.engine.rows import Rows
from fedjaxsim.engine.shape_bytes import bytes_of
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.hyperparameters import Hyperparameters


@dataclasses.dataclass(frozen=True)
class Forward:
    """Forward mode, for few numbers.

    It carries a derivative of the state for every number through the rounds. Its time grows with
    their number; its memory does not grow with T.
    """

    def program(self, program: Program, rows: Rows) -> Program:
        """Return the program that is differentiated."""
        del rows
        workload = dataclasses.replace(program.workload, capped=True)
        return dataclasses.replace(program, workload=workload)

    def segment_length(self, program: Program, state: SimulationState, rounds: int) -> int:
        """Return the number of rounds that are recomputed together."""
        del program, state
        return rounds

    def differentiate(self, value: Callable[..., jax.Array]) -> Callable[..., Any]:
        """Return the compiled function of a value and its derivatives in the first argument."""

        def twice(*arguments: Any):
            found = value(*arguments)
            return found, found

        return jax.jit(lambda *given: jax.jacfwd(twice, has_aux=True)(*given)[::-1])


@dataclasses.dataclass(frozen=True)
class Reverse:
    """Reverse mode, for many numbers.

    It takes two to four times the time of a run for any number of derivatives, and keeps part of
    every round. A message that is not finite makes its derivatives NaN.

    Args:
      segment: number of rounds that are recomputed together, at least 1; by default the number that
        needs the least memory. T keeps all rounds, which saves a third of the time.
    """

    segment: int | None = None

    def __post_init__(self):
        if self.segment is not None:
            checks.count(segment=self.segment)

    def program(self, program: Program, rows: Rows) -> Program:
        """Return the program that is differentiated; forward mode does not apply to it."""
        workload = dataclasses.replace(bounded(program.workload, rows), rematerialize=True)
        return dataclasses.replace(program, workload=workload)

    def segment_length(self, program: Program, state: SimulationState, rounds: int) -> int:
        """Return the number of rounds that are recomputed together.

        Segments of L rounds keep T/L states of S bytes and L rounds of R bytes each: least at
        L = √(T·S/R). With full participation that is about √T; with a state much larger than the
        cohort's part of it, there is only one segment.
        """
        if self.segment is not None:
            return self.segment
        whole = bytes_of(state)
        cohort = program.sampling.scheme.capacity / program.num_clients
        # A round keeps the cohort's rows, the server state, and noise of its size.
        kept = cohort * bytes_of(state.personal) + 2 * bytes_of(state.shared) + 1
        best = min(rounds, max(1.0, math.sqrt(rounds * whole / kept)))
        near = [n for n in range(1, rounds + 1) if rounds % n == 0 and best / 2 <= n <= best * 2]
        # A rest would be one more program to compile, so divisors of T come first.
        return min(near, key=lambda n: abs(math.log(n / best))) if near else round(best)

    def differentiate(self, value: Callable[..., jax.Array]) -> Callable[..., Any]:
        """Return the compiled function of a value and its derivatives in the first argument."""
        return jax.jit(jax.value_and_grad(value))


Mode = Forward | Reverse


def bounded(workload: Workload, rows: Rows) -> Workload:
    """Return the workload with the largest client's rows as a static bound of loops."""
    counts = (np.max(np.asarray(each.count)) for each in (rows, rows.of_training()))
    most_rows = max(1, int(max(counts)))
    return dataclasses.replace(workload, capped=True, most_rows=most_rows)


def run_rounds(
    program: Program,
    state: SimulationState,
    hparams: Hyperparameters,
    rows: Rows,
    rounds: int,
    segment: int,
) -> SimulationState:
    """Run T rounds and return the state; reverse mode recomputes `segment` rounds together."""

    def several(state, length):
        def one(state, _):
            return program.step(state, hparams, rows)[0], None

        return jax.lax.scan(one, state, length=length)[0]

    if segment >= rounds:
        return several(state, rounds)
    again = jax.checkpoint(lambda state, _: (several(state, segment), None), prevent_cse=False)
    state, _ = jax.lax.scan(again, state, length=rounds // segment)
    rest = rounds % segment
    return several(state, rest) if rest else state
