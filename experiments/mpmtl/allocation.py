"""How a budget is best spread over rounds (MP-MTL, Figure 4).

    python experiments/mpmtl/allocation.py --parts runs/mpmtl/allocation --figure FILE \
        [--data-sets 10]

The low-rank synthetic problem and the low-rank method over T rounds, with ε_t in proportion to t^a,
or to Q^−t with Q = Q₀^b and Q₀ = 1 − √μ = 0.9684: nMSE of 5-fold cross-validation at the best of a
grid of λ, 0 among them, which is chosen anew for every point and data set. Sound, where the whole
run costs exactly ε (replace), and as published, where ε_t compose to ε by the paper's equation 6.
"""

import argparse
import math
from pathlib import Path

import matplotlib as mpl
import numpy as np
import scipy.stats
from contenders import METHODS
from data_problems import PROBLEMS, folded
from study import TUNING_SEED, Repetitions, Study

import fedjaxsim as fjs
from fedjaxsim.algorithms.proximal import Acceleration
from fedjaxsim.privacy.accounting import kov
from fedjaxsim.privacy.budget import Budget
from fedjaxsim.privacy.events import Entry
from fedjaxsim.report.plots import COLOURS, STYLE, picture

ROUNDS, EPSILONS = 20, (0.1, 1.0, 10.0)
POWERS = (-2.0, -1.0, -0.4, 0.0, 0.4, 1.0, 2.0, 4.0)
EXPONENTS = (-8.0, -4.0, -1.6, 0.0, 1.6, 4.0, 8.0, 16.0)
SHRINKAGES = (0.0, 5.0, 15.0, 60.0, 240.0)
ACCELERATIONS: tuple[Acceleration, ...] = ("none", "convex")
SHOWN = ("low-rank", "low-rank-published")


def schedules() -> dict[str, Budget]:
    """Every allocation by what the axis of its panel says."""
    base = 1 - math.sqrt(1e-3)
    powers = {f"t^{a:g}": Budget("power", a) for a in POWERS}
    return powers | {f"Q0^{b:g}": Budget("geometric", base**b) for b in EXPONENTS}


def published(budget: Budget, epsilon: float, delta: float, rounds: int) -> np.ndarray:
    """1/ε_t of ε_t that follow a schedule and compose to ε by equation 6, (T,)."""
    shares = np.asarray(budget.weights(rounds))
    low, high = 0.0, epsilon
    for _ in range(60):
        middle = (low + high) / 2
        planned = [Entry(float(middle * share), 1.0, 1) for share in shares]
        fits = kov.compose(planned, delta) <= epsilon
        low, high = (middle, high) if fits else (low, middle)
    return (1 / (low * shares)).astype(np.float32)


def scores(
    study: Study, name: str, acceleration: Acceleration, seed: int
) -> dict[str, list[float]]:
    """Return the nMSE of every ε at the best λ on the folds of one data set, by allocation."""
    method, m = METHODS[name], study.clients
    mechanism = method.mechanism()

    def compute() -> dict[str, list[float]]:
        algorithm = fjs.mpmtl(study.task, penalty="low-rank", acceleration=acceleration)
        folds = folded(study.problem.read(seed), seed)
        runs = Repetitions(study.simulation(algorithm, mechanism, folds[0], None))
        own = study.models(folds, range(len(folds)))
        found = {}
        for title, budget in schedules().items():
            plan = []
            for epsilon in EPSILONS:
                if method.style == "solid":
                    z = budget.noise(
                        method.noise(mechanism, epsilon, study.delta, ROUNDS, m), ROUNDS
                    )
                else:
                    z = published(budget, epsilon, study.delta, ROUNDS)
                z = np.broadcast_to(np.asarray(z, np.float32), (ROUNDS,))
                plan += [
                    study.point(
                        lam=shrinkage * study.unit(method),
                        clip_norm=study.problem.clip_norm,
                        noise_multiplier=z,
                    )
                    for shrinkage in SHRINKAGES
                ]
            of, _ = runs.run(folds, plan, ROUNDS, range(len(folds)), "validation", own)
            mean = np.mean([one["validation_nmse"] for one in of], axis=0)
            found[title] = mean.reshape(len(EPSILONS), -1).min(axis=1).tolist()
        return found

    return study.part(f"{name}-{acceleration}-{seed}", compute)


def main() -> None:
    """Run unfinished parts, print the table and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=Path, required=True, help="folder of finished parts")
    parser.add_argument("--figure", type=Path, required=True, help="a .png file")
    parser.add_argument("--data-sets", type=int, default=10, help="of the same kind")
    options = parser.parse_args()
    study = Study(PROBLEMS["low-rank"], options.parts)
    study.ridge = 3e-4  # as cross-validation chooses
    found = {
        (name, acceleration): [
            scores(study, name, acceleration, TUNING_SEED + index)
            for index in range(options.data_sets)
        ]
        for name in SHOWN
        for acceleration in ACCELERATIONS
    }
    panels = (("a of ε_t ∝ t^a", "t^", POWERS), ("b of ε_t ∝ Q₀^(−bt)", "Q0^", EXPONENTS))
    with mpl.rc_context(STYLE):
        title = f"Budgets over {ROUNDS} rounds, low-rank pattern, m = 320"
        figure = picture(f"{title}, {options.data_sets} data sets", 8, 6)
        grid = figure.subplots(2, 2, sharex="col", sharey="row")
        for (name, acceleration), of in found.items():
            method, row = METHODS[name], SHOWN.index(name)
            words = ("sound", "as published (no ε)")[row]
            grid[row, 0].set_ylabel(f"{words}: nMSE")
            for axes, (label, prefix, values) in zip(grid[row], panels, strict=True):
                for index, (epsilon, colour) in enumerate(zip(EPSILONS, COLOURS, strict=False)):
                    each = np.array([[one[f"{prefix}{v:g}"][index] for v in values] for one in of])
                    y = each.mean(axis=0)
                    # What a data set makes of all budgets alike is left out of their errors.
                    error = scipy.stats.sem(each - each[:, values.index(0.0), None])
                    fast = acceleration != "none"
                    title = f"{'accelerated, ' if fast else ''}ε = {epsilon:g}"
                    axes.plot(
                        values, y, color=colour, ls=method.style, lw=1.8 if fast else 0.8,
                        marker="o", ms=2, label=title,
                    )  # fmt: skip
                    axes.fill_between(values, y - error, y + error, color=colour, alpha=0.2, lw=0)
                    triples = zip(values, y, error, strict=True)
                    shown = [f"{v:g}: {mean:.4f} ± {sem:.5f}" for v, mean, sem in triples]
                    print(f"{label:20} {words}, {title:22}", *shown)
                if row:
                    axes.set_xlabel(label)
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=6)
        figure.savefig(options.figure, dpi=100)


if __name__ == "__main__":
    main()
