"""Private PMTL with both messages, Ditto, FedAvg, FedProx and Local at equal ε, on five data sets.

    python experiments/multi_task/equal_privacy.py $FEDJAXSIM_DATA

Answers at which ε, and with which message, private PMTL beats both Local and private FedAvg, and
draws accuracy against ε (PMTL's Figures 3 and 7). Each row of `data_sets.py` says how it is run.

Every method has as many tuning points as the others, at every ε, in a box of hyperparameters that
is the same for all (`methods.py`). The mean score on a validation split (a fifth of the training
rows) of seeds of their own chooses; then the choice runs with seeds 0, 1, …, each with its own
split, first model, cohorts, minibatches and noise, which all methods share. So differences are
paired. Final runs leave a validation split out, too: they train on as many rows as the choice did.
No ε covers the choice, here as in the papers. ε is for zero-out in the joint-DP view at
δ = 1/(10 m); ε = ∞ is z = 0 without clipping. T is the same at every ε.

The plan, in seconds of one core for 100 rounds of one setting: 0.003 to 0.03 for the small sets,
1.7 (FedAvg) to 5 (Ditto) for FEMNIST with a linear model. So the small sets get 64 or 128 points,
three tuning seeds and ten final ones, FEMNIST 50 rounds, 18 points, one tuning seed and three final
ones.

What is finished is kept in --parts; empty it when the code has changed. --problems and --methods
say what is run; the answer and the picture are of all results that there are, so that with
--problems alone nothing is run.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import figures
from data_sets import PROBLEMS, Problem
from harness import Parts, Record, Trial, shortened, write
from methods import COMPARED, METHODS, Method
from tables import difference, epsilon_text, markdown, spread

from fedjaxsim.metrics import metric

RESULTS = Path(__file__).parents[1] / "results"
PICTURES = Path(__file__).parents[2] / "docs" / "figures"
QUESTION = ("digits", "digits-sampled", "school", "vehicle", "landmine", "femnist")
MESSAGES, AGAINST = ("pmtl", "pmtl-offset"), ("local", "fedavg")


def compare(
    problem: Problem, methods: dict[str, Method], folder: Path, parts: Parts
) -> dict[str, Any]:
    """All methods on one problem: what was chosen, and the test results by ε and seed."""
    clients = problem.read(folder, 0, 0.0).num_clients
    noise = {epsilon: problem.noise(epsilon, clients) for epsilon in problem.epsilons}
    levels = [
        {"epsilon": epsilon if z else None, "noise_multiplier": z}
        | (problem.spent(z, clients) if z else {})
        for epsilon, z in noise.items()
    ]
    result: dict[str, Any] = {
        "title": problem.title,
        "metric": problem.metric,
        "clients": clients,
        "rate": problem.rate,
        "rounds": problem.rounds,
        "delta": 1 / (10 * clients),
        "points": problem.points,
        "tuning_seeds": problem.tuning_seeds,
        "seeds": problem.seeds,
        "box": problem.box,
        "levels": levels,
        "methods": {},
    }
    for name, method in methods.items():
        trial = Trial(problem, method, folder, parts, name)
        of_method = noise if method.sends else {math.inf: 0.0}
        chosen = trial.choose(of_method)
        tests = trial.judge(of_method, {epsilon: one["point"] for epsilon, one in chosen.items()})
        result["methods"][name] = [
            {**one, "test": [shortened(of_seed, problem.metric) for of_seed in test]}
            for one, test in zip(chosen.values(), tests, strict=True)
        ]
    return result


def values(result: Record, method: str, level: int) -> list[float]:
    """Return the test results of a method by seed; Local has the same at every ε."""
    rows = result["methods"][method]
    column = f"test_{result['metric']}"
    # A run that diverged has no finite result; it must not look good.
    larger = metric(result["metric"]).larger_is_better
    worst = 0.0 if larger else math.inf
    tests = rows[level if len(rows) > 1 else 0]["test"]
    return [worst if test[column] is None else test[column] for test in tests]


def table(result: Record) -> str:
    """Mean ± standard deviation of every method at every ε, the best mean of a row in bold."""
    names = list(result["methods"])
    larger = metric(result["metric"]).larger_is_better
    rows = []
    for level, about in enumerate(result["levels"]):
        of_row = {name: values(result, name, level) for name in names}
        means = {name: sum(of) / len(of) for name, of in of_row.items()}
        best = (max if larger else min)(means, key=lambda name: means[name])
        cells = [f"**{spread(of)}**" if name == best else spread(of) for name, of in of_row.items()]
        rows.append([_level(about), *cells])
    head = ["ε zero-out (replace; as the paper counts), z", *(METHODS[n].title for n in names)]
    return markdown(head, rows)


def _level(about: Record) -> str:
    if about["epsilon"] is None:
        return "∞"
    spent = (about["zero_out"], about["replace"], about["as_the_paper_counts"])
    zero_out, replace, paper = map(epsilon_text, spent)
    return f"{zero_out} ({replace}; {paper}), {about['noise_multiplier']:.2f}"


def edges(result: Record) -> str:
    """Which choices lie at an end of where they were looked for."""
    found = [
        (METHODS[name].title, epsilon_text(about["epsilon"]), ", ".join(row["at_edge"]))
        for name, rows in result["methods"].items()
        for about, row in zip(result["levels"], rows, strict=False)
        if row["at_edge"]
    ]
    texts = [f"{title} at ε = {epsilon}: {what}" for title, epsilon, what in found]
    return f"At an end of the box: {'; '.join(texts) or 'no choice'}."


def answer(results: dict[str, Record]) -> str:
    """Where PMTL beats both Local and private FedAvg, by how much, and which method is best."""
    rows = []
    for result in results.values():
        if not {*MESSAGES, *AGAINST} <= result["methods"].keys():
            continue
        larger = metric(result["metric"]).larger_is_better
        for level, about in enumerate(result["levels"]):
            cells, wins = [], []
            for name in MESSAGES:
                gains = [
                    difference(values(result, name, level), values(result, other, level), larger)
                    for other in AGAINST
                ]
                cells += map(str, gains)
                if all(gain.sure and gain.mean > 0 for gain in gains):
                    wins.append(METHODS[name].title.removeprefix("PMTL "))
            rows.append(
                [
                    f"{result['title'].split(',')[0]}, p = {result['rate']:.3g}",
                    metric(result["metric"]).title,
                    epsilon_text(about["epsilon"]),
                    *cells,
                    " and ".join(wins) or "–",
                ]
            )
    titles = {name: METHODS[name].title for name in (*MESSAGES, *AGAINST)}
    pairs = [f"{titles[n]} − {titles[other]}" for n in MESSAGES for other in AGAINST]
    return markdown(["data", "by", "ε", *pairs, "beats both"], rows)


def main() -> None:
    """Run unfinished parts, print the tables, write results and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where femnist/, school/ … lie")
    parser.add_argument("--problems", nargs="*", choices=PROBLEMS, default=list(QUESTION))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(COMPARED))
    parser.add_argument("--parts", type=Path, default=Path("runs/multi-task"))
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder for the results")
    parser.add_argument("--picture", type=Path, help="a .png file, of all results together")
    args = parser.parse_args()
    methods = {name: METHODS[name] for name in args.methods}
    for name in args.problems:
        parts = Parts(args.parts / name)
        result = compare(PROBLEMS[name], methods, args.folder, parts)
        write(args.out / f"compare-{name}.json", result)
        print(f"\n{result['title']}\n\n{table(result)}\n\n{edges(result)}", flush=True)
    files = {name: args.out / f"compare-{name}.json" for name in QUESTION}
    results = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    print(f"\n{answer(results)}")
    if args.picture:
        shown = {name: results[name] for name in QUESTION if name in results}
        figures.save(figures.against_epsilon(shown), args.picture)


if __name__ == "__main__":
    main()
