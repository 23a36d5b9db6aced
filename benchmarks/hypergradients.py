"""What derivatives of a whole run cost: memory as runs grow longer, and time beside a plain run.

    python benchmarks/hypergradients.py [--processes 5] [--parts memory cost] [--out FILE]

* memory: from 10 to 1,000 rounds, one process for each point. "planned" is the temporary memory of
  the compiled program (`memory_analysis`), "resident" what the process grows by at most while the
  program runs (Linux only). Two problems of PP-SGD's synthetic regression: 1,000 clients who all
  take part, whose state is small (0.4 MB), and 20,000 clients of whom 50 are expected in a round.
  Reverse mode in segments may then grow as the root of the rounds, or by the cohort's rows each
  round.
* cost: every process alternates plain runs with derivatives and takes medians. A plain run is
  `Simulation.run` of as many rounds with one evaluation at its end. Derivatives are those of the
  evaluated mean: in forward mode for one hyperparameter and for three, in reverse mode for three,
  in segments of the default length and with all rounds kept.

The parent reports medians and ranges over the processes.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import matplotlib as mpl
import numpy as np
from common import of_script
from matplotlib.figure import Figure

import fedjaxsim as fjs
from fedjaxsim.bench.ceilings import seconds
from fedjaxsim.bench.measure import forget_peak
from fedjaxsim.bench.results import spread
from fedjaxsim.data.synthetic import regression_stream
from fedjaxsim.gradients.objectives import mean_metric
from fedjaxsim.gradients.whole_run import Mode, hypergradient
from fedjaxsim.models import linear
from fedjaxsim.report.plots import COLOURS, STYLE
from fedjaxsim.runs.memory import peak_bytes
from fedjaxsim.tasks import softmax
from fedjaxsim.tasks.known_risk import known_regression

ROUNDS = (10, 30, 100, 300, 1000)
FEATURES, BATCH = 100, 10
ROOT = Path(__file__).parent
RESULTS = ROOT / "results" / "hypergradients.json"
FIGURE = ROOT.parent / "docs" / "figures" / "hypergradient-memory.png"
Problem = tuple[fjs.Simulation, fjs.Hyperparameters, tuple[str, ...], str]
"""Simulation, hyperparameters, the names of three of them, and the metric."""


# --- problems -------------------------------------------------------------------------------------


def synthetic(clients: int, rate: float, **chunking: Any) -> Problem:
    """PP-SGD's synthetic problem; everyone at rate 1, else Poisson cohorts."""
    population, task = regression_stream(clients, FEATURES), known_regression(FEATURES)
    sampling = fjs.full_participation() if rate == 1 else fjs.poisson(rate)
    minibatches = fjs.Minibatches(BATCH, steps=1)
    simulation = fjs.Simulation(fjs.ppsgd(task), population, sampling, minibatches, **chunking)
    hparams = simulation.hyperparameters(
        learning_rate=0.1, personalization=0.5, clip_norm=10.0, noise_multiplier=3.0
    )
    return simulation, hparams, ("learning_rate", "personalization", "clip_norm"), "excess_risk"


def personal_models(clients: int = 1000, features: int = 784, classes: int = 10) -> Problem:
    """PMTL with a linear model of each client's own: cohorts of 100, 5 steps of batch 10."""
    rng = np.random.default_rng(0)
    rows = 50
    fields = {
        "x": rng.normal(size=(clients * rows, features)).astype(np.float32),
        "y": rng.integers(0, classes, clients * rows).astype(np.int32),
    }
    population = fjs.data.split(fjs.Population.from_flat(fields, [rows] * clients), test=0.2)
    task = softmax(linear((features,), classes), classes)
    rate = 100 / clients
    simulation = fjs.Simulation(
        fjs.pmtl(task),
        population,
        fjs.poisson(rate),
        fjs.Minibatches(BATCH, steps=5),
    )
    hparams = simulation.hyperparameters(
        learning_rate=0.01, lam=0.1, clip_norm=1.0, noise_multiplier=1.0
    )
    return simulation, hparams, ("learning_rate", "lam", "clip_norm"), "loss"


MEMORY: dict[str, Callable[[], Problem]] = {
    "full": lambda: synthetic(1000, 1.0, chunk_map="vmap", chunk_size=250),
    "cohorts": lambda: synthetic(20_000, 0.0025, chunk_map="vmap", chunk_size=64),
}
COST: dict[str, tuple[Callable[[], Problem], int]] = {
    "synthetic, chunks as batches": (MEMORY["full"], 50),
    "synthetic, clients in turn": (lambda: synthetic(1000, 1.0), 50),
    "personal models, clients in turn": (personal_models, 15),
}
"""With the rounds of a run."""


# --- what a process measures ----------------------------------------------------------------------


def memory_process(problem: str, mode: Mode, rounds: int) -> dict[str, Any]:
    """Planned and resident megabytes of the derivatives of a run by three hyperparameters."""
    simulation, hparams, names, metric = MEMORY[problem]()
    objective = mean_metric(simulation, metric, "test")
    function = jax.jit(hypergradient(simulation, objective, rounds, names, mode=mode))
    arguments = (jax.random.key(0), hparams.as_arrays())
    compiled = function.lower(*arguments).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    before = resident()
    forget_peak()
    jax.block_until_ready(compiled(*arguments))
    grown = None if before is None else peak_bytes() / 1e6 - before
    return {"planned_mb": analysis.temp_size_in_bytes / 1e6, "resident_mb": grown}


