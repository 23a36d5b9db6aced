"""A picture of results of `fedjaxsim bench`: speed, fraction of the ceiling, compile time.

    python benchmarks/workloads_picture.py benchmarks/results/bench.json docs/figures/bench.png

Points are medians over processes, lines their ranges. Points of `growth.py` are left out.
"""

import argparse
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedjaxsim.bench.results import Results, Spread
from fedjaxsim.report.plots import COLOURS, STYLE, picture, save

BOUNDS = {"GEMM": COLOURS[0], "memory": COLOURS[1], None: "0.5"}


def draw(results: Results) -> Figure:
    """Draw a line for every run."""
    names = [name for name in results.processes if not name.startswith("growth-")]
    found = {name: results.reached(name) for name in names}
    machine = results.machine
    processes = max(len(results.processes[name]) for name in names)
    title = f"{machine['processor']}, {machine['cores']} cores, {processes} processes"
    with mpl.rc_context(STYLE):
        figure = picture(title, 11.4, 1.5 + 0.28 * len(names))
        speed, ceiling, compilation = figure.subplots(1, 3, sharey=True, width_ratios=(1.2, 1, 0.7))
        for place, (name, reached) in enumerate(found.items()):
            bound, fraction = reached or (None, None)
            point(speed, place, results.spread(name, "rounds_per_second"), bound, "{:,.3g}")
            point(ceiling, place, fraction, bound, "{:.0%}")
            point(compilation, place, results.spread(name, "compile_seconds"), bound, "{:.3g}")
        speed.set(xscale="log", xlabel="rounds/s")
        speed.margins(x=0.2)
        speed.set_yticks(range(len(names)), names)
        speed.set_ylim(len(names) - 0.4, -0.6)
        most = max([1.0, *(reached[1].greatest for reached in found.values() if reached)])
        ceiling.set(xlim=(0, 1.05 * most), xlabel="fraction of the ceiling")
        ceiling.xaxis.set_major_formatter("{x:.0%}")
        compilation.set(xlabel="s to compile", xlim=(0, None))
        compilation.margins(x=0.25)
        bounds = dict.fromkeys(reached and reached[0] for reached in found.values())
        marks = [
            Line2D([], [], color=BOUNDS[bound], marker="o", ls="", ms=5,
                   label=f"bound by {bound}" if bound else "the loop alone")
            for bound in bounds
        ]  # fmt: skip
        figure.legend(handles=marks, loc="outside lower right", ncols=len(marks))
    return figure


def point(axes: Axes, place: int, found: Spread | None, bound: str | None, text: str) -> None:
    """Draw a spread with its median as text, to the right of the range."""
    if found is None:
        return
    axes.plot([found.least, found.greatest], [place, place], color=BOUNDS[bound], lw=3, alpha=0.4)
    axes.plot([found.median], [place], color=BOUNDS[bound], marker="o", ms=5)
    axes.annotate(
        text.format(found.median), (found.greatest, place), xytext=(6, 0),
        textcoords="offset points", va="center", fontsize=8,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    save(draw(Results.read(args.results)), args.picture)


if __name__ == "__main__":
    main()
