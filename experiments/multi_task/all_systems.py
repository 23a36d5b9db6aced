"""All systems on one data set at equal client-level ε, for both adjacencies.

    python experiments/multi_task/all_systems.py $FEDJAXSIM_DATA school

Every system has as many points as the others at every level, in a box of its own scale
(`methods.py`), the same tuning seeds, and five final seeds whose splits all share. 50 rounds of
everybody from models of 0: an epoch of minibatches in each, or for STL, MP-MTL and PP-SGD one
gradient of all of a client's rows. A level is an ε of the whole run in the joint-DP view at
δ = 1/(10 m), for zero-out or for replace, which ask for different noise.

With `school-unit` it is the setting of Liu, Hu, Wu and Smith (NeurIPS 2022): their split, features
and targets, final runs on all training rows, and the pooled mean squared error beside nMSE.
"""

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from data_sets import PROBLEMS, Problem
from harness import FIRST_TUNING_SEED, VALIDATION, Parts, Record, Trial, rounded, write
from methods import METHODS
from tables import difference, markdown

import fedjaxsim as fjs
from fedjaxsim.metrics import metric
from fedjaxsim.privacy.calibration import noise_multiplier
from fedjaxsim.privacy.events import ADJACENCIES, Adjacency

RESULTS = Path(__file__).parents[1] / "results"
POINTS, SEEDS = 48, 5
ALL = (
    "local", "stl", "fedavg", "pmtl", "pmtl-offset", "ppsgd", "dpfedmtl-intercepts",
    "mpmtl-low-rank", "mpmtl-group-sparse",
)  # fmt: skip
STUDIES = {
    "school": (ALL, (1.0, 4.0), 2),
    "landmine": (ALL, (1.0, 4.0), 5),
    "school-unit": (("local", "fedavg", "pmtl", "pmtl-offset"), (6.0,), 2),
}
"""Methods, ε and the number of tuning seeds."""


class Level(NamedTuple):
    """A target, or None for no noise."""

    epsilon: float
    adjacency: Adjacency | None

    def __str__(self) -> str:
        return f"ε = {self.epsilon:g}, {self.adjacency}" if self.adjacency else "∞"


class WholeTraining(Trial):
    """Final runs train on the validation rows, too."""

    def population(self, seed: int) -> fjs.Population:
        """Return the data as split by this seed."""
        final = seed < FIRST_TUNING_SEED
        return self.problem.read(self.folder, seed, 0.0 if final else VALIDATION)


def noise(trial: Trial, levels: list[Level]) -> dict[Level, float]:
    """Return z of a method at every level; without messages there is one level, no noise."""
    if not trial.method.sends:
        return {Level(math.inf, None): 0.0}
    population = trial.population(0)
    m = population.num_clients
    _, mechanism = trial.method.make(trial.problem.model(population), m)
    plan: Any = {"rounds": trial.problem.rounds, "sampling_rate": 1.0, "event": mechanism.event}
    return {
        level: noise_multiplier(
            level.epsilon, 1 / (10 * m), scheme=fjs.full_participation().for_clients(m).scheme,
            adjacency=level.adjacency, **plan,
        )
        if level.adjacency
        else 0.0
        for level in levels
    }  # fmt: skip


def study(name: str, problem: Problem, folder: Path, parts: Parts) -> Record:
    """Return the chosen points and the test results of all seeds, by method and level."""
    names, epsilons, _ = STUDIES[name]
    levels = [Level(e, a) for e in epsilons for a in ADJACENCIES] + [Level(math.inf, None)]
    kind = WholeTraining if name == "school-unit" else Trial
    found: Record = {"title": problem.title, "metric": problem.metric, "methods": {}}
    for key in names:
        trial = kind(problem, METHODS[key], folder, parts, key)
        of_method = noise(trial, levels)
        chosen = trial.choose(of_method)
        tests = trial.judge(of_method, {level: one["point"] for level, one in chosen.items()})
        columns = {problem.metric: f"test_{problem.metric}"}
        if problem.metric == "nmse":
            columns["mse"] = "test_squared_error_weighted"
        found["methods"][key] = {
            str(level): {
                **chosen[level],
                **{k: [rounded(t[c]) for t in test] for k, c in columns.items()},
                "noise_multiplier": of_method[level],
            }
            for level, test in zip(of_method, tests, strict=True)
        }
    return found


def tables(result: Record, by: str) -> str:
    """Mean ± standard error of every method at every level, and what is sure against Local."""
    larger = by != "mse" and metric(by).larger_is_better
    methods = result["methods"]
    levels = list(max(methods.values(), key=len))
    local = values(methods["local"], levels[-1], by, larger)
    rows = []
    for key, of in methods.items():
        cells = []
        for level in levels:
            scores = values(of, level, by, larger)
            sure = difference(scores, local, larger)
            mark = ("+" if sure.mean > 0 else "−") if sure.sure else ""
            error = np.std(scores, ddof=1) / math.sqrt(len(scores))
            cells.append(f"{np.mean(scores):.4f} ± {error:.4f} {mark}".strip())
        if len(of) == 1:
            cells = [*["" for _ in cells[1:]], cells[-1]]
        rows.append([METHODS[key].title, *cells])
    return markdown(["", *levels], rows)


def values(of_method: Record, level: str, by: str, larger: bool) -> list[float]:
    """Return a method's test results by seed; a run that diverged has the worst score."""
    row = of_method.get(level) or next(iter(of_method.values()))
    worst = 0.0 if larger else math.inf
    return [worst if value is None else value for value in row[by]]


def main() -> None:
    """Run unfinished parts, print the table and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where school/ and landmine/ lie")
    parser.add_argument("problem", choices=STUDIES)
    parser.add_argument("--parts", type=Path, default=Path("runs/all-systems"))
    args = parser.parse_args()
    sizes = {"points": POINTS, "seeds": SEEDS, "tuning_seeds": STUDIES[args.problem][2]}
    problem = dataclasses.replace(PROBLEMS[args.problem], **sizes)
    result = study(args.problem, problem, args.folder, Parts(args.parts / args.problem))
    write(RESULTS / f"all-systems-{args.problem}.json", result)
    for by in ("nmse", "mse") if problem.metric == "nmse" else (problem.metric,):
        print(f"\n{problem.title}, {by}\n\n{tables(result, by)}")
    for key, levels in result["methods"].items():
        for level, row in levels.items():
            if row["at_edge"]:
                print(f"at an end of its box: {key} at {level}: {', '.join(row['at_edge'])}")


if __name__ == "__main__":
    main()
