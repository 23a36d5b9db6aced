"""When does personalization pay if silos protect each example? Local, FedAvg and mean-regularized.

    python experiments/multi_task/silo_privacy.py $FEDJAXSIM_DATA school-unit --picture school.png

The setting of Liu, Hu, Wu and Smith (NeurIPS 2022): every silo takes part in every round and spends
ε on each of its examples, at δ = 1/(10 n), by DP-SGD inside; nothing is added to messages. Each
method has the same learning rates and clip norms, and mean regularization (PMTL's "offset") several
λ besides: those with the best validation score on one split, then other splits.
"""

import argparse
import functools
import itertools
import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from data_sets import PROBLEMS
from harness import FIRST_TUNING_SEED, VALIDATION, Record, rounded, write
from tables import markdown

import fedjaxsim as fjs
from fedjaxsim.sweep import SimulationBatch

RESULTS = Path(__file__).parents[1] / "results"
METHODS = {
    "Local": fjs.local,
    "FedAvg": fjs.fedavg,
    "mean-regularized": functools.partial(fjs.pmtl, message="offset"),
}
LAMBDAS = (0.1, 0.3, 1.0, 3.0)
STUDIES: dict[str, dict[str, Any]] = {
    "school-unit": {
        "column": "squared_error_weighted", "rounds": 30, "size": 10, "sign": -1,
        "rates": (0.01, 0.03, 0.1, 0.3), "clips": (0.3,),
        "epsilons": (0.5, 1.0, 2.0, 6.0),
    },
    "vehicle": {
        "column": "accuracy", "rounds": 20, "size": 64, "sign": 1,
        "rates": (0.03, 0.1, 0.3, 1.0), "clips": (0.3,),
        "epsilons": (0.1, 1.0, 10.0),
    },
}  # fmt: skip
"""The judged column and its sign, rounds, batch size, learning rates, clip norms and ε."""


def simulation(name: str, method: str, epsilon: float, population: fjs.Population) -> Any:
    """Return a method whose silos protect examples at ε."""
    study, task = STUDIES[name], PROBLEMS[name].model(population)
    if math.isfinite(epsilon):
        task = fjs.private_examples(task, epsilon=epsilon, rounds=study["rounds"])
    return fjs.Simulation(
        METHODS[method](task), population, fjs.full_participation(),
        fjs.Minibatches(study["size"], epochs=1),
        fjs.no_release() if method == "Local" else fjs.gaussian(),
    )  # fmt: skip


def settings_of(name: str, sim: fjs.Simulation) -> list[dict[str, float]]:
    """Return the settings of a method: a grid of what it reads."""
    study = STUDIES[name]
    axes = {"learning_rate": study["rates"], "example_clip": study["clips"], "lam": LAMBDAS}
    axes = {key: values for key, values in axes.items() if key in sim.records}
    return [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]


def study(name: str, folder: Path, seeds: int) -> Record:
    """Return the best setting of each λ, and test scores, of each method at each ε."""
    column, sign, rounds = (STUDIES[name][key] for key in ("column", "sign", "rounds"))
    found: Record = {}
    for method, epsilon in itertools.product(METHODS, STUDIES[name]["epsilons"]):
        many, grid, results = None, [], []
        for seed in (FIRST_TUNING_SEED, *range(seeds)):
            population = PROBLEMS[name].read(folder, seed, VALIDATION)
            if many is None:
                sim = simulation(name, method, epsilon, population)
                grid += settings_of(name, sim)
                many = SimulationBatch(sim, [sim.hyperparameters(**point) for point in grid])
            # Splits have the same numbers of rows, so they share the program and the noise.
            here = many.with_runs(many.simulation.with_population(population), many.settings)
            state, _ = here.run(here.init(seed), rounds)
            split = "validation" if seed == FIRST_TUNING_SEED else "test"
            values = np.ravel(here.evaluate(state, split).summary()[f"{split}_{column}"])
            results.append(np.where(np.isfinite(values), values, -sign * 1e6))
        by_lam: dict[Any, list[int]] = {}
        for index, point in enumerate(grid):
            by_lam.setdefault(point.get("lam"), []).append(index)
        best = [max(group, key=lambda i: sign * results[0][i]) for group in by_lam.values()]
        winner = max(range(len(best)), key=lambda k: sign * results[0][best[k]])
        found.setdefault(method, {})[str(epsilon)] = {
            "chosen": winner, "settings": [grid[index] for index in best],
            "tests": [[rounded(float(row[index])) for index in best] for row in results[1:]],
        }  # fmt: skip
        own = [row[winner] for row in found[method][str(epsilon)]["tests"]]
        print(method, epsilon, grid[best[winner]], np.mean(own), flush=True)
    return found


def table(found: Record) -> str:
    """Return mean ± standard error over splits, by method and ε."""
    levels = list(next(iter(found.values())))
    rows = []
    for method, of in found.items():
        cells = []
        for level in levels:
            own = np.array([row[of[level]["chosen"]] for row in of[level]["tests"]], float)
            cells.append(f"{own.mean():.4f} ± {own.std(ddof=1) / math.sqrt(len(own)):.4f}")
        rows.append([method, *cells])
    return markdown(["", *(f"ε = {level}" for level in levels)], rows)


def picture(found: Record, name: str, path: Path) -> None:
    """Draw the score over ε, and over λ at each ε."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    levels = [level for level in next(iter(found.values())) if level != "inf"]
    for method, of in found.items():
        rows = [[row[of[e]["chosen"]] for row in of[e]["tests"]] for e in levels]
        mean, error = np.mean(rows, axis=1), np.std(rows, axis=1) / math.sqrt(len(rows[0]))
        left.errorbar(list(map(float, levels)), mean, error, marker="o", label=method)
    left.set(
        xscale="log", xlabel="ε of each example", ylabel=STUDIES[name]["column"].replace("_", " ")
    )
    left.set_xticks(list(map(float, levels)), levels)
    left.minorticks_off()
    left.legend()
    for level in levels:
        of = found["mean-regularized"][level]
        right.plot(LAMBDAS, np.mean(of["tests"], axis=0), marker=".", label=f"ε = {level}")
    right.set(xscale="log", xlabel="λ of mean regularization")
    right.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run a study, print its table, write the results and the picture."""
    parser = argparse.ArgumentParser(description="Personalization under silo privacy.")
    parser.add_argument("folder", type=Path, help="where school/ and vehicle/ lie")
    parser.add_argument("problem", choices=STUDIES)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    found = study(args.problem, args.folder, args.seeds)
    write(RESULTS / f"silo-privacy-{args.problem}.json", found)
    print(table(found))
    if args.picture:
        picture(found, args.problem, args.picture)


if __name__ == "__main__":
    main()
