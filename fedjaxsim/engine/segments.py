"""Results of a run: a segment of rounds with its evaluation, and all of them as a history."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from fedjaxsim import notebook
from fedjaxsim.engine.evaluation import Evaluation
from fedjaxsim.engine.private_evaluation import PrivateMetric
from fedjaxsim.extras import importing

if TYPE_CHECKING:
    import pandas as pd

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Segment:
    """Results of the rounds between two evaluations.

    Attributes:
      round: rounds done at its end.
      metrics: per-round metrics by name, (rounds,) numpy arrays: means over the cohort of the
        algorithm's metrics, and "participants", "overflow", "clipped", "nonfinite",
        "noise_multiplier".
      evaluation: on the test split, after the last round.
      seconds: time of the rounds alone, without compilation.
      compile_seconds: tracing, lowering and compiling since the segment before.
      private: the released evaluation on the validation split, if the run releases any.
    """

    round: int
    metrics: dict[str, np.ndarray] = dataclasses.field(repr=False)
    evaluation: Evaluation
    seconds: float = 0.0
    compile_seconds: float = 0.0
    private: PrivateMetric | None = None


class History(Sequence[Segment]):
    """The segments of a run, in the order of rounds."""

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
        """Append the later history of the same run."""
        return History((*self, *later)) if isinstance(later, History) else NotImplemented

    def to_pandas(self) -> "pd.DataFrame":
        """Return a data frame with one row per evaluation and, of several runs at once, per run.

        Its columns are "round"; "run", 0 to S − 1, of several runs; the per-round metrics
        ("participants", …), averaged over the segment; and the keys of `Evaluation.summary`.

        Raises:
          MissingExtraError: if pandas is not installed.
        """
        with importing("tables"):
            import pandas as pd

        rows: list[Record] = []
        for segment in self:
            values = _means(segment) | segment.evaluation.summary()
            size = next(iter(np.broadcast_shapes(*map(np.shape, values.values()))), None)
            rows += rows_of({"round": segment.round} | values, size)
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        """Show the rounds, and the first and last mean of each metric."""
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


def rows_of(columns: Mapping[str, Any], size: int | None) -> list[Record]:
    """Return a row for each of `size` runs; columns are (size,) or, if the runs share them, ().

    If `size` is None there is one run and no `run` column.
    """
    spread = [np.broadcast_to(each, size or 1).tolist() for each in columns.values()]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*spread, strict=True)]
    return rows if size is None else [{"run": run, **row} for run, row in enumerate(rows)]


def _means(segment: Segment) -> dict[str, Any]:
    """Average the per-round metrics over the segment."""
    return {name: np.mean(each, axis=0) for name, each in segment.metrics.items() if len(each)}


def _metrics(segment: Segment) -> list[str]:
    """Return the names of the metrics' means in the summary."""
    return [f"{segment.evaluation.split}_{name}" for name in segment.evaluation.values]
