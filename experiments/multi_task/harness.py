"""Tuning by validation, and final runs on other seeds.

Every method gets the same number of points for every ε. Settings of one method are one program
(`SimulationBatch`), in which z is an axis like the others: the whole grid at all ε runs at once, as
far as `Problem.at_once` allows. Finished runs are kept, so that a stopped command goes on.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from data_sets import BATCH, Problem
from methods import Method, Point, at_edge, hyperparameters
from rich.progress import track

import fedjaxsim as fjs
from fedjaxsim import store
from fedjaxsim.engine.batch import varying
from fedjaxsim.metrics import metric
from fedjaxsim.sweep import SimulationBatch

FIRST_TUNING_SEED = 1000
_DETAILS = ("_p10", "_p50", "_p90", "_weighted", "_unweighted")
VALIDATION = 0.2
"""The part of a client's training rows on which hyperparameters are chosen. The final runs leave it
out too: with more rows an epoch has more steps, and other hyperparameters would be best."""
Record = dict[str, Any]


class Parts:
    """Finished parts of an experiment, one JSON file each.

    Args:
      folder: where they lie. It has to be emptied when the code changes.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, of: Any, compute: Callable[[], Any]) -> Any:
        """Return a kept part if it was made of the same, or else make and keep it.

        Args:
          name: of the file.
          of: all that it depends on, but for the code; JSON.
          compute: gives the part, as JSON.
        """
        path = self.folder / f"{name}.json"
        if path.exists() and (kept := json.loads(path.read_text()))["of"] == of:
            return kept["part"]
        part = compute()
        store.write(path, (json.dumps({"of": of, "part": part}) + "\n").encode())
        return part


