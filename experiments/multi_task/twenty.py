"""All algorithms that fit a linear model, on four data sets, at ε of 1, 4 and ∞.

    python experiments/multi_task/twenty.py $FEDJAXSIM_DATA

Every method has as many tuning points as the others at every ε (`methods.py`), in a box that is the
same for all but for its own hyperparameters; a validation seed chooses, and the choice runs with
five seeds whose splits, first models, cohorts and noise all methods share. So differences are
paired. ε is that of the whole run for zero-out in the joint-DP view at δ = 1/(10 m); it does not
cover the choice. Finished parts are kept in --parts, and the table and the picture are of all
results that there are: a stopped command goes on.

Bytes are those that a client of the cohort receives and sends in a round, as float32 numbers
without compression. With --speed rounds/s are those of one run without noise, its evaluation
included, compiled: measure them on an idle machine.
"""

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path

import jax
import matplotlib as mpl
import numpy as np
from data_sets import PROBLEMS, Problem
from equal_privacy import RESULTS, compare, values
from harness import Parts, Record, Trial, write
from matplotlib.figure import Figure
from methods import METHODS, Method, hyperparameters
from scipy import stats
from tables import difference, epsilon_text, markdown

import fedjaxsim as fjs
from fedjaxsim.engine.shape_bytes import bytes_of
from fedjaxsim.metrics import metric
from fedjaxsim.report.plots import STYLE, picture, save

SIZES = {"points": 12, "seeds": 5, "tuning_seeds": 1, "epsilons": (1.0, 4.0, math.inf)}
QUESTION = ("vehicle", "school", "digits", "femnist-7", "shakespeare")
AGAINST = ("local", "fedavg")
COSTS = {"received": "bytes received", "sent": "sent", "rounds_per_second": "rounds/s"}
TWENTY = (
    "local", "fedavg", "fedprox", "fedavgm", "fedadam", "fedyogi", "scaffold", "scaffold-steps",
    "feddyn", "feddyn-state", "qffl",
    "pmtl", "pmtl-offset", "ditto", "apfl", "apfl-adaptive", "pfedme", "per-fedavg",
    "per-fedavg-hessian", "ifca", "fedala", "knn-per", "fedper-intercepts",
    "fedrep-intercepts", "ppsgd",
)  # fmt: skip


def cost(problem: Problem, name: str, folder: Path, parts: Parts, speed: bool) -> Record:
    """Return the bytes that a client receives and sends in a round, and rounds/s if wanted."""
    method = METHODS[name]

    def prepared() -> tuple[fjs.Simulation, fjs.Hyperparameters]:
        simulation = Trial(problem, method, folder, parts, name).simulation(0)
        point = {**method.points(1, problem.box)[0], "noise_multiplier": 0.0}
        return simulation, hyperparameters(simulation, point)

    def sizes() -> Record:
        simulation, hparams = prepared()
        state = jax.eval_shape(simulation.program.init, jax.random.key(0), hparams.as_arrays())
        message = simulation.setup.message_shapes(jax.random.key(0), hparams.as_arrays())
        received = bytes_of(state.shared) if method.sends else 0
        return {"received": received, "sent": bytes_of(message)}

    def rate() -> Record:
        simulation, hparams = prepared()
        state, times = simulation.init(0, hparams), []
        for _ in range(4):
            begun = time.perf_counter()
            state, _ = simulation.run(state, hparams, problem.rounds)
            times.append(time.perf_counter() - begun)
        return {"rounds_per_second": float(f"{problem.rounds / min(times):.3g}")}

    spent = parts.get(f"{name}-cost", [problem.rounds], sizes)
    return spent | parts.get(f"{name}-speed", [problem.rounds], rate) if speed else spent


def fits(problem: Problem, method: Method) -> bool:
    """Return whether a method suits the task; kNN-Per needs a softmax classification."""
    return "softmax" in problem.title or not fjs.SYSTEMS[method.system].softmax


def shortened(result: Record) -> Record:
    """Keep the points, the scores of all seeds and the cost of each method."""
    kept = {key: result[key] for key in ("title", "metric", "clients", "rate", "rounds", "levels")}
    column = f"test_{result['metric']}"
    kept["methods"] = {
        name: [
            {key: row[key] for key in ("point", "at_edge")}
            | {"test": [{column: of_seed[column]} for of_seed in row["test"]]}
            for row in rows
        ]
        for name, rows in result["methods"].items()
    }
    return kept


