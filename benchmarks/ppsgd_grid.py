"""PP-SGD on its synthetic problem: a grid of runs as one program, and one run, against numpy.

1,000 clients, d = 100, fresh batches of 10, 300 rounds (Bietti et al. 2022, section 6). The numpy
version below is Algorithm 2 for this one case in float64, all clients as arrays, one run after the
other, with `np.random.default_rng`.

    python benchmarks/ppsgd_grid.py [--processes 5] [--rounds 300] [--out FILE]

Three parts, each in processes of its own; the first two alternate engine and numpy:

* grid: the 990 runs of appendix A with C = 10 (learning rates × levels × noise multipliers), as
  `SimulationBatch` over one host device per core, with an evaluation of every client's excess risk
  every 10 rounds. Timed is the whole run with its evaluations; the first segment, in which
  everything is compiled, is run beforehand and reported apart. After every segment numpy does as
  many rounds and one evaluation of one of the settings; that time is scaled to all of them.
* single: one setting, in `Simulation.run` with chunk_map="vmap" and chunk_size=250. Those two were
  chosen by hand on 2 cores: clients so small are slower one at a time ("scan"), and other sizes of
  chunks are a little slower.

* sizes: several numbers of settings of the grid, each as one program. Numbers are rounds of one run
  per second, S times the rounds of the program, with an evaluation after every 10.

The parent reports medians and ranges over the processes. GFLOP count the two matrix products of a
gradient, 4bd a client and round; bytes, one read and one write of all θ_i a round. The ceilings are
measured in the same process, after the run: a product of float32 matrices of 2048 rows, and adding
1 to 256 MB in place. Peak memory is that of the whole process, numpy's part included, and what
exceeds a process that has only the same imports.
"""

import argparse
import itertools
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import of_script, use_all_cores

from fedjaxsim.algorithms.ppsgd import ppsgd
from fedjaxsim.data.minibatches import Minibatches
from fedjaxsim.data.synthetic import feature_variances, regression_stream
from fedjaxsim.hyperparameters import Hyperparameters
from fedjaxsim.privacy.samplers import full_participation
from fedjaxsim.simulation import Simulation
from fedjaxsim.sweep import SimulationBatch
from fedjaxsim.tasks.known_risk import known_regression

N, D, BATCH, CLIP, LABEL_NOISE, EVAL_EVERY = 1000, 100, 10, 10.0, 0.01, 10
RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.2, 1.5, 1.8)
LEVELS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, float("inf"))
NOISES = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
SETTINGS = list(itertools.product(RATES, LEVELS, NOISES))
SIZES = (16, 32, 64, 128, 256, len(SETTINGS))
"""Numbers of settings that run as one program."""
SINGLE = (0.1, 1.0, 1.0)
"""Learning rate, level and noise multiplier of the single run."""
PARTS = ("grid", "single", "sizes")
GFLOP = 4e-9 * N * BATCH * D
"""Of one round of one run."""
RESULTS = Path(__file__).parent / "results" / "ppsgd_grid.json"


class InNumpy:
    """One run in numpy.

    Args:
      theta: θ_i* of all clients, (N, d).
      setting: learning rate, level and noise multiplier.
      rng: what batches and noise are drawn from.
    """

    def __init__(
        self, theta: np.ndarray, setting: tuple[float, float, float], rng: np.random.Generator
    ):
        rate, level, self.z = setting
        self.shared_rate, self.personal_rate = rate * min(level, 1.0), rate / max(level, 1.0)
        self.theta, self.rng = theta, rng
        self.variances = feature_variances(D)
        self.deviations = np.sqrt(self.variances)
        self.w, self.personal = np.zeros(D), np.zeros((N, D))

    def run(self, rounds: int) -> float:
        """Runs rounds; the mean excess risk after the last."""
        for _ in range(rounds):
            self._round()
        error = self.w + self.personal - self.theta
        return float(np.mean(np.sum(self.variances * error**2, axis=1)))

    def _round(self) -> None:
        x = self.rng.standard_normal((BATCH, N, D)) * self.deviations
        noise = LABEL_NOISE * self.rng.standard_normal((BATCH, N))
        y = np.sum(x * self.theta, axis=2) + noise
        predictions = np.sum(x * (self.w + self.personal), axis=2)
        gradients = np.sum(x * (predictions - y)[:, :, None], axis=0) / BATCH
        if self.personal_rate > 0:
            self.personal -= self.personal_rate * gradients
        norms = np.linalg.norm(gradients, axis=1)
        gradients /= np.maximum(norms / CLIP, 1.0)[:, None]
        noise = self.z * CLIP * self.rng.standard_normal(D)
        if self.shared_rate > 0:
            self.w -= self.shared_rate * (np.mean(gradients, axis=0) + noise / N)