def resident() -> float | None:
    """This process's resident memory in megabytes; None where the system does not tell."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024 / 1e6


def cost_process(problem: str, repeats: int) -> dict[str, float]:
    """Seconds of a plain run and of each kind of derivative, medians of alternating repetitions."""
    make, rounds = COST[problem]
    simulation, hparams, names, metric = make()
    objective = mean_metric(simulation, metric, "test")

    def plain():
        return simulation.run(simulation.init(0, hparams), hparams, rounds)[0].shared

    kinds: dict[str, Callable[[], Any]] = {"plain": plain}
    derivatives: list[tuple[str, tuple[str, ...], Mode, int | None]] = [
        ("forward, 1", names[:1], "forward", None),
        ("forward, 3", names, "forward", None),
        ("reverse, 3", names, "reverse", None),
        ("reverse, 3, all rounds kept", names, "reverse", rounds),
    ]
    for label, wrt, mode, segment in derivatives:
        function = hypergradient(simulation, objective, rounds, wrt, mode=mode, segment=segment)
        kinds[label] = lambda function=function: function(0, hparams)
    times: dict[str, list[float]] = {label: [] for label in kinds}
    for function in kinds.values():
        jax.block_until_ready(function())
    for _ in range(repeats):
        for label, function in kinds.items():
            took = seconds(lambda function=function: jax.block_until_ready(function()))
            times[label].append(took)
    return {label: statistics.median(values) for label, values in times.items()}


# --- the parent -----------------------------------------------------------------------------------


def child(arguments: list[str]) -> dict[str, Any]:
    part, problem, *rest = arguments
    if part == "cost":
        return cost_process(problem, int(rest[0]))
    mode: Mode = "forward" if rest[0] == "forward" else "reverse"
    return memory_process(problem, mode, int(rest[1]))


def all_memory() -> dict[str, Any]:
    """By problem and mode, what each number of rounds needs."""
    found: dict[str, Any] = {}
    for problem in MEMORY:
        for mode in ("forward", "reverse"):
            points = [of_script(__file__, "memory", problem, mode, rounds) for rounds in ROUNDS]
            found.setdefault(problem, {})[mode] = {
                name: [point[name] for point in points] for name in points[0]
            }
            planned = ", ".join(f"{point['planned_mb']:.1f}" for point in points)
            print(f"memory, {problem}, {mode}: {planned} MB after {ROUNDS} rounds", flush=True)
    return {"rounds": ROUNDS, "problems": found}


def all_costs(processes: int, repeats: int) -> dict[str, Any]:
    """By problem and kind of derivative, times a plain run: median and range over processes."""
    found: dict[str, Any] = {}
    for problem, (_, rounds) in COST.items():
        runs = [of_script(__file__, "cost", problem, repeats) for _ in range(processes)]
        ratios = {
            label: spread([run[label] / run["plain"] for run in runs])
            for label in runs[0]
            if label != "plain"
        }
        plain = statistics.median(run["plain"] for run in runs)
        print(f"cost, {problem}: a plain run of {rounds} rounds takes {plain:.3f} s")
        for label, values in ratios.items():
            print(
                f"  {label:28} {values.median:5.2f} times "
                f"({values.least:.2f} to {values.greatest:.2f})",
                flush=True,
            )
        found[problem] = {
            "rounds": rounds,
            "plain_seconds": plain,
            "times_a_plain_run": {label: values._asdict() for label, values in ratios.items()},
        }
    return {"processes": processes, "repeats": repeats, "problems": found}


def draw(memory: dict[str, Any], out: Path) -> None:
    """Temporary memory against the number of rounds."""
    titles = {
        "full": "1,000 clients, all take part",
        "cohorts": "20,000 clients, 50 in a round",
    }
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 2.9), layout="constrained")
        panels = figure.subplots(1, len(titles), sharey=True)
        rounds = np.array(memory["rounds"])
        for panel, (problem, title) in zip(panels, titles.items(), strict=True):
            for colour, mode in zip(COLOURS, ("forward", "reverse"), strict=False):
                values = memory["problems"][problem][mode]
                panel.plot(rounds, values["planned_mb"], "o-", color=colour, label=mode)
                if None not in values["resident_mb"]:
                    panel.plot(
                        rounds, values["resident_mb"], ":", color=colour, label=f"{mode}, resident"
                    )
            first = memory["problems"][problem]["reverse"]["planned_mb"][0]
            law, power = (r"$\sqrt{T}$", 0.5) if problem == "full" else ("$T$", 1.0)
            panel.plot(
                rounds, first * (rounds / rounds[0]) ** power, "--", color="grey", lw=1, label=law
            )
            panel.set(xscale="log", yscale="log", xlabel="rounds T", title=title)
            panel.legend(fontsize=7)
        panels[0].set_ylabel("temporary memory (MB)")
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=5, help="of each problem's cost")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--parts", nargs="+", choices=("memory", "cost"), default=["memory", "cost"]
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="updated part by part")
    parser.add_argument("--figure", type=Path, default=FIGURE)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child)))
        return
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    results |= {"jax": jax.__version__, "cores": os.cpu_count()}
    if "memory" in args.parts:
        results["memory"] = all_memory()
        draw(results["memory"], args.figure)
    if "cost" in args.parts:
        results["cost"] = all_costs(args.processes, args.repeats)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
