"""PP-SGD on its synthetic problem: a grid of runs as one program, and one run, against numpy.

    python benchmarks/ppsgd_grid.py [--processes 5] [--rounds 300] [--out FILE]

1,000 clients, d = 100, fresh batches of 10, 300 rounds (Bietti et al. 2022, section 6). The numpy
version below is Algorithm 2 for this one case in float64, all clients as arrays, one run after the
other. Three parts, each in processes of its own:

* grid: the 990 runs of appendix A with C = 10 (learning rates × levels × noise multipliers), as
  `SimulationBatch` over one device for each core, with an evaluation of every client's excess risk
  every 10 rounds. The first segment, which compiles, is run beforehand and reported apart. After
  every segment numpy does as many rounds and one evaluation of one of the settings; that time is
  scaled to all of them.
* single: one setting, in `Simulation.run` with chunk_map="vmap" and chunk_size=250, which were
  chosen by hand on 2 cores: clients so small are slower one at a time ("scan").
* sizes: several numbers of settings of the grid, each as one program: rounds of one run per second,
  with an evaluation after every 10.

GFLOP count the two matrix products of a gradient, 4bd a client and round; bytes, one read and one
write of all θ_i a round. The ceilings are measured in the same process, after the run. Peak memory
is that of the whole process, numpy's part included, and its excess over an idle process with the
same imports.
"""

import itertools
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from common import RESULTS, Record, alternate, in_process, show, spreads, update

import fedjaxsim as fjs
from fedjaxsim.bench.ceilings import Ceilings, seconds
from fedjaxsim.data.synthetic import feature_variances, regression_stream
from fedjaxsim.runs.memory import peak_bytes
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
GFLOP = 4e-9 * N * BATCH * D
"""Of one round of one run."""


