"""Correlated and banded against independent noise at equal ε: the noise on sums, and two systems.

    python experiments/correlated_noise.py

makes the numbers of experiments/systems/README.md, which experiments/pictures.py draws, of two
populations: 100 clients with digits (Dirichlet 0.5), and 1,000 clients with related linear
classifiers. Ten clients take part in each of 100 rounds. The model is linear, with one epoch a
round. Cohorts are Poisson, of random allocation, of groups in turn, or, for banded noise, Poisson
within the group in turn. There the bands have the least noise on sums over all ε, and jax_privacy
optimizes their coefficients. Every arm is tuned at every ε on the same grid of learning rates, clip
norms and, if it has one, λ, by the mean test accuracy over seeds 0 to 2, which no ε covers; seeds 3
to 12 are reported. δ = 1/(10 m), zero-out, joint DP.
"""

import functools
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax_privacy.matrix_factorization import toeplitz
from numpy.typing import ArrayLike

import fedjaxsim as fjs
from fedjaxsim.privacy.accounting.gaussian import (
    coefficients,
    inverse_series,
    square_root,
    squared_sensitivity,
)
from fedjaxsim.privacy.events import Banded, Correlated
from fedjaxsim.simulation_batch import SimulationBatch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results" / "correlated-noise.json"
EPSILONS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
GRID = {"learning_rate": (0.03, 0.1, 0.3, 1.0), "clip": (0.1, 0.3, 1.0), "lam": (0.1, 1.0, 3.0)}
TUNING, FINAL = range(3), range(3, 13)
SEPARATIONS = ((100, 10), (100, 25), (400, 20), (1000, 1000), (2052, 342))
SYSTEMS = {"FedAvg": fjs.fedavg, "PMTL": functools.partial(fjs.pmtl, message="update")}


class Setting(NamedTuple):
    """A population, and how often its clients take part: in one round of `groups` on average.

    `correlated` are bands and power of noise that is correlated in fixed groups.
    """

    population: Callable[[], fjs.Population]
    shape: tuple[int, int]
    clients: int
    groups: int
    rounds: int
    correlated: tuple[int, float]

    @property
    def delta(self) -> float:
        """δ = 1/(10 m)."""
        return 1 / (10 * self.clients)


def digits() -> fjs.Population:
    """Divide digits among 100 clients."""
    return fjs.data.dirichlet(fjs.data.digits(), 100, 0.5, min_rows=5)


def classifiers() -> fjs.Population:
    """Draw 1,000 clients of ten rows, labelled by a common linear classifier and one of their own.

    50 standard normal features, ten classes, weights N(0, 1) plus N(0, 1/4) of each client.
    """
    rng, size = np.random.default_rng(0), (50, 10)
    common, clients = rng.normal(size=size), []
    for _ in range(1000):
        x = rng.normal(size=(10, 50)).astype(np.float32)
        y = np.argmax(x @ (common + 0.5 * rng.normal(size=size)), axis=1)
        clients.append({"x": x, "y": y.astype(np.int32)})
    return fjs.Population.from_clients(clients)


SETTINGS = {
    "digits": Setting(digits, (64, 10), 100, 10, 100, (4, 0.6)),
    "classifiers": Setting(classifiers, (50, 10), 1000, 100, 100, (64, 0.5)),
}
Arm = tuple[fjs.privacy.Sampling, fjs.privacy.Mechanism]


def prefix_error(weights: ArrayLike, rounds: int) -> float:
    """Compute the root mean square over rounds of the noise on sums of releases, at zC = 1.

    A release has the noise Σ_j weights_j ξ_{t−j}.
    """
    padded, series = np.zeros(rounds), np.asarray(weights)[:rounds]
    padded[: len(series)] = series
    return math.sqrt(np.mean(np.cumsum(np.cumsum(padded) ** 2)))


def gains() -> list[dict[str, float]]:
    """Compute the error of independent noise over that of other noise, for fixed groups."""

    def error(event, rounds, groups):
        squared = squared_sensitivity(event.series, rounds, groups)
        return math.sqrt(squared) * prefix_error(event.series, rounds)

    def published(rounds, groups):
        """Return the error of the optimized banded Toeplitz matrix with as many bands as groups."""
        strategy = toeplitz.optimize_banded_toeplitz(rounds, min(groups, 64))
        squared = toeplitz.minsep_sensitivity_squared(strategy, groups, n=rounds, skip_checks=True)
        errors = toeplitz.per_query_error(strategy_coef=strategy, n=rounds)
        return math.sqrt(float(squared) * float(jnp.mean(errors)))

    rows = []
    for rounds, groups in SEPARATIONS:
        independent = error(Correlated(), rounds, groups)
        row: dict[str, float] = {"rounds": rounds, "groups": groups}
        for bands in (2, 4, 8, 16, 64):
            powers = np.linspace(0.05, 1, 96).tolist()
            found = [error(Correlated(bands=bands, power=p), rounds, groups) for p in powers]
            half = error(Correlated(bands=bands), rounds, groups)
            row[f"half_{bands}"] = independent / half
            row[f"best_{bands}"] = independent / min(found)
            row[f"power_{bands}"] = powers[int(np.argmin(found))]
        rows.append(row | {"jax_privacy": independent / published(rounds, groups)})
    return rows


def weights_of(event: Any) -> ArrayLike:
    """Return the weights of earlier rounds in the noise of a release."""
    if isinstance(event, Banded):
        return inverse_series(event.coefficients)
    if isinstance(event, Correlated):
        return coefficients(event.bands, event.power)
    return [1.0]


