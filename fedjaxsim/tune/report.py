"""A tuning on the terminal and in a figure."""

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjaxsim.factories import flag
from fedjaxsim.report.labels import key_label
from fedjaxsim.report.progress import Bar, number
from fedjaxsim.tune.descent import Step, TuningTrace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class TuneProgress(Bar):
    """A bar on a terminal; elsewhere one plain line per step; nothing if quiet."""

    def __init__(self, metric: str, steps: int, *, quiet: bool = False):
        super().__init__("tune", steps, quiet=quiet)
        self._metric, self._steps, self._done = metric, steps, -1

    def update(self, step: Step) -> None:
        """Show the start, or a step that was tried, e.g. `loss 0.93 ± 0.018  lam 0.1  kept`."""
        self._done += 1
        point = "  ".join(f"{flag(name)} {shown(value)}" for name, value in step.point.items())
        fate = "kept" if step.accepted else "taken back"
        words = f"{self._metric} {step.objective.estimate}  {point}  {fate}"
        self.show(f"step {self._done}/{self._steps}  {words}", completed=self._done, words=words)


def shown(value: Any) -> str:
    """Return a hyperparameter in words; the least and the largest of clients' values."""
    return " to ".join(map(number, (np.min(value), np.max(value))[: 1 + np.ndim(value)]))


def trace_figure(trace: TuningTrace, metric: str, title: str) -> "Figure":
    """Draw the objective, with 95 % intervals over seeds, and the hyperparameters over their cost.

    Steps that were taken back are left out. Clients' values are shown by their median.
    """
    import matplotlib as mpl

    from fedjaxsim.report.plots import COLOURS, STYLE, legend_above, line, picture

    with mpl.rc_context(STYLE):
        figure = picture(title, 7.4, 3.3)
        objective, values = figure.subplots(1, 2)
        kept = [step for step in trace.steps if step.accepted]
        runs, means = ([getattr(step, name) for step in kept] for name in ("runs", "value"))
        halves = [step.objective.estimate.half or math.nan for step in kept]
        band = np.subtract(means, halves), np.add(means, halves)
        line(objective, runs, means, band, marker="o", ms=3.5, color=COLOURS[0])
        label = f"{metric.replace('_', ' ')}\nmean over clients and seeds, 95 %"
        objective.set(xlabel="run-equivalents", ylabel=label)
        for name, colour in zip(trace.steps[0].point, itertools.cycle(COLOURS)):
            points = [np.median(step.point[name]) for step in kept]
            values.plot(runs, points, color=colour, marker="o", ms=3, label=key_label(name))
        values.set_yscale("log")
        values.yaxis.set_major_formatter("{x:g}")
        values.set(xlabel="run-equivalents", ylabel="hyperparameter")
        legend_above(values)
        return figure
