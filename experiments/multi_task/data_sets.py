"""The data sets that the methods are compared on, each with its task, rounds and tuning."""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

import fedjaxsim as fjs
from fedjaxsim.data import load
from fedjaxsim.data.transforms import drop_constant_columns, invert
from fedjaxsim.models import linear
from fedjaxsim.privacy.calibration import noise_multiplier, spent
from fedjaxsim.privacy.events import SamplingScheme
from fedjaxsim.tasks import logistic, softmax, squared

SMALL = (0.5, 2.0, 8.0, math.inf)
MANY = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 4.0, 8.0, math.inf)
BATCH = 10
_PERCENTAGES = [3, 4]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A data set of many clients and what is learned from it.

    Attributes:
      title: for people.
      read: `(folder, seed, validation) -> Population`, split by `seed`.
      model: `(population) -> Task`.
      rate: p, the part of the clients in a round.
      rounds: T.
      epsilons: the targets; ∞ is without noise.
      metric: by which methods are chosen and judged.
      points: how many points every method is tuned at, for every ε.
      seeds: of the final runs: 0, 1, ….
      tuning_seeds: of the runs whose mean validation score chooses: 1000, 1001, ….
      box: see `methods`.
      at_once: how many settings make one program.
      chunk_size: clients that are run together; None for the default.
      chunk_map: how, see `fjs.Simulation`; None for the default.
      every: rounds between evaluations, where results are wanted on the way.
    """

    title: str
    read: Callable[[Path, int, float], fjs.Population]
    model: Callable[[fjs.Population], fjs.Task]
    rate: float
    rounds: int
    epsilons: tuple[float, ...] = SMALL
    metric: str = "accuracy"
    points: int = 128
    seeds: int = 10
    tuning_seeds: int = 3
    box: Any = dataclasses.field(
        default_factory=lambda: {
            "learning_rate": (0.01, 5.0),
            "clip_norm": (0.003, 3.0),
            "lam": (0.003, 1.5),
            "mu": (0.003, 1.5),
        }
    )
    at_once: int = 512
    chunk_size: int | None = None
    chunk_map: Literal["scan", "vmap"] | None = None
    every: int | None = None

    @property
    def sampling(self) -> fjs.Sampling:
        """Poisson cohorts, or everyone where p = 1."""
        everyone = self.rate == 1
        return fjs.full_participation() if everyone else fjs.poisson(self.rate)

    def scheme(self, clients: int) -> SamplingScheme:
        """Return the scheme by which so many clients are sampled."""
        return self.sampling.for_clients(clients).scheme

    def noise(self, epsilon: float, clients: int) -> float:
        """Return z for ε of the whole run, zero-out in the joint-DP view, at δ = 1/(10 m)."""
        if math.isinf(epsilon):
            return 0.0
        scheme = self.scheme(clients)
        delta = 1 / (10 * clients)
        return noise_multiplier(
            epsilon, delta, rounds=self.rounds, sampling_rate=self.rate, scheme=scheme
        )

    def spent(self, z: float, clients: int) -> dict[str, float]:
        """ε of the whole run for both adjacencies, and as PMTL's paper counts it, at δ = 1/m."""
        scheme, run = self.scheme(clients), (z, self.rate, self.rounds)
        delta = 1 / (10 * clients)
        moments = "gaussian" if self.rate == 1 else "rdp"
        return {
            "zero_out": spent(*run, delta, scheme),
            "replace": spent(*run, delta, scheme, adjacency="replace"),
            "as_the_paper_counts": spent(*run, 1 / clients, scheme, accountant=moments),
        }


def _digits(folder: Path, seed: int, validation: float) -> fjs.Population:
    del folder
    return load("digits", alpha=0.3, test=0.3, validation=validation, seed=seed)


def _femnist(folder: Path, seed: int, validation: float) -> fjs.Population:
    source = f"leaf:{folder}/femnist/mytest.json.zip"
    return invert(load(source, test=0.2, validation=validation, seed=seed))


@functools.cache
def _femnist_7(folder: Path, seed: int, validation: float) -> fjs.Population:
    """FEMNIST with the means of 4 × 4 pixels, 7 × 7."""
    whole = _femnist(folder, seed, validation)
    x = whole.fields["x"].reshape(-1, 7, 4, 7, 4).mean((2, 4)).reshape(-1, 49)
    return dataclasses.replace(whole, fields={**whole.fields, "x": x})


_SYMBOLS = " abcdefghijklmnopqrstuvwxyz"


