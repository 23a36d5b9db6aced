"""PMTL over the rounds on FEMNIST at the paper's noise and clip norms (PMTL's Figures 2 and 4).

    python experiments/multi_task/rounds.py $FEDJAXSIM_DATA

Noise of standard deviation σ ∈ {0.02, 0.05, 0.1} on the average of 100 messages that are clipped at
γ ∈ {0.2, 0.5, 1}: z = 100 σ/γ. Softmax regression instead of the paper's CNN, 206 writers with a
tenth of their images, cohorts that are Poisson of expected size 100, and both messages; η and λ of
each message are those that `equal_privacy.py` chose at ε = ∞. ε is that of the paper's figure
(moments accountant, δ = 1/m) and the sound one (zero-out in the joint-DP view, δ = 1/(10 m)).

A round of ten settings takes about 0.3 seconds of one core, so 200 of the paper's 1000 rounds are
run; ε is drawn for all 1000.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import figures
import numpy as np
from data_sets import PROBLEMS
from equal_privacy import PICTURES, RESULTS
from harness import Parts, Record, Trial, finite
from methods import METHODS, hyperparameters

from fedjaxsim.privacy.calibration import spent
from fedjaxsim.runs.many import ManyRuns

MESSAGES = ("pmtl", "pmtl-offset")
COHORT, SIGMAS, CLIPS = 100, (0.02, 0.05, 0.1), (0.2, 0.5, 1.0)
SHOWN = 4
"""The setting in Figure 2: σ = 0.05, γ = 0.5."""
LONG = 1000
"""Rounds of the paper's figure."""


def noises() -> list[Record]:
    """The paper's nine settings, and the one without noise."""
    pairs = [(sigma, clip) for clip in CLIPS for sigma in SIGMAS]
    private = [
        {"sigma": sigma, "clip_norm": clip, "noise_multiplier": sigma * COHORT / clip}
        for sigma, clip in pairs
    ]
    return [*private, {"sigma": 0.0, "clip_norm": math.inf, "noise_multiplier": 0.0}]


def curves(trial: Trial, point: Record, seed: int, rounds: int, every: int) -> Record:
    """Accuracy after every so many rounds, and the training loss of every round, by setting."""
    settings = [
        hyperparameters(
            {name: value for name, value in {**point, **noise}.items() if name != "sigma"},
            trial.problem.rate,
        )
        for noise in noises()
    ]
    many = ManyRuns(trial.simulation(seed), settings)
    _, segments = many.run(many.init(seed), rounds, eval_every=every)
    return {
        "accuracy": [list(segment.evaluation.mean("accuracy")) for segment in segments],
        "loss": np.concatenate([segment.metrics["loss"] for segment in segments]).tolist(),
    }


def epsilons(clients: int, rate: float, rounds: list[int]) -> dict[str, Any]:
    """ε after so many rounds for each of the paper's settings, as it counts and as it is."""
    scheme = PROBLEMS["femnist"].sampling(clients).scheme
    found: dict[str, list[list[float | None]]] = {"sound": [], "paper": []}
    for noise in noises()[:-1]:
        z = noise["noise_multiplier"]
        sound = [spent(z, rate, t, 1 / (10 * clients), scheme) for t in rounds]
        paper = [spent(z, rate, t, 1 / clients, scheme, accountant="rdp") for t in rounds]
        found["sound"].append([finite(epsilon) for epsilon in sound])
        found["paper"].append([finite(epsilon) for epsilon in paper])
    return found


def main() -> None:
    """Runs what is not there yet, writes results and pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where femnist/ lies")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="rounds between evaluations")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parts", type=Path, default=Path("runs/multi-task/rounds"))
    args = parser.parse_args()
    problem, parts = PROBLEMS["femnist"], Parts(args.parts)
    chosen = json.loads((RESULTS / "compare-femnist.json").read_text())["methods"]
    clients = problem.read(args.folder, 0, 0.0).num_clients
    at = [1, *range(50, LONG + 1, 50)]
    result: dict[str, Any] = {
        "rounds": args.rounds,
        "every": args.every,
        "evaluations": -(-args.rounds // args.every),
        "noises": noises()[:-1],
        "epsilon_at": at,
        "epsilon": parts.get("epsilon", at, lambda: epsilons(clients, problem.rate, at)),
    }
    for name in MESSAGES:
        point = chosen[name][-1]["point"]
        trial = Trial(problem, METHODS[name], args.folder, parts, name)
        of_seeds = []
        for seed in range(args.seeds):
            plan = (trial, point, seed, args.rounds, args.every)
            of = [point, seed, args.rounds, args.every]
            of_seeds.append(parts.get(f"{name}-{seed}", of, lambda plan=plan: curves(*plan)))
        result[name] = {"point": point, "seeds": of_seeds}
    (RESULTS / "rounds.json").write_text(json.dumps(result) + "\n")
    figures.save(figures.over_rounds(result, MESSAGES), PICTURES / "pmtl-4.png")
    figures.save(figures.loss_and_epsilon(result, MESSAGES, SHOWN), PICTURES / "pmtl-2.png")


if __name__ == "__main__":
    main()
