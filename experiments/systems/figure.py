"""The table and the picture of systems at equal ε, from sweeps of `classes.toml` and `school.toml`.

    python experiments/systems/figure.py runs/digits runs/vehicle … --picture systems.png
    python experiments/systems/figure.py experiments/results/systems.csv --picture twenty.png

A sweep's folder is named by its data, and may hold a folder for each of several sweeps. A CSV file
holds results of before, and --csv writes one. The table has means with 95 % intervals over seeds;
⁺ is better than both Local and FedAvg, by paired 95 % intervals.
"""

import argparse
import csv
import itertools
import math
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from fedjaxsim import metrics
from fedjaxsim.report.labels import combination_label
from fedjaxsim.report.plots import COLOURS, STYLE, picture, save
from fedjaxsim.report.results import difference, estimate
from fedjaxsim.runs.sweep_results import read_runs

Scores = dict[tuple[str, float], dict[int, float]]
"""By system and ε, the value of each seed; NaN is a run that failed."""
AGAINST = ("Local", "FedAvg")
_MARKS = ("o", "s", "D", "^", "v")


def of_sweep(folder: Path) -> tuple[str, Scores]:
    """Return the metric and the scores of a sweep, or of all in a folder; Local has every ε."""
    metric, scores = "", {}
    here = folder / "report.json"
    for file in [here] if here.exists() else sorted(folder.glob("*/report.json")):
        runs, _, report = read_runs(file.parent)
        metric = report["summary"]["metric"]
        chosen = {"target_epsilon", *report["summary"]["best_over"]}
        for run in runs:
            names = [name for name, value in run.settings.items() if name not in chosen and value]
            label = combination_label(names, [run.settings[name] for name in names])
            epsilon, value = run.settings.get("target_epsilon"), run.value(metric)
            key = label, math.nan if epsilon is None else epsilon
            scores.setdefault(key, {})[run.seed] = math.nan if value is None else value
    # What releases nothing is there at every ε.
    levels = sorted({epsilon for _, epsilon in scores if not math.isnan(epsilon)})
    return metric, {
        (label, level): values
        for (label, epsilon), values in scores.items()
        for level in (levels if math.isnan(epsilon) else [epsilon])
    }


def of_file(file: Path) -> dict[str, tuple[str, Scores]]:
    """Return metric and scores by data set."""
    found: dict[str, tuple[str, Scores]] = {}
    with file.open(newline="") as stream:
        for row in csv.DictReader(stream):
            _, scores = found.setdefault(row["data"], (row["metric"], {}))
            key = row["system"], float(row["epsilon"])
            scores.setdefault(key, {})[int(row["seed"])] = float(row["value"] or "nan")
    return found


def write(found: dict[str, tuple[str, Scores]], file: Path) -> None:
    """Write all scores as `of_file` reads them."""
    with file.open("w", newline="") as stream:
        rows = csv.writer(stream, lineterminator="\n")
        rows.writerow(["data", "metric", "system", "epsilon", "seed", "value"])
        for name, (metric, scores) in found.items():
            for (system, epsilon), values in scores.items():
                for seed, value in sorted(values.items()):
                    rows.writerow([name, metric, system, epsilon, seed, round(value, 5)])


def gain(scores: Scores, system: str, other: str, level: float, metric: str) -> tuple[float, float]:
    """Return by how much a system is better than another, paired by seed, and the 95 % half-width.

    Both are NaN without results of two seeds.
    """
    sign = 1 if metrics.column_metric(metric).larger_is_better else -1
    ours, theirs = scores[system, level], scores.get((other, level), {})
    seeds = sorted(ours.keys() & theirs.keys())
    mean, half, *_ = difference([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])[0]
    return (math.nan, math.nan) if mean is None or half is None else (sign * mean, half)


def is_better(scores: Scores, system: str, level: float, metric: str) -> bool:
    """Return whether a system is surely better than both Local and FedAvg."""
    gains = [gain(scores, system, other, level, metric) for other in AGAINST]
    return all(mean > half for mean, half in gains)


