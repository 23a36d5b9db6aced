"""What more tasks are worth, and what soundness costs as they become many (MP-MTL, Figure 8).

    python experiments/mpmtl/tasks.py [group-sparse] --parts runs/mpmtl/tasks --figure FILE

A synthetic problem, by default the low-rank one, with m tasks: nMSE of the first 20, after one
release, and its distance from what no noise gives, which the paper's Table 2 says falls as a power
of m. λ is the best of a grid on other data; all start from single-task learning, ridge 3e-4.
"""

import argparse
import math
from pathlib import Path
from typing import get_args

import jax
import matplotlib as mpl
import numpy as np
from contenders import METHODS
from data_problems import synthetic
from study import Repetitions, Study

from fedjaxsim.data import related_regression
from fedjaxsim.data.synthetic import Pattern
from fedjaxsim.report.plots import STYLE, picture

FIRST, TEST_ROWS, REPETITIONS = 20, 30, 3
MANY = (40, 160, 640, 2560, 10240)
EPSILONS = (1.0, 10.0, math.inf)


def score(kernel: np.ndarray, truth: np.ndarray) -> float:
    """Return the expected nMSE of the first tasks under their true regressions, with noise 1.

    Rows are uniform on the sphere, so an error of w costs ‖w − w*‖²/d.
    """
    d = len(truth)
    errors = np.sum((kernel[:FIRST].T - truth[:, :FIRST]) ** 2, axis=0) / d
    signal = np.sum(truth[:, :FIRST] ** 2, axis=0) / d
    return float((errors.mean() + 1) / (signal.mean() + 1))


def shown(pattern: Pattern) -> tuple[str, str]:
    """Return the sound method for a pattern, and the published one."""
    return pattern, f"{pattern}-published"


def with_tasks(pattern: Pattern, clients: int, folder: Path) -> dict[str, list[float]]:
    """Return the mean score of every method and ε, and of single-task learning."""
    study = Study(synthetic(pattern, clients), folder)
    study.ridge = 3e-4  # as cross-validation chooses, for either pattern

    def compute() -> dict[str, list[float]]:
        data = [
            related_regression(pattern, clients, num_test_rows=TEST_ROWS, seed=seed)
            for seed in range(REPETITIONS + 1)
        ]
        own = [study.models([population], [0]) for population, _ in data]
        found = {}
        for name in shown(pattern):
            method = METHODS[name]
            mechanism = method.mechanism()
            algorithm = method.make(study.task, clients)
            runs = Repetitions(study.simulation(algorithm, mechanism, data[0][0], None))
            plan = [
                study.point(
                    lam=shrinkage * study.unit(method),
                    clip_norm=study.problem.clip_norm,
                    noise_multiplier=method.noise(mechanism, epsilon, study.delta, 1, clients),
                )
                for epsilon in EPSILONS
                for shrinkage in study.problem.shrinkages
            ]
            every = []
            for seed, ((population, truth), start) in enumerate(zip(data, own, strict=True)):
                _, params = runs.run([population], plan, 1, [seed], own=start)
                kernels = np.asarray(params["kernel"])[0, :, :, 0]
                every.append([score(kernel, truth) for kernel in kernels])
            scores = np.reshape(every, (len(data), len(EPSILONS), -1))
            best = scores[-1].argmin(axis=1)  # on the data of the last seed
            found[name] = [float(scores[:-1, e, k].mean()) for e, k in enumerate(best)]
        alone = [
            score(np.asarray(start["kernel"])[0, :, 0], truth)
            for (_, truth), start in zip(data[:-1], own, strict=False)
        ]
        return found | {"alone": [float(np.mean(alone))]}

    return study.part(f"{pattern}-{clients}", compute)


def main() -> None:
    """Run unfinished parts, draw the figure and print the slopes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pattern", nargs="?", choices=get_args(Pattern), default="low-rank")
    parser.add_argument("--parts", type=Path, required=True, help="folder of finished parts")
    parser.add_argument("--figure", type=Path, required=True, help="a .png file")
    options = parser.parse_args()
    found = {}
    for m in MANY:
        found[m] = with_tasks(options.pattern, m, options.parts)
        jax.clear_caches()
    alone = [found[m]["alone"][0] for m in MANY]
    with mpl.rc_context(STYLE):
        title = (
            f"{options.pattern.capitalize()} pattern, one release: m tasks, the first 20 of them"
        )
        figure = picture(title, 8, 3.4)
        left, right = figure.subplots(1, 2)
        left.plot(MANY, alone, color="black", lw=1, label="STL")
        for name in shown(options.pattern):
            method = METHODS[name]
            of = np.array([found[m][name] for m in MANY])
            for index, (epsilon, width) in enumerate(zip(EPSILONS, (1.0, 1.8, 2.8), strict=True)):
                if math.isinf(epsilon) and method.style != "solid":
                    continue
                title = "no noise" if math.isinf(epsilon) else f"{method.title}, ε = {epsilon:g}"
                style = ":" if math.isinf(epsilon) else method.style
                left.plot(MANY, of[:, index], color=method.colour, ls=style, lw=width, label=title)
                if not math.isinf(epsilon):
                    excess = np.maximum(of[:, index] - of[:, -1], 1e-6)
                    right.plot(MANY, excess, color=method.colour, ls=style, lw=width)
                    slope = np.polyfit(np.log(MANY[-3:]), np.log(excess[-3:]), 1)[0]
                    print(
                        f"{title:44} {of[:, index].round(4)} slope over the last three {slope:.2f}"
                    )
        print(f"{'no noise':44} {np.round([found[m][options.pattern][-1] for m in MANY], 4)}")
        print(f"{'STL':44} {np.round(alone, 4)}")
        for axes, title in ((left, "nMSE"), (right, "nMSE above that without noise")):
            axes.set_xscale("log")
            axes.set_xlabel("m")
            axes.set_ylabel(title)
        right.set_yscale("log")
        figure.legend(loc="outside lower center", ncols=3)
        figure.savefig(options.figure, dpi=100)


if __name__ == "__main__":
    main()
