"""MP-MTL at 30, 50, 70 and 90 % of the rows for training (MP-MTL, Figures 11 and 12).

    python experiments/mpmtl/percentages.py school --parts runs/mpmtl --figure FILE [--out FILE]

What trade_off.py does for one percentage, for all four, in one picture: every method over ε, as in
the paper, and what it gains or loses on learning alone, which is paired by repetition.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from contenders import METHODS
from data_problems import PERCENTAGES, PROBLEMS
from study import Study
from trade_off import EPSILONS, band, compare, legend_below, over_epsilon

from fedjaxsim.report.files import write_atomically
from fedjaxsim.report.plots import COLOURS, STYLE, line, picture

FORMS = [name for name in METHODS if not name.startswith("dp-")]
SHOWN = (1.0, 10.0, 100.0, EPSILONS[-1])


def against_alone(result: dict[str, Any], name: str, epsilon: float) -> np.ndarray:
    """Scores less those of ridge regression alone on the same data, (repetitions,)."""
    (row,) = (row for row in result["methods"][name] if row["epsilon"] == str(epsilon))
    return np.subtract(row["test"], result["alone"]["test"]["ridge"])


def draw(results: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draw the results at all percentages."""
    metric = "aAUC" if PROBLEMS[results[0]["problem"]].metric == "auc" else "nMSE"
    repetitions = len(results[0]["alone"]["test"]["ridge"])
    with mpl.rc_context(STYLE):
        what = "by ε (above), less that of ridge regression alone (below)"
        figure = picture(f"{title}, {repetitions} repetitions: {metric} {what}", 9.6, 5.2)
        upper, lower = figure.subplots(2, 4)
        for axes, percentage, result in zip(upper, PERCENTAGES, results, strict=True):
            over_epsilon(axes, result, FORMS)
            axes.set_title(f"{percentage} % for training", loc="left")
        for axes, epsilon in zip(lower, SHOWN, strict=True):
            for name in FORMS:
                method = METHODS[name]
                scores = np.array([against_alone(result, name, epsilon) for result in results])
                line(axes, PERCENTAGES, *band(scores), color=method.colour, ls=method.style)
            axes.axhline(0, color=COLOURS[6], lw=1)
            axes.set_title(
                "no privacy" if epsilon == EPSILONS[-1] else f"ε = {epsilon:g}", loc="left"
            )
            axes.set_xticks(PERCENTAGES)
            axes.set_xlabel("% of rows for training")
        upper[0].set_ylabel(metric)
        lower[0].set_ylabel(f"{metric} less that alone")
        legend_below(figure, upper)
        figure.savefig(path, dpi=100)


def main() -> None:
    """Run unfinished parts, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", choices=("school", "landmine"))
    parser.add_argument("--parts", type=Path, required=True, help="folder of finished parts")
    parser.add_argument("--figure", type=Path, required=True, help="a .png file")
    parser.add_argument("--out", type=Path, help="a .json file for the results")
    options = parser.parse_args()
    names = [f"{options.data}-{percentage}" for percentage in PERCENTAGES]
    results = [
        compare(name, Study(PROBLEMS[name], options.parts / name), list(METHODS)) for name in names
    ]
    if options.out:
        write_atomically(options.out, (json.dumps(results) + "\n").encode())
    draw(results, options.data.capitalize(), options.figure)
    for name, result in zip(names, results, strict=True):
        alone = {key: round(float(np.mean(of)), 4) for key, of in result["alone"]["test"].items()}
        print(name, alone, "repetitions:", len(result["alone"]["test"]["ridge"]))
        for key, rows in result["methods"].items():
            print(f"  {key:24}", *(f"{np.mean(row['test']):10.4f}" for row in rows))
            found = [against_alone(result, key, epsilon) for epsilon in EPSILONS]
            means, (_, high) = band(np.array(found))
            signed = zip(means, high - means, strict=True)
            print(f"  {'less that alone':24}", *(f"{m:+.4f}±{e:.4f}" for m, e in signed))


if __name__ == "__main__":
    main()
