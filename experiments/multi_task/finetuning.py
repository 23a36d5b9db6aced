"""Fine-tuning after PMTL and after FedAvg, at equal ε (PMTL's Tables 1 and 3).

    python experiments/multi_task/finetuning.py $FEDJAXSIM_DATA

The first stages are what `equal_privacy.py` chose on FEMNIST: softmax regression on 206 writers
(the paper: a CNN, ten times the images), 50 rounds, cohorts of expected size 100. Then every client
alone minimizes each of the paper's four objectives from the model it predicts with, the global one
after FedAvg, in 5 epochs of batch 10 over the same training rows. η and λ of each objective are
chosen for each first stage and ε among as many points on the validation split of the extra seed.
The second stage sends nothing, so ε is that of the first.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from data_sets import BATCH, PROBLEMS
from equal_privacy import RESULTS
from harness import FIRST_TUNING_SEED, Parts, Record, Trial, write
from methods import METHODS, Method, Point, at_edge, hyperparameters
from tables import difference, epsilon_text, markdown, spread

import fedjaxsim as fjs

STAGES = ("pmtl", "fedavg")
EPSILONS = (0.1, 0.8, 2.0, None)
"""Those of Table 1; None is without noise."""
EPOCHS, POINTS = 5, 6
BOX = {"learning_rate": (0.003, 0.3), "lam": (0.01, 30.0)}
PAPER = {
    "vanilla": {"pmtl": (0.645, 0.640, 0.677, 0.832), "fedavg": (0.606, 0.648, 0.653, 0.812)},
    "mean": {"pmtl": (0.608, 0.605, 0.656, 0.826), "fedavg": (0.581, 0.574, 0.633, 0.839)},
    "kl": {"pmtl": (0.486, 0.584, 0.662, 0.839), "fedavg": (0.348, 0.481, 0.565, 0.829)},
    "ewc": {"pmtl": (0.663, 0.595, 0.681, 0.837), "fedavg": (0.556, 0.607, 0.666, 0.823)},
}
"""Table 1, in the order of `EPSILONS`."""
PAPER_LOCAL = 0.618
"""Table 3."""


def points() -> list[Point]:
    """Where every objective is tuned; λ is meant as it is, since KL and Fisher have scales."""
    rows = Method("", "finetune", "").points(POINTS, BOX)
    return [row | {"lam": float(f"{row['lam'] * row['learning_rate']:.3g}")} for row in rows]


def _pulled(point: Point) -> Point:
    """Return a point in the form that `at_edge` takes."""
    return point | {"lam": point["lam"] / point["learning_rate"]}


class Second:
    """The second stage after one system.

    Args:
      trial: of the first stage.
    """

    def __init__(self, trial: Trial):
        self.trial, self.first = trial, trial.simulation(0)
        self.tasks = {
            penalty: fjs.Simulation(
                fjs.finetune(self.first.task, penalty=penalty),
                self.first.population,
                fjs.full_participation(),
                fjs.Minibatches(BATCH, epochs=EPOCHS),
                fjs.no_release(),
            )
            for penalty in ("mean", "kl", "ewc")
        }

    def run(
        self, point: Point, seed: int, split: str, tries: dict[str, list[Point]]
    ) -> dict[str, Any]:
        """Accuracy of one first stage, and after each try of each objective.

        Args:
          point: of the first stage, with its noise.
          seed: of the split and of all random numbers.
          split: on which they are evaluated.
          tries: points by objective.
        """
        problem = self.trial.problem
        population = self.trial.population(seed)
        first = self.first.with_population(population)
        hparams = hyperparameters(first, point)
        state, _ = first.run(first.init(seed, hparams), hparams, problem.rounds)
        found: dict[str, Any] = {"first": accuracy(first, state, hparams, split)}
        # All objectives begin with the same state, which is compiled anew at each call.
        mean = self.tasks["mean"]
        begun = mean.start_from(state, mean.hyperparameters(), first, hparams)
        for penalty, of_penalty in tries.items():
            vanilla = {"lam": 0.0} if penalty == "vanilla" else {}
            second = self.tasks["mean" if vanilla else penalty].with_population(population)
            found[penalty] = []
            for one in of_penalty:
                fine = second.hyperparameters(**{**one, **vanilla})
                done, _ = second.run(jax.tree.map(jnp.copy, begun), fine, 1)
                found[penalty].append(accuracy(second, done, fine, split))
        return found


def accuracy(simulation: fjs.Simulation, state: Any, hparams: Any, split: str) -> float:
    """Mean accuracy over clients."""
    return float(simulation.evaluate(state, hparams, split).mean("accuracy"))


def stages(system: str, rows: list[Record], noise: list[float], trial: Trial) -> list[Record]:
    """For every ε what was chosen for each objective, and the test results by seed."""
    parts, grid = trial.parts, points()
    second = Second(trial)
    found = []
    for level, (row, z) in enumerate(zip(rows, noise, strict=True)):
        point = {**METHODS[system].fixed, **row["point"], "noise_multiplier": z}
        tries = dict.fromkeys(PAPER, grid)
        scores = parts.get(
            f"{system}-{level}-tune",
            [point, grid, EPOCHS],
            lambda point=point, tries=tries: second.run(
                point, FIRST_TUNING_SEED, "validation", tries
            ),
        )
        chosen = {penalty: grid[int(np.nanargmax(scores[penalty]))] for penalty in tries}
        tests = [
            parts.get(
                f"{system}-{level}-test-{seed}",
                [point, chosen, EPOCHS],
                lambda point=point, chosen=chosen, seed=seed: second.run(
                    point, seed, "test", {penalty: [one] for penalty, one in chosen.items()}
                ),
            )
            for seed in range(trial.problem.seeds)
        ]
        edges = {
            penalty: at_edge(_pulled(one), BOX, private=False) for penalty, one in chosen.items()
        }
        found.append({"chosen": chosen, "at_edge": edges, "test": tests})
    return found


def of_seeds(result: Record, stage: str, level: int, penalty: str) -> list[float]:
    """Test accuracy after an objective, or of the "first" stage alone, by seed."""
    tests = result["stages"][stage][level]["test"]
    return [test["first"] if penalty == "first" else test[penalty][0] for test in tests]


def table_1(result: Record) -> str:
    """Make the paper's Table 1: every objective after every first stage."""
    rows = []
    for level, epsilon in enumerate(result["epsilons"]):
        for penalty in ("first", *PAPER):
            cells = []
            for stage in STAGES:
                paper = PAPER.get(penalty, {}).get(stage)
                printed = f" ({paper[level]:.3f})" if paper else ""
                cells.append(spread(of_seeds(result, stage, level, penalty)) + printed)
            label = "none" if penalty == "first" else penalty
            after = [of_seeds(result, stage, level, penalty) for stage in STAGES]
            gains = [str(difference(of, after[-1], larger=True)) for of in after[:-1]]
            rows.append([epsilon_text(epsilon), label, *cells, *gains])
    names = [METHODS[stage].title for stage in STAGES]
    gains = [f"{name} − {names[-1]}" for name in names[:-1]]
    return markdown(["ε", "objective", *(f"after {name}" for name in names), *gains], rows)