def noise(arm: Arm, setting: Setting) -> list[float]:
    """Compute the root mean square of the noise on sums of releases, C = 1, at every ε."""
    sampling, mechanism = arm
    plan = {
        "rounds": setting.rounds,
        "sampling_rate": 1 / setting.groups,
        "scheme": sampling.for_clients(setting.clients).scheme,
        "event": mechanism.event,
    }
    factor = prefix_error(weights_of(mechanism.event), setting.rounds)
    return [fjs.privacy.noise_multiplier(e, setting.delta, **plan) * factor for e in EPSILONS]


def arms(setting: Setting) -> dict[str, Arm]:
    """Return the ways to draw clients and noise."""
    groups, rate = setting.groups, 1 / setting.groups

    def of_bands(bands: int, c: ArrayLike) -> Arm:
        mechanism = fjs.privacy.banded(coefficients=np.asarray(c, np.float64).tolist())
        return fjs.privacy.cyclic(rate, groups=bands), mechanism

    powers = [2**k for k in range(1, 8) if 2**k <= groups]
    bands = min(
        powers, key=lambda b: float(np.mean(np.log(noise(of_bands(b, square_root(b)), setting))))
    )
    best = toeplitz.optimize_banded_toeplitz(setting.rounds, bands)
    in_turn, (correlated, power) = fjs.privacy.fixed_groups(groups=groups), setting.correlated
    return {
        "Poisson": (fjs.poisson(rate), fjs.gaussian()),
        "random allocation": (fjs.privacy.random_allocation(every=groups), fjs.gaussian()),
        "groups": (in_turn, fjs.gaussian()),
        "correlated, groups": (in_turn, fjs.privacy.correlated(bands=correlated, power=power)),
        f"banded ({bands}), cyclic": of_bands(bands, best),
    }


def accuracy(system: str, arm: Arm, setting: Setting, population: fjs.Population) -> dict[str, Any]:
    """Tune one arm at every ε, and report the choices with other seeds."""
    task = fjs.tasks.softmax(
        fjs.models.linear(setting.shape[:1], setting.shape[1]), setting.shape[1]
    )
    sampling, mechanism = arm
    simulation = fjs.Simulation(SYSTEMS[system](task), population, sampling, mechanism=mechanism)
    values: dict[str, Any] = {
        "sampling_rate": 1 / setting.groups, "lam": 0.1, "server_learning_rate": 1.0,
    }  # fmt: skip
    if system == "PMTL":
        values["server_learning_rate"] = 1 / setting.groups  # its server adds up all releases
    start = {"learning_rate": 0.1, "clip": 1.0, "noise_multiplier": 1.0, **values}
    start = {name: value for name, value in start.items() if name in simulation.records}
    names = [name for name in GRID if name in simulation.records]
    grid = list(itertools.product(*(GRID[name] for name in names)))

    def hparams(z: float, *point: float) -> fjs.Hyperparameters:
        changes = {"noise_multiplier": z, **dict(zip(names, point, strict=True))}
        return simulation.hyperparameters(**(start | changes))

    calibrated = [
        float(
            simulation.calibrate(
                simulation.hyperparameters(**start),
                epsilon=epsilon, rounds=setting.rounds, delta=setting.delta,
            ).noise_multiplier
        )
        for epsilon in EPSILONS
    ]  # fmt: skip
    first = [hparams(1.0 + point[0], *point) for point in grid]  # so that all of them vary
    program = SimulationBatch(simulation, first)

    def run(settings, seeds) -> np.ndarray:
        batch, found = program.with_runs(simulation, settings), []
        for seed in seeds:
            _, history = batch.run(batch.init(seed), setting.rounds)
            found.append(np.asarray(history[-1].evaluation.mean("accuracy"))[: len(settings)])
        return np.array(found)

    chosen = []
    for z in calibrated:
        tuned = run([hparams(z, *point) for point in grid], TUNING).mean(axis=0)
        chosen.append(grid[int(np.argmax(tuned))])
    final = run([hparams(z, *at) for z, at in zip(calibrated, chosen, strict=True)], FINAL)
    return {
        "noise_multiplier": calibrated,
        "chosen": chosen,
        "accuracy": final.mean(axis=0).tolist(),
        "error": (final.std(axis=0, ddof=1) / math.sqrt(len(final))).tolist(),
    }


def main() -> None:
    """Compute everything, write it, and print the tables."""
    result: dict[str, Any] = {"gains": gains(), "populations": {}}
    for name, setting in SETTINGS.items():
        population = fjs.data.split(setting.population(), test=0.2, seed=0)
        of_setting = arms(setting)
        found: dict[str, Any] = {
            "noise": {arm: noise(parts, setting) for arm, parts in of_setting.items()},
            "systems": {system: {} for system in SYSTEMS},
        }
        result["populations"][name] = found
        for (system, by_arm), arm in itertools.product(found["systems"].items(), of_setting):
            by_arm[arm] = accuracy(system, of_setting[arm], setting, population)
            pairs = zip(by_arm[arm]["accuracy"], by_arm[arm]["error"], strict=True)
            values = " | ".join(f"{100 * a:.1f} ± {100 * e:.1f}" for a, e in pairs)
            print(f"{name} | {system} | {arm} | {values}", flush=True)
        for arm, values in found["noise"].items():
            print(f"{name} | noise | {arm} | " + " | ".join(f"{value:.3g}" for value in values))
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["gains"]:
        print(" | ".join(f"{value:.4g}" for value in row.values()))


if __name__ == "__main__":
    main()
