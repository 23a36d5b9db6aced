"""Relationships of tasks, and models, after one private release (MP-MTL, Figure 3).

    python experiments/mpmtl/relationships.py --figure FILE [--epsilon 0.1]

The low-rank synthetic problem: correlations of the columns of W, and W itself, averaged over
ten runs on one data set with different noise; every fifth task is drawn. All methods start from
single-task learning.
"""

import argparse
from pathlib import Path

import matplotlib as mpl
import numpy as np
from contenders import METHODS
from data_problems import PROBLEMS
from study import Repetitions, Study

from fedjaxsim.data import related_regression
from fedjaxsim.report.plots import STYLE, picture

RUNS, SHRINKAGE = 10, 30.0
EVERY = 5
SHOWN = ("low-rank", "low-rank-published", "dp-mtrl")


def main() -> None:
    """Draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figure", type=Path, required=True, help="a .png file")
    parser.add_argument("--epsilon", type=float, default=0.1)
    options = parser.parse_args()
    study = Study(PROBLEMS["low-rank"], Path())
    study.ridge = 3e-4  # as cross-validation chooses
    population, truth = related_regression("low-rank", study.clients, seed=0)
    panels = {"truth": truth}
    own = study.models([population], [0])
    panels["STL"] = np.asarray(own["kernel"][0, :, 0]).T
    for name in SHOWN:
        method = METHODS[name]
        mechanism, algorithm = method.mechanism(), method.make(study.task, study.clients)
        unit = study.unit(method)
        z = method.noise(mechanism, options.epsilon, study.delta, 1, study.clients)
        point = study.point(
            lam=SHRINKAGE * unit, clip_norm=study.problem.clip_norm, noise_multiplier=z
        )
        runs = Repetitions(study.simulation(algorithm, mechanism, population, None))
        models = [runs.run([population], [point], 1, [seed], own=own)[1] for seed in range(RUNS)]
        every = np.stack([np.asarray(one["kernel"])[0, 0, :, 0].T for one in models])
        panels[method.title] = every
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        title = f"ε = {options.epsilon:g}, one release: correlations of tasks, and their models"
        figure = picture(title, 9, 3.8)
        axes = figure.subplots(2, len(panels))
        for column, (name, every) in enumerate(panels.items()):
            every = np.reshape(every, (-1, *np.shape(truth)))
            relations = np.mean([np.corrcoef(w.T[::EVERY]) for w in every], axis=0)
            mean = every.mean(axis=0)[:, ::EVERY]
            error = np.mean(np.sum((every - truth) ** 2, axis=(1, 2))) / np.sum(truth**2)
            print(f"{name:32} ‖W − W*‖²/‖W*‖² = {error:.3g}")
            axes[0, column].imshow(
                relations, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest"
            )
            axes[0, column].set_title(name.replace(", ", ",\n"))
            largest = np.abs(truth).max()
            axes[1, column].imshow(
                mean,
                cmap="RdBu_r",
                vmin=-largest,
                vmax=largest,
                aspect="auto",
                interpolation="nearest",
            )
            for one in axes[:, column]:
                one.set_xticks([])
                one.set_yticks([])
        axes[0, 0].set_ylabel("task × task")
        axes[1, 0].set_ylabel("feature × task")
        figure.savefig(options.figure, dpi=90)


if __name__ == "__main__":
    main()
