"""Rounds in compiled segments, with an evaluation after each."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

import jax
import numpy as np

from fedjaxsim import notebook
from fedjaxsim.algorithm import Metrics
from fedjaxsim.engine.evaluation import Evaluation
from fedjaxsim.engine.state import SimulationState
from fedjaxsim.extras import importing

if TYPE_CHECKING:
    import pandas as pd


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
    metrics: dict[str, np.ndarray] = dataclasses.field(repr=False)
    evaluation: Evaluation


class History(Sequence[Segment]):
    """The segments of a run, in the order of rounds.

    Args:
      segments: in this order.
    """

    def __init__(self, segments: Iterable[Segment] = ()):
        self._segments = tuple(segments)

    def __len__(self) -> int:
        return len(self._segments)

    @overload
    def __getitem__(self, index: int) -> Segment: ...

    @overload
    def __getitem__(self, index: slice) -> "History": ...

    def __getitem__(self, index: int | slice) -> "Segment | History":
        found = self._segments[index]
        return found if isinstance(found, Segment) else History(found)

    def __add__(self, later: "History") -> "History":
        """Append the history of the same run that goes on."""
        return History((*self, *later)) if isinstance(later, History) else NotImplemented

    def to_pandas(self) -> "pd.DataFrame":
        """Return a data frame with one row per evaluation and, of several runs at once, per run.

        Its columns are "round"; "run", 0 to S − 1, where there are several; the per-round metrics
        ("participants", …), averaged over the segment; and those of `Evaluation.summary`.

        Raises:
          MissingExtraError: if pandas is not installed.
        """
        with importing("tables"):
            import pandas as pd

        columns: dict[str, list[Any]] = {}
        for segment in self:
            values = _means(segment) | segment.evaluation.summary()
            shape = np.broadcast_shapes(*map(np.shape, values.values()))
            of_runs = {"run": np.arange(*shape)} if shape else {}
            for name, value in ({"round": segment.round} | of_runs | values).items():
                columns.setdefault(name, []).extend(np.broadcast_to(value, shape or (1,)).tolist())
        return pd.DataFrame(columns)

    def __repr__(self) -> str:
        """The rounds, and the first and last mean of each metric."""
        ends = [each.evaluation.summary() for each in (*self[:1], *self[1:][-1:])]
        names = _metrics(self[-1]) if self else []
        lines = (
            f"  {name}: {' → '.join(notebook.number(end[name]) for end in ends)}" for name in names
        )
        return "\n".join([self._title, *lines])

    def _repr_html_(self) -> str:
        names = _metrics(self[-1]) if self else []
        rows = []
        for segment in self:
            values = _means(segment) | segment.evaluation.summary()
            shown = (values.get(name, np.nan) for name in ("participants", *names))
            rows.append([segment.round, *map(notebook.number, shown)])
        return notebook.table(self._title, ["round", "participants", *names], rows)

    @property
    def _title(self) -> str:
        count = "1 evaluation" if len(self) == 1 else f"{len(self)} evaluations"
        if not self:
            return f"History of {count}"
        return f"History of {count}, up to round {self[-1].round}"


def _means(segment: Segment) -> dict[str, Any]:
    """Average the per-round metrics over the segment."""
    return {name: np.mean(each, axis=0) for name, each in segment.metrics.items() if len(each)}


def _metrics(segment: Segment) -> list[str]:
    """Return the names of the metrics' means in the summary."""
    return [f"{segment.evaluation.split}_{name}" for name in segment.evaluation.values]


def run_segments(
    advance: Callable[[SimulationState, int], tuple[SimulationState, Metrics]],
    evaluate: Callable[[SimulationState], Evaluation],
    state: SimulationState,
    rounds: int,
    eval_every: int | None,
    on_segment: Callable[[SimulationState, Segment], bool | None] | None,
) -> tuple[SimulationState, History]:
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
    return state, History(history)
