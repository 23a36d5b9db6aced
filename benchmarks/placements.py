"""Memory and speed of runs in memory, over two devices, mapped from disk and streamed.

    python benchmarks/placements.py [CASE ...] [--scratch FOLDER] [--out FILE]
    python benchmarks/placements.py --parts times first draws

* cases: memory beside what `fedjaxsim plan` says, and rounds per second. Every placement of every
  case is a process of its own, which watches its anonymous memory: neither code nor mapped files.
  It loads a population from a folder, computes rounds and evaluations, and computes both again;
  `running` is the largest memory of that second time, `whole` that of everything, `idle` that after
  the imports. A mapped folder must give the server state of rows in memory bit for bit. The cases
  of 10⁵ to 10⁷ clients are those of docs/scale.md; the one of 10⁶ takes 8 GB of disk.
* times: seconds of an evaluation, the table of clients and the fingerprint of three million
  clients, and of drawing a cohort of a billion.
* first: from arrays in memory to a split population, the first round, and an evaluation.
* draws: milliseconds of a compiled draw of a Poisson cohort of expected size q from m clients.
"""

import dataclasses
import hashlib
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

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
from fedjaxsim.data.ranges import consecutive
from fedjaxsim.report.files import write_csv, write_json
from fedjaxsim.runs import capacity
from fedjaxsim.runs.assemble import parts_of
from fedjaxsim.runs.build import fill_settings
from fedjaxsim.runs.fingerprints import fingerprint_of
from fedjaxsim.runs.memory import this_machine
from fedjaxsim.runs.settings import RunConfig, run_config
from fedjaxsim.runs.sizes import sizes_without_data

ROUNDS, SPEED_ROUNDS, REPEATS, DEVICES = 10, 300, 3, 2
PLACEMENTS = ("in memory", f"over {DEVICES} devices", "mapped", "streamed")
FIRST = (10**5, 10**6, 10**7)
DRAWS = ((10**4, 100), (10**5, 100), (10**6, 100), (10**7, 100), (10**7, 10**4))
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
        splits = consecutive(r - tests, np.zeros(m, int), tests)
        labels = {} if classes is None else {"y": tuple(map(str, range(classes)))}
        kept = {name: np.load(Path(scratch) / name, mmap_mode="r") for name in fields}
        save_folder(path, fjs.Population(kept, splits, np.arange(m), categories=labels))


