"""The default layout against seven others, on small and middling rounds.

    python benchmarks/layouts.py [--only mlp] [--minutes 12] [--short]
    python benchmarks/layouts.py --markdown                # the table of what has been measured

Each line is a workload: a system and a model, m clients with 20 rows each, a part of whom takes
part in a round of one epoch in batches of 10 with clip and noise. All layouts of a workload take
turns in one process on one core, and each time is the median over turns of core seconds a round.
As many processes run side by side as there are cores, each with a workload of its own. The results
file is written after each workload, and the same command goes on from it.
"""

import dataclasses
import itertools
import os
import queue
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import tyro
from common import in_process, read_by, time_left

import fedjaxsim as fjs
from fedjaxsim.data.synthetic import random_rows
from fedjaxsim.report.files import read_json, write_json

RESULTS = Path(__file__).parent / "results" / "layouts.json"
ROUNDS = 8
"""Rounds of a compiled program."""
LAYOUTS = [("scan", 16), *(("vmap", size) for size in (4, 8, 16, 32, 64, 128))]
VALUES = {"learning_rate": 0.05, "lam": 0.1, "clip": 1.0, "noise_multiplier": 1.0}
SYSTEMS = {
    "fedavg": fjs.fedavg, "pmtl": fjs.pmtl, "ditto": fjs.ditto, "scaffold": fjs.scaffold,
}  # fmt: skip
MODELS = {
    "softmax 64": ((64,), 10, lambda: fjs.models.linear((64,), 10)),
    "softmax 784": ((784,), 10, lambda: fjs.models.linear((784,), 10)),
    "softmax 784-62": ((784,), 62, lambda: fjs.models.linear((784,), 62)),
    "mlp 64-64-10": ((64,), 10, lambda: fjs.models.mlp((64,), 10)),
    "mlp 784-100-62": ((784,), 62, lambda: fjs.models.mlp((784,), 62, (100,))),
    "cnn": ((28, 28), 62, lambda: fjs.models.cnn((28, 28), 62)),
    "gru": ((80,), 80, lambda: fjs.models.gru((80,), 80, 80)),
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """A system, a model, m clients and the part of them that takes part in a round."""

    system: str
    model: str
    clients: int
    part: float

    def __str__(self) -> str:
        return f"{self.system} {self.model}, {round(self.part * self.clients)} of {self.clients}"


def _workloads() -> list[Workload]:
    sizes = {
        "softmax 64": [(100, 0.1), (1000, 0.1), (1000, 1.0)],
        "softmax 784": [(1000, 0.1)],
        "softmax 784-62": [(500, 0.1), (500, 1.0)],
        "mlp 64-64-10": [(100, 0.1), (1000, 0.1), (10_000, 0.01)],
        "mlp 784-100-62": [(100, 0.1), (100, 1.0)],
    }
    every = [
        Workload(system, model, clients, part)
        for model, each in sizes.items()
        for (clients, part), system in itertools.product(each, SYSTEMS)
    ]
    large = itertools.product(("fedavg", "pmtl"), ("cnn", "gru"))
    every += [Workload(system, model, 100, 0.1) for system, model in large]
    return sorted(every, key=lambda workload: list(SYSTEMS).index(workload.system))


WORKLOADS = _workloads()


def simulation_of(workload: Workload, **layout: Any) -> fjs.Simulation:
    """Return the simulation of a workload with a layout, by default the engine's own."""
    _, classes, model = MODELS[workload.model]
    population = _population(workload.model, workload.clients)
    task = fjs.tasks.softmax if workload.model != "gru" else fjs.tasks.softmax_sequence
    sampling = fjs.full_participation() if workload.part == 1 else fjs.poisson(workload.part)
    algorithm = SYSTEMS[workload.system](task(model(), classes))
    return fjs.Simulation(algorithm, population, sampling, fjs.Minibatches(10, epochs=1), **layout)


def _population(model: str, clients: int) -> fjs.Population:
    (shape, classes, _), rows = MODELS[model], 20
    if model == "gru":
        return random_rows(clients, shape, (rows,), labels=classes, tokens=classes)
    return random_rows(clients, shape, (rows,), labels=classes)


def measure(workload: Workload, core: int, seconds: float, turns: int) -> dict[str, float]:
    """Return core seconds a round of the default and of each layout."""
    os.sched_setaffinity(0, {core})
    forms = {"default": {}} | {
        f"{kind} {size}": {"chunk_map": kind, "chunk_size": size} for kind, size in LAYOUTS
    }
    runs, took = {}, {name: [] for name in forms}
    for name, layout in forms.items():
        simulation = simulation_of(workload, **layout)
        hparams = read_by(simulation, VALUES)
        state = _timed(simulation, simulation.init(0, hparams), hparams, 1)[0]
        state, each = _timed(simulation, state, hparams, 1)
        runs[name] = [simulation, state, hparams, max(1, min(1000, int(seconds / each)))]
    for _ in range(turns):
        for name, (simulation, state, hparams, times) in runs.items():
            runs[name][1], each = _timed(simulation, state, hparams, times)
            took[name].append(each)
    return {name: statistics.median(each) for name, each in took.items()}


def _timed(simulation: fjs.Simulation, state: Any, hparams: Any, times: int) -> tuple[Any, float]:
    """Advance by several times `ROUNDS` rounds; return the state and core seconds a round."""
    rows, arrays = simulation.placed["train"], hparams.as_arrays()
    begin = time.process_time()
    for _ in range(times):
        state, _ = simulation.compiled.rounds(state, arrays, rows, rounds=ROUNDS)
    state = jax.block_until_ready(state)
    return state, (time.process_time() - begin) / times / ROUNDS


def table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Return the results as Markdown, in microseconds a round."""
    names = list(next(iter(rows.values())))
    lines = [("", "default / best", *names), ["---"] * (len(names) + 2)]
    ratios = {}
    for workload, took in rows.items():
        best = min(took, key=took.__getitem__)
        others = min(value for name, value in took.items() if name != "default")
        ratios[workload] = others / took["default"]
        each = [f"{1e6 * value:.0f}" for value in took.values()]
        each = [f"**{v}**" if name == best else v for name, v in zip(took, each, strict=True)]
        lines.append((workload, f"{ratios[workload]:.2f}", *each))
    within = sum(ratio >= 1 / 1.1 for ratio in ratios.values())
    least = min(ratios, key=ratios.__getitem__)
    return "\n".join([f"| {' | '.join(line)} |" for line in lines]) + (
        f"\n\nWithin 10 % of the best of the others: {within} of {len(ratios)}; "
        f"least {ratios[least]:.2f}, {least}."
    )


def main(
    only: str = "",
    seconds: float = 0.1,
    turns: int = 5,
    short: bool = False,
    minutes: float = float("inf"),
    markdown: bool = False,
    out: Path = RESULTS,
) -> None:
    """Compare layouts.

    Args:
      only: a part of the names of workloads.
      seconds: of a turn.
      turns: of each layout.
      short: one short turn.
      minutes: after which no further workload starts.
      markdown: measure nothing.
      out: a JSON file for the results; a second call goes on from it.
    """
    seconds, turns = (0.01, 1) if short else (seconds, turns)
    rows = read_json(out) if out.exists() else {}
    left = time_left(0 if markdown else minutes)
    asked = [workload for workload in WORKLOADS if only in str(workload)]
    cores: queue.SimpleQueue[int] = queue.SimpleQueue()
    for core in sorted(os.sched_getaffinity(0)):
        cores.put(core)

    def run(workload: Workload) -> None:
        if not left():
            return
        core = cores.get()
        rows[str(workload)] = in_process(measure, workload, core, seconds, turns)
        cores.put(core)
        print(f"{workload}: done", flush=True)
        write_json(out, {str(each): rows[str(each)] for each in WORKLOADS if str(each) in rows})

    with ThreadPoolExecutor(cores.qsize()) as pool:
        list(pool.map(run, [each for each in asked if str(each) not in rows]))
    measured = {str(each): rows[str(each)] for each in asked if str(each) in rows}
    print(table(measured) if measured else "Nothing has been measured.")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
