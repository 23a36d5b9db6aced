"""Pictures of results: speed and ceilings of the systems, and growth curves."""

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedjaxsim.bench.report import BOUNDS
from fedjaxsim.bench.results import Results
from fedjaxsim.bench.spread import Spread
from fedjaxsim.bench.workload import Workload
from fedjaxsim.report.plots import COLOURS, STYLE

_COLOUR = {"gemm": COLOURS[0], "memory": COLOURS[1], None: "0.5"}


def systems_figure(results: Results, names: Sequence[str]) -> Figure:
    """Rounds per second, the fraction of the ceiling that bounds each workload, compile time.

    Points are medians over processes, lines their ranges.

    Args:
      results: with the processes of these workloads.
      names: workloads, at least one; the first at the top.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.4, 1.5 + 0.28 * len(names)), layout="constrained")
        figure.suptitle(_title(results, names), fontsize=10)
        panels = figure.subplots(1, 3, sharey=True, width_ratios=(1.2, 1, 0.7))
        speed, ceiling, compilation = panels
        for place, name in enumerate(names):
            colour = _COLOUR[results.bound(name)]
            _point(speed, place, results.spread(name, "rounds_per_second"), colour, _speed)
            _point(ceiling, place, results.fraction(name), colour, "{:.0%}".format)
            _point(compilation, place, results.spread(name, "compile_seconds"), colour, _speed)
        speed.set(xscale="log", xlabel="rounds/s")
        speed.margins(x=0.2)
        speed.set_yticks(range(len(names)), names)
        speed.set_ylim(len(names) - 0.4, -0.6)
        reached = [each.greatest for each in map(results.fraction, names) if each is not None]
        # Forms with fewer products than are counted go beyond 1.
        limit = 1.05 * max([1.0, *reached])
        ceiling.set(xlim=(0, limit), xlabel="fraction of the ceiling that is reached")
        ceiling.xaxis.set_major_formatter("{x:.0%}")
        compilation.set(xlabel="s to compile a segment")
        compilation.margins(x=0.25)
        compilation.set_xlim(left=0)
        bounds = dict.fromkeys(results.bound(name) for name in names)
        marks = [
            Line2D([], [], color=_COLOUR[bound], marker="o", ls="", ms=5, label=_BOUND[bound])
            for bound in bounds
        ]
        figure.legend(handles=marks, loc="outside lower right", ncols=len(marks))
    return figure


_BOUND = {
    "gemm": f"bound by {BOUNDS['gemm']}",
    "memory": f"bound by {BOUNDS['memory']}",
    None: "the loop alone",
}


def growth_figure(results: Results, workloads: Sequence[Workload]) -> Figure:
    """Rounds per second and memory over the size of each growth curve, both axes logarithmic.

    Dashed below the memory is what state and rows alone take.

    Args:
      results: with the processes of these workloads.
      workloads: points of curves, at least one.
    """
    curves: dict[str, list[Workload]] = {}
    for workload in workloads:
        assert workload.curve is not None
        curves.setdefault(workload.curve, []).append(workload)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(0.6 + 2.5 * len(curves), 4.8), layout="constrained")
        figure.suptitle(_title(results, [w.name for w in workloads]), fontsize=10, wrap=True)
        panels = figure.subplots(2, len(curves), squeeze=False, sharex="col")
        for (curve, points), (speed, memory) in zip(curves.items(), panels.T, strict=True):
            sizes = np.array([point.size for point in points])
            names = [point.name for point in points]
            _curve(speed, sizes, [results.spread(name, "rounds_per_second") for name in names], 0)
            _curve(memory, sizes, [results.spread(name, "memory_mb") for name in names], 1)
            least = [_state_and_data(results, name) for name in names]
            memory.plot(sizes, least, color="0.4", ls="dashed", lw=1.2, label="state + data")
            speed.set(xscale="log", yscale="log", title=curve)
            memory.set(xscale="log", yscale="log", xlabel=points[0].summary)
            memory.xaxis.label.set_wrap(True)
        panels[0, 0].set_ylabel("rounds/s")
        panels[1, 0].set_ylabel("MB above an idle process")
        panels[1, 0].legend(loc="best")
    return figure


def _state_and_data(results: Results, name: str) -> float:
    parts = [results.spread(name, key) for key in ("state_mb", "data_mb")]
    return sum(part.median for part in parts if part is not None)


def _point(
    axes: Axes, place: int, found: Spread | None, colour: str, text: Callable[[float], str]
) -> None:
    if found is None:
        return
    axes.plot([found.least, found.greatest], [place, place], color=colour, lw=3, alpha=0.4)
    axes.plot([found.median], [place], color=colour, marker="o", ms=5)
    # To the right of the whole range, where no other mark can be.
    axes.annotate(
        text(found.median),
        (found.greatest, place),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
    )


def _curve(axes: Axes, sizes: np.ndarray, spreads: Sequence[Spread | None], colour: int) -> None:
    known = [(size, s) for size, s in zip(sizes, spreads, strict=True) if s is not None]
    x = [size for size, _ in known]
    median = np.array([s.median for _, s in known])
    reach: Any = [
        median - [s.least for _, s in known],
        np.array([s.greatest for _, s in known]) - median,
    ]
    axes.errorbar(
        x, median, yerr=reach, color=COLOURS[colour], marker="o", ms=4, capsize=3, label="measured"
    )


def _speed(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _title(results: Results, names: Sequence[str]) -> str:
    machine = results.machine
    what = machine["device_kind"]
    if machine["platform"] == "cpu":
        what = f"{machine['processor']}, {machine['cores']} cores"
    counts = {len(results.processes[name]) for name in names}
    return f"{what}; median and range over {max(counts)} processes"
