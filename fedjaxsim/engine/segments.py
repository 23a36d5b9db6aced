"""Rounds in compiled segments, with an evaluation after each."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from fedjaxsim.algorithm import Metrics
from fedjaxsim.engine.evaluation import Evaluation
from fedjaxsim.engine.state import SimulationState


@dataclasses.dataclass(frozen=True)
class Segment:
    """What the rounds between two evaluations gave.

    Attributes:
      round: rounds done at its end.
      metrics: per-round metrics by name, each (rounds,) numpy arrays: the means over the cohort of
        the algorithm's own, and "participants", "overflow", "clipped", "nonfinite",
        "noise_multiplier".
      evaluation: on the test split, after the last round.
    """

    round: int
    metrics: dict[str, np.ndarray]
    evaluation: Evaluation


def run_segments(
    advance: Callable[[SimulationState, int], tuple[SimulationState, Metrics]],
    evaluate: Callable[[SimulationState], Evaluation],
    state: SimulationState,
    rounds: int,
    eval_every: int | None,
    on_segment: Callable[[SimulationState, Segment], bool | None] | None,
) -> tuple[SimulationState, list[Segment]]:
    """Runs rounds in compiled segments, evaluating after each; see `Simulation.run`.

    Args:
      advance: `(state, rounds) -> (state, metrics)`.
      evaluate: `(state) -> Evaluation`.
      state: where to start.
      rounds: how many.
      eval_every: rounds in one segment; None for all.
      on_segment: called after each; returning False stops.
    """
    done = int(state.round)
    last = done + rounds
    history = []
    while done < last:
        length = min(eval_every or rounds, last - done)
        state, metrics = advance(state, length)
        done += length
        history.append(Segment(done, jax.tree.map(np.asarray, metrics), evaluate(state)))
        if on_segment is not None and on_segment(state, history[-1]) is False:
            break
    return state, history
