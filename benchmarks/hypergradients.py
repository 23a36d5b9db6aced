"""Measure derivatives of a whole run: memory as runs grow longer, and time beside a plain run.

    python benchmarks/hypergradients.py [--processes 5] [--parts memory cost] [--out FILE]

* memory: from 10 to 1,000 rounds, one process for each point. "planned" is the temporary memory of
  the compiled program (`memory_analysis`), "resident" the growth of the process while the program
  runs (Linux only). Two problems of PP-SGD's synthetic regression: 1,000 clients who all take part,
  whose state is small (0.4 MB), and 20,000 clients of whom 50 are expected in a round. Reverse mode
  in segments may then grow as the root of the rounds, or by the cohort's rows each round.
* cost: every process alternates plain runs with derivatives and takes medians. A plain run is
  `Simulation.run` of as many rounds with one evaluation at its end. Derivatives are those
  of the evaluated mean: in forward mode for one hyperparameter and for three, in reverse mode for
  three, in segments of the default length and with all rounds kept.
"""

import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import matplotlib as mpl
import numpy as np
import tyro
from common import (
    FIGURES,
    RESULTS,
    Record,
    alternate,
    in_process,
    random_population,
    show,
    spreads,
    update,
)

import fedjaxsim as fjs
from fedjaxsim.bench.measure import forget_peak
from fedjaxsim.data.synthetic import regression_stream
from fedjaxsim.gradients.objectives import mean_metric
from fedjaxsim.gradients.whole_run import Mode, hypergradient
from fedjaxsim.report.plots import COLOURS, STYLE, picture, save
from fedjaxsim.runs.memory import peak_bytes
from fedjaxsim.tasks.known_risk import known_regression

ROUNDS = (10, 30, 100, 300, 1000)
FEATURES, BATCH = 100, 10
MODES: tuple[Mode, ...] = ("forward", "reverse")
Problem = tuple[fjs.Simulation, fjs.Hyperparameters, tuple[str, ...], str]
"""Simulation, hyperparameters, the names of three of them, and the metric."""


def synthetic(clients: int, rate: float, **chunking: Any) -> Problem:
    """Make PP-SGD's synthetic problem, with full participation at rate 1, else Poisson cohorts."""
    population, task = regression_stream(clients, FEATURES), known_regression(FEATURES)
    sampling = fjs.full_participation() if rate == 1 else fjs.poisson(rate)
    minibatches = fjs.Minibatches(BATCH, steps=1)
    simulation = fjs.Simulation(fjs.ppsgd(task), population, sampling, minibatches, **chunking)
    hparams = simulation.hyperparameters(
        learning_rate=0.1, personalization=0.5, clip_norm=10.0, noise_multiplier=3.0
    )
    return simulation, hparams, ("learning_rate", "personalization", "clip_norm"), "excess_risk"


def personal_models(clients: int = 1000, features: int = 784, classes: int = 10) -> Problem:
    """Make PMTL with a linear model for each client: cohorts of 100, 5 steps of batch 10."""
    population = random_population(clients, 50, features, classes, test=0.2)
    task = fjs.tasks.softmax(fjs.models.linear((features,), classes), classes)
    minibatches = fjs.Minibatches(BATCH, steps=5)
    simulation = fjs.Simulation(fjs.pmtl(task), population, fjs.poisson(100 / clients), minibatches)
    hparams = simulation.hyperparameters(
        learning_rate=0.01, lam=0.1, clip_norm=1.0, noise_multiplier=1.0
    )
    return simulation, hparams, ("learning_rate", "lam", "clip_norm"), "loss"


MEMORY: dict[str, Callable[[], Problem]] = {
    "full": lambda: synthetic(1000, 1.0, chunk_map="vmap", chunk_size=250),
    "cohorts": lambda: synthetic(20_000, 0.0025, chunk_map="vmap", chunk_size=64),
}
TITLES = {"full": "1,000 clients, all take part", "cohorts": "20,000 clients, 50 in a round"}
COST: dict[str, tuple[Callable[[], Problem], int]] = {
    "synthetic, chunks as batches": (MEMORY["full"], 50),
    "synthetic, clients in turn": (lambda: synthetic(1000, 1.0), 50),
    "personal models, clients in turn": (personal_models, 15),
}
"""Problems, and the rounds of a run."""


def memory_process(problem: str, mode: Mode, rounds: int) -> Record:
    """Measure planned and resident megabytes of the derivatives by three hyperparameters."""
    simulation, hparams, names, metric = MEMORY[problem]()
    objective = mean_metric(simulation, metric, "test")
    function = jax.jit(hypergradient(simulation, objective, rounds, names, mode=mode))
    arguments = (jax.random.key(0), hparams.as_arrays())
    compiled = function.lower(*arguments).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    forget_peak()
    before = peak_bytes()
    jax.block_until_ready(compiled(*arguments))
    grown = (peak_bytes() - before) / 1e6 if Path("/proc/self/clear_refs").exists() else None
    return {"planned_mb": analysis.temp_size_in_bytes / 1e6, "resident_mb": grown}


