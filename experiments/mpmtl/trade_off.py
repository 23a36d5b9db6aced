"""Privacy and accuracy of all methods on one problem (MP-MTL, Figures 6, 7, 9 to 12).

    python experiments/mpmtl/trade_off.py low-rank --parts runs/mpmtl --figure FILE

Everything is chosen by 5-fold cross-validation on training rows, for every ε: the number of rounds
and λ of each method, from grids of one size; the choice is not charged, as in the paper. All start
from the models of single-task learning. Test scores are means over repetitions with other data,
so many of which are one program as --together says. Folds have fewer rows to train on; with
--other-data, other data sets of the same size choose.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
from contenders import METHODS
from data_problems import PROBLEMS
from study import Study

from fedjaxsim.data.synthetic import Pattern
from fedjaxsim.report.files import write_atomically
from fedjaxsim.report.plots import COLOURS, STYLE, picture

EPSILONS = (0.01, 0.1, 1.0, 3.0, 10.0, 100.0, math.inf)


def compare(name: str, study: Study, methods: Sequence[str]) -> dict[str, Any]:
    """Methods on one problem, as JSON."""
    found = {key: study.compare(key, METHODS[key], EPSILONS) for key in methods}
    return {"problem": name, "alone": study.alone(), "methods": found}


def draw(result: dict[str, Any], path: Path) -> None:
    """The figure: all methods, and from near."""
    import matplotlib as mpl

    problem = PROBLEMS[result["problem"]]
    with mpl.rc_context(STYLE):
        figure = picture(
            f"{problem.title}: {len(result['alone']['test']['ridge'])} repetitions", 8, 4
        )
        axes = figure.subplots(1, 2)
        alone = {name: np.mean(scores) for name, scores in result["alone"]["test"].items()}
        best_alone = (max if problem.larger_is_better else min)(alone.values())
        values = [best_alone]
        for key, rows in result["methods"].items():
            method = METHODS[key]
            private = [row for row in rows if row["epsilon"] != "inf"]
            x = [float(row["epsilon"]) for row in private]
            means = np.array([np.mean(row["test"]) for row in private])
            errors = np.array([np.std(row["test"]) / np.sqrt(len(row["test"])) for row in private])
            if not key.startswith("dp-"):
                values += [*means, np.mean(rows[-1]["test"])]
            for one in axes:
                one.plot(x, means, color=method.colour, ls=method.style, label=method.title)
                one.fill_between(x, means - errors, means + errors, color=method.colour, alpha=0.2)
                if method.style == "solid" and not key.startswith("dp-"):
                    one.axhline(np.mean(rows[-1]["test"]), color=method.colour, ls=":", lw=1)
        for one in axes:
            one.axhline(best_alone, color=COLOURS[6], lw=1, label="STL")
            one.set_xscale("log")
            one.set_xlabel("ε (replacing a client)")
        axes[0].set_ylabel("aAUC" if problem.metric == "auc" else "nMSE")
        if problem.metric == "nmse":
            axes[0].set_yscale("log")
        low, high = min(values), max(values)
        axes[1].set_ylim(low - 0.1 * (high - low), high + 0.15 * (high - low))
        axes[1].set_title("from near; dotted: without privacy", loc="left")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)
        figure.savefig(path, dpi=100)


def main() -> None:
    """Runs what is not finished, prints and draws it."""
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
                f"{np.mean(row['test']):.4f}, against λ = 0 {np.mean(against):+.5f} ± "
                f"{np.std(against) / root:.5f}; standard error of λ = 0 {np.std(single) / root:.5f}"
            )
    print({name: float(np.mean(scores)) for name, scores in result["alone"]["test"].items()})


if __name__ == "__main__":
    main()