def hyperparameters(simulation: Simulation, setting: tuple[float, float, float]) -> Hyperparameters:
    rate, level, z = setting
    return simulation.hyperparameters(
        learning_rate=rate, personalization=level, clip_norm=CLIP, noise_multiplier=z
    )


def make_simulation(**chunking: Any) -> tuple[Simulation, np.ndarray]:
    """The simulation, and θ_i* of all clients, (N, d)."""
    population = regression_stream(N, D, label_noise=LABEL_NOISE)
    task = known_regression(D)
    minibatches = Minibatches(BATCH, steps=1)
    simulation = Simulation(ppsgd(task), population, full_participation(), minibatches, **chunking)
    rows = population.splits["test"].start
    return simulation, population.fields["theta"][rows].astype(np.float64)


# --- what a process measures ----------------------------------------------------------------------


def megabytes() -> float:
    """Peak memory of this process so far."""
    scale = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in kilobytes on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e6


def seconds(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def ceilings() -> dict[str, float]:
    """The best of several repetitions of a matrix product and of an update in place."""
    matrix = jnp.ones((2048, 2048))
    product = jax.jit(jnp.matmul)
    array = jnp.zeros(2**26)
    update = jax.jit(lambda array: array + 1, donate_argnums=0)
    array = jax.block_until_ready(update(array))
    jax.block_until_ready(product(matrix, matrix))
    products, updates = [], []
    for _ in range(9):
        products.append(seconds(lambda: jax.block_until_ready(product(matrix, matrix))))
        begin = time.perf_counter()
        array = jax.block_until_ready(update(array))
        updates.append(time.perf_counter() - begin)
    return {
        "gemm_gflops": 2 * 2048**3 / min(products) / 1e9,
        "update_gb_per_s": 2 * array.nbytes / min(updates) / 1e9,
    }


def grid_process(rounds: int) -> dict[str, Any]:
    """The whole grid once, and numpy on a part of it."""
    simulation, theta = make_simulation()
    settings = [hyperparameters(simulation, setting) for setting in SETTINGS]
    many = SimulationBatch(simulation, settings)
    first = seconds(lambda: many.run(many.init(0), EVAL_EVERY))
    rng = np.random.default_rng(0)
    in_numpy: list[float] = []

    def alternate(*_):
        begin = time.perf_counter()
        # A prime stride visits all rates, levels and noises.
        setting = SETTINGS[len(in_numpy) * 37 % len(SETTINGS)]
        with np.errstate(over="ignore", invalid="ignore"):
            InNumpy(theta, setting, rng).run(EVAL_EVERY)
        in_numpy.append(time.perf_counter() - begin)

    state = many.init(0)
    jax.block_until_ready(state)
    total = seconds(lambda: many.run(state, rounds, eval_every=EVAL_EVERY, callbacks=[alternate]))
    engine = total - sum(in_numpy)
    numpy_round = sum(in_numpy) / rounds
    peak, limit = megabytes(), ceilings()
    gflops = GFLOP * len(SETTINGS) * rounds / engine
    gb_per_s = 2 * 4e-9 * N * D * len(SETTINGS) * rounds / engine
    return limit | {
        "seconds": engine,
        "rounds_per_s": rounds / engine,
        "compile_seconds": first - engine * EVAL_EVERY / rounds,
        "numpy_seconds": numpy_round * rounds * len(SETTINGS),
        "numpy_rounds_per_s": 1 / numpy_round,
        "ratio": numpy_round * rounds * len(SETTINGS) / engine,
        "peak_mb": peak,
        "gflops": gflops,
        "of_gemm": gflops / limit["gemm_gflops"],
        "gb_per_s": gb_per_s,
        "of_update": gb_per_s / limit["update_gb_per_s"],
    }


def single_process(rounds: int, repeats: int) -> dict[str, Any]:
    """Rounds per second of one run; engine and numpy in turn go on where they were."""
    simulation, theta = make_simulation(chunk_map="vmap", chunk_size=250)
    hparams = hyperparameters(simulation, SINGLE)
    first = seconds(lambda: simulation.run(simulation.init(0, hparams), hparams, rounds))
    state = simulation.init(0, hparams)
    in_numpy = InNumpy(theta, SINGLE, np.random.default_rng(0))
    engine_times, numpy_times, risks = [], [], [0.0, 0.0]
    for _ in range(repeats):
        begin = time.perf_counter()
        state, history = simulation.run(state, hparams, rounds)
        middle = time.perf_counter()
        risks = [float(history[-1].evaluation.mean("excess_risk")), in_numpy.run(rounds)]
        engine_times.append(middle - begin)
        numpy_times.append(time.perf_counter() - middle)
    engine, other = statistics.median(engine_times), statistics.median(numpy_times)
    return {
        "rounds_per_s": rounds / engine,
        "numpy_rounds_per_s": rounds / other,
        "ratio": other / engine,
        "compile_seconds": first - engine,
        "peak_mb": megabytes(),
        "excess_risk": risks[0],
        "numpy_excess_risk": risks[1],
    }


def of_size(simulation: Simulation, size: int, rounds: int, repeats: int) -> float:
    """Rounds of one run per second, of `size` settings of the grid as one program."""
    chosen = SETTINGS[:: len(SETTINGS) // size][:size]
    many = SimulationBatch(simulation, [hyperparameters(simulation, setting) for setting in chosen])
    state, _ = many.run(many.init(0), rounds)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        state, _ = many.run(state, rounds)
        times.append(time.perf_counter() - begin)
    return size * rounds / statistics.median(times)


def sizes_process(sizes: list[int], rounds: int, repeats: int) -> dict[str, Any]:
    """Rounds of a run per second by number of settings, with one evaluation after `rounds`."""
    simulation, _ = make_simulation()
    speeds = {f"{size}_per_s": of_size(simulation, size, rounds, repeats) for size in sizes}
    return speeds | {"peak_mb": megabytes()}


def idle_process() -> dict[str, Any]:
    """What a process takes that imports all this and starts JAX."""
    jax.block_until_ready(jnp.zeros(()) + 1)
    return {"peak_mb": megabytes()}


# --- the parent -----------------------------------------------------------------------------------


def measure(part: str, args: argparse.Namespace) -> dict[str, Any]:
    """What one part gives in this process."""
    if part == "grid":
        return grid_process(args.rounds)
    if part == "single":
        return single_process(args.single_rounds, args.repeats)
    if part == "map":
        return sizes_process(args.sizes, EVAL_EVERY, args.repeats)
    return idle_process()


def in_new_process(part: str, args: argparse.Namespace) -> dict[str, Any]:
    flags: list[Any] = []
    for name in ("rounds", "single_rounds", "repeats"):
        flags += ["--" + name.replace("_", "-"), getattr(args, name)]
    flags += ["--sizes", *args.sizes]
    return of_script(__file__, part, *flags)


def summarize(processes: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median and range over the processes of each number."""
    columns = {name: [process[name] for process in processes] for name in processes[0]}
    return {
        name: {"median": statistics.median(values), "least": min(values), "greatest": max(values)}
        for name, values in columns.items()
    }


def show(numbers: dict[str, dict[str, float]]) -> None:
    for name, n in numbers.items():
        print(f"  {name:24} {n['median']:10.4g} ({n['least']:.4g} to {n['greatest']:.4g})")


def multiple(text: str) -> int:
    """A number of rounds that ends with an evaluation."""
    value = int(text)
    if value < 1 or value % EVAL_EVERY:
        raise argparse.ArgumentTypeError(f"must be a multiple of {EVAL_EVERY}, got {value}")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=5, help="of each part")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=multiple, default=300, help="of the grid's runs")
    parser.add_argument("--single-rounds", type=int, default=100, help="in one repetition")
    parser.add_argument("--repeats", type=int, default=5, help="of the single run and of a size")
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=int,
        choices=range(1, len(SETTINGS) + 1),
        metavar="S",
        default=SIZES,
        help="how many settings, in the part sizes",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--child", choices=(*PARTS, "idle"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    # Before JAX starts. The single run has one device, which uses all cores in an operation.
    if args.child in ("grid", "sizes"):
        use_all_cores()
    if args.child:
        print(json.dumps(measure(args.child, args)))
        return
    idle = in_new_process("idle", args)
    results: dict[str, Any] = {"jax": jax.__version__, "cores": os.cpu_count()}
    results |= {"runs": len(SETTINGS), "rounds": args.rounds, "idle_mb": idle["peak_mb"]}
    processes = {part: [] for part in args.parts}
    for index in range(args.processes):
        for part in args.parts:
            numbers = in_new_process(part, args)
            numbers["peak_above_idle_mb"] = numbers["peak_mb"] - idle["peak_mb"]
            processes[part].append(numbers)
            ratio = f": {numbers['ratio']:.2f} times numpy" if "ratio" in numbers else ""
            print(f"process {index + 1}, {part}{ratio}", flush=True)
    for part, several in processes.items():
        results[part] = {"summary": summarize(several), "processes": several}
        print(f"{part}, median (range) over {args.processes} processes:")
        show(results[part]["summary"])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