def _shakespeare(folder: Path, seed: int, validation: float) -> fjs.Population:
    """Speakers of tiny Shakespeare (karpathy/char-rnn): the next character after two.

    The 141 speakers with 1,000 characters or more have a row for each 20 characters, 50 to 100, at
    random places. Letters have one case, and all else but the space is one more symbol: x holds
    two unit vectors of 28, y one of 28 labels.
    """
    said: dict[str, str] = {}
    for part in (folder / "shakespeare" / "input.txt").read_text().split("\n\n"):
        speaker, _, words = part.partition(":\n")
        said[speaker] = f"{said.get(speaker, '')}{words}\n"
    rng, clients = np.random.default_rng(0), {}
    for speaker, words in said.items():
        if len(words) < 1000:
            continue
        text = np.array([_SYMBOLS.find(symbol) % 28 for symbol in words.lower()])
        size = int(np.clip(len(words) // 20, 50, 100))
        place = rng.choice(len(text) - 2, size, replace=False)
        x = np.eye(28, dtype="float32")[text[place[:, None] + [0, 1]]].reshape(size, 56)
        clients[speaker] = {"x": x, "y": text[place + 2]}
    whole = fjs.Population.from_clients(list(clients.values()), list(clients))
    return fjs.data.split(whole, test=0.3, validation=validation, seed=seed)


def _school(folder: Path, seed: int, validation: float) -> fjs.Population:
    source = f"mat:{folder}/school/school.mat"
    rows = drop_constant_columns(load(source, test=0.2, validation=validation, seed=seed))
    x, y = rows.fields["x"].copy(), rows.fields["y"]
    # Two of the features are percentages and the others 0 or 1; a score lies between 1 and 70.
    x[:, _PERCENTAGES] /= 100
    return dataclasses.replace(rows, fields={**rows.fields, "x": x, "y": (y - 35) / 35})


def _school_unit(folder: Path, seed: int, validation: float) -> fjs.Population:
    """As Liu et al. (2022) have it: every school's features standardized, scores in [0, 1]."""
    source = f"mat:{folder}/school/school.mat"
    rows = load(source, test=0.2, validation=validation, seed=seed)
    x, y = rows.fields["x"].astype("float32"), rows.fields["y"]
    for school in range(rows.num_clients):
        train = x[rows.splits["train"].rows(school)]
        deviation = train.std(axis=0)
        of_school = np.concatenate([rows.splits[split].rows(school) for split in rows.splits])
        x[of_school] = (x[of_school] - train.mean(axis=0)) / np.where(deviation > 0, deviation, 1)
    return dataclasses.replace(rows, fields={**rows.fields, "x": x, "y": (y - 1) / 69})


def _vehicle(folder: Path, seed: int, validation: float) -> fjs.Population:
    source = f"leaf:{folder}/vehicle/mytrain.json"
    return load(source, test=0.3, validation=validation, seed=seed)


def _landmine(folder: Path, seed: int, validation: float) -> fjs.Population:
    source = f"mat:{folder}/landmine/small.mat"
    return load(source, test=0.3, validation=validation, seed=seed)


def _softmax(classes: int) -> Callable[[fjs.Population], fjs.Task]:
    return lambda population: softmax(linear(_inputs(population), classes), classes)


def _squared(population: fjs.Population) -> fjs.Task:
    return squared(linear(_inputs(population), 1))


def _logistic(population: fjs.Population) -> fjs.Task:
    return logistic(linear(_inputs(population), 1))


def _inputs(population: fjs.Population) -> tuple[int, ...]:
    return population.fields["x"].shape[1:]


PROBLEMS = {
    "digits": Problem(
        "digits, softmax regression", _digits, _softmax(10), rate=1.0, rounds=100,
        epsilons=MANY, points=64,
    ),
    "digits-sampled": Problem(
        "digits, a fifth of the clients a round", _digits, _softmax(10), rate=0.2, rounds=100,
        points=64,
    ),
    "school": Problem(
        "School, linear regression", _school, _squared, rate=1.0, rounds=50, metric="nmse"
    ),
    "school-unit": Problem(
        "School with scores in [0, 1]", _school_unit, _squared, rate=1.0, rounds=50, metric="nmse"
    ),
    "vehicle": Problem("Vehicle, logistic regression", _vehicle, _logistic, rate=1.0, rounds=50),
    "landmine": Problem(
        "Landmine, logistic regression", _landmine, _logistic, rate=1.0, rounds=50,
        metric="auc", tuning_seeds=10,
    ),
    "femnist": Problem(
        "FEMNIST-206, softmax regression", _femnist, _softmax(62), rate=100 / 206, rounds=50,
        epsilons=MANY, points=18, seeds=3, tuning_seeds=1, at_once=5,
        box={
            "learning_rate": (0.03, 1.0), "clip_norm": (0.05, 2.0), "lam": (0.003, 1.5),
            "mu": (0.003, 1.5),
        },
    ),
    "femnist-7": Problem(
        "FEMNIST-206, softmax regression of 7 × 7 pixels", _femnist_7, _softmax(62),
        rate=100 / 206, rounds=25, at_once=12,
        box={
            "learning_rate": (0.1, 5.0), "clip_norm": (0.05, 2.0), "lam": (0.003, 1.5),
            "mu": (0.003, 1.5),
        },
    ),
    "shakespeare": Problem(
        "Shakespeare, softmax regression of two characters", _shakespeare, _softmax(28), rate=1.0,
        rounds=25,
        box={
            "learning_rate": (0.05, 5.0), "clip_norm": (0.01, 3.0), "lam": (0.003, 1.5),
            "mu": (0.003, 1.5),
        },
    ),
}  # fmt: skip
