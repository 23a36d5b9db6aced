"""DP of all models, the naive way, beside PMTL, FedAvg and Local at equal ε (PMTL's Figure 1).

    python experiments/multi_task/naive.py $FEDJAXSIM_DATA

The others are read from what `equal_privacy.py` wrote, on the same data with the same tuning. The
noise on the matrix of all models takes long on FEMNIST, hence only three ε there.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import figures
from data_sets import MANY, PROBLEMS
from equal_privacy import PICTURES, RESULTS, table
from harness import Parts, Trial
from methods import METHODS

EPSILONS = {"digits": MANY, "femnist": (0.8, 2.0, 8.0)}
BESIDE = ("pmtl", "fedavg", "local")


def main() -> None:
    """Runs what is not there yet, prints the tables, writes results and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where femnist/ lies")
    parser.add_argument("--parts", type=Path, default=Path("runs/multi-task/naive"))
    args = parser.parse_args()
    results = {}
    for name, epsilons in EPSILONS.items():
        result = json.loads((RESULTS / f"compare-{name}.json").read_text())
        places = [i for i, one in enumerate(result["levels"]) if one["epsilon"] in epsilons]
        result["levels"] = [result["levels"][i] for i in places]
        others = {other: result["methods"][other] for other in BESIDE}
        noise = {one["epsilon"]: one["noise_multiplier"] for one in result["levels"]}
        problem = dataclasses.replace(PROBLEMS[name], epsilons=epsilons)
        trial = Trial(problem, METHODS["naive-dp"], args.folder, Parts(args.parts), name)
        chosen = trial.choose(noise)
        tests = trial.judge(noise, {epsilon: one["point"] for epsilon, one in chosen.items()})
        result["methods"] = {
            "naive-dp": [
                {**one, "test": test} for one, test in zip(chosen.values(), tests, strict=True)
            ]
        } | {
            other: [rows[i] for i in places] if len(rows) > 1 else rows
            for other, rows in others.items()
        }
        results[name] = result
        print(f"\n{result['title']}\n\n{table(result)}")
    (RESULTS / "naive.json").write_text(json.dumps(results) + "\n")
    figures.save(figures.against_epsilon(results), PICTURES / "pmtl-1.png")


if __name__ == "__main__":
    main()
