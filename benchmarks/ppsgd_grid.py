"""PP-SGD on its synthetic problem: a grid of runs as one program, against numpy.

    python benchmarks/ppsgd_grid.py [--processes 5] [--rounds 300] [--out FILE]

1,000 clients, d = 100, fresh batches of 10, 300 rounds (Bietti et al. 2022, section 6). The numpy
version below is Algorithm 2 for this one case in float64, all clients as arrays, one run after the
other. The grid is the 990 runs of appendix A with C = 10 (learning rates × levels × noise
multipliers), as `SimulationBatch` over one device for each core, with an evaluation of every
client's excess risk every 10 rounds. The first segment, which compiles, is run beforehand and
reported apart. After every segment numpy does as many rounds and one evaluation of one of the
settings; that time is scaled to all of them.

GFLOP count the two matrix products of a gradient, 4bd a client and round; bytes, one read and one
write of all θ_i a round. The ceilings are measured in the same process, after the run. Peak memory
is that of the whole process, numpy's part included, and its excess over an idle process with the
same imports.
"""

import itertools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from ceilings import Ceilings
from common import RESULTS, Record, in_process, show, spreads, update

import fedjaxsim as fjs
from fedjaxsim.bench.measure import seconds
from fedjaxsim.data.synthetic import feature_variances, regression_stream
from fedjaxsim.runs.memory import peak_bytes
from fedjaxsim.simulation_batch import SimulationBatch
from fedjaxsim.tasks.task import known_regression

N, D, BATCH, CLIP, LABEL_NOISE, EVAL_EVERY = 1000, 100, 10, 10.0, 0.01, 10
RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.2, 1.5, 1.8)
LEVELS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, float("inf"))
NOISES = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
SETTINGS = list(itertools.product(RATES, LEVELS, NOISES))
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
        learning_rate=rate, personalization=level, clip=CLIP, noise_multiplier=z
    )


def make_simulation() -> tuple[fjs.Simulation, np.ndarray]:
    """Return the simulation, and θ_i* of all clients, (N, d)."""
    population, task = regression_stream(N, D, label_noise=LABEL_NOISE), known_regression(D)
    minibatches = fjs.Minibatches(BATCH, steps=1)
    simulation = fjs.Simulation(fjs.ppsgd(task), population, fjs.full_participation(), minibatches)
    rows = population.splits["test"].start
    return simulation, population.fields["theta"][rows].astype(np.float64)


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
        "gemm_gflops": gemm, "update_gb_per_s": updates,
        "seconds": engine, "rounds_per_s": rounds / engine,
        "compile_seconds": first - engine * EVAL_EVERY / rounds,
        "numpy_seconds": numpy_round * rounds * len(SETTINGS),
        "numpy_rounds_per_s": 1 / numpy_round,
        "ratio": numpy_round * rounds * len(SETTINGS) / engine,
        "peak_mb": peak, "gflops": gflops, "of_gemm": gflops / gemm,
        "gb_per_s": gb_per_s, "of_update": gb_per_s / updates,
    }  # fmt: skip


def idle_megabytes() -> float:
    """Return the peak memory of a process that imports all this and starts JAX."""
    jax.block_until_ready(jnp.zeros(()) + 1)
    return peak_bytes() / 1e6


def main(processes: int = 5, rounds: int = 300, out: Path = RESULTS / "ppsgd_grid.json") -> None:
    """Measure PP-SGD's grid.

    Args:
      processes: that measure, one after the other.
      rounds: of the runs, a multiple of 10.
      out: a JSON file for the results.
    """
    idle, several = in_process(idle_megabytes), list[Record]()
    for _ in range(processes):
        numbers = in_process(grid_process, rounds)
        several.append(numbers | {"peak_above_idle_mb": numbers["peak_mb"] - idle})
    summary = spreads(several)
    show("grid", summary)
    about: Record = {"jax": jax.__version__, "cores": os.cpu_count(), "runs": len(SETTINGS)}
    grid = {"summary": summary, "processes": several}
    update(out, about | {"rounds": rounds, "idle_mb": idle, "grid": grid})


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