def table(metric: str, scores: Scores) -> str:
    """Return the Markdown table of one data set."""
    levels = sorted({level for _, level in scores})
    lines = [["", *(f"ε = {_level(level)}" for level in levels)], ["---"] * (1 + len(levels))]
    for system in dict.fromkeys(system for system, _ in scores):
        cells = []
        for level in levels:
            values = list(scores.get((system, level), {}).values())
            mark = values and is_better(scores, system, level, metric)
            cells.append(f"{estimate(values)}{'⁺' if mark else ''}")
        lines.append([system, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _level(level: float) -> str:
    return "∞" if math.isinf(level) else f"{level:g}"


@mpl.rc_context({**STYLE, "font.size": 10, "axes.titlesize": 10})
def drawn(found: dict[str, tuple[str, Scores]]) -> Figure:
    """Draw all systems, three data sets in a row at most, each row with its own systems."""
    down = -(-len(found) // 3)
    across = -(-len(found) // down)  # four are two and two
    of_panel = [list(dict.fromkeys(name for name, _ in scores)) for _, scores in found.values()]
    rows_of = [
        list(dict.fromkeys(itertools.chain(*of_panel[first : first + across])))
        for first in range(0, len(found), across)
    ]
    title = "Equal ε, equal tuning: means over seeds with 95 % intervals"
    figure = picture(title, 1.6 + 2.2 * across, 0.8 * down + 0.2 * sum(map(len, rows_of)))
    heights = {"height_ratios": [len(systems) for systems in rows_of]}
    panels = figure.subplots(down, across, sharey="row", squeeze=False, gridspec_kw=heights)
    axes = panels.ravel().tolist()
    levels = sorted({level for _, scores in found.values() for _, level in scores})
    shown = {}
    for place, (name, (metric, scores)) in enumerate(found.items()):
        panel, systems = axes[place], rows_of[place // across]
        for rank, level in enumerate(levels):
            if not any(of == level for _, of in scores):
                continue
            by_seed = [scores.get((system, level), {}).values() for system in systems]
            rows = [
                (at + 0.2 * (rank - (len(levels) - 1) / 2), over.mean, over.half or 0.0)
                for at, over in enumerate(estimate(list(values)) for values in by_seed)
                if over.mean is not None
            ]
            y, x, half = (list(each) for each in zip(*rows, strict=True))
            shown[rank] = panel.errorbar(
                x, y, xerr=half, color=COLOURS[rank], marker=_MARKS[rank], ms=3.5, ls="none", lw=1,
                label=f"ε = {_level(level)}",
            )  # fmt: skip
        over = [estimate(list(values.values())) for values in scores.values()]
        ends = [(each.mean, each.half or 0.0) for each in over if each.mean is not None]
        # What is far worse than most, such as noise that adds up, does not squeeze the rest.
        tenth, middle, ninth = np.quantile([mean for mean, _ in ends], (0.1, 0.5, 0.9))
        spread = ninth - tenth
        low = min(mean - half for mean, half in ends)
        high = max(mean + half for mean, half in ends)
        if metrics.column_metric(metric).larger_is_better:
            low = max(low, middle - 1.6 * spread)
        else:
            high = min(high, middle + 1.6 * spread)
        panel.set_xlim(low - 0.1 * spread, high + 0.1 * spread)
        panel.set(title=name, xlabel=metrics.column_label(metric).partition(" (")[0])
        panel.set_yticks(range(len(systems)), systems)
        panel.set_ylim(len(systems) - 0.4, -0.6)
    for unused in axes[len(found) :]:
        unused.set_axis_off()
    handles = [shown[rank] for rank in sorted(shown)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


def main() -> None:
    """Print a table for each data set, and draw all of them."""
    parser = argparse.ArgumentParser(description="Systems at equal ε, as a table and a picture.")
    parser.add_argument("results", nargs="+", type=Path, help="folders of sweeps, or a .csv file")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--csv", type=Path, help="where all scores are written")
    args = parser.parse_args()
    if missing := [str(path) for path in args.results if not path.exists()]:
        parser.error(f"no such file or folder: {', '.join(missing)}")
    found: dict[str, tuple[str, Scores]] = {}
    for path in args.results:
        found |= of_file(path) if path.suffix == ".csv" else {path.name: of_sweep(path)}
    for name, (metric, scores) in found.items():
        print(f"{name}, {metrics.column_label(metric)}\n\n{table(metric, scores)}\n")
    if args.csv:
        write(found, args.csv)
    if args.picture:
        save(drawn(found), args.picture)


if __name__ == "__main__":
    main()