def in_arrays(population: fjs.Population, folder: Path) -> fjs.Population:
    """Return a population of a folder with its rows in memory, once."""
    mapped = [
        np.load(folder / f"field-{number}.npy", mmap_mode="c")
        for number in range(len(population.fields))
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
    return simulation, fill_settings(config, simulation.records)


# --- measured in a process of its own -------------------------------------------------------------


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


def planned(case: str) -> dict[str, dict[str, int]]:
    """Return what is planned for every placement, in bytes."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    m, r, features, _ = CASES[case]
    config = config_of(case)
    found = capacity.plan(config, sizes_without_data(config, features, m, r), this_machine())
    return {each["name"]: each["host"] for each in found.to_json()["placements"]}


def times(folder: Path) -> Record:
    """Return seconds of work that grows with the clients, and bytes of their table."""
    jax.config.update("jax_num_cpu_devices", 1)
    population = load_folder(folder)
    simulation, hparams = simulation_of(DEFAULT[0], population)
    state = simulation.init(0, hparams)
    evaluation = simulation.evaluate(state, hparams)
    counts = {name: ranges.count for name, ranges in population.splits.items()}
    columns = {"name": population.names, **counts, **evaluation.values}
    table = folder.parent / "clients.csv"
    return {
        "clients": population.num_clients,
        "draw_of_a_billion": draw(10**9, 1000),
        "evaluation": median_of(lambda: simulation.evaluate(state, hparams).summary()),
        "fingerprint": median_of(lambda: fingerprint_of(population)),
        "fingerprint_bytes": sum(values.nbytes for values in population.fields.values()),
        "table": median_of(lambda: write_csv(table, columns)),
        "table_bytes": table.stat().st_size,
    }


def draw(clients: int, cohort: int, repeats: int = 5) -> list[float]:
    """Return the median, least and greatest seconds of drawing a Poisson cohort."""
    p = cohort / clients
    compiled = jax.jit(fjs.poisson(p).for_clients(clients).draw)
    rate, key = fjs.Hyperparameters(sampling_rate=p).as_arrays(), jax.random.key(0)
    return median_of(lambda: jax.block_until_ready(compiled(key, jnp.int32(0), rate)), repeats)


def first_round(clients: int, rows: int = 2) -> Record:
    """Return seconds of each step from arrays on, and memory above an idle process."""
    case = f"10^{len(str(clients)) - 1} clients"
    rng, idle = np.random.default_rng(0), anonymous()
    x = rng.standard_normal((clients * rows, 32), dtype=np.float32)
    whole = {"x": x, "y": x[:, 0] + rng.standard_normal(len(x), dtype=np.float32)}
    for values in whole.values():
        values.flags.writeable = False  # so they are taken without a copy
    arrays = sum(values.nbytes for values in whole.values())
    watch, seconds, last = Watch(), {}, time.perf_counter()

    def lap(name: str) -> None:
        nonlocal last
        seconds[name], last = time.perf_counter() - last, time.perf_counter()

    population = fjs.Population.from_flat(whole, np.full(clients, rows))
    del whole, x
    lap("from_flat")
    population = fjs.data.split(population, test=1 / rows)
    lap("split")
    simulation, hparams = simulation_of(case, population)
    state = jax.block_until_ready(simulation.init(0, hparams))
    lap("init")
    state, _ = jax.block_until_ready(simulation.round(state, hparams))
    lap("round")
    peak, to_first_round = watch.peak - idle, sum(seconds.values())
    simulation.evaluate(state, hparams).summary()
    lap("evaluation")
    arrays += sum(leaf.nbytes for leaf in jax.tree.leaves(state.personal))
    return {
        "clients": clients, "seconds": seconds, "to_first_round": to_first_round,
        "arrays": arrays, "peak": peak, "ratio": peak / arrays,
    }  # fmt: skip


# --- the parent -----------------------------------------------------------------------------------


def of_case(case: str, folder: Path) -> Record:
    """Measure every placement of a case, beside its plan."""
    plan, placements = in_process(planned, case), {}
    for name in PLACEMENTS:
        took = in_process(measured, case, name, folder)
        ratio = plan[name]["peak"] / took["running"]
        placements[name] = {"planned": plan[name], **took, "ratio": ratio}
        mb = [round(each / 1e6) for each in (plan[name]["peak"], took["running"])]
        speed = took["rounds_per_second"][0]
        print(f"{case}: {name}: planned {mb[0]} MB, took {mb[1]}, {ratio:.3f}, {speed:.4g}/s")
    if placements["in memory"]["shared"] != placements["mapped"]["shared"]:
        raise SystemExit(f"{case}: rows in memory and mapped rows gave different server states")
    m, r, features, _ = CASES[case]
    return {
        "case": case, "clients": m, "rows": r, "features": features, "placements": placements
    }  # fmt: skip


def main(
    cases: Positional[tuple[str, ...]] = (),
    parts: Sequence[Literal["cases", "times", "first", "draws"]] = ("cases", "times"),
    scratch: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    out: Path | None = None,
) -> None:
    """Measure memory and speed by placement, and what grows with the clients.

    Args:
      cases: names of cases; by default those beside the planner.
      parts: what is measured.
      scratch: where populations are written for a while.
      out: a JSON file for the results.
    """
    found: Record = {"machine": in_process(machine), "cases": []}
    if "draws" in parts:
        for m, q in DRAWS:
            middle, least, most = (1e3 * took for took in in_process(draw, m, q, 30))
            print(f"| {m:,} | {q:,} | {middle:.2f} ({least:.2f} to {most:.2f}) |", flush=True)
    if "first" in parts:
        found["first"] = [in_process(first_round, m) for m in FIRST]
        print(*found["first"], sep="\n", flush=True)
    asked = list(cases or DEFAULT) if "cases" in parts else []
    for case in dict.fromkeys([*DEFAULT[:1], *asked] if "times" in parts else asked):
        with tempfile.TemporaryDirectory(dir=scratch) as temporary:
            folder = Path(temporary) / "population"
            write_folder(folder, case)
            if "times" in parts and case == DEFAULT[0]:
                found["times"] = in_process(times, folder)
                print(found["times"], flush=True)
            if case in asked:
                found["cases"].append(of_case(case, folder))
        if out is not None:
            write_json(out, found)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
