"""Many clients: from arrays to the first round, and rounds on data that stay on disk.

Every client has a linear model of its own (PMTL, squared loss, one local step); 1,000 of them are
drawn in a round (Poisson). Each figure comes from a process of its own, which watches its anonymous
memory (what is neither code nor a mapped file):

* from arrays in memory to a split population, the first round, and an evaluation;
* rounds per second where rows and states lie in memory, where a folder of rows is mapped from disk
  and the CPU reads it through the mapping, and where the simulation is streamed, with the same
  seeds: the billboards of the first two must agree bit for bit.

    python benchmarks/streaming.py [--out results.json] [--scratch FOLDER]
        [--first 1e5 1e6 1e7] [--mapped 1e5x32x2 1e6x100x20 1e7x32x2]

A folder of 10⁶ clients with 20 examples of 100 features takes 8 GB on the disk of the scratch
folder, and is removed at the end. Its pages stay in the file cache where there is room.
"""

import argparse
import functools
import hashlib
import json
import shutil
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
from fedjaxsim.bench.measure import Rounds
from fedjaxsim.data import load_folder, save_folder
from fedjaxsim.data.ranges import consecutive

COHORT = 1000
ROUNDS = 300
REPEATS = 3
_PLACEMENTS = ("memory", "mapped", "streamed")
TEST_PART = 4
"""One in so many rows of a client is for testing; of two, one."""


def rows_of(begin: int, count: int, d: int) -> dict[str, np.ndarray]:
    """Some rows of the population, (count, d) and (count,)."""
    rng = np.random.default_rng(begin)
    x = rng.standard_normal((count, d), dtype=np.float32)
    return {"x": x, "y": x[:, 0] + rng.standard_normal(count, dtype=np.float32)}


def simulation_of(
    population: fjs.Population, *, streamed: bool = False
) -> tuple[fjs.Simulation, fjs.Hyperparameters]:
    m, d = population.num_clients, population.fields["x"].shape[1]
    task = fjs.tasks.squared(fjs.models.linear((d,), 1))
    simulation = fjs.Simulation(
        fjs.pmtl(task),
        population,
        fjs.poisson(COHORT / m),
        fjs.Minibatches(10, steps=1),
        streamed=streamed,
    )
    return simulation, simulation.hyperparameters(
        noise_multiplier=1.0,
        clip_norm=1.0,
        learning_rate=0.01,
        lam=0.1,
    )


def first_round(m: int, d: int = 32, rows: int = 2) -> dict[str, Any]:
    """Seconds of each step from arrays on, and the largest anonymous memory until the first round.

    Memory is above an idle process. Nobody else holds the arrays, and nobody can write to them.
    """
    idle = anonymous()
    whole = rows_of(0, m * rows, d)
    for values in whole.values():
        values.flags.writeable = False
    arrays = sum(values.nbytes for values in whole.values())
    watch, seconds = Watch(), {}
    last = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds[name], last = now - last, now

    population = fjs.Population.from_flat(whole, np.full(m, rows))
    del whole
    lap("from_flat")
    population = fjs.data.split(population, test=1 / rows)
    lap("split")
    simulation, hparams = simulation_of(population)
    state = jax.block_until_ready(simulation.init(0, hparams))
    lap("init")
    state, _ = jax.block_until_ready(simulation.round(state, hparams))
    lap("round")
    peak = watch.peak - idle
    simulation.evaluate(state, hparams).summary()
    lap("evaluation")
    states = sum(leaf.nbytes for leaf in jax.tree.leaves(state.personal))
    return {
        "clients": m,
        "seconds": seconds,
        "to_first_round": sum(seconds[name] for name in ("from_flat", "split", "init", "round")),
        "arrays": arrays + states,
        "peak": peak,
        "ratio": peak / (arrays + states),
    }


def write_folder(path: Path, m: int, d: int, rows: int) -> None:
    """Writes a population of which only a block of rows is ever in memory."""
    block = 100_000
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        shapes = {"x": (m * rows, d), "y": (m * rows,)}
        for name, shape in shapes.items():
            with open(Path(scratch) / name, "wb") as file:
                header: Any = {"descr": "<f4", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_2_0(file, header)
                for begin in range(0, m * rows, block):
                    file.write(rows_of(begin, min(block, m * rows - begin), d)[name].tobytes())
        fields = {name: np.load(Path(scratch) / name, mmap_mode="r") for name in shapes}
        tests = np.full(m, max(1, rows // TEST_PART))
        splits = consecutive(rows - tests, np.zeros(m, int), tests)
        save_folder(path, fjs.Population(fields, splits, np.arange(m)))


def rounds(folder: Path, how: str) -> dict[str, Any]:
    """Rounds per second (the median), and the largest anonymous memory."""
    base = anonymous()
    watch = Watch()
    begin = time.perf_counter()
    population = load_folder(folder)
    if how == "memory":
        # As arrays that nobody can write to, and that begin where JAX's do, the device shares them.
        fields = {name: np.asarray(jnp.array(v)) for name, v in population.fields.items()}
        population = fjs.Population(fields, population.splits, population.names)
    simulation, hparams = simulation_of(population, streamed=how == "streamed")
    run = Rounds(simulation, hparams)
    state = run.start()
    loading = time.perf_counter() - begin
    rates = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        state = run.advance(state, ROUNDS)
        rates.append(ROUNDS / (time.perf_counter() - begin))
    shared = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state.shared))
    return {
        "loading": loading,
        "rounds_per_second": float(np.median(rates[1:])),
        "range": [min(rates[1:]), max(rates[1:])],
        "before": base,
        "peak": watch.peak,
        "shared": hashlib.sha256(shared).hexdigest(),
    }


def _rounds_of(how: str, folder: str) -> dict[str, Any]:
    return rounds(Path(folder), how)


def of_folder(text: str, scratch: Path | None) -> dict[str, Any]:
    """One population on disk, measured in memory and mapped."""
    m, d, rows = (int(float(part)) for part in text.split("x"))
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        path = Path(folder) / "population"
        need = 2 * 4 * m * rows * (d + 1)
        if need > 0.9 * shutil.disk_usage(folder).free:
            raise SystemExit(f"{text} needs {need / 1e9:.1f} GB of disk while it is written")
        begin = time.perf_counter()
        write_folder(path, m, d, rows)
        written = time.perf_counter() - begin
        found = {how: of_script(__file__, how, path) for how in _PLACEMENTS}
    shared = [each.pop("shared") for each in found.values()]
    if shared[0] != shared[1]:
        raise SystemExit(f"{text}: the two placements gave different billboards")
    return {"clients": m, "d": d, "rows": rows, "writing": written, **found}


_CHILDREN: dict[str, Callable[[str], dict[str, Any]]] = {
    "first": lambda text: first_round(int(float(text))),
    **{how: functools.partial(_rounds_of, how) for how in _PLACEMENTS},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--first", nargs="*", default=["1e5", "1e6", "1e7"])
    parser.add_argument("--mapped", nargs="*", default=["1e5x32x2", "1e6x100x20", "1e7x32x2"])
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        what, text = args.child
        print(json.dumps(_CHILDREN[what](text)))
        return
    found: dict[str, Any] = {"first": [], "mapped": []}
    for text in args.first:
        found["first"].append(of_script(__file__, "first", text))
        print(json.dumps(found["first"][-1]), flush=True)
    for text in args.mapped:
        found["mapped"].append(of_folder(text, args.scratch))
        print(json.dumps(found["mapped"][-1]), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