class Trial:
    """One method on one problem.

    Args:
      problem: its data, rounds and sampling.
      method: what learns.
      folder: where data lie.
      parts: what is finished.
      name: of its parts.
    """

    def __init__(self, problem: Problem, method: Method, folder: Path, parts: Parts, name: str):
        self.problem, self.method, self.folder = problem, method, folder
        self.parts, self.name = parts, name
        self._compiled: dict[int, SimulationBatch] = {}

    def population(self, seed: int) -> fjs.Population:
        """Return the data as split by this seed."""
        return self.problem.read(self.folder, seed, VALIDATION)

    def simulation(self, seed: int) -> fjs.Simulation:
        """Return the method on the data of this seed."""
        population = self.population(seed)
        task, clients = self.problem.model(population), population.num_clients
        algorithm, mechanism = self.method.make(task, clients)
        sampling, minibatches = self.problem.sampling, fjs.Minibatches(BATCH, epochs=1)
        if fjs.SYSTEMS[self.method.system].one_minibatch:
            every = int(population.splits["train"].count.max())
            minibatches = fjs.Minibatches(every, epochs=1)
        return fjs.Simulation(
            algorithm, population, sampling, minibatches, mechanism,
            chunk_size=self.problem.chunk_size, chunk_map=self.problem.chunk_map,
        )  # fmt: skip

    def run(self, split: str, plan: Sequence[Record], seed: int) -> list[Record]:
        """Run points at their noise, and evaluate each.

        Args:
          split: "validation" or "test", on which they are evaluated.
          plan: each point, with its "noise_multiplier".
          seed: of the split, the first model, the cohorts, the minibatches and the noise.

        Returns:
          For each, the summary of its last evaluation, and what is judged of those on the way as
          "curve", if there are any. Numbers that are not finite are None.
        """
        size, rounds = self.problem.at_once, self.problem.rounds
        found, here = [], None
        for start in range(0, len(plan), size):
            group = slice(start, start + size)

            def compute(group=group):
                nonlocal here
                here = here or self.simulation(seed)
                settings = [hyperparameters(here, point) for point in plan]
                many = self.many(here, settings, settings[group])
                every = self.problem.every if split == "test" else None
                state, segments = many.run(many.init(seed), rounds, eval_every=every)
                summaries = [segment.evaluation.summary() for segment in segments]
                if split != "test":
                    summaries = [many.evaluate(state, split).summary()]
                return [
                    _of_setting(summaries, index, self.problem.metric)
                    for index in range(len(plan[group]))
                ]

            of = [self.problem.rate, rounds, split, plan[group]]
            found += self.parts.get(f"{self.name}-{split}-{seed}-{start}", of, compute)
        return found

    def many(
        self,
        simulation: fjs.Simulation,
        settings: Sequence[fjs.Hyperparameters],
        group: Sequence[fjs.Hyperparameters],
    ) -> SimulationBatch:
        """Return the program of a group of all settings, compiled once for all seeds."""
        key = len(settings)
        if key not in self._compiled:
            self._compiled[key] = SimulationBatch(simulation, group, axes=varying(settings))
        first = self._compiled[key]
        return first.with_runs(first.simulation.with_population(simulation.population), group)

    def choose(self, noise: dict[Any, float]) -> dict[Any, Record]:
        """For each ε the point with the best mean validation score over the tuning seeds.

        Args:
          noise: z of each ε, or of whatever else names a level.

        Returns:
          For each of them the "point", its "score", and what lies "at_edge" of its box.
        """
        problem = self.problem
        points = self.method.points(problem.points, problem.box)
        box, tuned = {**problem.box, **self.method.box}, self.method.tuned
        plan = [{**point, "noise_multiplier": z} for z in noise.values() for point in points]
        seeds = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + problem.tuning_seeds)
        column = f"validation_{problem.metric}"
        worst = -math.inf if metric(problem.metric).larger_is_better else math.inf
        runs = [
            self.run("validation", plan, seed) for seed in track(seeds, self.name, transient=True)
        ]
        found = [[worst if one[column] is None else one[column] for one in run] for run in runs]
        scores = np.mean(found, axis=0).reshape(len(noise), len(points))
        chosen = scores.argmax(1) if worst < 0 else scores.argmin(1)
        return {
            epsilon: {
                "point": points[index],
                "score": float(row[index]),
                "at_edge": at_edge({n: points[index][n] for n in tuned}, box, private=z > 0),
            }
            for (epsilon, z), index, row in zip(noise.items(), chosen, scores, strict=True)
        }

    def judge(self, noise: dict[Any, float], chosen: dict[Any, Point]) -> list[list[Record]]:
        """Return the test results of the chosen points, by ε and final seed."""
        plan = [{**chosen[epsilon], "noise_multiplier": z} for epsilon, z in noise.items()]
        of_seeds = [self.run("test", plan, seed) for seed in range(self.problem.seeds)]
        return [list(row) for row in zip(*of_seeds, strict=True)]


def _of_setting(summaries: Sequence[Record], index: int, name: str) -> Record:
    last = {column: finite(values[index]) for column, values in summaries[-1].items()}
    if len(summaries) == 1:
        return last
    return last | {"curve": [finite(summary[f"test_{name}"][index]) for summary in summaries]}


def shortened(test: Record, name: str) -> Record:
    """Keep the judged metric, means over clients and curves of a test result, to five digits.

    Args:
      test: of `Trial.run`.
      name: the metric that is judged.
    """
    judged = (f"test_{name}", f"test_{name}_p10")
    return {
        column: [rounded(v) for v in value] if isinstance(value, list) else rounded(value)
        for column, value in test.items()
        if column in judged or not column.endswith(_DETAILS)
    }


def rounded(value: float | None) -> float | None:
    """Round a number to five digits; None where it is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def write(path: Path, result: Any) -> None:
    """Write results as JSON on one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    store.write(path, (json.dumps(result, separators=(",", ":")) + "\n").encode())


def finite(value: float) -> float | None:
    """Return a number for JSON; None where it is not finite."""
    return float(value) if math.isfinite(value) else None
