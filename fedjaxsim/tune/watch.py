"""A tuning on the terminal: its steps as they come, and the points that it compares."""

from collections.abc import Sequence

import numpy as np

from fedjaxsim.report.files import Record
from fedjaxsim.report.progress import COUNT, Bar, number
from fedjaxsim.runs.settings import flag
from fedjaxsim.tune.descent import Point, Step, standard_error


class TuneProgress(Bar):
    """A bar on a terminal; elsewhere, or when quiet, one plain line per step."""

    def __init__(self, metric: str, steps: int, *, quiet: bool = False):
        super().__init__("tune", steps, after=(COUNT,), quiet=quiet)
        self._metric, self._steps, self._done = metric, steps, -1

    def update(self, step: Step) -> None:
        """Show the start, or a step that was tried, e.g. `loss 0.93 ± 0.018  lam 0.1  kept`."""
        self._done += 1
        point = "  ".join(f"{flag(name)} {number(value)}" for name, value in step.point.items())
        fate = "kept" if step.accepted else "taken back"
        words = f"{self._metric} {with_error(step.value, step.standard_error)}  {point}  {fate}"
        self.show(f"step {self._done}/{self._steps}  {words}", completed=self._done, words=words)


def with_error(value: float, error: float) -> str:
    """Format a mean with its standard error, which has two digits."""
    return f"{number(value)} ± {error:.2g}"


def compared_points(record: Record) -> list[list[str]]:
    """Return a line for the start, the best step and the best point of the grid.

    Args:
      record: content of path.json.
    """
    steps, grid = record["steps"], record["grid"]
    start, best = steps[0], steps[record["best"]]
    shown = [
        ("start", start["point"], start["values"], start["runs"]),
        ("tuned", best["point"], best["values"], steps[-1]["runs"]),
    ]
    if grid is not None:
        at = grid["best"]
        shown.append(("best on the grid", grid["points"][at], grid["values"][at], grid["runs"]))
    return [[name, *cells(*each), number(runs)] for name, *each, runs in shown]


def cells(point: Point, values: Sequence[float | None]) -> list[str]:
    """Format hyperparameters, and the metric over seeds with its error."""
    seeds = np.asarray(values, np.float64)
    finite = bool(np.isfinite(seeds).all())
    value = with_error(float(seeds.mean()), standard_error(seeds)) if finite else "not finite"
    return [*map(number, point.values()), value]
