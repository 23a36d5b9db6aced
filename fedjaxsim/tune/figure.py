"""The figure of a tuning: the objective and the hyperparameters over their cost."""

import itertools
import math
from typing import Any

import numpy as np

from fedjaxsim.extras import importing
from fedjaxsim.report.plots import COLOURS, STYLE, legend_above, line, picture
from fedjaxsim.report.results import estimate
from fedjaxsim.report.symbols import axis_label
from fedjaxsim.tune.descent import TuningTrace

with importing("plots"):
    import matplotlib as mpl
    from matplotlib.figure import Figure

_REFUSED: dict[str, Any] = {"color": COLOURS[1], "marker": "x", "ms": 5, "ls": "none"}


@mpl.rc_context(STYLE)
def trace_figure(trace: TuningTrace, metric: str, title: str) -> Figure:
    """Draw the objective, with 95 % intervals over seeds, and the hyperparameters over their cost.

    A step that was taken back is a cross, at the edge if it is far above: the descent is readable.
    """
    figure = picture(title, 7.4, 3.3)
    objective, values = figure.subplots(1, 2)
    kept = [step for step in trace.steps if step.accepted]
    refused = [step for step in trace.steps if not step.accepted]
    runs, means = ([getattr(step, name) for step in kept] for name in ("runs", "value"))
    halves = [estimate(step.objective.values.tolist()).half or math.nan for step in kept]
    low, high = np.subtract(means, halves), np.add(means, halves)
    looks: dict[str, Any] = {"color": COLOURS[0], "label": "descent, 95 % over seeds"}
    line(objective, runs, means, (low, high), marker="o", ms=3.5, **looks)
    finite = [height for height in (*low, *high, *means) if math.isfinite(height)]
    bottom, top = min(finite, default=0.0), max(finite, default=0.0)
    room = 0.06 * (top - bottom) or 1.0
    if refused:
        heights = np.minimum(np.nan_to_num([s.value for s in refused], nan=math.inf), top + room)
        places = [step.runs for step in refused]
        objective.plot(places, heights, label="taken back", clip_on=False, **_REFUSED)
    if finite:
        objective.set_ylim(bottom - room, top + room)
    label = f"{metric.replace('_', ' ')}\nmean over clients and the tuning's seeds"
    objective.set(xlabel="run-equivalents", ylabel=label)
    legend_above(objective, ncols=1)
    for name, colour in zip(trace.steps[0].point, itertools.cycle(COLOURS)):
        points = [step.point[name] for step in kept]
        values.plot(runs, points, color=colour, marker="o", ms=3, label=axis_label(name))
    if min(min(step.point.values()) for step in kept) > 0:
        values.set_yscale("log")
        values.yaxis.set_major_formatter("{x:g}")
    values.set(xlabel="run-equivalents", ylabel="hyperparameter")
    legend_above(values)
    return figure
