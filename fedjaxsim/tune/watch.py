"""A tuning on the terminal: its steps as they come, and the points that it compares."""

from collections.abc import Sequence

import numpy as np

from fedjaxsim.report.files import Record
from fedjaxsim.report.progress import COUNT, Bar, number
from fedjaxsim.report.results import Estimate, estimate
from fedjaxsim.runs.settings import flag
from fedjaxsim.tune.descent import Point, Step


class TuneProgress(Bar):
    """A bar on a terminal; elsewhere one plain line per step; nothing if quiet."""

    def __init__(self, metric: str, steps: int, *, quiet: bool = False):
        super().__init__("tune", steps, after=(COUNT,), quiet=quiet)
        self._metric, self._steps, self._done = metric, steps, -1

    def update(self, step: Step) -> None:
        """Show the start, or a step that was tried, e.g. `loss 0.93 ± 0.018  lam 0.1  kept`."""
        self._done += 1
        point = "  ".join(f"{flag(name)} {number(value)}" for name, value in step.point.items())
        fate = "kept" if step.accepted else "taken back"
        words = f"{self._metric} {over_seeds(step.objective.values)}  {point}  {fate}"
        self.show(f"step {self._done}/{self._steps}  {words}", completed=self._done, words=words)


def over_seeds(values: Sequence[float | None] | np.ndarray) -> Estimate:
    """Estimate a metric from its values over seeds; null and NaN are seeds that failed."""
    return estimate(np.asarray(values, np.float64).tolist())


def compared_points(record: Record) -> list[list[str]]:
    """Return a line for the start and the best step: the point, its metric on both kinds of seeds.

    Args:
      record: content of path.json.
    """
    steps, test = record["steps"], record["test"] or {}
    shown = [("start", steps[0]), ("tuned", steps[record["best"]])]
    return [
        [name, *cells(step["point"], step["values"]), str(over_seeds(test.get(name, [])))]
        for name, step in shown
    ]


def gain_text(record: Record) -> str:
    """Return by how much the metric fell on fresh seeds, or that nothing was tested."""
    test = record["test"]
    if test is None:
        return "not tested on fresh seeds"
    return str(Estimate(test["gain"], test["half"], None, record["seeds"], test["failed"]))


def cells(point: Point, values: Sequence[float | None]) -> list[str]:
    """Format hyperparameters, and the metric over seeds with its interval."""
    return [*map(number, point.values()), str(over_seeds(values))]
