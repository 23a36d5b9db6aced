"""PMTL over the rounds on FEMNIST at the paper's noise and clip norms (PMTL's Figures 2 and 4).

    python experiments/multi_task/rounds.py $FEDJAXSIM_DATA

Noise of standard deviation σ ∈ {0.02, 0.05, 0.1} on the average of 100 messages that are clipped at
γ ∈ {0.2, 0.5, 1}: z = 100 σ/γ. Softmax regression instead of the paper's CNN, 206 writers with a
tenth of their images, cohorts that are Poisson of expected size 100, and both messages; η and λ of
each message are those that `equal_privacy.py` chose at ε = ∞. ε is that of the paper's figure
(moments accountant, δ = 1/m) and the sound one (zero-out in the joint-DP view, δ = 1/(10 m)).

A round of ten settings takes half a second of one core, so 100 of the paper's 1000 rounds are run;
ε is drawn for all 1000.
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
from harness import Parts, Record, Trial, rounded, write
from methods import METHODS, hyperparameters
from tables import difference, epsilon_text, markdown, spread

from fedjaxsim.privacy.calibration import spent

MESSAGES = ("pmtl", "pmtl-offset")
COHORT, SIGMAS, CLIPS = 100, (0.02, 0.05, 0.1), (0.2, 0.5, 1.0)
SHOWN = 4
"""The setting in Figure 2: σ = 0.05, γ = 0.5."""
SPENT_AT = (1, 25, 50, 100, 200, 400, 700, 1000)
"""Rounds after which ε is computed; the last is the end of the paper's figure."""


def noises() -> list[Record]:
    """Return the paper's nine settings, and the one without noise."""
    pairs = [(sigma, clip) for clip in CLIPS for sigma in SIGMAS]
    private = [
        {"sigma": sigma, "clip_norm": clip, "noise_multiplier": sigma * COHORT / clip}
        for sigma, clip in pairs
    ]
    return [*private, {"sigma": 0.0, "clip_norm": math.inf, "noise_multiplier": 0.0}]


def curves(trial: Trial, point: Record, seed: int, rounds: int, every: int) -> Record:
    """By setting, accuracy after every so many rounds and the training loss of every round."""
    simulation = trial.simulation(seed)
    settings = [
        hyperparameters(
            simulation,
            {name: value for name, value in {**point, **noise}.items() if name != "sigma"},
        )
        for noise in noises()
    ]
    many = trial.many(simulation, settings, settings)
    _, segments = many.run(many.init(seed), rounds, eval_every=every)
    accuracy = np.stack([segment.evaluation.mean("accuracy") for segment in segments], axis=1)
    loss = np.concatenate([segment.metrics["loss"] for segment in segments]).T
    return {"accuracy": _rounded(accuracy), "loss": _rounded(loss[[SHOWN, -1]])}


def _rounded(values: np.ndarray) -> list[list[float | None]]:
    return [[rounded(value) for value in row] for row in values.tolist()]


def epsilons(clients: int, rate: float, rounds: tuple[int, ...]) -> dict[str, Any]:
    """ε after so many rounds for each of the paper's settings, as it counts and as it is."""
    scheme = PROBLEMS["femnist"].scheme(clients)
    found: dict[str, list[list[float | None]]] = {"sound": [], "paper": []}
    for noise in noises()[:-1]:
        z = noise["noise_multiplier"]
        sound = [spent(z, rate, t, 1 / (10 * clients), scheme) for t in rounds]
        paper = [spent(z, rate, t, 1 / clients, scheme, accountant="rdp") for t in rounds]
        found["sound"].append([rounded(epsilon) for epsilon in sound])
        found["paper"].append([rounded(epsilon) for epsilon in paper])
    return found


def table(result: Record) -> str:
    """Make the table of final accuracy at every noise, with both ε at the end of both runs."""
    rows = []
    for index, noise in enumerate([*result["noises"], None]):
        update, offset = (
            [seed["accuracy"][index][-1] for seed in result[name]["seeds"]] for name in MESSAGES
        )
        cells = [spread(update), spread(offset), difference(offset, update, larger=True)]
        if noise is None:
            rows.append(["none", "∞", "∞", *cells])
            continue
        ends = (result["epsilon_at"].index(result["rounds"]), -1)
        texts = [
            " and ".join(epsilon_text(result["epsilon"][kind][index][end]) for end in ends)
            for kind in ("sound", "paper")
        ]
        rows.append([f"{noise['sigma']:g}, {noise['clip_norm']:g}", *texts, *cells])
    ends = f"after {result['rounds']} and {result['epsilon_at'][-1]} rounds"
    head = ["σ, γ", f"ε zero-out, {ends}", "ε as the paper counts"]
    return markdown([*head, *(METHODS[name].title for name in MESSAGES), "offset − update"], rows)


def main() -> None:
    """Run unfinished parts, print the table, write results and pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where femnist/ lies")
    parser.add_argument("--rounds", type=int, choices=SPENT_AT, default=100)
    parser.add_argument("--every", type=int, default=10, help="rounds between evaluations")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parts", type=Path, default=Path("runs/multi-task/rounds"))
    args = parser.parse_args()
    problem, parts = PROBLEMS["femnist"], Parts(args.parts)
    chosen = json.loads((RESULTS / "compare-femnist.json").read_text())["methods"]
    clients = problem.read(args.folder, 0, 0.0).num_clients
    result: dict[str, Any] = {
        "rounds": args.rounds,
        "every": args.every,
        "noises": noises()[:-1],
        "shown": SHOWN,
        "epsilon_at": SPENT_AT,
        "epsilon": parts.get(
            "epsilon", list(SPENT_AT), lambda: epsilons(clients, problem.rate, SPENT_AT)
        ),
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
    write(RESULTS / "rounds.json", result)
    print(table(result))
    figures.save(figures.over_rounds(result, MESSAGES), PICTURES / "pmtl-4.png")
    figures.save(figures.loss_and_epsilon(result, MESSAGES), PICTURES / "pmtl-2.png")


if __name__ == "__main__":
    main()
