"""Tuning λ and η of PMTL by hypergradients on a third of FEMNIST's writers, for the others.

    python benchmarks/tuning_femnist.py leaf:PATH/TO/mytest.json.zip [--seeds 3] [--out FILE]

A linear model, images turned over, 50 rounds, Poisson cohorts of half the writers, one local epoch
of batch 10, C = 0.3, ε = 2 for the others' run. Tuned is the mean loss per writer on a validation
split, mean over seeds, from a poor start and on a grid of 25 points, with the same seeds; judged is
the test accuracy of the other writers, with other seeds. On the third of the writers z is scaled so
that the noise on the mean message is that of the others' run: they count as public, no ε covers
them.
"""

import itertools
from pathlib import Path

import jax
import numpy as np
import tyro
from common import RESULTS, Record, use_all_cores, with_error
from tyro.conf import Positional

import fedjaxsim as fjs
from fedjaxsim.data import load
from fedjaxsim.data.hold_out import hold_out
from fedjaxsim.data.transforms import invert
from fedjaxsim.privacy.calibration import noise_multiplier
from fedjaxsim.report.files import write_json
from fedjaxsim.tune import SeedGradient, descend

ROUNDS, EPSILON, RATE, CLIP, BATCH = 50, 2.0, 0.5, 0.3, 10
START = {"learning_rate": 0.005, "lam": 3.0}
AXIS = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Of the grid, for both."""


def tune(source: str, seeds: int, most: int) -> Record:
    """Tune λ and η of PMTL on a third of the writers, and judge them on the others."""
    writers = invert(load(source, test=0.2, validation=0.2, seed=0))
    others, third = hold_out(writers, 1 / 3, 0)
    task = fjs.tasks.softmax(fjs.models.linear(writers.fields["x"].shape[1:], 62), 62)

    def simulation(population):
        minibatches = fjs.Minibatches(BATCH, epochs=1)
        return fjs.Simulation(fjs.pmtl(task), population, fjs.poisson(RATE), minibatches)

    final, public = simulation(others), simulation(third)
    z = noise_multiplier(
        EPSILON, 1 / (10 * others.num_clients), rounds=ROUNDS, sampling_rate=RATE,
        scheme=final.sampling.scheme,
    )  # fmt: skip
    # The noise on the mean message is what the run on the others will have.
    scaled = z * third.num_clients / others.num_clients
    base = public.hyperparameters(clip_norm=CLIP, noise_multiplier=scaled)
    keys = jax.random.split(jax.random.key(3), seeds)
    names = tuple(START)
    measure = SeedGradient(public, base, ROUNDS, names, keys)
    path = descend(measure, START, steps=most - 1, cost=1 + len(names))
    points = [dict(zip(names, pair, strict=True)) for pair in itertools.product(AXIS, AXIS)]
    grid = measure.on_grid(points)
    assert grid is not None
    best = points[grid.best]
    candidates = {"start": START, "tuned": path.best.point, "best of the grid": best}
    private, fresh = base.replace(noise_multiplier=z), jax.random.split(jax.random.key(4), seeds)
    others_run = SeedGradient(final, private, ROUNDS, names, fresh, metric="accuracy", split="test")
    judged = others_run.on_grid(list(candidates.values()))
    assert judged is not None
    return {
        "epsilon": EPSILON,
        "rounds": ROUNDS,
        "writers": [third.num_clients, others.num_clients],
        "path": [
            {"point": step.point, "value": step.value, "kept": step.accepted, "runs": step.runs}
            for step in path.steps
        ],
        "stopped": path.stopped,
        "grid_runs": len(points),
        "validation_loss": {
            "start": path.steps[0].value,
            "tuned": path.best.value,
            "best of the grid": float(np.mean(grid.values[grid.best])),
        },
        "points": candidates,
        "test_accuracy_of_others": {
            name: with_error(values) for name, values in zip(candidates, judged.values, strict=True)
        },
    }


def main(
    source: Positional[str],
    seeds: int = 3,
    most: int = 20,
    out: Path = RESULTS / "tuning_femnist.json",
) -> None:
    """Tune PMTL on FEMNIST.

    Args:
      source: leaf:PATH of the FEMNIST file.
      seeds: of the objective, and as many others to judge.
      most: points that the descent measures.
      out: a JSON file for the results.
    """
    use_all_cores()
    results = {"jax": jax.__version__} | tune(source, seeds, most)
    print({key: value for key, value in results.items() if key != "path"})
    write_json(out, results)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
