"""The price of private tuning: ε = 2 for everything, selection included.

    python experiments/multi_task/private_tuning.py $FEDJAXSIM_DATA

Every candidate is trained at several noise levels, on several splits with several seeds; the
settings of a seed are one program. From these runs thousands of selections are drawn: a geometric
number K of runs, a candidate and a seed at random for each, a noisy score on validation rows, the
test metric of the best. At the level of E[K] the whole costs ε = 2 at δ = 1/(10 m), a fifth of a
run's Σ 1/z² for its score. Beside it, with all of ε = 2 for one run: a candidate at random, and the
usual choice by all scores without noise, which no ε covers.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
from data_sets import PROBLEMS, Problem
from equal_privacy import PICTURES, RESULTS
from harness import Parts, Record, Trial, rounded, write
from methods import METHODS, hyperparameters
from scipy.optimize import brentq
from tables import markdown

from fedjaxsim.metrics import metric
from fedjaxsim.privacy import selection
from fedjaxsim.privacy.events import GAUSSIAN, Entry, PrivacySpend

EPSILON, SHARE, DRAWN = 2.0, 0.2, 20_000
MEANS, CANDIDATES, SPLITS, SEEDS = (2, 4, 8, 16), 16, 3, 3
CHOSEN = {"digits": ("fedavg", 1.0), "school": ("pmtl-offset", 0.5)}
"""The method on each problem, and the public bound of a client's score."""


def levels(problem: Problem, clients: int) -> list[Record]:
    """Return z of a run and of its score, for one run and for each mean number of runs."""
    scheme, delta = problem.scheme(clients), 1 / (10 * clients)
    found: list[Record] = [{"mean": 1, "z": problem.noise(EPSILON, clients), "score_z": 0.0}]
    for mean in MEANS:
        runs = selection.parse(f"geometric:{mean}")

        def excess(log: float, runs: Any = runs) -> float:
            # μ² = Σ 1/z² of a run with its score, as one Gaussian release.
            spend = PrivacySpend(scheme, GAUSSIAN, (Entry(math.exp(-log / 2), 1.0, 1),))
            return math.log(selection.epsilon(runs, [[spend]], delta) / EPSILON)

        total = math.exp(float(brentq(excess, -12.0, 3.0)))  # type: ignore[arg-type]
        z, score_z = math.sqrt(problem.rounds / ((1 - SHARE) * total)), (SHARE * total) ** -0.5
        found.append({"mean": mean, "z": z, "score_z": score_z})
    return found


def scores(trial: Trial, plan: list[Record], split: int, largest: float) -> list[Any]:
    """Run all settings on one split with each seed; return validation and test by seed."""
    simulation, name = trial.simulation(split), trial.problem.metric
    judged = "squared_error" if name == "nmse" else name
    settings = [hyperparameters(simulation, point) for point in plan]
    many = trial.many(simulation, settings, settings)
    found = []
    for seed in range(SEEDS):
        state, segments = many.run(many.init(1000 * split + seed), trial.problem.rounds)
        values = many.evaluate(state, "validation").values[judged]
        sent = np.clip(np.nan_to_num(values, nan=largest if name == "nmse" else 0), 0, largest)
        test = segments[-1].evaluation.summary()[f"test_{name}"]
        found.append([np.mean(sent, axis=0).tolist(), np.asarray(test).tolist()])
    return found


