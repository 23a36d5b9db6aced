"""The problems on which the methods of MP-MTL's paper are compared, with repetitions and folds."""

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np

import fedjaxsim as fjs
from fedjaxsim.data import load, related_regression
from fedjaxsim.data.synthetic import Pattern
from fedjaxsim.data.transforms import drop_constant_columns, unit_rows
from fedjaxsim.models import linear
from fedjaxsim.tasks import logistic, squared

FOLDS = 5
PERCENTAGES = (30, 50, 70, 90)
"""Of the rows of real data, for training."""
_DATA = Path(os.environ.get("FEDJAXSIM_DATA", "data"))


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem of linear models.

    Attributes:
      title: for people.
      read: `(seed) -> Population` with a test split.
      task: `(features) -> Task`.
      learning_rate: η, a public number: at most about 1/L for rows of norm 1.
      clip_norm: K, a public number.
      clips: K from which every method chooses, by multiples of that.
      ridges: ℓ2 penalties from which single-task learning chooses.
      shrinkages: ηλ from which every method chooses, 0 among them.
      alone: rounds of single-task learning, whose models are where the others start.
      tunings: data sets whose folds choose.
      repetitions: of the final runs.
      metric: "nmse" or "auc".
    """

    title: str
    read: Callable[[int], fjs.Population]
    task: Callable[[int], fjs.Task]
    learning_rate: float
    clip_norm: float
    ridges: tuple[float, ...]
    shrinkages: tuple[float, ...]
    clips: tuple[float, ...] = (1.0,)
    alone: int = 100
    tunings: int = 1
    repetitions: int = 20
    metric: str = "nmse"

    @property
    def larger_is_better(self) -> bool:
        """Of the metric."""
        return self.metric == "auc"


def delta(clients: int) -> float:
    """δ = 1/(m log m), as in the paper."""
    return 1 / (clients * math.log(clients))


def _squared(features: int) -> fjs.Task:
    return squared(linear((features,), 1, bias=False))


def _logistic(features: int) -> fjs.Task:
    return logistic(linear((features,), 1, bias=False))


def _school(percentage: int) -> Problem:
    def read(seed: int) -> fjs.Population:
        source = f"mat:{_DATA}/school/school.mat"
        rows = drop_constant_columns(load(source, test=1 - percentage / 100, seed=seed))
        return unit_rows(rows)

    return Problem(
        f"School, {percentage} % for training",
        read,
        _squared,
        learning_rate=1.0,
        clip_norm=400.0,
        clips=(1.0, 2.0, 4.0),
        ridges=(1e-5, 3e-5, 1e-4, 3e-4, 1e-3),
        shrinkages=(0.0, 10.0, 30.0, 100.0, 300.0, 800.0, 2000.0, 5000.0),
        alone=1000,
        repetitions=20,
    )


def _landmine(percentage: int) -> Problem:
    def read(seed: int) -> fjs.Population:
        source = f"mat:{_DATA}/landmine/small.mat"
        return unit_rows(load(source, test=1 - percentage / 100, seed=seed))

    return Problem(
        f"Landmine, {percentage} % for training",
        read,
        _logistic,
        learning_rate=4.0,
        clip_norm=5.0,
        ridges=(0.0, 1e-3, 3e-3, 1e-2, 3e-2),
        shrinkages=(0.0, 0.3, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0),
        tunings=5,
        repetitions=20,
        metric="auc",
    )


def synthetic(pattern: Pattern, clients: int = 320) -> Problem:
    """One of the two synthetic problems, with so many clients; many have fewer test rows."""
    test_rows = None if clients <= 320 else 30
    return Problem(
        f"{pattern} pattern, m = {clients:,}",
        lambda seed: related_regression(pattern, clients, num_test_rows=test_rows, seed=seed)[0],
        _squared,
        learning_rate=6.0,
        clip_norm=60.0,
        ridges=(0.0, 1e-4, 3e-4, 1e-3, 3e-3),
        shrinkages=tuple(
            round(s * math.sqrt(clients / 320), 3) for s in (0, 5, 15, 30, 60, 120, 240, 480)
        ),
    )


PROBLEMS = {
    **{pattern: synthetic(pattern) for pattern in get_args(Pattern)},
    **{f"school-{percentage}": _school(percentage) for percentage in PERCENTAGES},
    **{f"landmine-{percentage}": _landmine(percentage) for percentage in PERCENTAGES},
}


def folded(population: fjs.Population, seed: int) -> list[fjs.Population]:
    """Return the population with each fifth of the training rows in turn as validation rows.

    Args:
      population: without validation rows.
      seed: of the folds.
    """
    rng = np.random.default_rng(seed)
    train, test = population.splits["train"], population.splits["test"]
    every = [
        (np.array_split(rng.permutation(train.rows(k)), FOLDS), test.rows(k))
        for k in range(population.num_clients)
    ]

    def with_fold(fold: int) -> fjs.Population:
        rows = [
            [np.concatenate([*parts[:fold], *parts[fold + 1 :]]), parts[fold], kept]
            for parts, kept in every
        ]
        counts = np.array([[len(part) for part in of_client] for of_client in rows])
        index = np.concatenate([part for of_client in rows for part in of_client])
        return population.of_rows(index, counts)

    return [with_fold(fold) for fold in range(FOLDS)]
