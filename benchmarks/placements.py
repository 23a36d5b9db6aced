"""Memory and speed of runs in memory, over two devices, mapped from disk and streamed.

    python benchmarks/placements.py [CASE ...] [--scratch FOLDER] [--out FILE]

Printed are the memory beside what `fedjaxsim plan` says, and rounds per second. Every placement of
every case is a process of its own, which watches its anonymous memory: neither code nor mapped
files. It loads a population from a folder, computes rounds and evaluations, and computes both
again; `running` is the largest memory of that second time, `whole` that of everything, `idle` that
after the imports. A mapped folder must give the server state of rows in memory bit for bit. The
case of 10⁶ clients takes 8 GB of disk.
"""

import dataclasses
import hashlib
import shutil
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from common import Record, Watch, anonymous, in_process, median_of
from tyro.conf import Positional

import fedjaxsim as fjs
from fedjaxsim.bench.measure import Rounds, forget_peak, machine
from fedjaxsim.data import load_folder, save_folder
from fedjaxsim.data.arrays import shareable
from fedjaxsim.report.files import write_json
from fedjaxsim.runs.assemble import parts_of
from fedjaxsim.runs.build import Experiment, hparams_of
from fedjaxsim.runs.settings import RunConfig, run_config
from fedjaxsim.runs.target import Target, plan_memory

ROUNDS, SPEED_ROUNDS, REPEATS, DEVICES = 10, 300, 3, 2
PLACEMENTS = ("in memory", f"over {DEVICES} devices", "mapped", "streamed")
_LINEAR = {"loss": "squared", "local_steps": 1, "clip": 1.0, "noise_multiplier": 1.0}
_IMAGES = {"classes": 10, "clip": 1.0, "noise_multiplier": 1.0}


def _linear(clients: int, rows: int = 2, features: int = 32, **more: Any) -> Any:
    settings = _LINEAR | {"sampling_rate": 1000 / clients} | more
    return clients, rows, (features,), settings


def _few(*features: int, **more: Any) -> Any:
    return 40, 10, features, _IMAGES | {"sampling_rate": 0.25} | more


CASES: dict[str, tuple[int, int, tuple[int, ...], Record]] = {
    "own linear, 32": _linear(3_000_000),
    "own softmax, 784 x 10": (20_000, 10, (784,), _IMAGES | {"sampling_rate": 0.05}),
    "shared linear, 32": _linear(3_000_000, 4, algorithm="fedavg"),
    "own MLP, 784 x 64 x 10": (
        5_000, 10, (784,), _IMAGES | {"sampling_rate": 0.05, "model": "mlp"},
    ),
    "own softmax, odd number": (20_001, 10, (784,), _IMAGES | {"sampling_rate": 0.05}),
    "own linear, 32, fewer": _linear(300_000),
    "40 clients, own linear": (40, 2, (32,), _LINEAR | {"sampling_rate": 0.25}),
    "40 clients, own softmax": _few(784),
    "40 clients, Ditto": _few(784, algorithm="ditto"),
    "40 clients, own MLP": _few(784, model="mlp"),
    "40 clients, own CNN": _few(28, 28, 1, model="cnn"),
    "10^5 clients": _linear(10**5),
    "10^6 clients": _linear(10**6, 20, 100),
    "10^7 clients": _linear(10**7),
}  # fmt: skip
"""Clients, rows of each, the shape of their features, settings."""
DEFAULT = [name for name in CASES if "^" not in name]


def config_of(case: str) -> RunConfig:
    """Return the settings of a case."""
    return run_config(test_fraction=0.5, **CASES[case][3])


