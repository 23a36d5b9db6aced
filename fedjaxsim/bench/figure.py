"""Pictures of results: speed and ceilings of the systems, and growth curves."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjaxsim.bench.report import BOUNDS
from fedjaxsim.bench.results import Results, Spread
from fedjaxsim.bench.workload import Workload
from fedjaxsim.extras import importing
from fedjaxsim.report.plots import COLOURS, STYLE, picture

with importing("plots"):
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_COLOUR = {"gemm": COLOURS[0], "memory": COLOURS[1], None: "0.5"}
_BOUND = {bound: f"bound by {name}" for bound, name in BOUNDS.items()} | {None: "the loop alone"}


def systems_figure(results: Results, names: Sequence[str]) -> Figure:
    """Rounds per second, the fraction of the ceiling that bounds each workload, compile time.

    Points are medians over processes, lines their ranges.

    Args:
      results: with the processes of these workloads.
      names: workloads, at least one; the first at the top.
    """
    with mpl.rc_context(STYLE):
        figure = picture(_title(results, names), 11.4, 1.5 + 0.28 * len(names))
        speed, ceiling, compilation = figure.subplots(1, 3, sharey=True, width_ratios=(1.2, 1, 0.7))
        for place, name in enumerate(names):
            colour = _COLOUR[results.bound(name)]
            for axes, found, text in (
                (speed, results.spread(name, "rounds_per_second"), _speed),
                (ceiling, results.fraction(name), "{:.0%}".format),
                (compilation, results.spread(name, "compile_seconds"), _speed),
            ):
                if found is not None:
                    _point(axes, place, found, colour, text(found.median))
        speed.set(xscale="log", xlabel="rounds/s")
        speed.margins(x=0.2)
        speed.set_yticks(range(len(names)), names)
        speed.set_ylim(len(names) - 0.4, -0.6)
        # Forms with fewer products than are counted go beyond 1.
        reached = [each.greatest for each in map(results.fraction, names) if each is not None]
        limit = 1.05 * max([1.0, *reached])
        ceiling.set(xlim=(0, limit), xlabel="fraction of the ceiling that is reached")
        ceiling.xaxis.set_major_formatter("{x:.0%}")
        compilation.set(xlabel="s to compile a segment")
        compilation.margins(x=0.25)
        compilation.set_xlim(left=0)
        marks = [
            Line2D([], [], color=_COLOUR[bound], marker="o", ls="", ms=5, label=_BOUND[bound])
            for bound in dict.fromkeys(map(results.bound, names))
        ]
        figure.legend(handles=marks, loc="outside lower right", ncols=len(marks))
    return figure


def growth_figure(results: Results, workloads: Sequence[Workload]) -> Figure:
    """Rounds per second and memory over the size of each growth curve, on logarithmic axes.

    Curves share the axis of their row, so that one slope means the same in all.
    Dashed below the memory is what state and rows alone take.

    Args:
      results: with the processes of these workloads.
      workloads: points of curves, at least one.
    """
    curves = list(dict.fromkeys(workload.curve for workload in workloads))
    with mpl.rc_context(STYLE):
        title = _title(results, [workload.name for workload in workloads])
        figure = picture(title, 0.6 + 2.5 * len(curves), 4.8)
        panels = figure.subplots(2, len(curves), squeeze=False, sharex="col", sharey="row")
        for curve, (speed, memory) in zip(curves, panels.T, strict=True):
            points = [workload for workload in workloads if workload.curve == curve]
            for axes, key, colour in ((speed, "rounds_per_second", 0), (memory, "memory_mb", 1)):
                _curve(axes, results, points, key, color=COLOURS[colour])
            least = [_state_and_data(results, point.name) for point in points]
            sizes = [point.size for point in points]
            memory.plot(sizes, least, color="0.4", ls="dashed", lw=1.2, label="state + data")
            speed.set(xscale="log", yscale="log", title=str(curve).removeprefix("growth-"))
            memory.set(xscale="log", yscale="log", xlabel=points[0].summary)
            memory.xaxis.label.set_wrap(True)
        panels[0, 0].set_ylabel("rounds/s")
        panels[1, 0].set_ylabel("MB above an idle process")
        handles, labels = panels[1, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower right", ncols=2)
    return figure


def _state_and_data(results: Results, name: str) -> float:
    parts = [results.spread(name, key) for key in ("state_mb", "data_mb")]
    return sum(part.median for part in parts if part is not None)


def _point(axes: Axes, place: int, found: Spread, colour: str, text: str) -> None:
    axes.plot([found.least, found.greatest], [place, place], color=colour, lw=3, alpha=0.4)
    axes.plot([found.median], [place], color=colour, marker="o", ms=5)
    # To the right of the whole range, where no other mark can be.
    axes.annotate(
        text, (found.greatest, place), xytext=(6, 0), textcoords="offset points",
        va="center", fontsize=8,
    )  # fmt: skip


def _curve(
    axes: Axes, results: Results, points: Sequence[Workload], key: str, **looks: Any
) -> None:
    found = {point.size: results.spread(point.name, key) for point in points}
    known = np.array([(size, *each) for size, each in found.items() if each is not None])
    sizes, median, least, greatest = known.reshape(-1, 4).T
    reach = [median - least, greatest - median]
    axes.errorbar(sizes, median, reach, marker="o", ms=4, capsize=3, label="measured", **looks)


def _speed(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _title(results: Results, names: Sequence[str]) -> str:
    machine = results.machine
    what = machine["device_kind"]
    if machine["platform"] == "cpu":
        what = f"{machine['processor']}, {machine['cores']} cores"
    counts = {len(results.processes[name]) for name in names}
    return f"{what}; median and range over {max(counts)} processes"