def draw(found: np.ndarray, level: Record, clients: int, largest: float, sign: int) -> Record:
    """Return the mean test metric of selections, with its standard error over splits.

    Args:
      found: (splits, seeds, 2, candidates), validation scores and test metrics.
      level: from `levels`.
      clients: m.
      largest: the bound of a client's score.
      sign: 1 if larger is better, else −1.
    """
    rng, means = np.random.default_rng(0), []
    for of_split in found:
        tests = []
        for _ in range(DRAWN // len(found)):
            k = selection.parse(f"geometric:{level['mean']}").draw(rng)
            seed, candidate = rng.integers(SEEDS, size=k), rng.integers(found.shape[-1], size=k)
            noise = level["score_z"] * largest / clients * rng.normal(size=k)
            best = np.argmax(sign * (of_split[seed, 0, candidate] + noise))
            tests.append(of_split[seed[best], 1, candidate[best]])
        means.append(np.mean(tests))
    return {
        "test": float(np.mean(means)),
        "error": float(np.std(means) / math.sqrt(len(means) - 1)),
    }


def price(name: str, folder: Path, parts: Parts) -> Record:
    """Return the levels of a problem with their results, and what one run gives."""
    problem, (method, largest) = PROBLEMS[name], CHOSEN[name]
    trial = Trial(problem, METHODS[method], folder, parts, f"private-{name}")
    clients = trial.population(0).num_clients
    known = levels(problem, clients)
    points = METHODS[method].points(CANDIDATES, problem.box)
    plan = [{**point, "noise_multiplier": each["z"]} for each in known for point in points]
    runs = [
        parts.get(
            f"private-{name}-{split}",
            [problem.rounds, plan, SEEDS, largest],
            lambda split=split: scores(trial, plan, split, largest),
        )
        for split in range(SPLITS)
    ]
    # (splits, seeds, 2, levels, candidates)
    found = np.array(runs).reshape(SPLITS, SEEDS, 2, len(known), CANDIDATES)
    sign = 1 if metric(problem.metric).larger_is_better else -1
    # A model that diverged, or has an nMSE above 1, is as good as one that predicts the mean.
    found[:, :, 1] = np.clip(np.nan_to_num(found[:, :, 1], nan=0 if sign > 0 else 1), 0, 1)
    of_one = found[:, :, :, 0]
    average = of_one.mean(axis=1)  # over seeds, as one tunes
    best = np.argmax(sign * average[:, 0], axis=1)
    usual, anyone = average[np.arange(SPLITS), 1, best], average[:, 1].mean(axis=1)
    result: Record = {"title": problem.title, "metric": problem.metric, "clients": clients}
    result |= {"method": METHODS[method].title, "usual": float(usual.mean())}
    result |= {"random": float(anyone.mean()), "spread": float(average[:, 1].std(axis=1).mean())}
    result["levels"] = [
        {**level, **draw(found[:, :, :, index], level, clients, largest, sign)}
        for index, level in enumerate(known)
        if index
    ]
    return result


def picture(results: list[Record], path: Path) -> None:
    """Draw the test metric against E[K], beside one run and the usual choice."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(4.2 * len(results), 3.2))
    for ax, result in zip(np.atleast_1d(axes), results, strict=True):
        means = [level["mean"] for level in result["levels"]]
        tests, errors = ([level[key] for level in result["levels"]] for key in ("test", "error"))
        ax.errorbar(means, tests, errors, marker="o", label="selected privately, ε = 2 in all")
        ax.axhline(result["random"], color="0.5", ls="dashed", label="one at random, ε = 2")
        ax.axhline(result["usual"], color="black", ls="dotted", label="the usual choice, no ε")
        ax.set_xscale("log", base=2)
        ax.minorticks_off()
        ax.set_xticks(means, [str(mean) for mean in means])
        ax.set_xlabel("mean number of runs E[K]")
        ax.set_ylabel(f"test {metric(result['metric']).title}")
        ax.set_title(f"{result['title'].partition(',')[0]}, {result['method']}", fontsize=10)
    axes.flat[0].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def table(results: list[Record]) -> str:
    """Return all numbers in Markdown."""
    rows = []
    for result in results:
        one = [f"{result['usual']:.3f}", f"{result['random']:.3f} ± {result['spread']:.3f}"]
        rows.append([result["title"], *one, *(f"{each['test']:.3f}" for each in result["levels"])])
    means = [f"E[K] = {mean}" for mean in MEANS]
    return markdown(["problem", "usual choice, no ε", "one at random", *means], rows)


def main() -> None:
    """Run what is missing; write results, picture and table."""
    parser = argparse.ArgumentParser(description="The price of private tuning.")
    parser.add_argument("folder", type=Path, help="of the data sets")
    parser.add_argument("--parts", type=Path, default=Path("runs/private-tuning"))
    options = parser.parse_args()
    parts = Parts(options.parts)
    results = [price(name, options.folder, parts) for name in CHOSEN]
    write(RESULTS / "private-tuning.json", rounded_all(results))
    picture(results, PICTURES / "private-tuning.png")
    print(table(results))


def rounded_all(value: Any) -> Any:
    """Round every number of a JSON value to five digits."""
    if isinstance(value, dict):
        return {key: rounded_all(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded_all(each) for each in value]
    return rounded(value) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
