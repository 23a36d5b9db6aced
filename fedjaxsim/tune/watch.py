"""A tuning on the terminal: its steps as they come, and a table of its result."""

from collections.abc import Mapping

from fedjaxsim.report.progress import COUNT, Bar, number, print_rows
from fedjaxsim.runs.settings import flag
from fedjaxsim.tune.descent import Point, Step


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


def print_points(metric: str, rows: Mapping[str, tuple[Point, float, float, float]]) -> None:
    """Print the points that a tuning compares.

    Args:
      metric: the metric that is minimized.
      rows: by name, the point, the metric with its standard error, and run-equivalents spent.
    """
    names = list(next(iter(rows.values()))[0])
    lines = [
        [name, *(number(point[each]) for each in names), with_error(value, error), number(runs)]
        for name, (point, value, error, runs) in rows.items()
    ]
    headings = ["", *map(flag, names), f"{metric} on seeds", "run-equivalents"]
    print_rows(headings, lines, padding=(0, 1, 0, 0))