def cost_process(problem: str, repeats: int) -> dict[str, float]:
    """Measure seconds of a plain run and of each kind of derivative."""
    make, rounds = COST[problem]
    simulation, hparams, names, metric = make()
    objective = mean_metric(simulation, metric, "test")
    kinds: dict[str, Callable[[], Any]] = {
        "plain": lambda: simulation.run(simulation.init(0, hparams), hparams, rounds)[0].shared
    }
    derivatives: list[tuple[str, tuple[str, ...], Mode, int | None]] = [
        ("forward, 1", names[:1], "forward", None),
        ("forward, 3", names, "forward", None),
        ("reverse, 3", names, "reverse", None),
        ("reverse, 3, all rounds kept", names, "reverse", rounds),
    ]
    for label, wrt, mode, segment in derivatives:
        function = hypergradient(simulation, objective, rounds, wrt, mode=mode, segment=segment)
        kinds[label] = lambda function=function: function(0, hparams)
    took = alternate(kinds, repeats)
    return {label: statistics.median(values) for label, values in took.items()}


def all_memory() -> Record:
    """Measure the memory of every number of rounds, by problem and mode."""
    found: Record = {}
    for problem in MEMORY:
        for mode in MODES:
            points = [in_process(memory_process, problem, mode, rounds) for rounds in ROUNDS]
            columns = {name: [point[name] for point in points] for name in points[0]}
            found.setdefault(problem, {})[mode] = columns
            print(f"memory, {problem}, {mode}: {columns['planned_mb']} MB", flush=True)
    return {"rounds": ROUNDS, "problems": found}


def all_costs(processes: int, repeats: int) -> Record:
    """Measure the time of every kind of derivative over that of a plain run, by problem."""
    found: Record = {}
    for problem, (_, rounds) in COST.items():
        runs = [in_process(cost_process, problem, repeats) for _ in range(processes)]
        ratios = spreads([{k: v / run["plain"] for k, v in run.items()} for run in runs])
        del ratios["plain"]
        plain = statistics.median(run["plain"] for run in runs)
        show(f"cost, {problem}: times a plain run of {rounds} rounds, {plain:.3f} s", ratios)
        found[problem] = {"rounds": rounds, "plain_seconds": plain, "times_a_plain_run": ratios}
    return {"processes": processes, "repeats": repeats, "problems": found}


def draw(memory: Record, out: Path) -> None:
    """Draw the temporary memory against the number of rounds."""
    rounds = np.array(memory["rounds"])
    with mpl.rc_context(STYLE):
        figure = picture("Derivatives of a whole run by three hyperparameters", 7.2, 3.1)
        panels = figure.subplots(1, len(TITLES), sharey=True)
        for panel, (problem, title) in zip(panels, TITLES.items(), strict=True):
            for colour, mode in zip(COLOURS, MODES, strict=False):
                values = memory["problems"][problem][mode]
                panel.plot(rounds, values["planned_mb"], "o-", color=colour, label=mode)
                if None not in values["resident_mb"]:
                    label = f"{mode}, resident"
                    panel.plot(rounds, values["resident_mb"], ":", color=colour, label=label)
            first = memory["problems"][problem]["reverse"]["planned_mb"][0]
            law, power = (r"$\sqrt{T}$", 0.5) if problem == "full" else ("$T$", 1.0)
            reference = first * (rounds / rounds[0]) ** power
            panel.plot(rounds, reference, "--", color="grey", lw=1, label=law)
            panel.set(xscale="log", yscale="log", xlabel="rounds T", title=title)
            panel.legend(fontsize=7)
        panels[0].set_ylabel("temporary memory (MB)")
    save(figure, out)


def main(
    processes: int = 5,
    repeats: int = 5,
    parts: Sequence[Literal["memory", "cost"]] = ("memory", "cost"),
    out: Path = RESULTS / "hypergradients.json",
    figure: Path = FIGURES / "hypergradient-memory.png",
) -> None:
    """Measure the memory and the time of derivatives.

    Args:
      processes: of each problem's cost.
      repeats: of each kind of derivative in a process.
      parts: that are measured.
      out: a JSON file for the results, updated part by part.
      figure: a .png file for the memory.
    """
    results: Record = {"jax": jax.__version__, "cores": os.cpu_count()}
    if "memory" in parts:
        results["memory"] = all_memory()
        draw(results["memory"], figure)
    if "cost" in parts:
        results["cost"] = all_costs(processes, repeats)
    update(out, results)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
