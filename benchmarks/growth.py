"""Measure PMTL at ever larger sizes with `fedjaxsim bench`, and draw results of it.

    python benchmarks/growth.py [--out runs/growth] [--curves cohort steps] [--repeats 3]
    python benchmarks/growth.py --drawn runs/growth/bench.json --figure docs/figures/growth.png
    python benchmarks/growth.py --drawn runs/bench/bench.json --figure docs/figures/bench.png

The first writes a file of settings for each point into the folder, measures and draws them: speed
and memory over the size, on axes that a row shares, so that one slope means the same in all; the
dashed line below the memory is the state alone. Results of other runs are drawn as a line for each:
speed, fraction of the ceiling and compile time, medians over processes with their ranges.
"""

import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import matplotlib as mpl
import numpy as np
import tomli_w
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedjaxsim.bench.results import Results, Spread
from fedjaxsim.cli import main as fedjaxsim
from fedjaxsim.report.plots import COLOURS, STYLE, picture, save

BASE = {"data": "random", "algorithm": "pmtl", "rows": [10], "local-steps": 1,
        "learning-rate": 0.05, "clip": 1.0, "noise-multiplier": 1.0}  # fmt: skip
HUNDRED = {"clients": 100, "sampling": "full"}
POINT = re.compile(r"growth-(\w+)-(\d+)")
"""Names of points: curve and size."""
BOUNDS = {"GEMM": COLOURS[0], "memory": COLOURS[1], None: "0.5"}


# --- settings -------------------------------------------------------------------------------------


