"""What `fedjaxsim plan` says of memory, against what runs take.

Every placement of every case is a process of its own on this machine's CPU, which watches its
anonymous memory: what is neither code nor a mapped file. It loads a population from a folder,
computes rounds and evaluations, gives back what compiling has freed, and computes both again: the
largest memory of that second time is what is planned. The largest of all, with loading and
compiling, is reported beside it, and what the process had when its imports were done and JAX was
up. In the last cases there are so few clients that the process is nearly all there is.

What grows with the clients besides memory is timed, too: drawing a cohort of a billion, and of a
million clients an evaluation, the table of clients and the fingerprint of their rows.

    python benchmarks/planner.py [--out benchmarks/results/planner.json] [--scratch FOLDER]
        [--cases NAME ...]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import Watch, anonymous, of_script

import fedjaxsim as fjs
from fedjaxsim.bench.measure import forget_peak, machine
from fedjaxsim.data import load_folder, save_folder
from fedjaxsim.data.arrays import shareable
from fedjaxsim.data.ranges import consecutive
from fedjaxsim.report.files import write_csv
from fedjaxsim.runs import capacity
from fedjaxsim.runs.assemble import parts_of
from fedjaxsim.runs.build import fill_settings
from fedjaxsim.runs.fingerprints import fingerprint_of
from fedjaxsim.runs.memory import this_machine
from fedjaxsim.runs.settings import RunConfig, run_config
from fedjaxsim.runs.sizes import sizes_without_data

ROUNDS = 10
DEVICES = 2
PLACEMENTS = ("in memory", f"over {DEVICES} devices", "mapped", "streamed")
_LINEAR = {"loss": "squared", "local_steps": 1, "clip": 1.0, "noise_multiplier": 1.0}
_IMAGES = {"classes": 10, "clip": 1.0, "noise_multiplier": 1.0}
_FEW = {"sampling_rate": 0.25}
CASES: dict[str, tuple[int, int, tuple[int, ...], dict[str, Any]]] = {
    "own linear, 32": (3_000_000, 2, (32,), _LINEAR | {"sampling_rate": 1000 / 3_000_000}),
    "own softmax, 784 x 10": (20_000, 10, (784,), _IMAGES | {"sampling_rate": 0.05}),
    "shared linear, 32": (
        3_000_000, 4, (32,), _LINEAR | {"sampling_rate": 1000 / 3_000_000, "algorithm": "fedavg"},
    ),
    "own MLP, 784 x 64 x 10": (
        5_000, 10, (784,), _IMAGES | {"sampling_rate": 0.05, "model": "mlp"},
    ),
    "own softmax, odd number": (20_001, 10, (784,), _IMAGES | {"sampling_rate": 0.05}),
    "own linear, 32, fewer": (300_000, 2, (32,), _LINEAR | {"sampling_rate": 1000 / 300_000}),
    "40 clients, own linear": (40, 2, (32,), _LINEAR | _FEW),
    "40 clients, own softmax": (40, 10, (784,), _IMAGES | _FEW),
    "40 clients, Ditto": (40, 10, (784,), _IMAGES | _FEW | {"algorithm": "ditto"}),
    "40 clients, own MLP": (40, 10, (784,), _IMAGES | _FEW | {"model": "mlp"}),
    "40 clients, own CNN": (40, 10, (28, 28, 1), _IMAGES | _FEW | {"model": "cnn"}),
}  # fmt: skip
"""Clients, rows of each, the shape of their features, settings."""


def config_of(case: str) -> RunConfig:
    """The settings of a case."""
    return run_config(test_fraction=0.5, **CASES[case][3])


def write_folder(path: Path, case: str) -> None:
    """Writes the population of a case, of which a block of rows is in memory at a time."""
    m, r, features, settings = CASES[case]
    classes, block, rng = settings.get("classes"), 100_000, np.random.default_rng(0)
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
            fields["x"][begin : begin + block] = x
            fields["y"][begin : begin + block] = (
                x[:, 0] if classes is None else rng.integers(classes, size=size)
            )
        for each in fields.values():
            each.flush()
            each.flags.writeable = False
        tests = np.full(m, r // 2)
        splits = consecutive(r - tests, np.zeros(m, int), tests)
        labels = {} if classes is None else {"y": tuple(map(str, range(classes)))}
        kept = {name: np.load(Path(scratch) / name, mmap_mode="r") for name in fields}
        save_folder(path, fjs.Population(kept, splits, np.arange(m), categories=labels))


def in_arrays(population: fjs.Population, folder: Path) -> fjs.Population:
    """A population of a folder with its rows in memory, once."""
    fields = {}
    for number, name in enumerate(population.fields):
        mapped = np.load(folder / f"field-{number}.npy", mmap_mode="c")
        fields[name] = shareable(mapped)  # a copy, as one could write to it
    names, categories = population.names, population.categories
    return fjs.Population(fields, population.splits, names, categories=categories)


def measured(case: str, placement: str, folder: Path) -> dict[str, int]:
    """Bytes of this process: while running, with loading and compiling, and before both."""
    jax.config.update("jax_num_cpu_devices", DEVICES if placement.startswith("over") else 1)
    jax.config.update("jax_enable_compilation_cache", False)
    jax.block_until_ready(jnp.zeros(()) + 1)
    idle = anonymous()
    whole = Watch()
    config, population = config_of(case), load_folder(folder)
    if placement not in ("mapped", "streamed"):
        population = in_arrays(population, folder)
    parts = parts_of(config, population, population.num_clients)
    simulation = fjs.Simulation(
        parts.algorithm, population, parts.sampling, parts.minibatches, parts.mechanism,
        devices=jax.devices() if placement.startswith("over") else None,
        streamed=placement == "streamed",
    )  # fmt: skip
    hparams = fill_settings(config, simulation.records)
    state = simulation.init(0, hparams)

    def run(state: Any) -> Any:
        state, _ = simulation.run(state, hparams, ROUNDS)
        simulation.evaluate(state, hparams).summary()
        return state

    state = run(state)
    forget_peak()
    running = Watch()
    run(state)
    return {"running": running.peak, "whole": whole.peak, "idle": idle}


def seconds(function: Callable[[], Any]) -> list[float]:
    """How long a call takes: the median of five after one that compiles, the least and the most."""
    took = []
    for _ in range(6):
        begin = time.perf_counter()
        jax.block_until_ready(function())
        took.append(time.perf_counter() - begin)
    return [statistics.median(took[1:]), min(took[1:]), max(took[1:])]


def times(folder: Path) -> dict[str, Any]:
    """Seconds of what grows with clients, of the first case but for a draw; bytes of the table."""
    jax.config.update("jax_num_cpu_devices", 1)
    many, p = 10**9, 1e-6
    draw = jax.jit(fjs.poisson(p).for_clients(many).draw)
    rate, key = fjs.Hyperparameters(sampling_rate=p).as_arrays(), jax.random.key(0)
    config, population = config_of(next(iter(CASES))), load_folder(folder)
    parts = parts_of(config, population, population.num_clients)
    simulation = fjs.Simulation(
        parts.algorithm, population, parts.sampling, parts.minibatches, parts.mechanism
    )
    hparams = fill_settings(config, simulation.records)
    state = simulation.init(0, hparams)
    evaluation = simulation.evaluate(state, hparams)
    counts = {name: ranges.count for name, ranges in population.splits.items()}
    columns = {"name": population.names, **counts, **evaluation.values}
    table = folder.parent / "clients.csv"
    return {
        "clients": population.num_clients,
        "draw_of_a_billion": seconds(lambda: draw(key, jnp.int32(0), rate)),
        "evaluation": seconds(lambda: simulation.evaluate(state, hparams).summary()),
        "fingerprint": seconds(lambda: fingerprint_of(population)),
        "fingerprint_bytes": sum(values.nbytes for values in population.fields.values()),
        "table": seconds(lambda: write_csv(table, columns)),
        "table_bytes": table.stat().st_size,
    }


def planned(case: str) -> dict[str, dict[str, int]]:
    """What is planned for every placement, in bytes."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    m, r, features, _ = CASES[case]
    config = config_of(case)
    sizes = sizes_without_data(config, features, m, r)
    found = capacity.plan(config, sizes, this_machine()).to_json()
    return {each["name"]: each["host"] for each in found["placements"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        case, placement, folder = args.child
        if placement == "plan":
            print(json.dumps(planned(case)))
        elif placement == "times":
            print(json.dumps(times(Path(folder))))
        else:
            print(json.dumps(measured(case, placement, Path(folder))))
        return
    found: dict[str, Any] = {"machine": machine(), "cases": []}
    for case in args.cases:
        with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
            folder = Path(scratch) / "population"
            write_folder(folder, case)
            plan = of_script(__file__, case, "plan", folder)
            if case == next(iter(CASES)):
                found["times"] = of_script(__file__, case, "times", folder)
                print(json.dumps(found["times"]), flush=True)
            placements = {}
            for name in PLACEMENTS:
                took = of_script(__file__, case, name, folder)
                ratio = plan[name]["peak"] / took["running"]
                placements[name] = {"planned": plan[name], **took, "ratio": ratio}
                mb = [round(each / 1e6) for each in (plan[name]["peak"], took["running"])]
                print(f"{case}: {name}: planned {mb[0]} MB, took {mb[1]}, {ratio:.3f}", flush=True)
        m, r, features, _ = CASES[case]
        about = {"case": case, "clients": m, "rows": r, "features": features}
        found["cases"].append({**about, "placements": placements})
        if args.out is not None:
            args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