def table_3(result: Record) -> str:
    """Make the paper's Table 3: Local, PMTL, and PMTL with the objective best on average."""
    rows = []
    for level, epsilon in enumerate(result["epsilons"]):
        cells = [spread(result["local"])]
        for stage in STAGES:
            plain = of_seeds(result, stage, level, "first")
            tuned = {penalty: of_seeds(result, stage, level, penalty) for penalty in PAPER}
            best = max(tuned, key=lambda penalty: np.mean(tuned[penalty]))
            gain = difference(tuned[best], result["local"], larger=True)
            cells += [spread(plain), f"{spread(tuned[best])} ({best})", str(gain)]
        rows.append([epsilon_text(epsilon), *cells])
    head = ["ε", "Local"]
    for stage in STAGES:
        title = METHODS[stage].title
        head += [title, f"{title} and the best objective", "that − Local"]
    return markdown(head, rows)


def main() -> None:
    """Run unfinished parts, print the tables and write results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where femnist/ lies")
    parser.add_argument("--parts", type=Path, default=Path("runs/multi-task/finetuning"))
    args = parser.parse_args()
    chosen = json.loads((RESULTS / "compare-femnist.json").read_text())
    problem, parts = PROBLEMS["femnist"], Parts(args.parts)
    of_level = [level["epsilon"] for level in chosen["levels"]]
    places = [of_level.index(epsilon) for epsilon in EPSILONS]
    local = chosen["methods"]["local"][0]["test"]
    result: Record = {
        "epochs": EPOCHS,
        "epsilons": EPSILONS,
        "local": [test["test_accuracy"] for test in local],
        "stages": {},
    }
    for name in STAGES:
        trial = Trial(problem, METHODS[name], args.folder, parts, name)
        rows = [chosen["methods"][name][place] for place in places]
        noise = [chosen["levels"][place]["noise_multiplier"] for place in places]
        result["stages"][name] = stages(name, rows, noise, trial)
    write(RESULTS / "finetuning.json", result)
    print(f"{table_1(result)}\n\n{table_3(result)}")


if __name__ == "__main__":
    main()