def cohort(q: int) -> dict[str, Any]:
    """Return settings by the expected cohort."""
    rate = {"clients": 20_000, "sampling-rate": q / 20_000}
    return {**rate, "shape": [32], "eval-every": max(2, 10_000 // q)}


def population(m: int) -> dict[str, Any]:
    """Return settings by the number of clients."""
    rows = {"rows": [3], "test-fraction": 0.3, "batch-size": 2, "shape": [10], "labels": 2}
    who = {"sampling": "full"} if m == 100 else {"sampling-rate": 100 / m}
    return {"clients": m, **who, **rows, "eval-every": 100}


def parameters(p: int) -> dict[str, Any]:
    """Return settings by the parameters of an MLP 64–h–10: 75h + 10."""
    return {**HUNDRED, "shape": [64], "model": "mlp", "hidden": [(p - 10) // 75], "eval-every": 4}


def steps(e: int) -> dict[str, Any]:
    """Return settings by the number of local steps."""
    size = {"shape": [64], "rows": [25], "local-steps": e}
    return {**HUNDRED, **size, "eval-every": max(1, 100 // e)}


Curve = Literal["cohort", "population", "parameters", "steps"]
CURVES = {
    "cohort": (cohort, (10, 100, 1000, 10_000)),
    "population": (population, (100, 1000, 10_000, 100_000, 1_000_000)),
    "parameters": (parameters, (985, 9985, 99_985, 999_985)),
    "steps": (steps, (1, 10, 100, 1000)),
}
LABELS = {
    "cohort": "The expected cohort, of 20,000 clients with 330 parameters",
    "population": "The clients, 100 of them expected, with 22 parameters and two training rows",
    "parameters": "The parameters of each of 100 clients: 75h + 10 of an MLP 64–h–10",
    "steps": "The local steps of 100 clients with 650 parameters",
}


def write(folder: Path, curves: Sequence[str]) -> list[Path]:
    """Write a file of settings for every point."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for curve in curves:
        settings, sizes = CURVES[curve]
        for size in sizes:
            files.append(folder / f"growth-{curve}-{size}.toml")
            given = BASE | settings(size)
            files[-1].write_text(tomli_w.dumps(given | {"rounds": 10 * given["eval-every"]}))
    return files


# --- pictures -------------------------------------------------------------------------------------


def draw_growth(results: Results) -> Figure:
    """Draw rounds per second and memory over the size, on logarithmic axes."""
    names = [POINT.fullmatch(run) for run in results.processes]
    points = [(found[1], int(found[2]), found[0]) for found in names if found]
    curves = list(dict.fromkeys(curve for curve, _, _ in points))
    title = f"{results.machine['processor']}, {results.machine['cores']} cores"
    figure = picture(title, 0.6 + 2.5 * len(curves), 4.8)
    panels = figure.subplots(2, len(curves), squeeze=False, sharex="col", sharey="row")
    for curve, (speed, memory) in zip(curves, panels.T, strict=True):
        of_curve = [(size, run) for name, size, run in points if name == curve]
        sizes = [size for size, _ in of_curve]
        for axes, key, colour in ((speed, "rounds_per_second", 0), (memory, "rounds_mb", 1)):
            spreads = [results.spread(run, key) for _, run in of_curve]
            median, least, greatest = np.array([each for each in spreads if each]).T
            reach = [median - least, greatest - median]
            looks = {"marker": "o", "ms": 4, "capsize": 3, "label": "measured"}
            axes.errorbar(sizes, median, reach, color=COLOURS[colour], **looks)
        states = [results.processes[run][0]["state_mb"] for _, run in of_curve]
        memory.plot(sizes, states, color="0.4", ls="dashed", lw=1.2, label="state")
        speed.set(xscale="log", yscale="log", title=curve)
        memory.set(xscale="log", yscale="log", xlabel=textwrap.fill(LABELS[curve], 26))
    panels[0, 0].set_ylabel("rounds/s")
    panels[1, 0].set_ylabel("MB")
    handles, labels = panels[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower right", ncols=2)
    return figure


def draw_runs(results: Results) -> Figure:
    """Draw a line for every run that is no point of a curve."""
    names = [name for name in results.processes if not POINT.fullmatch(name)]
    found = {name: results.reached(name) for name in names}
    machine, processes = results.machine, max(len(results.processes[name]) for name in names)
    title = f"{machine['processor']}, {machine['cores']} cores, {processes} processes"
    figure = picture(title, 11.4, 1.5 + 0.28 * len(names))
    speed, ceiling, compilation = figure.subplots(1, 3, sharey=True, width_ratios=(1.2, 1, 0.7))
    for line, (name, reached) in enumerate(found.items()):
        bound, fraction = reached or (None, None)
        _point(speed, line, results.spread(name, "rounds_per_second"), bound, "{:,.3g}")
        _point(ceiling, line, fraction, bound, "{:.0%}")
        _point(compilation, line, results.spread(name, "compile_seconds"), bound, "{:.3g}")
    speed.set(xscale="log", xlabel="rounds/s", ylim=(len(names) - 0.4, -0.6))
    speed.margins(x=0.2)
    speed.set_yticks(range(len(names)), names)
    most = max([1.0, *(reached[1].greatest for reached in found.values() if reached)])
    ceiling.set(xlim=(0, 1.05 * most), xlabel="fraction of the ceiling")
    ceiling.xaxis.set_major_formatter("{x:.0%}")
    compilation.set(xlabel="s to compile", xlim=(0, None))
    compilation.margins(x=0.25)
    marks = [
        Line2D([], [], color=BOUNDS[bound], marker="o", ls="", ms=5,
               label=f"bound by {bound}" if bound else "the loop alone")
        for bound in dict.fromkeys(reached and reached[0] for reached in found.values())
    ]  # fmt: skip
    figure.legend(handles=marks, loc="outside lower right", ncols=len(marks))
    return figure


def _point(axes: Axes, line: int, found: Spread | None, bound: str | None, text: str) -> None:
    """Draw a spread with its median as text, to the right of the range."""
    if found is None:
        return
    axes.plot([found.least, found.greatest], [line, line], color=BOUNDS[bound], lw=3, alpha=0.4)
    axes.plot([found.median], [line], color=BOUNDS[bound], marker="o", ms=5)
    axes.annotate(
        text.format(found.median), (found.greatest, line), xytext=(6, 0),
        textcoords="offset points", va="center", fontsize=8,
    )  # fmt: skip


def draw(results: Results, path: Path) -> None:
    """Draw the curves if all runs are points of them, and otherwise the other runs."""
    with mpl.rc_context(STYLE):
        growth = all(POINT.fullmatch(name) for name in results.processes)
        save((draw_growth if growth else draw_runs)(results), path)


def main(
    out: Path = Path("runs/growth"),
    curves: Sequence[Curve] = get_args(Curve),
    repeats: int = 3,
    drawn: Path | None = None,
    figure: Path | None = None,
) -> int:
    """Measure and draw growth curves, or draw any results.

    Args:
      out: a folder for settings, results and picture.
      curves: that are measured.
      repeats: processes of each point.
      drawn: a bench.json to draw; then nothing is measured.
      figure: a .png file.
    """
    code = 0
    if drawn is None:
        flags = ["--repeats", str(repeats), "--out", str(out), "--overwrite"]
        code = fedjaxsim(["bench", *map(str, write(out, curves)), *flags])
    results = Results.read(drawn or out / "bench.json")
    draw(results, figure or out / "growth.png")
    return code


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
