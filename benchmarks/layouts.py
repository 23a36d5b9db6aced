"""The default layout against seven others, on small and middling rounds.

    python benchmarks/layouts.py [--only mlp] [--seconds 0.5] [--out FILE.json]

Each line is a workload: a system and a model, m clients with 20 rows each, a part of whom takes
part in a round of one epoch in batches of 10 with clip and noise. All layouts of a workload take
turns in one process on one core, and each time is the median over turns of core seconds a round.
"""

import dataclasses
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import tyro
from common import in_process, read_by

import fedjaxsim as fjs
from fedjaxsim.data.random import random_rows
from fedjaxsim.report.files import write_json

LAYOUTS = [("scan", 16), *(("vmap", size) for size in (4, 8, 16, 32, 64, 128))]
VALUES = {"learning_rate": 0.05, "lam": 0.1, "clip": 1.0, "noise_multiplier": 1.0}
SYSTEMS = {
    "fedavg": fjs.fedavg, "pmtl": fjs.pmtl, "ditto": fjs.ditto, "scaffold": fjs.scaffold,
}  # fmt: skip
MODELS = {
    "softmax 64": ((64,), 10, lambda: fjs.models.linear((64,), 10)),
    "softmax 784": ((784,), 10, lambda: fjs.models.linear((784,), 10)),
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
        "mlp 64-64-10": [(100, 0.1), (1000, 0.1), (10_000, 0.01)],
        "mlp 784-100-62": [(100, 0.1), (100, 1.0)],
    }
    every = [
        Workload(system, model, clients, part)
        for model, each in sizes.items()
        for (clients, part), system in itertools.product(each, SYSTEMS)
    ]
    large = itertools.product(("fedavg", "pmtl"), ("cnn", "gru"))
    return every + [Workload(system, model, 100, 0.1) for system, model in large]


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


def measure(workload: Workload, seconds: float, turns: int) -> dict[str, float]:
    """Return core seconds a round of the default and of each layout."""
    forms = {"default": {}} | {
        f"{kind} {size}": {"chunk_map": kind, "chunk_size": size} for kind, size in LAYOUTS
    }
    runs, took = {}, {name: [] for name in forms}
    for name, layout in forms.items():
        simulation = simulation_of(workload, **layout)
        hparams = read_by(simulation, VALUES)
        state = simulation.init(0, hparams)
        rounds = 8
        state = _timed(simulation, state, hparams, rounds)[0]
        state, each = _timed(simulation, state, hparams, rounds)
        rounds = max(2, min(2000, int(seconds / each)))
        state = _timed(simulation, state, hparams, rounds)[0]
        runs[name] = [simulation, state, hparams, rounds]
    for _ in range(turns):
        for name, (simulation, state, hparams, rounds) in runs.items():
            runs[name][1], each = _timed(simulation, state, hparams, rounds)
            took[name].append(each)
    return {name: statistics.median(each) for name, each in took.items()}


def _timed(simulation: fjs.Simulation, state: Any, hparams: Any, rounds: int) -> tuple[Any, float]:
    begin = time.process_time()
    rows = simulation.placed["train"]
    state = simulation.compiled.rounds(state, hparams.as_arrays(), rows, rounds=rounds)
    state = jax.block_until_ready(state[0])
    return state, (time.process_time() - begin) / rounds


def main(only: str = "", seconds: float = 0.3, turns: int = 5, out: Path | None = None) -> None:
    """Compare layouts.

    Args:
      only: a part of the names of workloads.
      seconds: of a turn.
      turns: of each layout.
      out: a JSON file for the results.
    """
    rows = {}
    for workload in WORKLOADS:
        if only not in str(workload):
            continue
        took = in_process(measure, workload, seconds, turns)
        best = min((name for name in took if name != "default"), key=took.__getitem__)
        ratio = took[best] / took["default"]
        rows[str(workload)] = {"ratio": ratio, "best": best, "seconds": took}
        each = "  ".join(f"{name} {1e6 * took[name]:.0f}" for name in took)
        print(f"{workload!s:42} {ratio:.2f} of {best:9} µs: {each}", flush=True)
    within = sum(row["ratio"] >= 1 / 1.1 for row in rows.values())
    print(f"within 10 % of the best: {within} of {len(rows)}")
    if out is not None:
        write_json(out, rows)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