def write_folder(path: Path, case: str) -> None:
    """Write the population of a case, of which a block of rows is in memory at a time."""
    m, r, features, settings = CASES[case]
    classes, block, rng = settings.get("classes"), 100_000, np.random.default_rng(0)
    need = 2 * 4 * m * r * (np.prod(features) + 1)
    if need > 0.9 * shutil.disk_usage(path.parent).free:
        raise SystemExit(f"{case} needs {need / 1e9:.1f} GB of disk while it is written")
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        shapes: dict[str, Any] = {"x": ((m * r, *features), np.float32)}
        shapes["y"] = ((m * r,), np.float32 if classes is None else np.int32)
        fields = {
            name: np.lib.format.open_memmap(Path(scratch) / name, "w+", dtype, shape)
            for name, (shape, dtype) in shapes.items()
        }
        for begin in range(0, m * r, block):
            size = min(block, m * r - begin)
            x = rng.standard_normal((size, *features), dtype=np.float32)
            y = x[:, 0] if classes is None else rng.integers(classes, size=size)
            fields["x"][begin : begin + block], fields["y"][begin : begin + block] = x, y
        for each in fields.values():
            each.flush()
        tests = np.full(m, r // 2)
        counts = np.stack([r - tests, np.zeros(m, int), tests], axis=1)
        labels = {} if classes is None else {"y": tuple(map(str, range(classes)))}
        kept = {name: np.load(Path(scratch) / name, mmap_mode="r") for name in fields}
        save_folder(path, fjs.Population(kept, counts, np.arange(m), categories=labels))


def in_arrays(population: fjs.Population, folder: Path) -> fjs.Population:
    """Return a population of a folder with its rows in memory, once."""
    mapped = [
        np.load(folder / f"array-{number}.npy", mmap_mode="c")
        for number in range(1, 1 + len(population.fields))  # after their counts
    ]
    fields = dict(zip(population.fields, map(shareable, mapped), strict=True))
    return dataclasses.replace(population, fields=fields)


def simulation_of(
    case: str, population: fjs.Population, **placement: Any
) -> tuple[fjs.Simulation, fjs.Hyperparameters]:
    """Build the simulation of a case, and its hyperparameters."""
    config = config_of(case)
    parts = parts_of(config, population, population.num_clients)
    simulation = fjs.Simulation(
        parts.algorithm, population, parts.sampling, parts.minibatches, parts.mechanism, **placement
    )
    return simulation, hparams_of(config, simulation)


def measured(case: str, placement: str, folder: Path) -> Record:
    """Return bytes and rounds per second of a placement, and a digest of the server state."""
    jax.config.update("jax_num_cpu_devices", DEVICES if placement.startswith("over") else 1)
    jax.config.update("jax_enable_compilation_cache", False)
    jax.block_until_ready(jnp.zeros(()) + 1)
    idle, whole, begin = anonymous(), Watch(), time.perf_counter()
    population = load_folder(folder)
    if placement not in ("mapped", "streamed"):
        population = in_arrays(population, folder)
    devices = jax.devices() if placement.startswith("over") else None
    simulation, hparams = simulation_of(
        case, population, devices=devices, streamed=placement == "streamed"
    )
    state = simulation.init(0, hparams)
    loading = time.perf_counter() - begin

    def run(state: Any) -> Any:
        state, _ = simulation.run(state, hparams, ROUNDS)
        simulation.evaluate(state, hparams).summary()
        return state

    state = run(state)
    forget_peak()
    running = Watch()
    state = run(state)
    found = {"running": running.peak, "whole": whole.peak, "idle": idle, "loading": loading}
    shared = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state.shared))
    rounds = Rounds(simulation, hparams)
    del state
    advanced = rounds.start()

    def advance() -> None:
        nonlocal advanced
        advanced = rounds.advance(advanced, SPEED_ROUNDS)

    speeds = [SPEED_ROUNDS / took for took in median_of(advance, REPEATS)]
    return found | {"rounds_per_second": speeds, "shared": hashlib.sha256(shared).hexdigest()}


def planned(case: str, placement: str, folder: Path) -> int:
    """Return what a placement is planned to need, in bytes."""
    several = placement.startswith("over")
    jax.config.update("jax_num_cpu_devices", DEVICES if several else 1)
    population = load_folder(folder)
    if placement not in ("mapped", "streamed"):
        population = in_arrays(population, folder)
    simulation, hparams = simulation_of(
        case, population, devices=jax.devices() if several else None,
        streamed=placement == "streamed",
    )  # fmt: skip
    experiment = Experiment(config_of(case), simulation, hparams, 1e-5)
    return plan_memory(experiment, Target.here())["peak"]


def of_case(case: str, folder: Path) -> Record:
    """Measure every placement of a case, beside its plan."""
    placements = {}
    for name in PLACEMENTS:
        needs = in_process(planned, case, name, folder)
        took = in_process(measured, case, name, folder)
        ratio = needs / took["running"]
        placements[name] = {"planned": needs, **took, "ratio": ratio}
        mb = [round(each / 1e6) for each in (needs, took["running"])]
        speed = took["rounds_per_second"][0]
        print(f"{case}: {name}: planned {mb[0]} MB, took {mb[1]}, {ratio:.3f}, {speed:.4g}/s")
    if placements["in memory"]["shared"] != placements["mapped"]["shared"]:
        raise SystemExit(f"{case}: rows in memory and mapped rows gave different server states")
    m, r, features, _ = CASES[case]
    return {
        "case": case, "clients": m, "rows": r, "features": features, "placements": placements
    }  # fmt: skip


def main(
    cases: Positional[tuple[str, ...]] = tuple(DEFAULT),
    scratch: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    out: Path | None = None,
) -> None:
    """Measure memory and speed by placement.

    Args:
      cases: names of cases; by default those beside the planner.
      scratch: where populations are written for a while.
      out: a JSON file for the results.
    """
    found: Record = {"machine": in_process(machine), "cases": []}
    for case in cases:
        with tempfile.TemporaryDirectory(dir=scratch) as temporary:
            folder = Path(temporary) / "population"
            write_folder(folder, case)
            found["cases"].append(of_case(case, folder))
        if out is not None:
            write_json(out, found)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
