"""Functions that several benchmarks share: processes, timings, memory and records."""

import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fedjaxsim as fjs
from fedjaxsim.bench.measure import seconds, spread
from fedjaxsim.report.files import write_json
from fedjaxsim.report.progress import number

WORKLOADS = Path(__file__).parent / "workloads"
RESULTS = Path(__file__).parent / "results"
Record = dict[str, Any]


def in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a script in a new process, which starts JAX anew."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def time_left(minutes: float) -> Callable[[], bool]:
    """Return a function that tells whether so many minutes from now have not passed yet."""
    end = time.monotonic() + 60 * minutes
    return lambda: time.monotonic() < end


def alternate(
    forms: Mapping[str, Callable[[], Any]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time each form in turn, `repeats` times; a first turn, which compiles, is left out."""
    took: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(1 + repeats):
        for name, run in forms.items():
            begin = clock()
            jax.block_until_ready(run())
            took[name].append(clock() - begin)
    return {name: values[1:] for name, values in took.items()}


def median_of(function: Callable[[], Any], repeats: int = 5) -> list[float]:
    """Return the median, the least and the greatest seconds of calls after a first one."""
    function()
    took = [seconds(lambda: jax.block_until_ready(function())) for _ in range(repeats)]
    return [statistics.median(took), min(took), max(took)]


def spreads(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return the median and the range over processes of each number."""
    return {name: spread([row[name] for row in rows])._asdict() for name in rows[0]}


def show(title: str, numbers: Mapping[str, Mapping[str, float]]) -> None:
    """Print medians with their ranges."""
    print(title)
    for name, each in numbers.items():
        ends = f"{number(each['least'])} to {number(each['greatest'])}"
        print(f"  {name:32} {number(each['median'])} ({ends})", flush=True)


def update(path: Path, record: Record) -> None:
    """Replace entries of a JSON file of results, which need not exist yet."""
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, earlier | record)


def random_population(
    clients: int, rows: int, features: int, classes: int, test: float | None = None
) -> fjs.Population:
    """Make clients of as many rows each, normal features and random labels."""
    rng = np.random.default_rng(0)
    fields = {
        "x": rng.standard_normal((clients * rows, features), dtype=np.float32),
        "y": rng.integers(0, classes, clients * rows).astype(np.int32),
    }
    population = fjs.Population.from_flat(fields, [rows] * clients)
    return population if test is None else fjs.data.split(population, test=test)


def read_by(simulation: fjs.Simulation, values: Mapping[str, Any]) -> fjs.Hyperparameters:
    """Return the hyperparameters of a simulation from the values that it reads."""
    read = {name: value for name, value in values.items() if name in simulation.records}
    return simulation.hyperparameters(**read)


def anonymous() -> int:
    """Return the anonymous memory of this process in bytes: neither code nor mapped files."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


class Watch:
    """The largest anonymous memory since it began, in bytes, on Linux."""

    def __init__(self):
        self.peak = anonymous()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self.peak = max(self.peak, anonymous())
            time.sleep(0.005)
