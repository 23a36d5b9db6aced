"""Speed and memory of PMTL at ever larger sizes, measured by `fedjaxsim bench`, and their picture.

    python benchmarks/growth.py [--out runs/growth] [--curves cohort steps] [--repeats 3]
    python benchmarks/growth.py --draw runs/growth/bench.json docs/figures/growth.png

The first writes a file of settings for each point into the folder and measures them all; the second
draws results. Curves share the axis of their row, so that one slope means the same in all. The
dashed line below the memory is the state alone.
"""

import argparse
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import tomli_w

from fedjaxsim.bench.results import Results
from fedjaxsim.cli import main as fedjaxsim
from fedjaxsim.report.plots import COLOURS, STYLE, picture, save

BASE = {"data": "random", "algorithm": "pmtl", "rows": [10], "local-steps": 1,
        "learning-rate": 0.05, "clip": 1.0, "noise-multiplier": 1.0}  # fmt: skip
EVERYONE = {"clients": 100, "sampling": "full"}


def cohort(q: int) -> dict[str, Any]:
    """The expected cohort, of 20,000 clients with 330 parameters."""
    rate = {"clients": 20_000, "sampling-rate": q / 20_000}
    return {**rate, "shape": [32], "eval-every": max(2, 10_000 // q)}


def population(m: int) -> dict[str, Any]:
    """The clients, of whom 100 are expected, with 22 parameters and two rows for training."""
    rows = {"rows": [3], "test-fraction": 0.3, "batch-size": 2, "shape": [10], "labels": 2}
    who = {"sampling": "full"} if m == 100 else {"sampling-rate": 100 / m}
    return {"clients": m, **who, **rows, "eval-every": 100}


def parameters(p: int) -> dict[str, Any]:
    """The parameters of each of 100 clients: 75h + 10 of an MLP 64–h–10."""
    return {**EVERYONE, "shape": [64], "model": "mlp", "hidden": [(p - 10) // 75], "eval-every": 4}


def steps(e: int) -> dict[str, Any]:
    """The local steps of 100 clients with 650 parameters."""
    size = {"shape": [64], "rows": [25], "local-steps": e}
    return {**EVERYONE, **size, "eval-every": max(1, 100 // e)}


CURVES = {
    "cohort": (cohort, (10, 100, 1000, 10_000)),
    "population": (population, (100, 1000, 10_000, 100_000, 1_000_000)),
    "parameters": (parameters, (985, 9985, 99_985, 999_985)),
    "steps": (steps, (1, 10, 100, 1000)),
}


def write(folder: Path, curves: list[str]) -> list[Path]:
    """Write a file of settings for every point."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for curve in curves:
        settings, sizes = CURVES[curve]
        for size in sizes:
            files.append(folder / f"growth-{curve}-{size}.toml")
            own = settings(size)
            files[-1].write_text(tomli_w.dumps({**BASE, **own, "rounds": 10 * own["eval-every"]}))
    return files


def draw(results: Results, path: Path) -> None:
    """Draw rounds per second and memory over the size, on logarithmic axes."""
    names = [re.fullmatch(r"growth-(\w+)-(\d+)", run) for run in results.processes]
    points = [(found[1], int(found[2]), found[0]) for found in names if found]
    curves = list(dict.fromkeys(curve for curve, _, _ in points))
    with mpl.rc_context(STYLE):
        title = f"{results.machine['processor']}, {results.machine['cores']} cores"
        figure = picture(title, 0.6 + 2.5 * len(curves), 4.8)
        panels = figure.subplots(2, len(curves), squeeze=False, sharex="col", sharey="row")
        for curve, (speed, memory) in zip(curves, panels.T, strict=True):
            own = [(size, run) for name, size, run in points if name == curve]
            sizes = [size for size, _ in own]
            for axes, key, colour in ((speed, "rounds_per_second", 0), (memory, "rounds_mb", 1)):
                spreads = [results.spread(run, key) for _, run in own]
                median, least, greatest = np.array([each for each in spreads if each]).T
                reach = [median - least, greatest - median]
                looks = {"marker": "o", "ms": 4, "capsize": 3, "label": "measured"}
                axes.errorbar(sizes, median, reach, color=COLOURS[colour], **looks)
            states = [results.processes[run][0]["state_mb"] for _, run in own]
            memory.plot(sizes, states, color="0.4", ls="dashed", lw=1.2, label="state")
            speed.set(xscale="log", yscale="log", title=curve)
            words = (CURVES[curve][0].__doc__ or curve).rstrip(".")
            memory.set(xscale="log", yscale="log", xlabel=textwrap.fill(words, 26))
        panels[0, 0].set_ylabel("rounds/s")
        panels[1, 0].set_ylabel("MB")
        handles, labels = panels[1, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower right", ncols=2)
    save(figure, path)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/growth"))
    parser.add_argument("--curves", nargs="*", choices=CURVES, default=list(CURVES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--draw", nargs=2, type=Path, metavar=("RESULTS", "PICTURE"))
    args = parser.parse_args()
    if args.draw:
        draw(Results.read(args.draw[0]), args.draw[1])
        return 0
    files = map(str, write(args.out, args.curves))
    flags = ["--repeats", str(args.repeats), "--out", str(args.out), "--overwrite"]
    code = fedjaxsim(["bench", *files, *flags])
    draw(Results.read(args.out / "bench.json"), args.out / "growth.png")
    return code


if __name__ == "__main__":
    sys.exit(main())
