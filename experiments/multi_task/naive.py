"""DP of all models, the naive way, beside PMTL, FedAvg and Local at equal ε (PMTL's Figure 1).

    python experiments/multi_task/naive.py $FEDJAXSIM_DATA

The others are read from what `equal_privacy.py` wrote, on the same data with the same tuning. The
paper's figure is of FEMNIST. A round over the matrix of all its models takes a third of a second of
one core here, and the tuning that the others had a quarter of an hour for each ε.
"""

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import figures
from data_sets import PROBLEMS
from equal_privacy import PICTURES, RESULTS, compare, edges, table, values
from harness import Parts, Record, write
from methods import METHODS
from tables import difference

EPSILONS = {"digits": (2.0, 8.0, math.inf)}
BESIDE = ("pmtl", "fedavg", "local")


def beside(result: Record, others: Record) -> Record:
    """Return a result with the methods of another one at the same ε."""
    epsilons = [one["epsilon"] for one in others["levels"]]
    places = [epsilons.index(one["epsilon"]) for one in result["levels"]]
    rows = {name: others["methods"][name] for name in BESIDE}
    same = {name: [of[i] for i in places] if len(of) > 1 else of for name, of in rows.items()}
    return {**result, "methods": result["methods"] | same}


def main() -> None:
    """Run unfinished parts, print the tables, write results and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where data sets lie")
    parser.add_argument("--parts", type=Path, default=Path("runs/multi-task/naive"))
    args = parser.parse_args()
    methods = {"naive-dp": METHODS["naive-dp"]}
    results, shown = {}, {}
    for name, epsilons in EPSILONS.items():
        # A scan over clients copies the whole matrix for each of them.
        layout: Any = {"chunk_size": 16, "chunk_map": "vmap"}
        problem = dataclasses.replace(PROBLEMS[name], epsilons=epsilons, **layout)
        results[name] = compare(problem, methods, args.folder, Parts(args.parts / name))
        others = json.loads((RESULTS / f"compare-{name}.json").read_text())
        both = shown[name] = beside(results[name], others)
        print(f"\n{both['title']}\n\n{table(both)}\n\n{edges(results[name])}", flush=True)
        gains = [
            difference(values(both, "pmtl", level), values(both, "naive-dp", level), larger=True)
            for level in range(len(both["levels"]))
        ]
        print(f"\nPMTL update − naive, by ε: {'; '.join(map(str, gains))}")
    write(RESULTS / "naive.json", results)
    figures.save(figures.against_epsilon(shown), PICTURES / "pmtl-1.png")


if __name__ == "__main__":
    main()
