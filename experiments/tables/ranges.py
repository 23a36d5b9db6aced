"""Ranges that clients release with noise, beside public ranges that are too wide.

    python experiments/tables/ranges.py OUT [--tables NAME …]

runs FedAvg and Ditto of `systems.toml` on the tables of tables.py, at ε = 1 and 4 for whole clients
and with the default clip norm, with ranges of four kinds: the public ones of tables.py, 3 and 10
times wider ones around the same centres, and private ones (`privacy.scale_privately`), whose price
is part of the same ε. It prints the errors of tables.py, means over three seeds, a row for each
table and system; – where the private ranges alone cost more than ε.
"""

import math
from pathlib import Path

import numpy as np
from tables import TABLES, parsed, settings_of

from fedjaxsim.data.transforms import Range, ranges_of, scale
from fedjaxsim.privacy import scale_privately
from fedjaxsim.runs.assemble import population_of, simulation_of
from fedjaxsim.runs.settings import run_config

ALGORITHMS, LEVELS, SEEDS, ROUNDS = ("fedavg", "ditto"), (1.0, 4.0), (0, 1, 2), 100
WIDER = {"public": 1.0, "3 ×": 3.0, "10 ×": 10.0}


def wider(ranges: dict[str, Range], factor: float) -> dict[str, Range]:
    """Return ranges around the same centres, `factor` times as wide."""
    centres = {name: (low + high) / 2 for name, (low, high) in ranges.items()}
    halves = {name: factor * (high - low) / 2 for name, (low, high) in ranges.items()}
    return {name: (centres[name] - halves[name], centres[name] + halves[name]) for name in ranges}


def errors_of(name: str, algorithm: str, folder: Path) -> dict[tuple[str, float], float]:
    """Return the mean error over seeds by kind of range and ε; NaN where ranges cost more."""
    settings = {key.replace("-", "_"): value for key, value in settings_of(name, folder).items()}
    public = ranges_of(settings.pop("range"))
    classes, simulation = settings["loss"] == "softmax", None
    errors: dict[tuple[str, float], list[float]] = {}
    for seed in SEEDS:
        config = run_config(
            **settings, algorithm=algorithm, seed=seed, sampling="full", rounds=ROUNDS
        )
        table = population_of(config)
        scaled = {kind: scale(table, wider(public, factor)) for kind, factor in WIDER.items()}
        scaled["private"] = scale_privately(table, target=not classes, seed=seed)
        for kind, population in scaled.items():
            if simulation is None:
                simulation = simulation_of(config, population)
            sim = simulation.with_population(population)
            for epsilon in LEVELS:
                hparams = sim.hyperparameters(clip=sim.clip_norm)
                try:
                    hparams = sim.calibrate(hparams, epsilon=epsilon, rounds=ROUNDS)
                except ValueError:  # the ranges alone cost more
                    errors.setdefault((kind, epsilon), []).append(math.nan)
                    continue
                state, _ = sim.run(sim.init(seed, hparams), hparams, ROUNDS)
                values = sim.evaluate(state, hparams).summary()
                error = 1 - values["test_accuracy_weighted"] if classes else values["test_nmse"]
                errors.setdefault((kind, epsilon), []).append(float(error))
    return {key: float(np.mean(of_seeds)) for key, of_seeds in errors.items()}


def main() -> None:
    """Print errors at each ε, a row for each table and system."""
    args = parsed(main.__doc__, TABLES)
    kinds = [*WIDER, "private"]
    print("|  |", " | ".join(kinds), "|")
    print("|", " | ".join(["---"] * (1 + len(kinds))), "|")
    for name in args.tables:
        for algorithm in ALGORITHMS:
            errors = errors_of(name, algorithm, args.out)
            cells = (" · ".join(_cell(errors[kind, e]) for e in LEVELS) for kind in kinds)
            print(f"| {name}, {algorithm} |", " | ".join(cells), "|", flush=True)


def _cell(error: float) -> str:
    return "–" if math.isnan(error) else f"{error:.2g}" if error < 0.1 else f"{error:.3f}"


if __name__ == "__main__":
    main()
