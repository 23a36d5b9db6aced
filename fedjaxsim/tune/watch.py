"""A tuning on the terminal: its steps as they come."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjaxsim.report.progress import COUNT, Bar, number
from fedjaxsim.report.results import Estimate, estimate
from fedjaxsim.runs.settings import flag
from fedjaxsim.tune.descent import Step


class TuneProgress(Bar):
    """A bar on a terminal; elsewhere one plain line per step; nothing if quiet."""

    def __init__(self, metric: str, steps: int, *, quiet: bool = False):
        super().__init__("tune", steps, after=(COUNT,), quiet=quiet)
        self._metric, self._steps, self._done = metric, steps, -1

    def update(self, step: Step) -> None:
        """Show the start, or a step that was tried, e.g. `loss 0.93 ± 0.018  lam 0.1  kept`."""
        self._done += 1
        point = "  ".join(f"{flag(name)} {shown(value)}" for name, value in step.point.items())
        fate = "kept" if step.accepted else "taken back"
        words = f"{self._metric} {over_seeds(step.objective.values)}  {point}  {fate}"
        self.show(f"step {self._done}/{self._steps}  {words}", completed=self._done, words=words)


def shown(value: Any) -> str:
    """Return a hyperparameter in words; the least and the largest of clients' values."""
    return " to ".join(map(number, (np.min(value), np.max(value))[: 1 + np.ndim(value)]))


def over_seeds(values: Sequence[float | None] | np.ndarray) -> Estimate:
    """Estimate a metric from its values over seeds; null and NaN are seeds that failed."""
    return estimate(np.asarray(values, np.float64).tolist())
