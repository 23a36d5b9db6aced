"""The figure of a tuning: the objective and the hyperparameters over their cost."""

import itertools
import math

import numpy as np

from fedjaxsim.extras import importing
from fedjaxsim.report.labels import key_label
from fedjaxsim.report.plots import COLOURS, STYLE, legend_above, line, picture
from fedjaxsim.report.results import estimate
from fedjaxsim.tune.descent import TuningTrace

with importing("plots"):
    import matplotlib as mpl
    from matplotlib.figure import Figure


@mpl.rc_context(STYLE)
def trace_figure(trace: TuningTrace, metric: str, title: str) -> Figure:
    """Draw the objective, with 95 % intervals over seeds, and the hyperparameters over their cost.

    Steps that were taken back are left out. Clients' values are shown by their median.
    """
    figure = picture(title, 7.4, 3.3)
    objective, values = figure.subplots(1, 2)
    kept = [step for step in trace.steps if step.accepted]
    runs, means = ([getattr(step, name) for step in kept] for name in ("runs", "value"))
    halves = [estimate(step.objective.values.tolist()).half or math.nan for step in kept]
    band = np.subtract(means, halves), np.add(means, halves)
    line(objective, runs, means, band, marker="o", ms=3.5, color=COLOURS[0])
    label = f"{metric.replace('_', ' ')}\nmean over clients and seeds, 95 %"
    objective.set(xlabel="run-equivalents", ylabel=label)
    for name, colour in zip(trace.steps[0].point, itertools.cycle(COLOURS)):
        points = [np.median(step.point[name]) for step in kept]
        values.plot(runs, points, color=colour, marker="o", ms=3, label=key_label(name))
    if min(np.min(value) for step in kept for value in step.point.values()) > 0:
        values.set_yscale("log")
        values.yaxis.set_major_formatter("{x:g}")
    values.set(xlabel="run-equivalents", ylabel="hyperparameter")
    legend_above(values)
    return figure
