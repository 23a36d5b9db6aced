"""PMTL against private FedAvg, private FedProx and Local on FEMNIST with networks, at equal ε.

    python benchmarks/femnist_table.py leaf:PATH/TO/femnist/mytest.json.zip --model mlp
    python benchmarks/femnist_table.py leaf:PATH/TO/femnist/mytest.json.zip --model cnn \
        --rounds 40 --no-choice

The linear model, with more methods and ε, is in experiments/multi_task. Networks need a short grid
or none, all cores, and one run at a time: the models of all clients are large. 206 writers, 80/20
split per writer, Poisson cohorts of expected size 100, one local epoch of batch 10, T rounds; ε for
zero-out in the joint-DP view at δ = 1/(10 m). Pixels are inverted (x ↦ 1 − x, paper 0 and ink 1).

For every algorithm and ε the hyperparameters are chosen on a validation split (a quarter of the
training rows) of one extra seed, from the grids below; then that choice runs with each of the seeds
on all training rows. Each seed has its own split, initial model, cohorts and noise. The choice is
made on private data and is not covered by ε, as in the papers. With --no-choice one setting is used
throughout, for a model that takes long.
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import jax
import numpy as np
import tyro
from common import Record, read_by, use_all_cores
from tyro.conf import Positional

import fedjaxsim as fjs
from fedjaxsim.data.transforms import invert
from fedjaxsim.privacy.calibration import noise_multiplier
from fedjaxsim.report.files import write_json

COHORT, BATCH, SELECTION_SEED, CLASSES = 100, 10, 1000, 62
RATES, CLIPS = (0.1, 0.3), (0.1, 0.3, 1.0)
PULLS = {"pmtl": ("lam", (0.03, 0.1, 0.3)), "fedprox": ("mu", (0.1, 1.0))}
ONE = {"learning_rate": 0.1, "clip_norm": 0.3, "lam": 0.03, "mu": 0.1}
"""The setting without a choice."""
MODELS = {"mlp": fjs.models.mlp, "cnn": fjs.models.cnn}
Name = Literal["pmtl", "fedavg", "fedprox", "local"]
ALGORITHMS = {"pmtl": fjs.pmtl, "fedavg": fjs.fedavg, "fedprox": fjs.fedprox, "local": fjs.local}


def candidates(algorithm: str, private: bool, choice: bool) -> list[dict[str, float]]:
    """Return the grid of an algorithm; without a choice its one point."""
    if not choice:
        return [ONE | ({} if private else {"clip_norm": math.inf})]
    clips = CLIPS if private and algorithm != "local" else (math.inf,)
    name, values = PULLS.get(algorithm, ("lam", (0.0,)))
    return [
        {"learning_rate": rate, "clip_norm": clip, name: value}
        for rate, clip, value in itertools.product(RATES, clips, values)
    ]


def main(
    source: Positional[str],
    model: Literal["mlp", "cnn"] = "mlp",
    algorithms: Sequence[Name] = get_args(Name),
    epsilons: Sequence[float] = (0.5, 2, 8, math.inf),
    rounds: int = 100,
    seeds: int = 3,
    choice: bool = True,
    out: Path | None = None,
) -> None:
    """Choose hyperparameters, run, print the table and write the results.

    Args:
      source: leaf:PATH of the FEMNIST file.
      model: of every client.
      algorithms: that are compared.
      epsilons: targets; inf is without noise.
      rounds: T.
      seeds: of the final runs.
      choice: whether hyperparameters are chosen.
      out: a JSON file for the results.
    """
    use_all_cores()

    def population(seed: int, validation: float = 0.0) -> fjs.Population:
        return invert(fjs.data.load(source, test=0.2, validation=validation, seed=seed))

    selection, populations = population(SELECTION_SEED, 0.2), list(map(population, range(seeds)))
    m = selection.num_clients
    delta, p = 1 / (10 * m), COHORT / m
    task = fjs.tasks.softmax(MODELS[model](selection.fields["x"].shape[1:], CLASSES), CLASSES)

    def run(simulation: fjs.Simulation, hparams: fjs.Hyperparameters, seed: int):
        state = simulation.init(seed, hparams)
        state, (segment,) = simulation.run(state, hparams, rounds)
        return state, segment.evaluation

    rows: list[Record] = []
    for name in algorithms:
        chooser = fjs.Simulation(
            ALGORITHMS[name](task), selection, fjs.poisson(p), fjs.Minibatches(BATCH, epochs=1),
            fjs.no_release() if name == "local" else fjs.gaussian(), devices=jax.devices(),
        )  # fmt: skip
        scheme = chooser.sampling.scheme
        for epsilon in [math.inf] if name == "local" else epsilons:
            private, z = math.isfinite(epsilon), 0.0
            if private:
                z = noise_multiplier(epsilon, delta, rounds=rounds, sampling_rate=p, scheme=scheme)
            points = [{"noise_multiplier": z} | each for each in candidates(name, private, choice)]
            scores = []
            for point in points if len(points) > 1 else ():
                hparams = read_by(chooser, point)
                state, _ = run(chooser, hparams, SELECTION_SEED)
                scores.append(chooser.evaluate(state, hparams, "validation").mean("accuracy"))
            chosen = points[int(np.argmax(scores))] if scores else points[0]
            hparams = read_by(chooser, chosen)
            finals = [
                run(chooser.with_population(each), hparams, seed)
                for seed, each in enumerate(populations)
            ]
            means = [evaluation.mean("accuracy") for _, evaluation in finals]
            guarantee = chooser.guarantee(finals[0][0], delta)
            del chosen["noise_multiplier"]
            rows.append({
                "algorithm": name,
                "target_epsilon": epsilon if private else None,
                "guarantee": guarantee.to_json(),
                "noise_multiplier": z,
                "chosen": {k: v for k, v in chosen.items() if math.isfinite(v)},
                "test_accuracy": means,
                "test_accuracy_p10": [e.percentiles("accuracy")[0] for _, e in finals],
                "test_accuracy_p90": [e.percentiles("accuracy")[2] for _, e in finals],
            })  # fmt: skip
            spent = [guarantee.find(kind).epsilon for kind in ("zero_out", "replace")]
            texts = ["∞" if each is None else f"{each:.3f}" for each in spent]
            spread = np.std(means, ddof=1) if seeds > 1 else 0.0
            score = f"{np.mean(means):.3f} ± {spread:.3f}"
            print(f"| {name} | {model} | {' | '.join(texts)} | {z:.3f} | {score} | {chosen} |")
    if out is not None:
        device = jax.devices()[0]
        settings = {
            "model": model,
            "choice": "by validation" if choice else None,
            "rounds": rounds,
            "delta": delta,
            "sampling_rate": p,
            "jax": jax.__version__,
            "device": f"{device.platform}: {device.device_kind}",
        }
        write_json(out, {"settings": settings, "rows": rows})


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