class InNumpy:
    """One run in numpy.

    Args:
      theta: θ_i* of all clients, (N, d).
      setting: learning rate, level and noise multiplier.
      rng: source of batches and noise.
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
        """Run rounds; return the mean excess risk after the last."""
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


def hyperparameters(
    simulation: fjs.Simulation, setting: tuple[float, float, float]
) -> fjs.Hyperparameters:
    """Return the hyperparameters of a setting of the grid."""
    rate, level, z = setting
    return simulation.hyperparameters(
        learning_rate=rate, personalization=level, clip_norm=CLIP, noise_multiplier=z
    )


def make_simulation(**chunking: Any) -> tuple[fjs.Simulation, np.ndarray]:
    """Return the simulation, and θ_i* of all clients, (N, d)."""
    population = regression_stream(N, D, label_noise=LABEL_NOISE)
    task = known_regression(D)
    minibatches = fjs.Minibatches(BATCH, steps=1)
    simulation = fjs.Simulation(
        fjs.ppsgd(task), population, fjs.full_participation(), minibatches, **chunking
    )
    rows = population.splits["test"].start
    return simulation, population.fields["theta"][rows].astype(np.float64)


# --- measured in a process of its own -------------------------------------------------------------


def grid_process(rounds: int) -> Record:
    """Run the whole grid once, and numpy on a part of it."""
    fjs.use_all_cores()
    simulation, theta = make_simulation()
    many = SimulationBatch(simulation, [hyperparameters(simulation, each) for each in SETTINGS])
    first = seconds(lambda: many.run(many.init(0), EVAL_EVERY))
    rng, in_numpy = np.random.default_rng(0), list[float]()

    def turn(*_):
        # A prime stride visits all rates, levels and noises.
        setting = SETTINGS[len(in_numpy) * 37 % len(SETTINGS)]
        with np.errstate(over="ignore", invalid="ignore"):
            in_numpy.append(seconds(lambda: InNumpy(theta, setting, rng).run(EVAL_EVERY)))

    state = jax.block_until_ready(many.init(0))
    total = seconds(lambda: many.run(state, rounds, eval_every=EVAL_EVERY, callbacks=[turn]))
    engine, numpy_round = total - sum(in_numpy), sum(in_numpy) / rounds
    peak, ceilings = peak_bytes() / 1e6, Ceilings(jax.devices())
    gemm, updates = ceilings.flops() / 1e9, ceilings.bandwidth() / 1e9
    gflops = GFLOP * len(SETTINGS) * rounds / engine
    gb_per_s = 2 * 4e-9 * N * D * len(SETTINGS) * rounds / engine
    return {
        "gemm_gflops": gemm,
        "update_gb_per_s": updates,
        "seconds": engine,
        "rounds_per_s": rounds / engine,
        "compile_seconds": first - engine * EVAL_EVERY / rounds,
        "numpy_seconds": numpy_round * rounds * len(SETTINGS),
        "numpy_rounds_per_s": 1 / numpy_round,
        "ratio": numpy_round * rounds * len(SETTINGS) / engine,
        "peak_mb": peak,
        "gflops": gflops,
        "of_gemm": gflops / gemm,
        "gb_per_s": gb_per_s,
        "of_update": gb_per_s / updates,
    }


def single_process(rounds: int, repeats: int) -> Record:
    """Measure rounds per second of one run; engine and numpy in turn go on where they were."""
    simulation, theta = make_simulation(chunk_map="vmap", chunk_size=250)
    hparams = hyperparameters(simulation, SINGLE)
    first = seconds(lambda: simulation.run(simulation.init(0, hparams), hparams, rounds))
    state, other = simulation.init(0, hparams), InNumpy(theta, SINGLE, np.random.default_rng(0))
    risks = {"excess_risk": 0.0, "numpy_excess_risk": 0.0}

    def run() -> None:
        nonlocal state
        state, history = simulation.run(state, hparams, rounds)
        risks["excess_risk"] = float(history[-1].evaluation.mean("excess_risk"))

    def run_numpy() -> None:
        risks["numpy_excess_risk"] = other.run(rounds)

    took = alternate({"engine": run, "numpy": run_numpy}, repeats)
    engine, in_numpy = (statistics.median(values) for values in took.values())
    return {
        "rounds_per_s": rounds / engine,
        "numpy_rounds_per_s": rounds / in_numpy,
        "ratio": in_numpy / engine,
        "compile_seconds": first - engine,
        "peak_mb": peak_bytes() / 1e6,
        **risks,
    }


def sizes_process(sizes: Sequence[int], repeats: int) -> Record:
    """Measure rounds of a run per second by the number of settings in one program."""
    fjs.use_all_cores()
    simulation, _ = make_simulation()
    found = {}
    for size in sizes:
        chosen = SETTINGS[:: len(SETTINGS) // size][:size]
        many = SimulationBatch(simulation, [hyperparameters(simulation, each) for each in chosen])
        state = many.init(0)

        def run(many: SimulationBatch = many) -> None:
            nonlocal state
            state, _ = many.run(state, EVAL_EVERY)

        took = statistics.median(alternate({"": run}, repeats)[""])
        found[f"{size}_per_s"] = size * EVAL_EVERY / took
    return found | {"peak_mb": peak_bytes() / 1e6}


def idle_megabytes() -> float:
    """Return the peak memory of a process that imports all this and starts JAX."""
    jax.block_until_ready(jnp.zeros(()) + 1)
    return peak_bytes() / 1e6


def main(
    processes: int = 5,
    parts: Sequence[Literal["grid", "single", "sizes"]] = ("grid", "single", "sizes"),
    rounds: int = 300,
    single_rounds: int = 100,
    repeats: int = 5,
    sizes: Sequence[int] = SIZES,
    out: Path = RESULTS / "ppsgd_grid.json",
) -> None:
    """Measure PP-SGD's grid.

    Args:
      processes: of each part.
      parts: that are measured.
      rounds: of the grid's runs, a multiple of 10.
      single_rounds: in one repetition of the single run.
      repeats: of the single run and of each size.
      sizes: numbers of settings in the part sizes.
      out: a JSON file for the results, updated part by part.
    """
    idle = in_process(idle_megabytes)
    calls: dict[str, tuple[Any, ...]] = {
        "grid": (grid_process, rounds),
        "single": (single_process, single_rounds, repeats),
        "sizes": (sizes_process, sizes, repeats),
    }
    found: dict[str, list[Record]] = {part: [] for part in parts}
    for _ in range(processes):
        for part in parts:
            numbers = in_process(*calls[part])
            found[part].append(numbers | {"peak_above_idle_mb": numbers["peak_mb"] - idle})
    results: Record = {"jax": jax.__version__, "cores": os.cpu_count()}
    results |= {"runs": len(SETTINGS), "rounds": rounds, "idle_mb": idle}
    for part, several in found.items():
        results[part] = {"summary": spreads(several), "processes": several}
        show(part, results[part]["summary"])
    update(out, results)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
