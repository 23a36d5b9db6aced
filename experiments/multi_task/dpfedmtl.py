"""DPFedMTL's Tables 2 and 3 and its Figure 4 on FEMNIST, with the ε that really holds.

    python experiments/multi_task/dpfedmtl.py $FEDJAXSIM_DATA

σ ∈ {0.11, 0.65, 2.42, 9.69} as in the paper, for DPFedMTL and DPFedAvg each with two mechanisms: as
published (noise at the clients at the scale S = 2CK/M, which guarantees nothing) and central
(z = σ, with its ε); beside them Local, FedAvg and FedMTL in both orders without noise. K = 3 of the
206 writers in a round, Poisson, 1000 rounds, one local epoch of batch 10 (the paper names neither
its H nor its batches), accuracy weighted by examples as in the paper, δ = 1e-5.

Instead of the paper's CNN it is an MLP 784–32–62 with its output layer as the head, and the 206
writers have a tenth of their images. η and C are chosen for every method and σ among as many points
on a validation split of an extra seed; the paper takes those of LEAF.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import figures
from data_sets import PROBLEMS, Problem
from equal_privacy import PICTURES, RESULTS
from harness import Parts, Trial, finite, shortened, write
from methods import METHODS
from tables import difference, epsilon_text, markdown, spread

from fedjaxsim.models import mlp
from fedjaxsim.privacy.calibration import spent
from fedjaxsim.tasks import softmax

COHORT, CLIENTS, DELTA = 3, 206, 1e-5
SIGMAS = {0.11: 45.0, 0.65: 8.0, 2.42: 2.0, 9.69: 0.5}
"""The paper's σ, each with the ε that it claims for one step."""
PLAIN = ("local", "fedavg", "dpfedmtl", "dpfedmtl-head-first")
NOISED = ("fedavg-as-published", "fedavg", "dpfedmtl-as-published", "dpfedmtl")
PAIRS = ("FedMTL − FedAvg", "FedMTL − Local")
PAPER = {
    "local": {0.0: 0.7791},
    "fedavg": {0.0: 0.7844, 0.11: 0.7600, 0.65: 0.4218, 2.42: 0.0567, 9.69: 0.0079},
    "dpfedmtl": {0.0: 0.8124, 0.11: 0.8156, 0.65: 0.8158, 2.42: 0.8060, 9.69: 0.7679},
}
"""Table 2 and 3, FEMNIST."""


def problem() -> Problem:
    """Return the paper's experiment, as far as these data carry it."""
    return dataclasses.replace(
        PROBLEMS["femnist"],
        model=lambda population: softmax(mlp((784,), 62, hidden=(32,)), 62),
        rate=COHORT / CLIENTS,
        rounds=1000,
        metric="accuracy_weighted",
        points=8,
        at_once=8,
        chunk_size=4,
        every=50,
    )


def noise_of(name: str) -> dict[float, float]:
    """Return the noise multiplier of a method at each σ; a run without noise is at σ = 0."""
    noise = {0.0: 0.0} if name in PLAIN else {}
    if name in NOISED:
        # At a client the paper's noise has the standard deviation σ · 2CK/M.
        scale = 2 * COHORT / CLIENTS if name == "fedavg-as-published" else 1.0
        noise |= {sigma: sigma * scale for sigma in SIGMAS}
    return noise


def privacy() -> list[dict[str, Any]]:
    """Return the guarantee of the central mechanism at z = σ, beside the paper's claims."""
    rows = []
    for sigma, claim in SIGMAS.items():
        setting = problem()
        run = (sigma, setting.rate, setting.rounds, DELTA, setting.scheme(CLIENTS))
        rows.append(
            {
                "sigma": sigma,
                "claim_per_step": claim,
                "zero_out": finite(spent(*run)),
                "replace": finite(spent(*run, adjacency="replace")),
                # For σ = 0.11 its μ is 10¹⁷.
                "clt": spent(*run, accountant="clt") if sigma > 0.5 else None,
            }
        )
    return rows


def values(rows: dict[str, Any], sigma: float) -> list[float]:
    """Return the weighted accuracy of a method at one σ, by seed."""
    return [test["test_accuracy_weighted"] or 0.0 for test in rows[str(sigma)]["test"]]


def table(result: dict[str, Any]) -> str:
    """Make the table of weighted accuracy by σ and method, with the paper's numbers and ε."""
    names = [*PLAIN, *(name for name in NOISED if name not in PLAIN)]
    rows = []
    for sigma in (0.0, *SIGMAS):
        about = next((one for one in result["privacy"] if one["sigma"] == sigma), None)
        cells = []
        for name in names:
            of = result["methods"][name]
            paper = PAPER.get(name.removesuffix("-as-published"), {}).get(sigma)
            printed = f" ({paper:.3f})" if paper is not None else ""
            cells.append(spread(values(of, sigma)) + printed if str(sigma) in of else "")
        if about is None:
            head = "none"
        else:
            epsilons = (about[key] for key in ("claim_per_step", "clt", "zero_out", "replace"))
            head = f"{sigma:g}: {'; '.join(map(epsilon_text, epsilons))}"
        rows.append([head, *cells])
    titles = (METHODS[name].title for name in names)
    return markdown(["σ: ε as claimed for one step; by the CLT; zero-out; replace", *titles], rows)


def differences(result: dict[str, Any]) -> str:
    """Make the table of gains of personal heads at each σ, paired over seeds."""
    of = result["methods"]
    rows = []
    for sigma in (0.0, *SIGMAS):
        cells = [
            str(difference(values(of[ours], sigma), values(of[theirs], level), larger=True))
            if str(sigma) in of[ours]
            else ""
            for ours, theirs, level in (
                ("dpfedmtl", "fedavg", sigma),
                ("dpfedmtl", "local", 0.0),
                ("dpfedmtl-as-published", "fedavg-as-published", sigma),
                ("dpfedmtl-as-published", "local", 0.0),
            )
        ]
        rows.append([f"{sigma:g}" if sigma else "none", *cells])
    heads = [f"{place}: {one}" for place in ("central", "as published") for one in PAIRS]
    return markdown(["σ", *heads], rows)


def main() -> None:
    """Run unfinished parts, print the table, write results and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where femnist/ lies")
    parser.add_argument("--parts", type=Path, default=Path("runs/multi-task/dpfedmtl"))
    args = parser.parse_args()
    setting, parts = problem(), Parts(args.parts)
    result: dict[str, Any] = {
        "rounds": setting.rounds,
        "every": setting.every,
        "delta": DELTA,
        "privacy": parts.get("privacy", [list(SIGMAS), setting.rounds], privacy),
        "methods": {},
    }
    for name in dict.fromkeys((*NOISED, *PLAIN)):
        trial = Trial(setting, METHODS[name], args.folder, parts, name)
        noise = noise_of(name)
        chosen = trial.choose(noise)
        tests = trial.judge(noise, {sigma: one["point"] for sigma, one in chosen.items()})
        result["methods"][name] = {
            str(sigma): {**one, "test": [shortened(of_seed, setting.metric) for of_seed in test]}
            for (sigma, one), test in zip(chosen.items(), tests, strict=True)
        }
        print(name, {sigma: one["at_edge"] for sigma, one in chosen.items()}, flush=True)
    write(RESULTS / "dpfedmtl.json", result)
    print(f"\n{differences(result)}\n\n{table(result)}")
    figures.save(figures.convergence(result, max(SIGMAS)), PICTURES / "dpfedmtl-4.png")


if __name__ == "__main__":
    main()
