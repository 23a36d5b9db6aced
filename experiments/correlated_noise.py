"""Correlated against independent noise at equal ε: the noise on sums of releases, and two systems.

    python experiments/correlated_noise.py

makes the numbers of experiments/systems/README.md, which experiments/pictures.py draws: 100 clients
with digits (Dirichlet 0.5), a linear model, one epoch a round, ten groups in turn, or as many
clients on average by Poisson sampling. Every arm is tuned at every ε on the same grid of learning
rates and clip norms, by the mean test accuracy over seeds 0 to 2, which no ε covers; seeds 3 to 12
are reported. δ = 1/(10 m), zero-out, joint DP.
"""

import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax_privacy.matrix_factorization import toeplitz

import fedjaxsim as fjs
from fedjaxsim.privacy.accounting.gaussian import coefficients, squared_sensitivity
from fedjaxsim.privacy.events import Correlated
from fedjaxsim.simulation_batch import SimulationBatch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results" / "correlated-noise.json"
CLIENTS, GROUPS, ROUNDS, DELTA = 100, 10, 100, 1e-3
BANDS, POWER = 4, 0.6
EPSILONS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
RATES, CLIPS = (0.03, 0.1, 0.3, 1.0), (0.1, 0.3, 1.0)
TUNING, FINAL = range(3), range(3, 13)
SEPARATIONS = ((100, 10), (100, 25), (400, 20), (1000, 1000), (2052, 342))
ARMS = {
    "independent, Poisson": (fjs.poisson(1 / GROUPS), fjs.gaussian()),
    "independent, groups": (fjs.privacy.fixed_groups(groups=GROUPS), fjs.gaussian()),
    "correlated, groups": (
        fjs.privacy.fixed_groups(groups=GROUPS),
        fjs.privacy.correlated(bands=BANDS, power=POWER),
    ),
}
SYSTEMS = {"FedAvg": fjs.fedavg, "PMTL": functools.partial(fjs.pmtl, message="update")}


def prefix_error(bands: int, power: float, rounds: int) -> float:
    """Compute the root mean square over rounds of the noise on sums of releases, at zC = 1."""
    padded = np.zeros(rounds)
    d = coefficients(bands, power)[:rounds]
    padded[: len(d)] = d
    return math.sqrt(np.mean(np.cumsum(np.cumsum(padded) ** 2)))


def gains() -> list[dict[str, float]]:
    """Compute the error of independent noise over that of other noise, for fixed groups."""

    def error(event, rounds, groups):
        squared = squared_sensitivity(event.bands, event.power, rounds, groups)
        return math.sqrt(squared) * prefix_error(event.bands, event.power, rounds)

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


def noise() -> dict[str, list[float]]:
    """Compute the root mean square of the noise on sums of releases, C = 1, by arm and ε."""
    events = [Correlated(), Correlated(), Correlated(bands=BANDS, power=POWER)]
    rows = {}
    for (name, (sampling, _)), event in zip(ARMS.items(), events, strict=True):
        scheme = sampling.for_clients(CLIENTS).scheme
        plan = {"rounds": ROUNDS, "sampling_rate": 1 / GROUPS, "scheme": scheme, "event": event}
        z = [fjs.privacy.noise_multiplier(epsilon, DELTA, **plan) for epsilon in EPSILONS]
        rows[name] = [one * prefix_error(event.bands, event.power, ROUNDS) for one in z]
    return rows


def accuracy(system: str, arm: str, population: fjs.Population, task: fjs.Task) -> dict[str, Any]:
    """Tune one arm at every ε, and report the choices with other seeds."""
    sampling, mechanism = ARMS[arm]
    simulation = fjs.Simulation(SYSTEMS[system](task), population, sampling, mechanism=mechanism)
    values: dict[str, Any] = {"sampling_rate": 1 / GROUPS, "lam": 0.1, "server_learning_rate": 1.0}
    if system == "PMTL":
        values["server_learning_rate"] = 1 / GROUPS  # its server adds up all releases
    values = {k: v for k, v in values.items() if k in simulation.records}
    grid = list(itertools.product(EPSILONS, RATES, CLIPS))
    start = {"learning_rate": 0.1, "clip": 1.0, "noise_multiplier": 1.0, **values}
    calibrated = {}
    for epsilon in EPSILONS:
        found = simulation.hyperparameters(**start)
        found = simulation.calibrate(found, epsilon=epsilon, rounds=ROUNDS, delta=DELTA)
        calibrated[epsilon] = float(found.noise_multiplier)
    settings = [
        start | {"learning_rate": rate, "clip": clip, "noise_multiplier": calibrated[epsilon]}
        for epsilon, rate, clip in grid
    ]
    batch = SimulationBatch(simulation, [simulation.hyperparameters(**one) for one in settings])

    def run(seeds):
        found = []
        for seed in seeds:
            _, history = batch.run(batch.init(seed), ROUNDS)
            found.append(np.asarray(history[-1].evaluation.mean("accuracy")))
        return np.array(found)

    tuned = run(TUNING).mean(axis=0).reshape(len(EPSILONS), -1)
    chosen = np.argmax(tuned, axis=1) + np.arange(len(EPSILONS)) * tuned.shape[1]
    final = run(FINAL)[:, chosen]
    return {
        "noise_multiplier": list(calibrated.values()),
        "chosen": [grid[index][1:] for index in chosen],
        "accuracy": final.mean(axis=0).tolist(),
        "error": (final.std(axis=0, ddof=1) / math.sqrt(len(final))).tolist(),
    }


def main() -> None:
    """Compute everything, write it, and print the tables."""
    fields = fjs.data.digits()
    population = fjs.data.split(
        fjs.data.dirichlet(fields, CLIENTS, 0.5, min_rows=5), test=0.2, seed=0
    )
    task = fjs.tasks.softmax(fjs.models.linear((64,), 10), 10)
    result: dict[str, Any] = {"gains": gains(), "noise": noise()}
    result["systems"] = {
        system: {arm: accuracy(system, arm, population, task) for arm in ARMS} for system in SYSTEMS
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["gains"]:
        print(" | ".join(f"{value:.4g}" for value in row.values()))
    for arm in ARMS:
        print(arm, [f"{value:.3g}" for value in result["noise"][arm]])
        for system, arms in result["systems"].items():
            pairs = zip(arms[arm]["accuracy"], arms[arm]["error"], strict=True)
            print("  ", system, [f"{100 * a:.1f} ± {100 * e:.1f}" for a, e in pairs])


if __name__ == "__main__":
    main()
