"""Every system at its defaults for 2,000 rounds, with and without privacy, on three data sets.

    python experiments/defaults.py $FEDJAXSIM_DATA

makes the table of experiments/defaults.md: linear models, the settings of `fedjaxsim run` without
a flag but the data's, at ε = ∞ and at ε = 8 of the whole run. A cell is the test metric after 100
and after 2,000 rounds.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import fedjaxsim as fjs
from fedjaxsim.data.population import Population
from fedjaxsim.divergence import diverging_from
from fedjaxsim.runs.assemble import population_of
from fedjaxsim.runs.build import prepare
from fedjaxsim.runs.settings import run_config

RESULTS = Path(__file__).parent / "results" / "defaults.json"
EARLY, ROUNDS = 100, 2000
EPSILONS = (math.inf, 8.0)
OWN_SETTINGS = {
    "ppsgd": {"local_steps": 1},
    **{f"dpfedmtl{kind}": {"head": "bias"} for kind in ("", "-as-published")},
    **{name: {"head": "bias"} for name in ("fedper", "fedrep", "fedbn")},
}
"""Settings without which a system does not run on a linear model."""


def data_sets(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the settings of each data set."""
    return {
        "digits": {"data": "digits"},
        "FEMNIST-206": {
            "data": f"leaf:{folder}/femnist/mytest.json.zip", "preprocess": ("invert",),
        },
        "School": {
            "data": f"mat:{folder}/school/school.mat", "loss": "squared",
            "preprocess": ("drop-constant", "unit-rows"),
        },
    }  # fmt: skip


def runs(settings: dict[str, Any], population: Population, rounds: int) -> dict[str, Any]:
    """Run without and, if the mechanism has an ε, with privacy; return metrics by ε."""
    found, simulation = {}, None
    for epsilon in EPSILONS:
        try:
            given = settings | ({"epsilon": epsilon} if math.isfinite(epsilon) else {})
            config = run_config(**given, rounds=rounds, eval_every=EARLY)
            experiment = prepare(config, simulation, population=population)
        except ValueError as error:
            found[f"{epsilon:g}"] = {"refused": str(error)}
            continue
        simulation, recorded = experiment.simulation, fjs.callbacks.Records()
        simulation.run(
            experiment.init(), experiment.hparams, rounds, eval_every=EARLY, callbacks=[recorded]
        )
        records = recorded.rows
        name = next(f"test_{n}" for n in ("accuracy", "nmse") if f"test_{n}" in records[0])
        found[f"{epsilon:g}"] = {
            "metric": name,
            "values": {row["round"]: row[name] for row in records},
            "losses": {row["round"]: row["train_loss"] for row in records if "train_loss" in row},
            "diverging": diverging_from(records),
        }
    return found


def table(found: dict[str, Any]) -> str:
    """Return the table in Markdown."""
    sets = list(found)
    lines = ["| | " + " | ".join(f"{name}, {e}" for name in sets for e in ("∞", "8")) + " |"]
    lines += ["| --- |" + " --- |" * (2 * len(sets))]
    for system, record in fjs.SYSTEMS.items():
        cells = [
            _cell(found[name].get(system, {}).get(f"{epsilon:g}"))
            for name in sets
            for epsilon in EPSILONS
        ]
        if any(cells):
            lines.append(f"| {record.title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(run: dict[str, Any] | None) -> str:
    if run is None or "refused" in run:
        return ""
    early, *_, last = (run["values"][key] for key in (str(EARLY), max(run["values"], key=int)))
    mark = "" if run["diverging"] is None else f", diverges from {run['diverging']}"
    return f"{early:.3f} → {last:.3f}{mark}"


def main() -> None:
    """Run all that the results lack, and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", nargs="+")
    parser.add_argument("--systems", nargs="+", default=list(fjs.SYSTEMS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    found = json.loads(args.out.read_text()) if args.out.exists() else {}
    sets = data_sets(args.folder)
    for name in args.data or sets:
        population = population_of(run_config(**sets[name]))
        for system in args.systems:
            if system not in found.setdefault(name, {}):
                settings = {"algorithm": system} | sets[name] | OWN_SETTINGS.get(system, {})
                found[name][system] = runs(settings, population, args.rounds)
                args.out.write_text(json.dumps(found, indent=1))
                found = json.loads(args.out.read_text())
                print(name, system, *map(_cell, found[name][system].values()), flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