def table(result: Record) -> str:
    """Mean ± half of the 95 % interval, and the sign of sure differences to Local and FedAvg."""
    larger = metric(result["metric"]).larger_is_better
    costs = result.get("cost", {})
    known = [key for key in COSTS if any(key in spent for spent in costs.values())]
    rows = []
    for name in result["methods"]:
        cells = [METHODS[name].title]
        for level in range(len(result["levels"])):
            ours = values(result, name, level)
            signs = []
            for other in AGAINST:
                sure = difference(ours, values(result, other, level), larger)
                signs.append(("+" if sure.mean > 0 else "−") if sure.sure else "·")
            text = f"{np.mean(ours):.3f} ± {interval(ours):.3f}"
            best = name == best_of(result, level)
            cells.append(f"{f'**{text}**' if best else text} {''.join(signs)}")
        cells += [f"{costs[name][key]:,.10g}" for key in known]
        rows.append(cells)
    levels = [f"ε = {epsilon_text(about['epsilon'])}" for about in result["levels"]]
    return markdown(["", *levels, *(COSTS[key] for key in known)], rows)


def interval(scores: list[float]) -> float:
    """Return half the length of the 95 % confidence interval of a mean (Student's t)."""
    t = float(stats.t.ppf(0.975, len(scores) - 1))
    return t * float(np.std(scores, ddof=1)) / math.sqrt(len(scores))


def best_of(result: Record, level: int) -> str:
    """Return the method with the best mean."""
    larger = metric(result["metric"]).larger_is_better
    best = max if larger else min
    return best(result["methods"], key=lambda name: float(np.mean(values(result, name, level))))


def drawn(results: dict[str, Record]) -> Figure:
    """Draw a panel for each data set: a row for each method, a dot for each ε."""
    names = [name for name in TWENTY if any(name in r["methods"] for r in results.values())]
    with mpl.rc_context(STYLE):
        figure = picture(
            "Equal ε, equal tuning: mean and 95 % interval over five seeds",
            2 + 2.4 * len(results),
            1.2 + 0.22 * len(names),
        )
        panels = figure.subplots(1, len(results), squeeze=False, sharey=True)[0]
        for panel, result in zip(panels, results.values(), strict=True):
            for level, about in enumerate(result["levels"]):
                known = [name for name in names if name in result["methods"]]
                scores = [values(result, name, level) for name in known]
                panel.errorbar(
                    [np.mean(each) for each in scores],
                    [names.index(name) + 0.2 * (level - 1) for name in known],
                    xerr=[interval(each) for each in scores],
                    fmt="osD"[level], ms=3, lw=0, elinewidth=0.8, color=f"C{level}",
                    label=f"ε = {epsilon_text(about['epsilon'])}",
                )  # fmt: skip
            # A diverged run would leave all others in one place.
            middle = np.concatenate([values(result, n, k) for n in ("local", "fedavg")
                                     for k in range(len(result["levels"]))])  # fmt: skip
            room = 0.2 * max(np.ptp(middle), 0.1)
            panel.set_xlim(middle.min() - room, middle.max() + room)
            panel.set_title(result["title"].split(",")[0])
            panel.set_xlabel(f"test {metric(result['metric']).title}")
            panel.grid(axis="x", lw=0.4)
        panels[0].set_yticks(range(len(names)), [METHODS[name].title for name in names])
        panels[0].invert_yaxis()
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def main() -> None:
    """Run unfinished parts, print the tables, write results and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, help="where femnist/, school/, vehicle/ and shakespeare/input.txt are"
    )
    parser.add_argument("--problems", nargs="*", choices=PROBLEMS, default=list(QUESTION))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(TWENTY))
    parser.add_argument("--parts", type=Path, default=Path("runs/twenty"))
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder for the results")
    parser.add_argument("--speed", action="store_true", help="measure rounds/s, too")
    parser.add_argument("--picture", type=Path, help="a .png file, of all results together")
    args = parser.parse_args()
    for name in args.problems:
        problem = dataclasses.replace(PROBLEMS[name], **SIZES)
        methods = {each: METHODS[each] for each in args.methods if fits(problem, METHODS[each])}
        parts = Parts(args.parts / name)
        result = shortened(compare(problem, methods, args.folder, parts))
        result["cost"] = {
            each: cost(problem, each, args.folder, parts, args.speed) for each in methods
        }
        write(args.out / f"twenty-{name}.json", result)
        print(f"\n{result['title']}\n\n{table(result)}", flush=True)
    files = {name: args.out / f"twenty-{name}.json" for name in QUESTION}
    results = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    if args.picture:
        save(drawn(results), args.picture)


if __name__ == "__main__":
    main()
