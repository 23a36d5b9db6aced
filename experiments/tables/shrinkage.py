"""Private runs whose clients shrink by rows: λ by a public guess, an estimate, and a private one.

    python experiments/tables/shrinkage.py OUT [--tables NAME …]

runs Ditto and PMTL on the regressions of tables.py at ε = 4 for whole clients, with the default
clip norm: λ = 0.1 for all clients, λ = 1 by rows (`pull = rows`), λ by rows from
`data.variance_ratios`, which no ε covers, and λ by rows from statistics that all clients release
for a tenth of the budget. It prints nMSE, means over three seeds, a row for each table and system.

The statistics are a client's variance of the target, whether it has two rows, its mean, the square
of the mean, and 1/n: five numbers of norm √5 at most. The variance within clients and between them
follow, as in a one-way analysis of variance.
"""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tables import TABLES, parsed, settings_of

from fedjaxsim.data import variance_ratios
from fedjaxsim.data.population import Population
from fedjaxsim.privacy.mechanisms import release_once
from fedjaxsim.runs.assemble import population_of, simulation_of
from fedjaxsim.runs.settings import run_config

ALGORITHMS, EPSILON, SEEDS, ROUNDS = ("ditto", "pmtl"), 4.0, (0, 1, 2), 100
KINDS = {"0.1": "equal", "1, by rows": "rows", "estimated": "rows", "private": "rows"}
SHARE = 0.1
"""Share of the budget, a sum of 1/z², that private statistics take."""


def private_ratio(population: Population, z: float, seed: int) -> float:
    """Return the variance within clients over that between them, from noised means."""
    train = population.splits["train"]
    targets = np.split(population.fields["y"][train.all_rows()], np.cumsum(train.count)[:-1])
    sent = np.array([
        [min(1, y.var(ddof=1)) if n > 1 else 0, n > 1, y.mean(), y.mean() ** 2, 1 / n]
        for y, n in zip(targets, train.count.tolist(), strict=True)
    ], np.float32)  # fmt: skip
    key, everyone = jax.random.key(seed), jnp.ones(len(sent), bool)
    released = release_once(jnp.asarray(sent), everyone, key, clip=math.sqrt(5), noise_multiplier=z)
    within, several, mean, square, inverse = np.asarray(released, float)
    within = max(within / max(several, 0.05), 1e-4)
    return within / max(square - mean**2 - within * inverse, within / 1e3)


def errors_of(name: str, algorithm: str, folder: Path) -> dict[str, float]:
    """Return the mean nMSE over seeds by kind of λ."""
    settings = {key.replace("-", "_"): value for key, value in settings_of(name, folder).items()}
    simulations, errors = {}, {}
    for seed in SEEDS:
        for kind, pull in KINDS.items():
            config = run_config(
                **settings, algorithm=algorithm, pull=pull, seed=seed, sampling="full",
                rounds=ROUNDS, epsilon=EPSILON,
            )  # fmt: skip
            population = population_of(config)
            if pull not in simulations:
                simulations[pull] = simulation_of(config, population)
            sim = simulations[pull].with_population(population)
            by_rows = {"lam": 1.0} if pull == "rows" else {}
            hparams = sim.hyperparameters(clip=sim.clip_norm, **by_rows)
            hparams = sim.calibrate(hparams, epsilon=EPSILON, rounds=ROUNDS)
            if kind == "estimated":
                hparams = hparams.replace(**variance_ratios(population))
            elif kind == "private":
                budget = ROUNDS / float(hparams.noise_multiplier) ** 2
                ratio = private_ratio(population, (SHARE * budget) ** -0.5, seed)
                z = math.sqrt(ROUNDS / ((1 - SHARE) * budget))
                hparams = hparams.replace(
                    lam=max(1.0, ratio), lam_intercept=ratio, noise_multiplier=z
                )
            state, _ = sim.run(sim.init(seed, hparams), hparams, ROUNDS)
            error = sim.evaluate(state, hparams).summary()["test_nmse"]
            errors.setdefault(kind, []).append(float(error))
    return {kind: float(np.mean(of_seeds)) for kind, of_seeds in errors.items()}


def main() -> None:
    """Print errors, a row for each table and system."""
    regressions = [name for name, table in TABLES.items() if f" {table.target}=" in table.ranges]
    args = parsed(main.__doc__, regressions)
    print("|  |", " | ".join(KINDS), "|")
    print("|", " | ".join(["---"] * (1 + len(KINDS))), "|")
    for name in args.tables:
        for algorithm in ALGORITHMS:
            errors = errors_of(name, algorithm, args.out).values()
            cells = (f"{error:.2g}" if error < 0.1 else f"{error:.3f}" for error in errors)
            print(f"| {name}, {algorithm} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
