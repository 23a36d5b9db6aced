"""Privacy and accuracy of all methods on one problem (MP-MTL, Figures 6, 7, 9 to 12).

    python experiments/mpmtl/trade_off.py low-rank --parts runs/mpmtl --figure FILE

Everything is chosen by 5-fold cross-validation on training rows, for every ε: the number of rounds
and λ of each method, on School also K, from grids of one size; the choice is not charged, as in the
paper. All start from the models of single-task learning. Test scores are means over repetitions
with other data, so many of which are one program as --together says. Folds have fewer rows to train
on; with --other-data, other data sets of the same size choose.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import matplotlib as mpl
import numpy as np
from contenders import METHODS
from data_problems import PROBLEMS
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from study import Study

from fedjaxsim.data.synthetic import Pattern
from fedjaxsim.report.files import write_atomically
from fedjaxsim.report.plots import COLOURS, STYLE, line, picture

EPSILONS = (0.01, 0.1, 1.0, 3.0, 10.0, 100.0, math.inf)


def compare(name: str, study: Study, methods: Sequence[str]) -> dict[str, Any]:
    """Methods on one problem, as JSON."""
    found = {key: study.compare(key, METHODS[key], EPSILONS) for key in methods}
    return {"problem": name, "alone": study.alone(), "methods": found}


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the baselines beside the low-rank method, and all forms of it in a close-up."""
    problem = PROBLEMS[result["problem"]]
    repetitions = len(result["alone"]["test"]["ridge"])
    baselines = [name for name in result["methods"] if name.startswith("dp-")]
    forms = [name for name in result["methods"] if name not in baselines]
    with mpl.rc_context(STYLE):
        figure = picture(f"{problem.title}: {repetitions} repetitions", 8, 4)
        left, right = figure.subplots(1, 2)
        over_epsilon(left, result, [*forms[:1], *baselines])
        over_epsilon(right, result, forms)
        left.set_ylabel("aAUC" if problem.metric == "auc" else "nMSE")
        if problem.metric == "nmse":
            left.set_yscale("log")
        right.set_title("from near", loc="left")
        legend_below(figure, (right, left))
        figure.savefig(path, dpi=100)


def over_epsilon(axes: Axes, result: dict[str, Any], names: Sequence[str]) -> None:
    """Methods by ε with their standard errors, learning alone, and the best one without privacy."""
    best = max if PROBLEMS[result["problem"]].larger_is_better else min
    for name in names:
        method, private = METHODS[name], result["methods"][name][:-1]
        x = [float(row["epsilon"]) for row in private]
        tests = np.array([row["test"] for row in private])
        line(axes, x, *band(tests), color=method.colour, ls=method.style, label=method.title)
    free = [np.mean(rows[-1]["test"]) for rows in result["methods"].values()]
    alone = best(np.mean(scores) for scores in result["alone"]["test"].values())
    axes.axhline(alone, color=COLOURS[6], lw=1, label="STL")
    axes.axhline(best(free), color=COLOURS[6], lw=1, ls=":", label="best without privacy")
    axes.set_xscale("log")
    axes.set_xlabel("ε (replacing a client)")


def band(scores: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Means over repetitions, the last axis, and these less and plus their standard errors."""
    means = scores.mean(axis=-1)
    errors = scores.std(axis=-1) / math.sqrt(scores.shape[-1])
    return means, (means - errors, means + errors)


def legend_below(figure: Figure, panels: Sequence[Axes]) -> None:
    """One legend of all lines of these panels."""
    every = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        every |= dict(zip(labels, handles, strict=True))
    figure.legend(every.values(), every.keys(), loc="outside lower center", ncols=3)


def main() -> None:
    """Run unfinished parts, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("problem", choices=PROBLEMS)
    parser.add_argument("--parts", type=Path, required=True, help="folder of finished parts")
    parser.add_argument("--figure", type=Path, required=True, help="a .png file")
    parser.add_argument("--out", type=Path, help="a .json file for the results")
    parser.add_argument("--repetitions", type=int)
    parser.add_argument("--together", type=int, default=20, help="repetitions in one program")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument(
        "--other-data", action="store_true", help="choose by other data sets, not by folds"
    )
    options = parser.parse_args()
    if options.other_data and options.problem not in get_args(Pattern):
        parser.error(f"--other-data is for {', '.join(get_args(Pattern))}, got {options.problem}")
    folder, size = options.parts / options.problem, (options.repetitions, options.together)
    study = Study(PROBLEMS[options.problem], folder, *size, other_data=options.other_data)
    result = compare(options.problem, study, options.methods)
    if options.out:
        write_atomically(options.out, (json.dumps(result) + "\n").encode())
    draw(result, options.figure)
    for key, rows in result["methods"].items():
        for row in rows:
            single = row["single"] or row["test"]
            against, root = np.subtract(row["test"], single), np.sqrt(len(single))
            print(
                f"{key:24} ε = {row['epsilon']:5} T = {row['rounds']:2} ηλ = {row['shrinkage']:6g} "
                f"K = {row['clip_norm']:g} "
                f"{np.mean(row['test']):.4f}, against λ = 0 {np.mean(against):+.5f} ± "
                f"{np.std(against) / root:.5f}; standard error of λ = 0 {np.std(single) / root:.5f}"
            )
    print({name: float(np.mean(scores)) for name, scores in result["alone"]["test"].items()})


if __name__ == "__main__":
    main()
