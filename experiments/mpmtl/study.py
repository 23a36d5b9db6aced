"""Many repetitions as one compiled program: each with its own data, folds and noise.

`Program` is made of pure functions of (key, hyperparameters, rows). Here they are mapped over
settings, and over repetitions, whose data are an argument. The number of rounds is one, too, so
that cross-validation over it compiles nothing more.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from contenders import Method
from data_problems import Problem, delta, folded

import fedjaxsim as fjs
from fedjaxsim.engine.batch import stack
from fedjaxsim.engine.program import ClientMetrics
from fedjaxsim.engine.rows import Rows
from fedjaxsim.report.files import write_atomically

TUNING_SEED = 1000
"""Of the first data whose folds choose."""
OTHER_SEEDS = range(1000, 1005)
"""Of the data that choose instead of folds."""
UNBOUNDED = 1e6
"""A clip norm that binds nowhere."""
Record = dict[str, Any]
PyTree = Any
Values = Mapping[str, Any]
"""Values of hyperparameters, by name, for several simulations."""
_DIFFER = ("lam", "clip_norm", "noise_multiplier")
"""The hyperparameters that differ between the settings of a program."""


def read_by(simulation: fjs.Simulation, values: Values) -> fjs.Hyperparameters:
    """Return the hyperparameters of a simulation from the values that it reads."""
    known = simulation.records
    return simulation.hyperparameters(**{n: value for n, value in values.items() if n in known})


class Repetitions:
    """A simulation whose every repetition has data of its own, in one program.

    Args:
      simulation: on data of the shape of all.
    """

    def __init__(self, simulation: fjs.Simulation):
        self.simulation = simulation
        self._axes = fjs.Hyperparameters(
            **{name: 0 if name in _DIFFER else None for name in simulation.records}  # pyright: ignore[reportArgumentType]
        )
        self._compiled = jax.jit(self._all)

    def run(
        self,
        populations: Sequence[fjs.Population],
        settings: Sequence[Values],
        rounds: int,
        seeds: Sequence[int],
        split: str = "test",
        own: PyTree = None,
    ) -> tuple[list[Record], PyTree]:
        """Run every setting on every population.

        Args:
          populations: R of them, of one shape.
          settings: S, which differ in λ, clip norm and noise.
          rounds: of each run.
          seeds: of the noise, R.
          split: on which they are evaluated.
          own: parameters from which clients start, leaves (R, m, …); None for those of the task.

        Returns:
          R summaries, whose values are (S,); and what clients predict with, leaves (R, S, m, …).
        """
        each = [read_by(self.simulation, values) for values in settings]
        for setting in each:
            self.simulation.setup.check(setting)
        hparams = stack(each, self._axes).as_arrays()
        simulations = [self.simulation.with_population(one) for one in populations]
        train, judged = (
            _stacked([one.setup.rows[name] for one in simulations]) for name in ("train", split)
        )
        keys = jnp.stack([jax.random.key(seed, impl="threefry2x32") for seed in seeds])
        ranges = (judged.start, judged.count)
        measured, params = self._compiled(keys, hparams, train, ranges, own, jnp.int32(rounds))
        summaries = []
        for index, one in enumerate(simulations):
            of_one = jax.tree.map(lambda leaf, r=index: np.asarray(leaf[r]).T, measured)
            summaries.append(one.setup.summarize(split, ClientMetrics(*of_one)).summary())
        return summaries, params

    def _all(self, keys, hparams, train, ranges, own, rounds):
        def one(key, fields, start, count, judged, own):
            rows = dataclasses.replace(train, fields=fields, start=start, count=count)
            judged = dataclasses.replace(rows, start=judged[0], count=judged[1])

            def of_setting(hparams):
                return self._run(key, hparams, rows, judged, own, rounds)

            axes: Any = (self._axes,)
            return jax.vmap(of_setting, axes)(hparams)

        each = (keys, train.fields, train.start, train.count, ranges, own)
        return jax.lax.map(lambda of_one: one(*of_one), each)

    def _run(self, key, hparams, rows, judged, own, rounds):
        program, algorithm = self.simulation.program, self.simulation.algorithm
        state = program.init(key, hparams)
        if own is not None:
            state = dataclasses.replace(state, personal=first_personal(algorithm, hparams, own))
        state = jax.lax.fori_loop(
            0, rounds, lambda _, state: program.step(state, hparams, rows)[0], state
        )
        ids = jnp.arange(program.num_clients)
        predict = jax.vmap(algorithm.predict, (None, 0, None, 0))
        params = predict(state.shared, state.personal, hparams, ids)
        return program.evaluate(state, hparams, judged), params


def first_personal(algorithm: fjs.Algorithm, hparams: Any, own: PyTree) -> PyTree:
    """Return the personal state of clients that start from given models, leaves (m, …)."""
    start = algorithm.warm_start.start
    assert start is not None
    return jax.vmap(lambda own: start(hparams, None, own)[1])(own)


def _stacked(every: Sequence[Rows]) -> Rows:
    """Stack the rows of all repetitions, leaves (R, …), in passes of one size."""
    pass_size = max(rows.pass_size for rows in every)
    most = max(rows.most_rows for rows in every)
    same = [dataclasses.replace(rows, pass_size=pass_size, most_rows=most) for rows in every]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *same)


class Study:
    """One problem: its repetitions, its folds, and single-task learning on all of them.

    Args:
      problem: what is learned.
      folder: where finished parts are kept. It has to be emptied when the code changes.
      repetitions: of the final runs; by default the problem's.
      together: how many of them are one program, and one part.
      other_data: whether hyperparameters are chosen by the test rows of other data sets, drawn like
        those of the repetitions and of their size, instead of folds, which train on fewer rows.
    """

    def __init__(
        self,
        problem: Problem,
        folder: Path,
        repetitions: int | None = None,
        together: int = 20,
        *,
        other_data: bool = False,
    ):
        self.problem, self.folder, self.together = problem, folder, together
        self.other_data = other_data
        self.seeds = range(repetitions or problem.repetitions)
        first = problem.read(0)
        self.clients, self.features = first.num_clients, first.fields["x"].shape[1]
        self.task = problem.task(self.features)
        self.delta = delta(self.clients)
        self._started: dict[range | None, tuple[list[fjs.Population], PyTree]] = {}
        self._stl = Repetitions(
            self.simulation(
                fjs.stl(self.task, acceleration="convex"), fjs.no_release(), first, None
            )
        )
        self.ridge = 0.0

    def simulation(
        self,
        algorithm: fjs.Algorithm,
        mechanism: fjs.Mechanism,
        population: fjs.Population,
        epochs: int | None,
    ) -> fjs.Simulation:
        """Make a simulation with full participation."""
        most = int(population.splits["train"].count.max())
        batches = fjs.Minibatches(most, steps=1)
        if epochs is not None:
            batches = fjs.Minibatches(most, epochs=epochs)
        return fjs.Simulation(
            algorithm, population, fjs.full_participation(), batches, mechanism,
            chunk_map="vmap",
        )  # fmt: skip

    def point(self, **values: Any) -> Values:
        """Return the problem's values of hyperparameters, with others."""
        of_problem = {
            "learning_rate": self.problem.learning_rate,
            "ridge": self.ridge,
            "mu": max(self.ridge, 1e-3),
            "lam": 0.0,
        }
        return of_problem | values

    def unit(self, method: Method) -> float:
        """λ for ηλ = 1."""
        size = self.problem.clip_norm * math.sqrt(self.clients) if method.squared else 1.0
        return 1 / (self.problem.learning_rate * size)

    def part(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the JSON kept under this name, or else compute and keep it."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(compute()).encode())
        return json.loads(path.read_text())

    def folds(self) -> list[fjs.Population]:
        """Return the populations whose validation rows choose."""
        seeds = range(TUNING_SEED, TUNING_SEED + self.problem.tunings)
        return [one for seed in seeds for one in folded(self.problem.read(seed), seed)]

    @property
    def choosing_split(self) -> str:
        """The split whose scores choose."""
        return "test" if self.other_data else "validation"

    def choosing(self) -> list[fjs.Population]:
        """Return the populations that choose."""
        if self.other_data:
            return [self.problem.read(seed) for seed in OTHER_SEEDS]
        return self.folds()

    def best(self, scores: Any) -> int:
        """Return the index of the best mean score, of scores (…, S)."""
        mean = np.mean(np.asarray(scores).reshape(-1, np.shape(scores)[-1]), axis=0)
        worst = -math.inf if self.problem.larger_is_better else math.inf
        mean = np.where(np.isfinite(mean), mean, worst)
        return int(mean.argmax() if self.problem.larger_is_better else mean.argmin())

    def alone(self) -> Record:
        """Single-task learning: the chosen penalties, and the test scores of all repetitions.

        The ridge that is chosen is that of all methods.
        """

        def compute():
            found: Record = {}
            folds, split, rounds = self.choosing(), self.choosing_split, self.problem.alone
            seeds = range(len(folds))
            validation, test = (f"{name}_{self.problem.metric}" for name in (split, "test"))
            scores = []
            for ridge in self.problem.ridges:
                self.ridge = ridge
                summaries, _ = self._stl.run(folds, [self.point()], rounds, seeds, split)
                scores.append([one[validation][0] for one in summaries])
            found["ridge"] = self.problem.ridges[self.best(np.transpose(scores))]
            # ℓ1 at penalties of the size of those.
            self.ridge = 0.0
            lassos = [self.point(lam=30 * ridge) for ridge in self.problem.ridges]
            summaries, _ = self._stl.run(folds, lassos, rounds, seeds, split)
            found["lasso"] = 30 * self.problem.ridges[self.best([s[validation] for s in summaries])]
            tests = {"ridge": [], "lasso": []}
            for group in self._groups():
                populations = [self.problem.read(seed) for seed in group]
                for name, ridge, lam in (
                    ("ridge", found["ridge"], 0.0),
                    ("lasso", 0, found["lasso"]),
                ):
                    self.ridge = ridge
                    summaries, _ = self._stl.run(
                        populations, [self.point(lam=lam)], rounds, list(group)
                    )
                    tests[name] += [float(one[test][0]) for one in summaries]
            return found | {"test": tests}

        found = self.part("alone", compute)
        self.ridge = found["ridge"]
        return found

    def _groups(self) -> list[range]:
        size = self.together
        return [self.seeds[i : i + size] for i in range(0, len(self.seeds), size)]

    def models(self, populations: Sequence[fjs.Population], seeds: Sequence[int]) -> PyTree:
        """Return the models of single-task learning, from which the others start."""
        _, params = self._stl.run(populations, [self.point()], self.problem.alone, seeds)
        return jax.tree.map(lambda leaf: leaf[:, 0], params)

    def _starts(self, group: range | None) -> tuple[list[fjs.Population], PyTree]:
        """Return populations of a group, or those that choose, and the models to start from."""
        if group not in self._started:
            if group is None:
                populations = self.choosing()
                seeds = range(len(populations))
            else:
                populations, seeds = [self.problem.read(seed) for seed in group], group
            self._started[group] = populations, self.models(populations, seeds)
        return self._started[group]

    def compare(self, name: str, method: Method, epsilons: Sequence[float]) -> list[Record]:
        """Chooses rounds, λ and K for every ε by cross-validation, and judges on all repetitions.

        Args:
          name: of what is kept.
          method: what learns.
          epsilons: targets; ∞ for no noise and no clipping.

        Returns:
          For each ε what was chosen, its test scores, and those with λ = 0 (M = I): single-task
          learning with the same rounds, η, ridge, K and data.
        """
        self.alone()
        runs: list[Repetitions] = []

        def program() -> Repetitions:
            if not runs:
                algorithm = method.make(self.task, self.clients)
                mechanism, first = method.mechanism(), self.problem.read(0)
                runs.append(
                    Repetitions(self.simulation(algorithm, mechanism, first, method.epochs))
                )
            return runs[0]

        chosen = self.part(f"{name}-chosen", lambda: self._choose(method, epsilons, program()))
        rows = [
            {
                "epsilon": str(e),
                "rounds": t,
                "shrinkage": s,
                "clip_norm": k,
                "test": [],
                "single": [],
            }
            for e, (t, s, k) in zip(epsilons, chosen, strict=True)
        ]
        for group in self._groups():
            found = self.part(
                f"{name}-{group.start}-{group.stop}",
                lambda group=group: self._judge(method, epsilons, chosen, group, program()),
            )
            for row, scores in zip(rows, found, strict=True):
                row["test"] += scores["test"]
                row["single"] += scores["single"]
        return rows

    def _setting(
        self, method: Method, epsilon: float, rounds: int, shrinkage: float, clip_norm: float
    ) -> Values:
        mechanism = method.mechanism()
        return self.point(
            lam=shrinkage * self.unit(method),
            clip_norm=UNBOUNDED if math.isinf(epsilon) else clip_norm,
            noise_multiplier=method.noise(mechanism, epsilon, self.delta, rounds, self.clients),
        )

    def _choose(
        self, method: Method, epsilons: Sequence[float], runs: Repetitions
    ) -> list[tuple[int, float, float]]:
        """Choose rounds, ηλ and K for every ε, by the folds or other data."""
        folds, models = self._starts(None)
        seeds, split = range(len(folds)), self.choosing_split
        own = models if method.warm else None
        shrinkages = self.problem.shrinkages if method.warm else (0.0,)
        clip_norms = [self.problem.clip_norm * multiple for multiple in self.problem.clips]
        places = [(s, k) for s in shrinkages for k in clip_norms]
        every = []
        for t in method.rounds:
            plan = [self._setting(method, e, t, s, k) for e in epsilons for s, k in places]
            found, _ = runs.run(folds, plan, t, seeds, split, own)
            scores = np.array([one[f"{split}_{self.problem.metric}"] for one in found])
            every.append(scores.reshape(len(folds), len(epsilons), -1))
        places = [(t, *place) for t in method.rounds for place in places]
        return [places[self.best(of)] for of in np.concatenate(every, -1).swapaxes(0, 1)]

    def _judge(
        self,
        method: Method,
        epsilons: Sequence[float],
        chosen: Sequence[tuple[int, float, float]],
        group: range,
        runs: Repetitions,
    ) -> list[Record]:
        """For every ε the test scores of these repetitions, and those with λ = 0."""
        metric = f"test_{self.problem.metric}"
        populations, models = self._starts(group)
        own = models if method.warm else None
        rows: list[Record] = [{"test": [], "single": []} for _ in epsilons]
        for t in sorted({t for t, *_ in chosen}):
            for into, factor in (("test", 1.0), ("single", 0.0)):
                if into == "single" and not method.warm:
                    continue
                plan = [
                    self._setting(method, e, t, factor * s, k)
                    for e, (_, s, k) in zip(epsilons, chosen, strict=True)
                ]
                found, _ = runs.run(populations, plan, t, list(group), "test", own)
                for index, (rounds, *_) in enumerate(chosen):
                    if rounds == t:
                        rows[index][into] += [_rounded(one[metric][index]) for one in found]
        return rows


def _rounded(value: float) -> float:
    """To seven digits."""
    return float(f"{value:.7g}")
